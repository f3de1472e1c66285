"""The order in which a subtask takes its inputs: by time, or along the order log of an earlier run.

Invariants: a lane (a partition of a source, a channel) keeps its own order; every record of the lanes is taken once,
without the in-flight records of an unaligned checkpoint; the order is noted in the form of `engines.runtime.order_log`,
under the local engine's names, so that a replay need not know which engine took it. At most OPEN_READERS_MAX readers
stay open between two reads; a closed one goes on at its position, and loses only records fetched ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import SplitReader
from exactlyonce.engines.bounded.unit.staging import Frames
from exactlyonce.engines.runtime.batch import Batch, Push, joined
from exactlyonce.engines.runtime.batch_codec import BatchCodec
from exactlyonce.engines.runtime.order_log import INEXACT, OrderRuns, runs_of
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.pipeline.errors import Halt

BATCH_RECORDS_MAX = 2_000
OPEN_READERS_MAX = 64
"""An open reader is a client, with threads and some seven descriptors."""
NOT_A_SOURCE = -1
"""The partition of a channel in order logs."""


class Lane(Protocol):
    """One ordered input."""

    @property
    def name(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def push(self) -> Push: ...

    def time_ms(self) -> int | None:
        """The time of the next item, which never decreases; None at the end."""

    def take(self, count: int) -> tuple[int, Batch]:
        """Up to *count* next items, as the order log counts them, and their batch; (0, ...) at the end."""


class ReaderInTurn:
    """A `SplitReader` of a range from *start* on. *open* makes one at any position; *staying* are the open readers."""

    def __init__(
        self, start: SourceOffset, open: Callable[[SourceOffset], SplitReader], staying: set[ReaderInTurn]
    ) -> None:
        self._position, self._open, self._staying = start, open, staying
        self._reader: SplitReader | None = None

    def read(self, records_max: int) -> list[Any]:
        """The next records; none at the end of the range."""
        self._reader = self._reader or self._open(self._position)
        records = self._reader.read(records_max)
        if records and (self in self._staying or len(self._staying) < OPEN_READERS_MAX):
            self._staying.add(self)
        else:
            self.close()
        return records

    def position(self) -> SourceOffset:
        return self._position if self._reader is None else self._reader.position()

    def close(self) -> None:
        """Close the client; may be called more than once."""
        self._staying.discard(self)
        if self._reader is not None:
            self._position = self._reader.position()
            self._reader.close()
            self._reader = None


@dataclass
class PartitionLane:
    """A range of one partition. The order log counts its messages, even skipped ones."""

    name: str
    partition: int
    reader: SplitReader
    decoder: SourceDecoder
    push: Push
    records: int = 0
    _buffer: list[Any] = field(default_factory=list)
    _time_ms: int = 0

    def time_ms(self) -> int | None:
        if not self._buffer:
            self._buffer = self.reader.read(BATCH_RECORDS_MAX)
        if not self._buffer:
            return None
        self._time_ms = max(self._time_ms, self.decoder.time_ms(self._buffer[0]))
        return self._time_ms

    def take(self, count: int) -> tuple[int, Batch]:
        if not self._buffer:
            self._buffer = self.reader.read(BATCH_RECORDS_MAX)
        messages, self._buffer = self._buffer[:count], self._buffer[count:]
        self.records += len(messages)
        runs = ((self.partition, len(messages)),)
        return len(messages), self.decoder.decode(messages, runs) if messages else Batch([], [])


@dataclass
class ChannelLane:
    """The records from one subtask of the stage before. The order log counts its records."""

    name: str
    sent: Sequence[Frames]
    """In order: those of each split of the sender."""
    codec: BatchCodec
    push: Push
    before: list[bytes] = field(default_factory=list)
    """In-flight frames of the base, which go first, without a time."""
    partition: int = NOT_A_SOURCE
    _frames: Iterator[tuple[int, Callable[[], bytes]]] | None = None
    _read: Callable[[], bytes] | None = None
    """Reads the next frame, whose time is known."""
    _rest: Batch | None = None
    _taken: int = 0
    """Records taken of `_rest`."""
    _time_ms: int = 0

    def time_ms(self) -> int | None:
        return self._time_ms if self._rest or self._advance() else None

    def take(self, count: int) -> tuple[int, Batch]:
        if self._rest is None:
            if not self._advance() or self._read is None:
                return 0, Batch([], [])
            self._rest, self._read = self.codec.decode(self._read()), None
        batch, start, size = self._rest, self._taken, len(self._rest.records)
        self._taken = end = min(start + count, size)
        if end == size:
            self._rest, self._taken = None, 0
        return end - start, batch.part(start, end)

    def _advance(self) -> bool:
        if self._read is None:
            if self._frames is None:
                before = ((0, partial(bytes, frame)) for frame in self.before)
                self._frames = chain(before, chain.from_iterable(frames.timed() for frames in self.sent))
            time_ms, self._read = next(self._frames, (0, None))
            self._time_ms = max(self._time_ms, time_ms)  # a split does not know the times before it
        return self._read is not None


@dataclass
class BatchTime:
    """The time of the batch in the operators, which their output inherits."""

    time_ms: int = 0


def take_by_time(lanes: Sequence[Lane], order: OrderRuns | None, clock: BatchTime) -> None:
    """Push all batches of *lanes*: the oldest, by its first record, goes first; ties by name and partition."""
    places = enumerate(sorted(lanes, key=lambda lane: (lane.name, lane.partition)))
    waiting = [(time_ms, place, lane) for place, lane in places if (time_ms := lane.time_ms()) is not None]
    heapq.heapify(waiting)
    while waiting:
        time_ms, place, lane = waiting[0]
        clock.time_ms = time_ms
        count, batch = lane.take(BATCH_RECORDS_MAX)
        if order is not None:
            order.note(lane.name, lane.partition, count)
            order.end_batch()
        lane.push(batch)
        next_ms = lane.time_ms()
        if next_ms is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (next_ms, place, lane))


def take_along(
    lanes: Sequence[Lane], logs: Iterable[bytes], order: OrderRuns | None, left: Mapping[str, int] | None = None
) -> None:
    """Push the batches of *lanes* in the order of *logs*. Raises Halt if these do not fit.

    *left*: by channel, the number of records in flight at the end, which are not pushed.
    """
    by_name = {(lane.name, lane.partition): lane for lane in lanes}
    together: list[Batch] = []
    for (name, partition), count in runs_of(logs):
        if (name, partition) == INEXACT:
            raise Halt(
                "It cannot be recomputed: the run was one with mode at_least_once, and took records of the next "
                "checkpoint before this one, or of this one before the last."
            )
        lane = by_name.get((name, partition))
        if lane is None:
            raise _misfit(name, partition, f"the log has {count} records, and it is not read here")
        for batch in _taken(lane, count, order):
            if order is None or not order.batches:
                lane.push(batch)
            else:
                together.append(batch)
        if not count:
            lane.push(joined(together))
            together = []
            if order is not None:
                order.end_batch()
    for name, count in (left or {}).items():
        lane = by_name.get((name, NOT_A_SOURCE))
        if lane is None:
            raise _misfit(name, NOT_A_SOURCE, f"{count} records were on their way, and it is not read here")
        for _ in _taken(lane, count, None):
            pass
    for lane in lanes:
        if lane.time_ms() is not None:
            raise _misfit(lane.name, lane.partition, "there are records behind those that the log has")


def _taken(lane: Lane, count: int, order: OrderRuns | None) -> Iterator[Batch]:
    """Exactly *count* items, noted in *order*."""
    while count:
        taken, batch = lane.take(min(count, BATCH_RECORDS_MAX))
        if not taken:
            raise _misfit(lane.name, lane.partition, f"the log has {count} records more than there are to read")
        count -= taken
        if order is not None:
            order.note(lane.name, lane.partition, taken)
        yield batch


def _misfit(name: str, partition: int, why: str) -> Halt:
    where = f"partition {partition} of source {name!r}" if partition != NOT_A_SOURCE else f"channel {name}"
    return Halt(
        f"The order log does not fit what is read of {where}: {why}. The input is not what the first run read, or the "
        f"pipeline does not do what it did (it depends on time, chance or its surroundings): it cannot be recomputed."
    )
