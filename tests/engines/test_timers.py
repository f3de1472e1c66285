"""Handlers with timers on a real table: in order of time their calls are a plain function of times and floors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_windows import ARRIVALS, WATERMARKS, Arrivals, Arrived, as_batch, floors, in_batches, play_restored
from timed_rig import GROUPS, group_of, parts_of

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.timer_operators import OPERATORS, CoHandlerOperator, HandlerOperator
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.event_time import END_OF_TIME
from exactlyonce.pipeline.functions import Emit
from exactlyonce.pipeline.graph import Kind, Node
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.timed import Order
from exactlyonce.pipeline.timers import FOREVER, Batches, CoHandling, Handling, Timers, kept_entry
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.pipeline.windows import moment

State = list[int]
Out = tuple[str, str, int, list[int]]
"""What was called, the key, the time, and the ids in its state."""


def ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


class Gathers:
    """Keeps the ids of a key's records, in place. A timer takes those that are there; ids decide what a record does."""

    def on_record(self, key: str, ids: State | None, record: Arrived, timers: Timers, emit: Emit[Out]) -> State | None:
        ids = ids or []
        ids.append(record.id)
        now = timers.event.now
        if record.id % 5 == 3:
            timers.event.delete(now + timedelta(milliseconds=20))
        for delay in (0, 20, 20, 45, -7) if record.id % 3 == 0 else (20,):
            timers.event.set(now + timedelta(milliseconds=delay))
        emit(("record", key, ms(now), [record.id]))
        return ids

    def on_time(self, key: str, ids: State | None, at: datetime, timers: Timers, emit: Emit[Out]) -> State | None:
        assert timers.event.now == at
        emit(("time", key, ms(at), ids or []))
        if ids and len(ids) % 2:
            timers.event.set(at + timedelta(milliseconds=9))
            timers.event.set(at - timedelta(milliseconds=1))
            return ids[1:]
        return None


class GathersBoth:
    """Likewise, of two inputs: those of each partition come to a method of its own."""

    on_time = Gathers.on_time

    def __init__(self, arrivals: Arrivals) -> None:
        self.sides = [side for side, _, _ in arrivals]

    def on_left(self, key: str, ids: State | None, record: Arrived, timers: Timers, emit: Emit[Out]) -> State | None:
        assert self.sides[record.id] == 0
        return Gathers().on_record(key, ids, record, timers, emit)

    def on_right(self, key: str, ids: State | None, record: Arrived, timers: Timers, emit: Emit[Out]) -> State | None:
        assert self.sides[record.id] == 1
        return Gathers().on_record(key, ids, record, timers, emit)


def expected(records: Sequence[Arrived]) -> list[Out]:
    """By definition: all timers and records of one key after the other, by time."""
    return [
        out
        for key in sorted({record.key for record in records})
        for out in Gathered(key).calls([record for record in records if record.key == key])
    ]


class Gathered:
    """The calls of `Gathers` for one key, from sets of times."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.ids: State = []
        self.timers: set[int] = set()
        self.out: list[Out] = []

    def calls(self, records: Sequence[Arrived]) -> list[Out]:
        waiting = sorted(records, key=lambda record: (record.time, record.id))
        while waiting or self.timers:
            now = min([record.time for record in waiting[:1]] + [*self.timers])
            while waiting and waiting[0].time == now:
                self._record(waiting.pop(0).id, now)
            if now in self.timers:
                self.timers.discard(now)
                self._goes_off(now)
        return self.out

    def _record(self, id: int, now: int) -> None:
        self.ids.append(id)
        if id % 5 == 3:
            self.timers.discard(now + 20)
        self.out.append(("record", self.key, now, [id]))
        self.timers |= {now, now + 20, now + 45} if id % 3 == 0 else {now + 20}
        if id % 3 == 0:
            self._goes_off(now - 7)

    def _goes_off(self, at: int) -> None:
        self.out.append(("time", self.key, at, [*self.ids]))
        if len(self.ids) % 2 == 0:
            self.ids = []
            return
        self.ids = self.ids[1:]
        self.timers.add(at + 9)
        self._goes_off(at - 1)


def operator_of(
    handler: Any,
    listen: Callable[[Batch], None],
    late: Callable[[Batch], None] = print,
    order: Order = "time",
    watermarks: dict[int, int] | None = None,
    late_right: Callable[[Batch], None] | None = None,
    table: Any = None,
) -> HandlerOperator:
    methods, handlings = dir(handler), {"on_record": Handling, "on_left": CoHandling}
    handling = next(of for name, of in handlings.items() if name in methods)(
        order, "on_time" in methods, "on_clock" in methods
    )
    entry = kept_entry(State, [Arrived] * len(handling.takers), order)
    node = Node("p", Kind.KEYED_PROCESS, timed=handling, state_type=entry, key_type=str)
    parts = parts_of(node, VersionedState(entry), watermarks=watermarks, function=handler, table=table)
    operator: HandlerOperator = OPERATORS[type(handling)].made(parts)
    operator.downstream, operator.late_output, operator.late_right_output = [listen], "late", "late-right"
    operator.sides = {"late": [late], "late-right": [late_right or late]}
    return operator


def settle(operator: HandlerOperator, room: int = 3) -> None:
    while operator.firings:
        operator.fire(sys.maxsize, room)
        if not operator.fires:
            operator.firings.clear()


def play(
    arrivals: Arrivals, disorder: int, cuts: Collection[int], room: int, handler: Any
) -> tuple[list[Out], list[int], list[int]]:
    """The outputs, their times and the ids of late records, in batches that end at *cuts*."""
    out: list[Out] = []
    times: list[int] = []
    late: list[int] = []

    def listen(batch: Batch) -> None:
        assert batch.times is not None
        out.extend(batch.records)
        times.extend(batch.times)

    late_right: list[int] = []
    operator = operator_of(
        handler, listen, lambda batch: late.extend(record.id for record in batch.records),
        late_right=lambda batch: late_right.extend(record.id for record in batch.records),
    )  # fmt: skip
    stream = list(floors(arrivals, disorder))
    for batch, watermark in in_batches(stream, cuts):
        if isinstance(operator, CoHandlerOperator):
            is_right = [arrivals[record.id][0] == 1 for record in batch.records]
            operator.right(batch.where(is_right))
            operator.left(batch.where([not right for right in is_right]))
        else:
            operator(batch)
        operator.advance(watermark)
        settle(operator, room)
    operator.advance(10_000)
    settle(operator, room)
    assert {slot for slot, _, _ in operator.table.items()} <= {FOREVER}, "no timer is left"
    if isinstance(operator, CoHandlerOperator):
        assert [arrivals[id][0] for id in late + late_right] == [0] * len(late) + [1] * len(late_right)
    return out, times, sorted(late + late_right)


@pytest.mark.parametrize("handler", [lambda _: Gathers(), GathersBoth], ids=["one-input", "two"])
@settings(max_examples=2 * settings().max_examples)
@example(arrivals=[(0, "a", 0), (1, "a", 0), (0, "a", 20), (0, "b", 7)], disorder=0, cuts={0}, room=1)
@given(arrivals=ARRIVALS, disorder=st.integers(0, 60), cuts=st.sets(st.integers(0, 39)), room=st.integers(1, 5))
def test_in_order_of_time_the_calls_are_a_function_of_times_and_floors(
    handler: Callable[[Arrivals], Any], arrivals: list[tuple[int, str, int]], disorder: int, cuts: set[int], room: int
) -> None:
    out, times, late = play(arrivals, disorder, cuts, room, handler(arrivals))
    records = [record for record, _ in floors(arrivals, disorder)]
    assert late == [record.id for record in records if record.time <= record.floor]
    taken = expected([record for record in records if record.time > record.floor])
    assert sorted(out, key=lambda of: of[1]) == taken
    assert times == sorted(times), "a timer that has passed gives the time of the call that set it"
    for one, other in pairwise(out):
        if one[2] == other[2] and one[1] != other[1]:
            places = [(group_of(key), canonical_key(key)) for key in (one[1], other[1])]
            assert places[0] < places[1] or "time" in (one[0], other[0])


def test_each_key_group_goes_on_at_its_own_watermark() -> None:
    out: list[Out] = []
    late: list[Arrived] = []
    operator = operator_of(
        Gathers(), lambda batch: out.extend(batch.records), lambda batch: late.extend(batch.records),
        watermarks=WATERMARKS,
    )  # fmt: skip
    records = play_restored(operator, operator)
    assert [record.id for record in late] == [record.id for record in records if record.time <= record.floor]
    assert sorted(out, key=lambda of: of[1]) == expected([record for record in records if record.time > record.floor])


class Sets:
    """Sets the timers that a record names, and emits what goes off with its state: the number of calls."""

    def __init__(self, *events: int, clock: Sequence[int] = (), period: int = 0) -> None:
        self.events, self.clock, self.period = events, clock, period

    def on_record(self, key: str, ids: State | None, record: Arrived, timers: Timers, emit: Emit[Any]) -> State:
        for at in self.events:
            timers.event.set(moment(at))
        for at in self.clock:
            timers.clock.set(moment(at))
        emit(("record", key))
        return [len(ids or []) + 1]

    def on_time(self, key: str, ids: State | None, at: datetime, timers: Timers, emit: Emit[Any]) -> State | None:
        emit(("time", key, ms(at)))
        if self.period:
            timers.event.set(at + timedelta(milliseconds=self.period))
        return ids


class Clocked(Sets):
    def on_clock(self, key: str, ids: State | None, at: datetime, timers: Timers, emit: Emit[Any]) -> State | None:
        emit(("clock", key, ms(at), ms(timers.clock.now)))
        return None


def arrived(key: str, time: int) -> Batch:
    return as_batch([Arrived(0, key, time, -1_000)])


def test_by_arrival_a_timer_that_has_passed_goes_off_after_its_record_and_others_at_the_watermark() -> None:
    out: list[Any] = []
    further = {group: 100 if group == group_of("a") else 50 for group in GROUPS}
    operator = operator_of(
        Sets(150, 90, 60), lambda batch: out.extend(batch.records), order="arrival", watermarks=further
    )
    operator.advance(70)
    settle(operator)
    operator(arrived("a", 101))
    assert out == [("record", "a"), ("time", "a", 60), ("time", "a", 90)]
    operator(arrived("a", 120))
    operator.advance(149)
    settle(operator)
    assert len(out) == 6
    operator.advance(150)
    settle(operator)
    assert out[6:] == [("time", "a", 150)], "set twice, it goes off once"


def test_clock_timers_go_off_once_by_a_clock_that_never_falls() -> None:
    out: list[Any] = []
    operator = operator_of(Clocked(clock=[1_000, 2_000, 500]), lambda batch: out.extend(batch.records), order="arrival")
    operator.tell_time(900)
    operator(arrived("a", 5))
    assert out == [("record", "a"), ("clock", "a", 500, 900)], "the time that has passed, at once"
    for now, count in ((999, 2), (1_000, 3), (700, 3), (1_999, 3), (2_500, 4), (9_000, 4)):
        operator.tell_time(now)
        settle(operator)
        assert len(out) == count, now
    assert out[2:] == [("clock", "a", 1_000, 1_000), ("clock", "a", 2_000, 2_500)]
    assert list(operator.table.items()) == [], "no state and no timer is left"


def test_batches_come_full_or_some_time_after_their_first_record() -> None:
    out: list[list[int]] = []
    batches = Batches("arrival", on_clock=True, count=3, timeout="1s")
    operator = operator_of(
        batches.function.call(), lambda batch: out.extend([one.id for one in some] for some in batch.records),
        order="arrival",
    )  # fmt: skip
    steps: list[tuple[int, list[tuple[int, str]], list[list[int]]]] = [
        (100, [(0, "a"), (1, "a"), (2, "a"), (3, "a"), (4, "b")], [[0, 1, 2]]),
        (200, [(5, "a")], []),
        (1_099, [], []),
        (1_100, [(6, "b"), (7, "b")], [[3, 5], [4]]),
        (2_050, [(8, "b")], [[6, 7, 8]]),
        (9_000, [], []),
    ]
    for now, records, due in steps:
        operator.tell_time(now)
        settle(operator)
        operator(as_batch([Arrived(id, key, 0, -1) for id, key in records]))
        assert sorted(out) == sorted(due), now
        out.clear()
    assert list(operator.table.items()) == []


def test_a_drain_ends_though_a_timer_sets_the_next() -> None:
    out: list[Any] = []
    operator = operator_of(Sets(10, 35, period=10), lambda batch: out.extend(batch.records))
    operator(arrived("a", 1))
    operator.advance(END_OF_TIME)
    settle(operator)
    assert [at for name, _, at in out[1:]] == [10, 20, 30, 35]
    operator.firings.clear()
    assert sorted(slot for slot, _, _ in operator.table.items()) == [40, 45, FOREVER]


def test_what_a_handler_lacks_is_said_with_the_record_or_the_timer() -> None:
    class Records:
        def on_record(self, key: str, ids: State | None, record: Arrived, timers: Timers, emit: Emit[Any]) -> None:
            timers.event.set(50)

    class Raises(Sets):
        def on_time(self, *given: Any) -> Any:
            raise ZeroDivisionError

    operator = operator_of(Records(), print, order="arrival")
    with pytest.raises(RecordError, match=r"the handler has no on_time\(\): add it, on the record at t\[0\] offset 0"):
        operator(arrived("a", 1))
    operator = operator_of(Raises(50), print)
    operator(arrived("a", 1))
    operator.advance(60)
    with pytest.raises(
        RecordError, match=r"on_time\(\) of operator 'p' raised ZeroDivisionError.*on the timer of 'a' at"
    ):
        settle(operator)


class EmitsState:
    """Emits its state as it is, which the next call for the key changes in place."""

    def on_record(self, key: str, ids: State | None, record: Arrived, timers: Timers, emit: Emit[State]) -> State:
        ids = ids or []
        ids.append(record.id)
        emit(ids)
        timers.event.set(moment(40))
        return ids

    def on_time(self, key: str, ids: State | None, at: datetime, timers: Timers, emit: Emit[State]) -> State:
        assert ids is not None
        ids.append(-1)
        return ids


@pytest.mark.parametrize("order", ["time", "arrival"])
def test_an_output_with_the_state_keeps_its_value_as_the_next_call_changes_that(order: Order) -> None:
    out: list[State] = []
    operator = operator_of(EmitsState(), lambda batch: out.extend(batch.records), order=order)
    operator.advance(50)
    settle(operator)
    operator(as_batch([Arrived(0, "a", 60, -1_000), Arrived(1, "a", 60, -1_000)]))
    operator.advance(100)
    settle(operator)
    assert out == [[0], [0, -1, 1]]
