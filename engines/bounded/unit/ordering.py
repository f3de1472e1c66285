"""The order in which a subtask takes what it has to read: by time, or along the order log of an earlier run.

Invariants: within a lane (a partition of a source, a channel) the order is the lane's own; all that is in the lanes is
taken, once, but for what an unaligned checkpoint has as on its way; what was taken is noted in the form of
`engines.runtime.order_log`, under the names that the local engine gives its inputs, so that a replay need not know
which engine took it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from exactlyonce.connectors.source import SplitReader
from exactlyonce.engines.bounded.unit.staging import StagedFile, read_frames
from exactlyonce.engines.runtime.batch import Batch, Push, joined
from exactlyonce.engines.runtime.batch_codec import BatchCodec
from exactlyonce.engines.runtime.order_log import INEXACT, OrderRuns, runs_of
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.pipeline.errors import Halt

BATCH_RECORDS_MAX = 2_000
TIME_BYTES = 8
NOT_A_SOURCE = -1
"""What order logs have in the place of a channel's partition."""


class Lane(Protocol):
    """One ordered input."""

    @property
    def name(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def push(self) -> Push: ...

    def time_ms(self) -> int | None:
        """When what comes next came to be, never less than before; None at the end."""

    def take(self, count: int) -> tuple[int, Batch]:
        """Up to *count* of what comes next, in the order log's measure, and the batch of it; (0, ...) at the end."""


@dataclass
class PartitionLane:
    """A range of one partition. The order log counts its messages, also those that are skipped."""

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
        return len(messages), self.decoder.decode(messages) if messages else Batch([], [])


@dataclass
class ChannelLane:
    """What one subtask of the stage before sent here. The order log counts its records."""

    name: str
    file: StagedFile | None
    codec: BatchCodec
    push: Push
    before: list[bytes] = field(default_factory=list)
    """In-flight frames of the base, which go first; without a time."""
    partition: int = NOT_A_SOURCE
    _frames: Iterator[bytes] | None = None
    _frame: bytes = b""
    _rest: Batch | None = None
    _taken: int = 0
    """How many of it were taken."""
    _time_ms: int = 0

    def time_ms(self) -> int | None:
        return self._time_ms if self._rest or self._advance() else None

    def take(self, count: int) -> tuple[int, Batch]:
        if self._rest is None:
            if not self._advance():
                return 0, Batch([], [])
            self._rest, self._frame = self.codec.decode(self._frame[TIME_BYTES:]), b""
        batch, start, size = self._rest, self._taken, len(self._rest.records)
        self._taken = end = min(start + count, size)
        if end == size:
            self._rest, self._taken = None, 0
        return end - start, batch.part(start, end)

    def _advance(self) -> bool:
        """Have the next frame at hand, if there is one."""
        if not self._frame:
            if self._frames is None:
                sent = iter(()) if self.file is None else read_frames(self.file)
                self._frames = chain((bytes(TIME_BYTES) + each for each in self.before), sent)
            self._frame = next(self._frames, b"")
            self._time_ms = int.from_bytes(self._frame[:TIME_BYTES], "big")
        return bool(self._frame)


@dataclass
class BatchTime:
    """The time of the batch that is going through the operators; what they send on stems from it."""

    time_ms: int = 0


def take_by_time(lanes: Sequence[Lane], order: OrderRuns | None, clock: BatchTime) -> None:
    """Push all that is in *lanes*: the oldest batch, by its first record, goes first; ties by name and partition."""
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
    """Push what is in *lanes* in the order that *logs* hold. Raises Halt if they do not fit what is there.

    *left*: by channel, how many records were on their way at the end, and are not to be taken.
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
    """Exactly *count* of what comes next, noted in *order*."""
    while count:
        taken, batch = lane.take(min(count, BATCH_RECORDS_MAX))
        if not taken:
            raise _misfit(lane.name, lane.partition, f"the log has {count} records more than there are to read")
        count -= taken
        if order is not None:
            order.note(lane.name, lane.partition, taken)
        yield batch


def _misfit(name: str, partition: int, what: str) -> Halt:
    where = f"partition {partition} of source {name!r}" if partition != NOT_A_SOURCE else f"channel {name}"
    return Halt(
        f"The order log does not fit what is read of {where}: {what}. The input is not what the first run read, or the "
        f"pipeline does not do what it did (it depends on time, chance or its surroundings): it cannot be recomputed."
    )
