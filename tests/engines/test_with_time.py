"""A new event time after an operator: windows after it are a function of the records that come, with their times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_firings import FEW, GIVEN, Driven
from test_windows import ARRIVALS, WINDOWS, Arrived, Seen, as_batch, expected, floors, in_batches
from test_windows import operator_of as windows_of

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.faults import DeadLetterOutput, Notes
from exactlyonce.engines.runtime.operators import WithTime
from exactlyonce.errors import RecordError
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.windows import moment


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@FEW
@given(arrivals=ARRIVALS, shifts=st.lists(st.integers(-80, 80), min_size=1), lag=st.integers(0, 80), **GIVEN)
def test_windows_of_new_times_take_each_record_that_is_no_further_back_than_the_disorder(
    window: Any, arrivals: Any, shifts: list[int], lag: int, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    """Whatever comes between two slices, and whichever batches and watermarks there are."""
    stream = list(floors(arrivals, disorder))
    times = [record.time + shifts[record.id % len(shifts)] for record, _ in stream]
    seen = Seen()
    driven = Driven(lambda table: windows_of(window, seen.take, seen.take_late, table=table), size, turns)
    moved = WithTime("moved", lambda record: moment(times[record.id]), lag)
    moved.downstream = [lambda batch: driven.operator(batch.keyed([canonical_key(of.key) for of in batch.records]))]
    moved.ports = [Reaches(driven)]
    for batch, watermark in in_batches(stream, cuts):
        moved(batch)
        moved.advance(watermark)
    driven.end(100_000)
    results, late = expected(
        window,
        [
            replace(record, time=time, floor=max(record.time - 1, record.floor) - lag)
            for time, (record, _) in zip(times, stream, strict=True)
        ],
    )
    assert seen.counted() == results
    assert Counter(record.id for record in seen.late) == late


class Reaches:
    def __init__(self, driven: Driven) -> None:
        self._driven = driven

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        if watermark > NO_WATERMARK:
            self._driven.advance(watermark)


def test_a_watermark_is_lowered_by_the_disorder_unless_there_is_none_or_time_has_ended() -> None:
    told: list[tuple[int, bool]] = []

    class Tells:
        def advance(self, watermark: int, *, idle: bool = False) -> None:
            told.append((watermark, idle))

    moved = WithTime("moved", int, 30, ports=[Tells()])
    for watermark, idle in ((NO_WATERMARK, True), (100, False), (170, True), (END_OF_TIME, False)):
        moved.advance(watermark, idle=idle)
    assert told == [(NO_WATERMARK, True), (70, False), (140, True), (END_OF_TIME, False)]


def without_a_time(record: Arrived) -> Any:
    return [5, None, moment(7).replace(tzinfo=None)][record.id]


RECORDS = [Arrived(number, "a", 10, NO_FLOOR) for number in range(3)]


def test_a_record_without_a_usable_time_stops_the_job() -> None:
    with pytest.raises(
        RecordError, match=r"'moved' raised NoTime: with_time gave None, .*offset 1\. .* nothing is los"
    ):
        WithTime("moved", without_a_time, 5)(as_batch(RECORDS))


def test_or_it_becomes_a_dead_letter() -> None:
    pushed: list[Batch] = []
    moved = WithTime("moved", without_a_time, 4, downstream=[pushed.append])
    letters: list[Any] = []
    moved.dead_letters = DeadLetterOutput("p", "moved", "operator", Notes(), {})
    moved.dead_letters.listeners.append(lambda batch: letters.extend(batch.records))
    moved(as_batch(RECORDS))
    (batch,) = pushed
    assert ([record.id for record in batch.records], batch.times, batch.floors) == ([0], [5], [5])
    assert len(letters) == 2
