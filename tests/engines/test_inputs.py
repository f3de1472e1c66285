"""Records cross between workers unchanged, one that cannot is named; a few records of a source gather."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import pytest

from exactlyonce import EventTime
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors import IterableSource
from exactlyonce.connectors.source import ReaderContext
from exactlyonce.engines.local.inputs import (
    ALIGNED,
    BATCH_RECORDS_MAX,
    GATHER_S,
    TICK_S,
    Pace,
    Slices,
    SourceInput,
    SourceTrigger,
    slice_pace,
)
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.engines.runtime.watermarks import Barrier, Watermark
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK

if TYPE_CHECKING:
    from exactlyonce.connectors.source import Readable, SourceReader


class Price(msgspec.Struct):
    amount: float


def batch(*records: object) -> Batch:
    origins = [Coordinates("prices", 3, offset) for offset in range(len(records))]
    return Batch(list(records), origins, [b"k"] * len(records))


def test_a_batch_comes_out_as_it_went_in() -> None:
    codec = BatchCodec(Price)
    decoded = codec.decode(codec.encode(batch(Price(1.5), Price(2))))
    assert decoded.records == [Price(1.5), Price(2.0)]
    assert type(decoded.records[1].amount) is float
    assert decoded.keys == [b"k", b"k"]
    assert list(decoded.origins) == [Coordinates("prices", 3, 0), Coordinates("prices", 3, 1)]


def test_a_record_of_another_type_is_named() -> None:
    codec = BatchCodec(Price)
    frame = codec.encode(batch(Price(1.0), Price("dear")))  # type: ignore[arg-type]  # what a checker would refuse
    with pytest.raises(RecordError, match=r"no.* valid Price: .*got `str`.*\$\.amount.*prices\[3\] offset 1"):
        codec.decode(frame)


def test_a_record_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(RecordError, match=r"prices\[3\] offset 1"):
        BatchCodec(Price).encode(batch(Price(1.0), object()))


def test_coordinates_are_made_where_they_are_looked_at() -> None:
    codec = BatchCodec(Price)
    decoded = codec.decode(codec.encode(batch(*(Price(n) for n in range(5)))))
    part = decoded.part(1, 4)
    assert (len(part.origins), part.origins[0], part.origins[-1]) == (
        3, Coordinates("prices", 3, 1), Coordinates("prices", 3, 3)
    )  # fmt: skip
    again = codec.decode(codec.encode(part))
    assert list(again.origins) == [Coordinates("prices", 3, offset) for offset in (1, 2, 3)]
    with pytest.raises(IndexError):
        part.origins[3]


class Few:
    idle = False

    def __init__(self, has: int, clock: Callable[[], float]) -> None:
        self.has, self.asked, self._clock = has, list[float](), clock
        self._taken = 0

    def poll(self, records_max: int, timeout_s: float) -> list[Any]:
        self.runs: list[tuple[int, int]] = []
        self.asked.append(self._clock())
        lines = [Line(n) for n in range(min(self.has, records_max))]
        self._taken += len(lines)
        return lines

    def positions(self) -> tuple[SourceOffset, ...]:
        return (SourceOffset("in", "lines", "id", 0, self._taken),)


class Line(NamedTuple):
    n: int


class Numbers:
    on_error = "fail"
    event_time = None

    def decoder(self) -> Any:
        return SimpleNamespace(parts=lambda lines: [each.n for each in lines], decode=lambda n: n)


def source(has: int) -> tuple[SourceInput, Few, list[float]]:
    now = [100.0]
    reader = Few(has, lambda: now[0])
    decoder = SourceDecoder("in", cast("Readable", Numbers()))
    slices = Slices(slice_pace(), lambda: now[0])
    read = SourceInput("in", cast("SourceReader", reader), decoder, lambda _: None, Activity(lambda: now[0]), slices)
    return read, reader, now


def test_few_records_of_a_source_gather() -> None:
    read, reader, now = source(has=3)
    assert isinstance(read.next(1_000), Batch)
    assert read.next(1_000) is None
    now[0] += GATHER_S
    assert isinstance(read.next(1_000), Batch)
    assert reader.asked == [100.0, 100.0 + GATHER_S]
    reader.has = 0
    for _ in range(3):
        now[0] += GATHER_S * 0.6
        assert read.next(1_000) is None
    assert len(reader.asked) == 3, "one that has nothing is not asked all the time, either"


def test_a_barrier_does_not_wait_for_records_to_gather() -> None:
    read, reader, _ = source(has=3)
    read.next(1_000)
    read.triggers.append(SourceTrigger(Barrier(7, 6), False, ()))
    assert read.next(1_000) == Barrier(7, 6)
    assert len(reader.asked) == 1


def timed(items: list[int], positions: int = 1) -> tuple[SourceInput, list[float]]:
    """The input of an iterable, whose items are their times, with a clock."""
    description = IterableSource(items, value=int, time=EventTime(lambda item: item, disorder="2ms", idle="10s"))
    now = [100.0]
    starts = [SourceOffset("in", description.place, description.place, split, 0) for split in range(positions)]
    context = ReaderContext(source="in", positions=starts, targets=None, clients=cast(Any, None))
    reader = description.open_reader(context)
    reader.open()
    slices = Slices(Pace(0.1, 2, 2), lambda: now[0])
    decoder = SourceDecoder("in", description, before=starts)
    return SourceInput("in", reader, decoder, lambda _: None, Activity(lambda: now[0]), slices), now


def test_a_watermark_follows_each_batch_and_sn_has_the_floor() -> None:
    read, _ = timed([10, 5, 20, 21, 22])
    taken, told = [], []
    while isinstance(batch := read.next(2), Batch):
        taken += [batch.times, batch.floors]
        read.triggers.append(SourceTrigger(Barrier(7, 6), False, ()))
        read.next(2)
        told.append(read.processed())
    assert taken == [[10, 5], [NO_FLOOR, 7], [20, 21], None, [22], None]
    assert batch is None
    assert told == [Watermark(7), Watermark(18), Watermark(19)]
    assert [position.floor for position in read.noted[7]] == [20]


def test_a_backlog_has_a_watermark_now_and_then() -> None:
    """After some full batches, or a while; after one that is not full at once."""
    read, now = timed([*range(7 * BATCH_RECORDS_MAX + 5)])
    read.slices = Slices(Pace(10.0, BATCH_RECORDS_MAX, BATCH_RECORDS_MAX), lambda: now[0])
    told = []
    for _ in range(8):
        now[0] += GATHER_S
        assert isinstance(read.next(BATCH_RECORDS_MAX), Batch)
        told.append(read.processed())
    last = 4 * BATCH_RECORDS_MAX - 1, 7 * BATCH_RECORDS_MAX + 4
    first, then = (Watermark(time - 3) for time in last)
    assert told == [None, None, None, first, None, None, None, then]
    read, now = timed([*range(2 * BATCH_RECORDS_MAX)])
    read.slices = Slices(Pace(10.0, BATCH_RECORDS_MAX, BATCH_RECORDS_MAX), lambda: now[0])
    assert isinstance(read.next(BATCH_RECORDS_MAX), Batch)
    assert read.processed() is None
    now[0] += TICK_S
    assert read.next(BATCH_RECORDS_MAX) == Watermark(BATCH_RECORDS_MAX - 4)


def test_a_drained_source_ends_time_once_before_its_last_barrier() -> None:
    read, _ = timed([10])
    read.triggers.append(SourceTrigger(Barrier(7, 6), True, (), drains=True))
    read.triggers.append(SourceTrigger(Barrier(8, 6), True, (), drains=True))
    items = [read.next(2) for _ in range(4)]
    assert items == [Watermark(END_OF_TIME), Barrier(7, 6), Barrier(8, 6), None]
    assert [position.floor for position in read.noted[8]] == [NO_FLOOR], "a later run goes on with its own time"


def test_the_watermark_of_an_ended_source_follows_the_clock_after_a_while() -> None:
    (read, now), told = timed([10, 11, 12]), []
    while isinstance(read.next(2), Batch):
        told.append(read.processed())
    assert told == [Watermark(8), Watermark(9)]
    now[0] += TICK_S
    assert read.next(2) == Watermark(9, idle=True)
    now[0] += 9
    assert read.next(2) is None
    for elapsed_ms in (10_000, 11_000):
        now[0] += 1
        assert read.next(2) == Watermark(9 + elapsed_ms, idle=True)
    waiting, now = timed([10], positions=0)
    assert waiting.next(2) == Watermark(NO_WATERMARK, idle=True)
    assert waiting.next(2) is None


def test_a_barrier_notes_all_that_was_handed_out_before_it() -> None:
    read, _, _ = source(has=1_000_000)
    for checkpoint in (1, 2):
        read.next(10)
        read.triggers.append(SourceTrigger(Barrier(checkpoint, checkpoint - 1), False, ()))
        handed_out = read.records
        assert read.next(10) == Barrier(checkpoint, checkpoint - 1)
        assert [position.offset for position in read.noted[checkpoint]] == [handed_out]


def test_a_wait_for_a_processor_does_not_shrink_a_slice_and_idle_splits_go_by_the_clock() -> None:
    """The size of a slice goes by the time that the work took; gathering and idleness go by the time that passes."""
    now, worked = [100.0], [0.0]
    decoder = SourceDecoder("in", cast("Readable", Numbers()))
    reader = Few(10_000, lambda: now[0])
    slices = Slices(slice_pace(), lambda: worked[0])
    read = SourceInput("in", cast("SourceReader", reader), decoder, lambda _: None, Activity(lambda: now[0]), slices)
    for _ in range(12):
        batch = read.next(10_000)
        assert isinstance(batch, Batch)
        worked[0] += len(batch.records) * 0.0001
        now[0] += 5.0  # it is away from the processor meanwhile
        read.processed()
    assert slices.pace.size == pytest.approx(ALIGNED.slice_s / 0.0001, rel=0.01)
    reader.has = 0
    assert read.next(1_000) is None
    assert read.due_s == now[0] + GATHER_S


def test_the_time_of_processing_stands_still_while_a_thread_waits_for_a_processor() -> None:
    """Beside a busy process on the same processor, the monotonic time moves on alone; a sleep counts in full."""
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this system does not tell how long a thread waits for a processor")
    clock, limit_s, away_s = SystemClock(), time.monotonic() + 60, 0.0
    before, processor = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    program = "print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        os.sched_setaffinity(busy.pid, {processor})
        os.sched_setaffinity(0, {processor})
        began_s, worked_s = time.monotonic(), clock.processing_s()
        last_s = worked_s
        while away_s < 0.05:
            assert time.monotonic() < limit_s
            before_s, last_s = last_s, clock.processing_s()
            assert before_s <= last_s
            away_s = (time.monotonic() - began_s) - (last_s - worked_s)
        time.sleep(0.05)
        assert clock.processing_s() - last_s >= 0.049
    finally:
        os.sched_setaffinity(0, before)
        busy.kill()
        busy.wait()
