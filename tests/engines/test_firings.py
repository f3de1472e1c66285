"""Firings take turns with records and barriers: what is between two slices makes no difference to any result."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, cycle
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_expiry import operator_of as expiring_of
from test_joins import JOINS
from test_joins import Arrived as Sided
from test_joins import Seen as SeenJoined
from test_joins import arrived as arrived_sides
from test_joins import as_batch as as_sides
from test_joins import expected as expected_joined
from test_joins import operator_of as joiner_of
from test_ordering import SPECS
from test_ordering import expected as expected_in_order
from test_ordering import operator_of as sorter_of
from test_timers import Gathers
from test_timers import expected as expected_calls
from test_timers import operator_of as handler_of
from test_windows import ARRIVALS, WINDOWS, Arrived, Seen, as_batch, expected, floors, in_batches
from test_windows import operator_of as windows_of

from exactlyonce.engines.bounded.unit.ordering import ChannelLane, take_along
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import BatchCodec
from exactlyonce.engines.runtime.operators import WithTime
from exactlyonce.engines.runtime.order_log import NOT_A_SOURCE, RECORDS, WATERMARK, OrderRuns, runs_of
from exactlyonce.engines.runtime.timed_operators import TimedOperator
from exactlyonce.engines.runtime.watermarks import MergedPorts, Watermark
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.joins import AsOf
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.timed import Deduplicate, InOrder
from exactlyonce.pipeline.timers import FOREVER
from exactlyonce.pipeline.windows import moment

SIDED = st.lists(
    st.tuples(st.sampled_from("lr"), st.sampled_from("ab"), st.integers(-60, 150), st.booleans()),
    min_size=1, max_size=40,
)  # fmt: skip
"""As `arrived_sides` takes them."""
Make = Callable[[Any], TimedOperator[Any]]
"""Makes an operator over a table; None: an empty one."""
TURNS = st.lists(
    st.sampled_from(["slice", "records", "barrier", "restore", "restore, then records"]), min_size=1, max_size=30
)
"""After each slice of a firing."""
FEW = settings(max_examples=max(5, settings().max_examples // 4))
GIVEN = {
    "disorder": st.integers(0, 60), "cuts": st.sets(st.integers(0, 39)), "size": st.integers(1, 3), "turns": TURNS
}  # fmt: skip


class Driven:
    """An operator whose firings have slices of *size*, and *turns* after each, over and over."""

    def __init__(self, make: Make, size: int, turns: list[str]) -> None:
        self._make, self._size, self._turns = make, size, self._again(turns)
        self.operator: Any = make(None)
        self._watermark = NO_WATERMARK

    @staticmethod
    def _again(turns: list[str]) -> Iterator[str]:
        for _ in range(20):
            yield from turns
        while True:
            yield "slice"

    def advance(self, watermark: int) -> None:
        """Go on to *watermark* until records have a turn."""
        self._watermark = max(self._watermark, watermark)
        self.operator.advance(self._watermark)
        while self.operator.firings:
            self.operator.fire(self._size, sys.maxsize)
            if not self.operator.fires:
                self.operator.firings.clear()
                self.operator.take_next()
            elif self.operator.whole and self._has_turn(next(self._turns)):
                return

    def _has_turn(self, turn: str) -> bool:
        if turn == "slice":
            return False
        self.operator.interrupt()
        if turn != "records":
            self.operator.settle()
        if turn.startswith("restore"):
            self.operator = self._make(self.operator.table)
        if turn == "restore":
            self.operator.advance(self._watermark)
        return turn.endswith("records")

    def end(self, watermark: int) -> None:
        while self.operator.firings or self.operator.watermark < watermark:
            self.advance(watermark)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@FEW
@given(arrivals=ARRIVALS, **GIVEN)
def test_windows_give_each_result_once_whatever_comes_between_two_slices(
    window: Any, arrivals: Any, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    seen = Seen()
    driven = Driven(lambda table: windows_of(window, seen.take, seen.take_late, table=table), size, turns)
    for batch, watermark in in_batches(list(floors(arrivals, disorder)), cuts):
        driven.operator(batch)
        driven.advance(watermark)
    driven.end(100_000)
    results, late = expected(window, [record for record, _ in floors(arrivals, disorder)])
    assert seen.counted() == results
    assert Counter(record.id for record in seen.late) == late
    assert list(driven.operator.table.items()) == [], "what is over leaves no state"


@pytest.mark.parametrize("spec", SPECS, ids=str)
@FEW
@given(arrivals=ARRIVALS, **GIVEN)
def test_held_records_are_given_once_whatever_comes_between_two_slices(
    spec: Any, arrivals: Any, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    results: list[Any] = []
    late: list[Any] = []
    driven = Driven(lambda table: sorter_of(spec, results, late, table=table), size, turns)
    for batch, watermark in in_batches(list(floors(arrivals, disorder)), cuts):
        driven.operator(batch)
        driven.operator.settle()
        driven.advance(watermark)
    driven.end(10_000)
    driven.end(20_000)
    records = [record for record, _ in floors(arrivals, disorder)]
    wanted = expected_in_order(spec, [record for record in records if record.time > record.floor])
    by_arrival = isinstance(spec, Deduplicate) and spec.order == "arrival"
    if not by_arrival:
        assert [record.time for record in results] == sorted(record.time for record in results)
    assert sorted(record.id for record in results) == sorted(record.id for record in wanted)
    assert list(driven.operator.table.items()) == [], "what has expired leaves no state"


@pytest.mark.parametrize("join", JOINS, ids=str)
@FEW
@given(arrivals=SIDED, **GIVEN)
def test_joins_give_each_result_once_whatever_comes_between_two_slices(
    join: Any, arrivals: Any, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    seen = SeenJoined()
    driven = Driven(lambda table: joiner_of(join, seen, table), size, turns)
    stream = list(arrived_sides(arrivals, disorder))
    for number, (record, watermark) in enumerate(stream):
        (driven.operator.left if record.side == "l" else driven.operator.right)(as_sides([record], join))
        if number in cuts:
            driven.advance(watermark)
    driven.end(1_000_000)
    results, late = expected_joined(join, [record for record, _ in stream])
    assert Counter(seen.results) == Counter(results)
    assert sorted(seen.late) == sorted(late)
    for slot, _, _ in driven.operator.table.items():
        assert isinstance(join, AsOf), slot


@FEW
@given(arrivals=ARRIVALS, **GIVEN)
def test_in_order_of_time_a_handler_is_called_once_whatever_comes_between_two_slices(
    arrivals: Any, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    out: list[Any] = []
    late: list[Any] = []

    def make(table: Any) -> Any:
        return handler_of(
            Gathers(), lambda batch: out.extend(batch.records), lambda batch: late.extend(batch.records), table=table
        )

    driven = Driven(make, size, turns)
    for batch, watermark in in_batches(list(floors(arrivals, disorder)), cuts):
        driven.operator(batch)
        driven.advance(watermark)
    driven.end(100_000)
    records = [record for record, _ in floors(arrivals, disorder)]
    assert sorted(record.id for record in late) == [record.id for record in records if record.time <= record.floor]
    assert sorted(out, key=lambda of: of[1]) == expected_calls([one for one in records if one.time > one.floor])
    assert {slot for slot, _, _ in driven.operator.table.items()} <= {FOREVER}, "no timer is left"


class Waits:
    """By arrival: each record sets a timer, which shows what the key has had before it."""

    def on_record(self, key: str, state: Any, record: Arrived, timers: Any, emit: Any) -> Any:
        timers.event.set(record.time + 100)
        return [*(state or []), record.id]

    def on_time(self, key: str, state: Any, at: Any, timers: Any, emit: Any) -> Any:
        emit((key, tuple(state or ()), round(at.timestamp() * 1000)))
        return state


@FEW
@given(arrivals=ARRIVALS, **GIVEN)
def test_by_arrival_the_timers_of_a_key_that_are_due_go_before_its_next_record(
    arrivals: Any, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    """Each key has the same calls in the same order as if nothing came between two slices."""

    def calls(size: int, turns: list[str]) -> dict[str, list[Any]]:
        by_key: dict[str, list[Any]] = {}

        def listen(batch: Any) -> None:
            for one in batch.records:
                by_key.setdefault(one[0], []).append(one)

        driven = Driven(lambda table: handler_of(Waits(), listen, order="arrival", table=table), size, turns)
        for batch, watermark in in_batches(list(floors(arrivals, disorder)), cuts):
            driven.operator(batch)
            driven.advance(watermark)
        driven.end(100_000)
        return by_key

    assert calls(size, [turn for turn in turns if "restore" not in turn]) == calls(1_000, ["slice"])


# --- replays --------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """The file of a channel."""

    items: Sequence[Any]

    def timed(self) -> Iterator[tuple[int, Any]]:
        for item in self.items:
            yield 0, item if isinstance(item, Watermark) else partial(CODEC.encode, item)


class Sorters:
    """A subtask of two sorters of one channel, one after the other, which note the order; the batches that come out.

    Between them records get times that lie up to *back_ms* before those that they had.
    """

    name, port = "by>n:0", None

    def __init__(self, tables: Sequence[Any] = (None, None), *, batches: bool, back_ms: int = 0) -> None:
        self.given: list[list[int]] = []
        self.operators = TaskOperators("n", 0, order=OrderRuns(batches))
        self.first, second = (sorter_of(InOrder(), [], [], table=table) for table in tables)
        self.first.id, second.id = "first", "second"
        for operator in (self.first, second):
            operator.firings, self.operators.by_id[operator.id] = self.operators.firings, operator
        moved = WithTime("moved", lambda record: moment(record.time - record.id % (back_ms + 1)), back_ms)
        self.first.downstream, self.first.ports = [moved], [moved]
        moved.downstream = [lambda batch: second(batch.keyed([canonical_key("a")] * len(batch.records)))]
        moved.ports = [second]
        second.downstream = [lambda batch: self.given.append([record.id for record in batch.records])]

    def take(self, items: Sequence[Any], most: int) -> None:
        """Take *items* live, with a slice of a firing between any two."""
        for item in items:
            if isinstance(item, Watermark):
                self.operators.interrupt()
                assert self.operators.order is not None
                self.operators.order.watermark(self.name, item)
                self.first.advance(item.value)
            else:
                self.batch = item
                self.operators.take(self, item)
            if self.operators.firings:
                self.operators.fire(most, sys.maxsize)

    def cut(self) -> tuple[bytes, ...]:
        """A barrier comes; the order log up to that."""
        order = self.operators.cut(1, 0, (), whole=False).order
        assert order is not None
        return tuple(order)

    def push(self, batch: Any) -> None:
        self.first(batch)

    def note(self, order: OrderRuns) -> None:
        order.note(self.name, NOT_A_SOURCE, len(self.batch.records))


CODEC = BatchCodec(Arrived)


@pytest.mark.parametrize("back_ms", [0, 4])
@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_a_replay_gives_as_much_between_the_same_batches(most: int, batches: bool, back_ms: int) -> None:
    """In the next interval, too, which begins within the firing; with the same batches where they matter."""
    records = [Arrived(number, "abc"[number % 3], number, NO_WATERMARK) for number in range(30)]
    made = [as_batch(records[start : start + 5]) for start in range(0, 30, 5)]
    intervals = [[*made[:3], Watermark(12), made[3]], [made[4], Watermark(21), made[5], Watermark(22), Watermark(29)]]
    live, replayed = (Sorters(batches=batches, back_ms=back_ms) for _ in range(2))
    for items in intervals:
        live.take(items, most)
        log = live.cut()
        files: Any = Sent(items)
        lane = ChannelLane(Sorters.name, [files], CODEC, replayed.push, port=replayed.first)
        take_along([lane], {}, log, replayed.operators)
        if batches:
            assert replayed.given == live.given
        assert [*chain.from_iterable(replayed.given)] == [*chain.from_iterable(live.given)]
        assert [*runs_of(replayed.cut())] == [*runs_of(log)], "it notes the same order"
        tables = [operator.table for operator in replayed.operators.by_id.values()]
        given, replayed = replayed.given, Sorters(tables, batches=batches, back_ms=back_ms)
        replayed.given = given
    live.operators.fire_all()
    assert sorted(chain.from_iterable(live.given)) == list(range(30))


class Lane:
    """One of the channels into `Diamond`, while it runs live."""

    def __init__(self, name: str, push: Any, port: Any) -> None:
        self.name, self.push, self.port = name, push, port
        self.batch: Any = None

    def note(self, order: OrderRuns) -> None:
        order.note(self.name, NOT_A_SOURCE, len(self.batch.records))


class Diamond:
    """A subtask of two sorters, one for each channel, and of a third one that has the records of both."""

    def __init__(
        self, *, batches: bool, tables: Sequence[Any] = (None, None, None), given: Sequence[list[int]] = ()
    ) -> None:
        self.given = list(given)
        self.operators = TaskOperators("n", 0, order=OrderRuns(batches))
        *sorters, last = (sorter_of(InOrder(), [], [], table=table) for table in tables)
        merged = MergedPorts(last)
        for name, operator in zip(("a", "b", "last"), (*sorters, last), strict=True):
            operator.id, operator.firings = name, self.operators.firings
            self.operators.by_id[name] = operator
        for operator in sorters:
            operator.downstream = [lambda batch: last(batch.keyed([canonical_key("k")] * len(batch.records)))]
            operator.ports = [merged.add()]
        last.downstream = [lambda batch: self.given.append([record.id for record in batch.records])]
        both = MergedPorts(Both(sorters))
        self.lanes = [Lane("by>n:0", sorters[0], both.add()), Lane("by>n:1", sorters[1], both.add())]

    def take(self, place: int, item: Any) -> None:
        lane = self.lanes[place]
        if isinstance(item, Watermark):
            self.operators.advance(lane.name, lane.port, item)
        else:
            lane.batch = item
            self.operators.take(lane, item)

    def cut(self) -> tuple[bytes, ...]:
        return tuple(self.operators.cut(1, 0, (), whole=False).order or ())

    def next(self, *, batches: bool) -> Diamond:
        """Of the next interval, as a replay restores it."""
        tables = [operator.table for operator in self.operators.by_id.values()]
        return Diamond(batches=batches, tables=tables, given=self.given)


class Both:
    """Both sorters go by the watermark of both channels, in turn."""

    def __init__(self, ports: Sequence[Any]) -> None:
        self._ports = ports

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        for port in self._ports:
            port.advance(watermark, idle=idle)


STEPS = st.one_of(
    st.tuples(st.integers(0, 1), st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), min_size=1, max_size=4)),
    st.tuples(st.integers(0, 1), st.booleans()),
    st.integers(1, 3),
    st.none(),
)
"""Records of a channel, by key and time after its watermark; a watermark, idle or not; a slice; a barrier."""


SCHEDULE = [
    (0, [("a", 0)]), (0, True), (1, False), (1, False), (0, [("a", 0)]), (1, False), (0, False), None, (0, [("a", 0)]),
]  # fmt: skip
"""A channel was idle, and has lowered the watermark of both since the firing began."""


@pytest.mark.parametrize("batches", [False, True])
@example(steps=SCHEDULE)
@FEW
@given(steps=st.lists(STEPS, max_size=60))
def test_a_replay_begins_within_the_same_firings(batches: bool, steps: list[Any]) -> None:
    """Whatever watermarks have come since they began, and whatever is due after them."""
    live, replayed = Diamond(batches=batches), Diamond(batches=batches)
    items: tuple[list[Any], list[Any]] = [], []
    reached, number = [0, 0], 0
    for step in [*steps, None]:
        if isinstance(step, int):
            if live.operators.firings:
                live.operators.fire(step, sys.maxsize)
            continue
        if step is not None:
            place, what = step
            item: Any
            if isinstance(what, bool):
                reached[place] += 5
                item = Watermark(reached[place], what)
            else:
                lowest = min(reached) if live.operators.firings else reached[place]
                made = [Arrived(number + n, key, lowest + after, NO_WATERMARK) for n, (key, after) in enumerate(what)]
                number += len(made)
                item = as_batch(made)
            items[place].append(item)
            live.take(place, item)
            continue
        log = live.cut()
        files: list[Any] = [Sent(own) for own in items]
        lanes = [
            ChannelLane(lane.name, [file], CODEC, lane.push, port=lane.port)
            for lane, file in zip(replayed.lanes, files, strict=True)
        ]
        take_along(lanes, {}, log, replayed.operators)
        assert [*chain.from_iterable(replayed.given)] == [*chain.from_iterable(live.given)]
        assert not batches or replayed.given == live.given
        assert [*runs_of(replayed.cut())] == [*runs_of(log)] or not log, "it notes the same order"
        replayed, items = replayed.next(batches=batches), ([], [])


class Single:
    """A subtask of one operator, with a channel for each of its inputs; the batches that come out."""

    def __init__(self, make: Make, *codecs: BatchCodec, table: Any = None, given: Sequence[Any] = ()) -> None:
        self.given = list(given)
        self._make, self._codecs = make, codecs
        self.operators = TaskOperators("n", 0, order=OrderRuns(batches=True))
        operator: Any = make(table)
        self.table, operator.firings, self.operators.by_id[operator.id] = (
            operator.table,
            self.operators.firings,
            operator,
        )
        operator.downstream = [lambda batch: self.given.append((batch.records, batch.times))]
        operator.sides = {name: [self._late] for name in operator.sides}
        inputs = [operator.left, operator.right] if hasattr(operator, "left") else [operator]
        merged = MergedPorts(operator)
        self.lanes = [Lane(f"by>n:{place}", push, merged.add()) for place, push in enumerate(inputs)]
        self._items: list[list[Any]] = [[] for _ in self.lanes]

    def _late(self, batch: Any) -> None:
        self.given.append(("late", batch.records))

    def take(self, place: int, batch: Any) -> None:
        self._items[place].append(batch)
        self.lanes[place].batch = batch
        self.operators.take(self.lanes[place], batch)

    def advance(self, watermark: int) -> None:
        for lane, items in zip(self.lanes, self._items, strict=True):
            items.append(Watermark(watermark))
            self.operators.advance(lane.name, lane.port, items[-1])

    def cut(self) -> tuple[bytes, ...]:
        return tuple(self.operators.cut(1, 0, (), whole=False).order or ())

    def barrier(self, replayed: Single) -> Single:
        """A barrier comes. *replayed* gives the interval again; the replay of the next one."""
        log = self.cut()
        files: list[Any] = list(map(Sent, self._items))
        lanes = [
            ChannelLane(lane.name, [file], codec, lane.push, port=lane.port)
            for lane, file, codec in zip(replayed.lanes, files, self._codecs, strict=True)
        ]
        take_along(lanes, {}, log, replayed.operators)
        assert replayed.given == self.given
        assert [*runs_of(replayed.cut())] == [*runs_of(log)] or not log, "it notes the same order"
        self._items = [[] for _ in self.lanes]
        return Single(self._make, *self._codecs, table=replayed.table, given=self.given)

    def play(self, events: Iterator[tuple[int, Any, int]], size: int, turns: list[str]) -> None:
        """Take *events*, each a batch of an input and a watermark, with slices of *size* and *turns* after each."""
        replayed, again = Single(self._make, *self._codecs), cycle([*turns, "slice"])
        for place, batch, watermark in events:
            self.take(place, batch)
            if watermark > NO_WATERMARK:
                self.advance(watermark)
            while self.operators.firings:
                self.operators.fire(size, sys.maxsize)
                turn = next(again) if self.operators.whole else "slice"
                if "slice" not in turn and turn != "records":
                    replayed = self.barrier(replayed)
                if turn.endswith("records"):
                    break
        self.barrier(replayed)


def _by_time(make: Callable[..., Any]) -> Make:
    return lambda table: make(lambda batch: None, lambda batch: None, table=table)


def _windows(window: Any, listen: Any, late: Any, table: Any) -> Any:
    return windows_of(window, listen, late, table=table)


def _sorter(spec: Any, given: Any, late: Any, table: Any) -> Any:
    return sorter_of(spec, [], [], table=table)


ONE_INPUT: dict[str, Make] = {
    **{str(window): _by_time(partial(_windows, window)) for window in WINDOWS},
    **{str(spec): _by_time(partial(_sorter, spec)) for spec in SPECS},
    "states that expire": lambda table: expiring_of("15ms", [], table=table),
    "a handler in order of time": _by_time(partial(handler_of, Gathers())),
    "a handler in order of arrival": _by_time(partial(handler_of, Waits(), order="arrival")),
}


@pytest.mark.parametrize("kind", ONE_INPUT)
@FEW
@given(arrivals=ARRIVALS, **GIVEN)
def test_a_replay_of_any_operator_gives_as_much_between_the_same_batches(
    kind: str, arrivals: Any, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    events = ((0, batch, watermark) for batch, watermark in in_batches(list(floors(arrivals, disorder)), cuts))
    Single(ONE_INPUT[kind], CODEC).play(events, size, turns)


@pytest.mark.parametrize("join", JOINS, ids=str)
@FEW
@given(arrivals=SIDED, **GIVEN)
def test_a_replay_of_any_join_gives_as_much_between_the_same_batches(
    join: Any, arrivals: Any, disorder: int, cuts: set[int], size: int, turns: list[str]
) -> None:
    events = (
        ("lr".index(record.side), as_sides([record], join), watermark if number in cuts else NO_WATERMARK)
        for number, (record, watermark) in enumerate(arrived_sides(arrivals, disorder))
    )
    codecs = BatchCodec(Sided), BatchCodec(int | None if isinstance(join, AsOf) else Sided)
    Single(lambda table: joiner_of(join, SeenJoined(), table), *codecs).play(events, size, turns)


def test_a_firing_that_nobody_interrupts_is_not_in_the_log() -> None:
    live = Sorters(batches=False)
    batch = as_batch([Arrived(0, "a", 0, NO_WATERMARK), Arrived(1, "a", 1, NO_WATERMARK)])
    live.take([batch, Watermark(5)], 1)
    while live.operators.firings:
        live.operators.fire(1, sys.maxsize)
    assert [kind for (_, _, kind), _ in runs_of(live.cut())] == [RECORDS, WATERMARK]


def test_a_replay_halts_where_a_firing_does_not_give_what_the_log_has() -> None:
    batch = as_batch([Arrived(0, "a", 0, NO_WATERMARK), Arrived(1, "a", 1, NO_WATERMARK)])
    order, replayed = OrderRuns(), Sorters(batches=False)
    order.note(Sorters.name, NOT_A_SOURCE, 2)
    order.watermark(Sorters.name, Watermark(5))
    order.gave("first", 3)
    order.interrupted("first")
    files: Any = Sent([batch, Watermark(5)])
    lane = ChannelLane(Sorters.name, [files], CODEC, replayed.push, port=replayed.first)
    with pytest.raises(Halt, match="in operator 'first': the log has 3 results"):
        take_along([lane], {}, order.cut(), replayed.operators)
