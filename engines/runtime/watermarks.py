"""Watermarks within a subtask: the ports on which operators get them, and the minimum over several ports.

A watermark W, in ms, says that every later record has a floor of W at least. Invariants: the watermark of an operator
never falls; results that it makes due go before it; an idle input does not hold it back.

Watermarks and barriers are signals: frames without records that keep their place among the batches of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from exactlyonce.pipeline.event_time import NO_WATERMARK


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

encode_signal = msgspec.msgpack.Encoder().encode
decode_signal = msgspec.msgpack.Decoder[Signal](Signal).decode


class Port(Protocol):
    """One way by which watermarks reach an operator."""

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        """*idle*: records are not expected; then *watermark* follows the clock, or is `NO_WATERMARK`."""


class Unheard:
    """The port of an input whose watermarks do not count."""

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        pass


@dataclass(slots=True)
class MergedPorts:
    """The ports of an operator with several inputs: it advances with the lowest of the active ones.

    While all are idle it follows the highest of them.

    >>> class Shown:
    ...     def advance(self, watermark, *, idle=False):
    ...         print(watermark, "idle" if idle else "active")
    >>> ports = MergedPorts(Shown())
    >>> one, other = ports.add(), ports.add()
    >>> one.advance(5)
    >>> other.advance(3)
    3 active
    >>> other.advance(4, idle=True)
    5 active
    >>> one.advance(7, idle=True)
    7 idle
    """

    receiver: Port
    _ports: list[_MergedPort] = field(default_factory=list)
    _watermark: int = NO_WATERMARK
    _idle: bool = False

    def add(self) -> Port:
        """Another port; until it has got a watermark, it holds back the others."""
        port = _MergedPort(self)
        self._ports.append(port)
        return port

    def changed(self) -> None:
        """A port has advanced."""
        active = [port.watermark for port in self._ports if not port.idle]
        lowest = min(active) if active else max(port.watermark for port in self._ports)
        watermark, idle = max(self._watermark, lowest), not active
        if (watermark, idle) != (self._watermark, self._idle):
            self._watermark, self._idle = watermark, idle
            self.receiver.advance(watermark, idle=idle)


@dataclass(slots=True)
class _MergedPort:
    ports: MergedPorts
    watermark: int = NO_WATERMARK
    idle: bool = False

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        self.watermark, self.idle = max(self.watermark, watermark), idle
        self.ports.changed()
