"""The order in which a subtask takes its inputs: by time, or along the order log of an earlier run.

Invariants: a lane (a partition of a source, a channel) keeps its own order; every record of the lanes is taken once,
without the in-flight records of an unaligned checkpoint; the order is noted in the form of `engines.runtime.order_log`,
under the local engine's names, so that a replay need not know which engine took it. At most OPEN_READERS_MAX readers
stay open between two reads; a closed one goes on at its position, and loses only records fetched ahead.

By time, watermarks follow from the records alone: no partition is idle, and the end of a range says nothing. A replay
takes those of the log, at their places; what its inputs say must agree. What a watermark makes due is out before
anything else is taken, unless the log says how much of it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import SplitReader
from exactlyonce.engines.bounded.unit.staging import Frames
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Push, joined
from exactlyonce.engines.runtime.order_log import (
    CLOCK,
    FIRED,
    FIRING,
    FLOOR,
    IDLE,
    INEXACT,
    NOT_A_SOURCE,
    OVER,
    RECORDS,
    OrderRuns,
    runs_of,
)
from exactlyonce.engines.runtime.source_decoder import SourceDecoder, SourceTimes
from exactlyonce.engines.runtime.watermarks import Port, Watermark
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.event_time import NO_WATERMARK, shown_time

BATCH_RECORDS_MAX = 2_000
OPEN_READERS_MAX = 64
"""An open reader is a client, with threads and some seven descriptors."""


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
    port: None = None
    records: int = 0
    taken: int = 0
    """The messages handed out last."""
    _buffer: list[Any] = field(default_factory=list)
    _time_ms: int = 0

    def time_ms(self) -> int | None:
        if not self._buffer:
            self._buffer = self.reader.read(BATCH_RECORDS_MAX)
        if not self._buffer:
            return None
        self._time_ms = max(self._time_ms, self.decoder.time_ms(self._buffer[0]))
        return self._time_ms

    def take(self, count: int) -> Batch | None:
        if not self._buffer:
            self._buffer = self.reader.read(BATCH_RECORDS_MAX)
        messages, self._buffer = self._buffer[:count], self._buffer[count:]
        self.taken = len(messages)
        self.records += self.taken
        return self.decoder.decode(messages, ((self.partition, self.taken),)) if messages else None

    def note(self, order: OrderRuns) -> None:
        order.note(self.name, self.partition, self.taken)

    def watermark(self) -> None:
        """It has none of its own: see `SourceWatermarks`."""


@dataclass
class SourceWatermarks:
    """The watermarks of a source in a unit, by all of its partitions there."""

    name: str
    times: SourceTimes
    port: Port
    lanes: list[PartitionLane] = field(default_factory=list)

    def look(self) -> None:
        """Look which partitions there are, and which have ended: they hold back nothing."""
        positions = [lane.reader.position() for lane in self.lanes]
        self.times.rest(positions, (), 0.0, behind=False)

    def next(self) -> Watermark | None:
        """The watermark now, if it is new."""
        return self.times.advanced(0.0)

    def follow(self, watermark: Watermark) -> bool:
        may_end = any(not lane.reader.position().in_topic for lane in self.lanes)
        return self.times.follow(watermark, may_end=may_end)


@dataclass
class ChannelLane:
    """The records and watermarks from one subtask of the stage before. The order log counts its records."""

    name: str
    sent: Sequence[Frames]
    """In order: the frames of each split of the sender."""
    codec: BatchCodec
    push: Push
    before: list[bytes] = field(default_factory=list)
    """In-flight frames of the base, which go first, without a time."""
    port: Port | None = None
    """Takes the watermarks; None: none come."""
    partition: int = NOT_A_SOURCE
    taken: int = 0
    """The records handed out last."""
    _items: Iterator[tuple[int, Watermark | Callable[[], bytes]]] | None = None
    _next: Watermark | Callable[[], bytes] | None = None
    """The next item, whose time is known: a frame is not read yet."""
    _rest: Batch | None = None
    """The frame in hand."""
    _begun: int = 0
    """Records taken of `_rest`."""
    _time_ms: int = 0
    _reached: int = NO_WATERMARK
    """The highest watermark so far."""
    _frames: int = 0
    """Frames that were taken, also in part."""

    def time_ms(self) -> int | None:
        return self._time_ms if self._rest or self._advance() else None

    def take(self, count: int) -> Batch | None:
        if self._rest is None:
            if not self._advance() or self._next is None or isinstance(self._next, Watermark):
                return None
            self._rest, self._next = self.codec.decode(self._next()), None
            self._frames += 1
        batch, start, size = self._rest, self._begun, len(self._rest.records)
        self._begun = end = min(start + count, size)
        if end == size:
            self._rest, self._begun = None, 0
        self.taken = end - start
        return batch.part(start, end)

    def note(self, order: OrderRuns) -> None:
        order.note(self.name, NOT_A_SOURCE, self.taken)

    def watermark(self) -> Watermark | None:
        if self._rest is not None or not self._advance() or not isinstance(self._next, Watermark):
            return None
        watermark, self._next = self._next, None
        self._reached = max(self._reached, watermark.value)
        return watermark

    def follow(self, watermark: Watermark) -> bool:
        while self.watermark() is not None:  # a channel may have kept the last one alone
            pass
        agrees = watermark.value <= self._reached or self._frames <= len(self.before)  # it may have been in flight
        self._reached = max(self._reached, watermark.value)
        return agrees

    def _advance(self) -> bool:
        if self._next is None:
            if self._items is None:
                before = ((0, partial(bytes, frame)) for frame in self.before)
                self._items = chain(before, chain.from_iterable(frames.timed() for frames in self.sent))
            time_ms, self._next = next(self._items, (0, None))
            self._time_ms = max(self._time_ms, time_ms)  # a split does not know the times before it
        return self._next is not None


Lane = PartitionLane | ChannelLane
"""An input that is here whole. `time_ms` is the time of its next item, which never decreases; None at the end. `take`
gives up to so many next items, as the order log counts them, and `watermark` takes the one that comes next, if one
does."""


@dataclass
class BatchTime:
    """The time of the batch in the operators, which their output inherits."""

    time_ms: int = 0


def take_by_time(
    lanes: Sequence[Lane], sources: Mapping[str, SourceWatermarks], operators: TaskOperators, clock: BatchTime
) -> None:
    """Push all batches of *lanes*: the oldest, by its first record, goes first; ties by name and partition. *sources*
    are those with event time."""
    for source in sources.values():
        source.look()
        _advance(operators, source, source.next())
    places = enumerate(sorted(lanes, key=lambda lane: (lane.name, lane.partition)))
    waiting = [(time_ms, place, lane) for place, lane in places if (time_ms := lane.time_ms()) is not None]
    heapq.heapify(waiting)
    while waiting:
        time_ms, place, lane = waiting[0]
        clock.time_ms = time_ms
        if (batch := lane.take(BATCH_RECORDS_MAX)) is not None:
            operators.take(lane, batch)
        while (watermark := lane.watermark()) is not None:
            _advance(operators, lane, watermark)
        next_ms = lane.time_ms()
        if (timed := sources.get(lane.name)) is not None:
            if next_ms is None:
                timed.look()
            _advance(operators, timed, timed.next())
        if next_ms is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (next_ms, place, lane))


def _advance(operators: TaskOperators, source: Lane | SourceWatermarks, watermark: Watermark | None) -> None:
    """Take *watermark* of *source*, if there is one, with all results that it makes due."""
    if watermark is not None:
        operators.advance(source.name, source.port, watermark)
    operators.fire_all()


def take_along(
    lanes: Sequence[Lane],
    sources: Mapping[str, SourceWatermarks],
    logs: Iterable[bytes],
    operators: TaskOperators,
    left: Mapping[str, int] | None = None,
) -> None:
    """Push the batches of *lanes* in the order of *logs*. Raises Halt if these do not fit.

    *left*: by channel, the number of records in flight at the end, which are not pushed. *sources*: see `take_by_time`.
    """
    by_name = {(lane.name, lane.partition): lane for lane in lanes}
    order = operators.order
    together: list[Batch] = []
    interrupted = False
    due: dict[str, list[Watermark]] = {}
    runs = runs_of(logs)
    for (name, partition, kind), count in runs:
        if (name, partition, kind) == INEXACT:
            raise Halt(
                "It cannot be recomputed: the run was one with mode at_least_once, and took records of the next "
                "checkpoint before this one, or of this one before the last."
            )
        if kind == FIRING:
            if count:
                interrupted = True
                for (operator, _, said), time in islice(runs, count):
                    due.setdefault(operator, []).append(Watermark(time, said == IDLE))
                operators.begin_within(due)
            else:
                operators.begun(due)
            continue
        if kind in (FIRED, OVER):
            if not operators.fire_along(name, count, over=kind == OVER):
                raise _does_not_fit(f"in operator {name!r}: the log has {count} results that it does not give")
            interrupted = kind == FIRED
            continue
        if not interrupted:
            operators.fire_all()
        if kind == FLOOR:
            sources[name].times.follow_floor(partition, count)
            if order is not None:
                order.floor(name, partition, count)
            continue
        if kind == CLOCK:
            operators.tell_time(count)
            continue
        if kind != RECORDS:
            watermark = Watermark(count, kind == IDLE)
            said_by = sources.get(name) or by_name.get((name, NOT_A_SOURCE))
            if not isinstance(said_by, SourceWatermarks | ChannelLane) or not said_by.follow(watermark):
                raise _misfit(name, NOT_A_SOURCE, f"the log has the watermark {_shown(count)}, and it says another one")
            operators.advance(said_by.name, said_by.port, watermark)
            continue
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
    if not interrupted:
        operators.fire_all()
    for name, count in (left or {}).items():
        lane = by_name.get((name, NOT_A_SOURCE))
        if lane is None:
            raise _misfit(name, NOT_A_SOURCE, f"{count} records were on their way, and it is not read here")
        for _ in _taken(lane, count, None):
            pass
    for lane in lanes:
        while lane.watermark() is not None:
            pass
        if lane.time_ms() is not None:
            raise _misfit(lane.name, lane.partition, "there are records behind those that the log has")


def _taken(lane: Lane, count: int, order: OrderRuns | None) -> Iterator[Batch]:
    """Exactly *count* items, noted in *order*."""
    while count:
        while lane.watermark() is not None:  # the log says where it was taken
            pass
        batch = lane.take(min(count, BATCH_RECORDS_MAX))
        if batch is None:
            raise _misfit(lane.name, lane.partition, f"the log has {count} records more than there are to read")
        count -= lane.taken
        if order is not None:
            lane.note(order)
        yield batch


def _shown(time: int) -> str:
    return "of no time" if time == NO_WATERMARK else shown_time(time)


def _misfit(name: str, partition: int, why: str) -> Halt:
    where = f"partition {partition} of source {name!r}" if partition != NOT_A_SOURCE else f"channel {name}"
    return _does_not_fit(f"of {where}: {why}")


def _does_not_fit(why: str) -> Halt:
    return Halt(
        f"The order log does not fit what is read {why}. The input is not what the first run read, or the "
        f"pipeline does not do what it did (it depends on time, chance or its surroundings): it cannot be recomputed."
    )
