"""The writer of a sink whose delivery is at most once: outputs wait until their checkpoint is finalized, and are then
written, once.

Invariants: nothing is written before a checkpoint is finalized that says that its input is done with, so whatever reads
that input again has written nothing of it; what is handed on is never handed on again. Outputs of an aborted checkpoint
wait for the next one. What waits is in memory up to a bound, and beyond that in a file without a name, which ends with
the process: it is what a crash loses. Only what may be written now, and is not, leaves the writer no `room`.
"""

from __future__ import annotations

import struct
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from exactlyonce.sinks.writer import ROOM, FlushedInterval, SinkFailed, SinkWriter

MEMORY_BYTES_MAX = 8 << 20
"""Of an interval; more of it goes to a file."""
UNWRITTEN_BYTES_MAX = 64 << 20
"""Of finalized intervals, before the caller is asked to pause."""
FRAMES_AT_ONCE = 16
"""Batches that are handed on before the worker does something else."""

_HEADER = struct.Struct("<I")


@dataclass
class _Interval:
    """What was written between two barriers, or up to now."""

    kept: IO[bytes] | None = None
    size: int = 0
    records: int = 0
    checkpoint: int = 0

    def keep(self, packed: bytes, records: int) -> None:
        if self.kept is None:
            self.kept = tempfile.SpooledTemporaryFile(MEMORY_BYTES_MAX)  # noqa: SIM115 - it is closed once it was read
        self.kept.write(_HEADER.pack(len(packed)) + packed)
        self.size += _HEADER.size + len(packed)
        self.records += records

    def frames(self) -> Iterator[bytes]:
        """All that was kept, once."""
        if self.kept is None:
            return
        self.kept.seek(0)
        while header := self.kept.read(_HEADER.size):
            yield self.kept.read(_HEADER.unpack(header)[0])
        self.kept.close()


@dataclass
class DeferredWriter:
    """Passes outputs on to *inner*, which writes them at once; see the module. They are of *type_*, whose length is the
    number of records, and wait as msgpack."""

    inner: SinkWriter
    type_: Any
    sink: str = field(init=False)
    records: int = 0
    open_transactions: int = 0
    unwritten: int = 0
    _open: _Interval = field(default_factory=_Interval)
    _cut: deque[_Interval] = field(default_factory=deque)
    """Not finalized yet."""
    _finalized: deque[_Interval] = field(default_factory=deque)
    _frames: Iterator[bytes] | None = None
    """Of the first that is finalized."""
    _handed_on: deque[_Interval] = field(default_factory=deque)
    """To the inner writer, which may have them under way."""

    def __post_init__(self) -> None:
        self.sink = self.inner.sink
        self._pack, self._unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(self.type_).decode

    @property
    def held_up(self) -> str:
        """As of the writer behind it."""
        return self.inner.held_up

    @property
    def room(self) -> int:
        """None while more may be written than should wait for it: the store is slower than the stream."""
        return 0 if sum(each.size for each in self._finalized) > UNWRITTEN_BYTES_MAX else ROOM

    def write(self, outputs: Any) -> None:
        """Keep *outputs* aside."""
        with self._room():
            self._open.keep(self._pack(outputs), len(outputs))
        self.records += len(outputs)

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SinkFailed(
                f"sink {self.sink!r}: what waits for its checkpoint does not fit into {tempfile.gettempdir()}: "
                f"{error.strerror}. Make room there, or set TMPDIR to a folder that has it."
            ) from None

    def barrier(self, checkpoint: int) -> None:
        """What was written before waits for *checkpoint*, or a later one."""
        self._open.checkpoint = checkpoint
        self._cut.append(self._open)
        self._open = _Interval()

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        """Nothing is to be flushed: a crash may lose what waits."""
        return FlushedInterval()

    def finalized(self, checkpoint: int) -> None:
        """All that was cut at *checkpoint* or before may be written now; `poll` does."""
        while self._cut and self._cut[0].checkpoint <= checkpoint:
            interval = self._cut.popleft()
            if interval.records:
                self._finalized.append(interval)
                self.unwritten += interval.records

    def poll(self, wait_s: float = 0.0) -> bool:
        """Hand on what may be written, as fast as it is taken."""
        moved = self.inner.poll(wait_s)
        for _ in range(FRAMES_AT_ONCE):
            if not self._finalized or not self.inner.room:
                break
            self._hand_on()
            moved = True
        while self._handed_on and self.inner.take_flushed(self._handed_on[0].checkpoint) is not None:
            self.unwritten -= self._handed_on.popleft().records
            moved = True
        return moved

    def _hand_on(self) -> None:
        """The next frame, or the barrier behind the last."""
        self._frames = self._frames or self._finalized[0].frames()
        with self._room():
            frame = next(self._frames, None)
        if frame is not None:
            self.inner.write(self._unpack(frame))
            return
        self._frames = None
        self.inner.barrier(self._finalized[0].checkpoint)
        self._handed_on.append(self._finalized.popleft())

    def abandon(self) -> None:
        """What waits is lost."""
        self.inner.abandon()
