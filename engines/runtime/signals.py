"""Signals: frames without records that keep their place among the batches of a channel.

A new kind is another struct in `Signal`: channels carry it, and `Subtask` handles it.
"""

from __future__ import annotations

import msgspec


class Barrier(msgspec.Struct, frozen=True, tag="barrier", array_like=True):
    """Barrier *checkpoint*, whose increments are relative to *base*. Unaligned, it may overtake records."""

    checkpoint: int
    base: int
    savepoint: bool = False
    """Whether it is a savepoint's: every input is held back after it, and the state is written whole."""


class Watermark(msgspec.Struct, frozen=True, tag="watermark", array_like=True):
    """The watermark of one sender; see `engines.runtime.watermarks`."""

    value: int
    """In ms."""
    idle: bool = False


Signal = Barrier | Watermark

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder[Signal](Signal).decode
