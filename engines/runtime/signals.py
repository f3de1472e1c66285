"""Signals: frames that keep their place among the batches of a channel, and are no records.

A barrier is one. Another kind is a struct beside it, in `Signal`: channels carry it, and `Subtask` says what it does.
"""

from __future__ import annotations

import msgspec


class Barrier(msgspec.Struct, frozen=True, tag="barrier", array_like=True):
    """Barrier *checkpoint*, whose increments are relative to *base*. Unaligned, it alone may overtake records."""

    checkpoint: int
    base: int
    savepoint: bool = False
    """Whether it is one's: every input is held back after it, and the state is written whole."""


Signal = Barrier

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Signal).decode
