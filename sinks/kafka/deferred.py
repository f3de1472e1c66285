"""The writer of a Kafka sink whose delivery is at most once: outputs wait until their checkpoint is finalized, and are
then written, once.

Invariants: an output is written only after the checkpoint that covers its input is finalized, so a replay of that input
has written nothing of it before; outputs are handed on once. Outputs of an aborted checkpoint wait for the next one.
Waiting outputs are in memory up to a bound, and beyond it in an unnamed file; a crash loses both. Only finalized ones
that are not written yet leave the writer no `room`.
"""

from __future__ import annotations

import struct
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import msgspec

from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.writer import ROOM, FlushedInterval, SinkFailed, SinkWriter

MEMORY_BYTES_MAX = 8 << 20
"""In memory for each interval; the rest goes to a file."""
UNWRITTEN_BYTES_MAX = 64 << 20
"""In finalized intervals, before the caller is asked to pause."""
FRAMES_AT_ONCE = 16
"""Batches that one poll hands on."""

_HEADER = struct.Struct("<I")


@dataclass
class _Interval:
    """The outputs between two barriers, or up to now."""

    file: IO[bytes] | None = None
    size: int = 0
    records: int = 0
    checkpoint: int = 0

    def keep(self, packed: bytes, records: int) -> None:
        if self.file is None:
            self.file = tempfile.SpooledTemporaryFile(MEMORY_BYTES_MAX)  # noqa: SIM115 - it is closed once it was read
        self.file.write(_HEADER.pack(len(packed)) + packed)
        self.size += _HEADER.size + len(packed)
        self.records += records

    def frames(self) -> Iterator[bytes]:
        """All kept frames; may be called once."""
        if self.file is None:
            return
        self.file.seek(0)
        while header := self.file.read(_HEADER.size):
            yield self.file.read(_HEADER.unpack(header)[0])
        self.file.close()


@dataclass
class DeferredWriter:
    """Passes outputs on to *inner*, which writes them at once; see the module. They wait as msgpack."""

    inner: SinkWriter
    sink: str = field(init=False)
    records: int = 0
    open_transactions: int = 0
    unwritten: int = 0
    _open: _Interval = field(default_factory=_Interval)
    _cut: deque[_Interval] = field(default_factory=deque)
    """Intervals that are not finalized yet."""
    _finalized: deque[_Interval] = field(default_factory=deque)
    _frames: Iterator[bytes] | None = None
    """Those left of the first finalized interval."""
    _handed_on: deque[_Interval] = field(default_factory=deque)
    """Intervals that the inner writer has not flushed yet."""

    def __post_init__(self) -> None:
        self.sink = self.inner.sink
        self._pack, self._unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Outputs).decode

    @property
    def held_up(self) -> str:
        """See `SinkWriter`: as of the inner writer."""
        return self.inner.held_up

    @property
    def room(self) -> int:
        """See `SinkWriter`: 0 while the broker is slower than the stream."""
        return 0 if sum(interval.size for interval in self._finalized) > UNWRITTEN_BYTES_MAX else ROOM

    def write(self, outputs: Outputs) -> None:
        """Keep *outputs* for later."""
        with self._disk_explained():
            self._open.keep(self._pack(outputs), len(outputs))
        self.records += len(outputs)

    @contextmanager
    def _disk_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SinkFailed(
                f"sink {self.sink!r}: the outputs that wait for their checkpoint do not fit into "
                f"{tempfile.gettempdir()}: {error.strerror}. Make room there, or set TMPDIR to a folder that has it."
            ) from None

    def barrier(self, checkpoint: int) -> None:
        """Let the outputs so far wait for *checkpoint*, or a later one."""
        self._open.checkpoint = checkpoint
        self._cut.append(self._open)
        self._open = _Interval()

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        """See `SinkWriter`: an empty interval at once, since a crash may lose what waits."""
        return FlushedInterval()

    def finalized(self, checkpoint: int) -> None:
        """Let `poll` write all intervals up to *checkpoint*."""
        while self._cut and self._cut[0].checkpoint <= checkpoint:
            interval = self._cut.popleft()
            if interval.records:
                self._finalized.append(interval)
                self.unwritten += interval.records

    def poll(self, wait_s: float = 0.0) -> bool:
        """Hand on finalized outputs, as fast as the inner writer takes them."""
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
        """Hand on the next frame, or the barrier after the last."""
        self._frames = self._frames or self._finalized[0].frames()
        with self._disk_explained():
            frame = next(self._frames, None)
        if frame is not None:
            self.inner.write(self._unpack(frame))
            return
        self._frames = None
        self.inner.barrier(self._finalized[0].checkpoint)
        self._handed_on.append(self._finalized.popleft())

    def abandon(self) -> None:
        """Give up all waiting outputs."""
        self.inner.abandon()
