"""Joins on a real table: results are a plain function of times and floors, whatever the order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_windows import WATERMARKS
from test_windows import Arrived as Clicked
from test_windows import expected as windowed
from timed_rig import advance, group_of, parts_of

from exactlyonce.engines.runtime import join_operators, ordering
from exactlyonce.engines.runtime.batch import Batch, Coordinates
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.graph import Kind, Node
from exactlyonce.pipeline.joins import AsOf, IntervalJoin, WindowJoin
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.pipeline.windows import Hopping, Session, Tumbling, Windowed

Join = IntervalJoin | AsOf | WindowJoin
OPERATORS: dict[type[Timed], Any] = join_operators.OPERATORS


@pytest.fixture(autouse=True, scope="module")
def small_memory() -> Iterator[None]:
    """Records get into the table soon, and are in many buckets and blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (join_operators, ordering):
            patch.setattr(module, "UNWRITTEN_MAX", 12)
        patch.setattr(ordering, "_BUCKET_BITS", 3)
        patch.setattr(ordering, "_BLOCK_BITS", 5)
        yield


@dataclass(frozen=True)
class Arrived:
    """A record of the left side or of the right one; the floor is that of its partition before it."""

    side: str
    key: str
    time: int
    value: int | None
    offset: int
    floor: int

    @property
    def late_at(self) -> int:
        return self.floor if self.time <= self.floor else NO_FLOOR


Arrivals = Sequence[tuple[str, str, int, bool]]
"""(side, key, time, whether it deletes) of each record."""


def arrived(arrivals: Arrivals, disorder: int) -> Iterator[tuple[Arrived, int]]:
    """The records with the watermark after each; a side is one partition."""
    greatest = dict.fromkeys("lr", NO_WATERMARK)
    for number, (side, key, time, deletes) in enumerate(arrivals):
        floor = NO_FLOOR if greatest[side] == NO_WATERMARK else greatest[side] - disorder - 1
        greatest[side] = max(greatest[side], time)
        lowest = min(greatest.values())
        value = None if deletes and side == "r" else number
        record = Arrived(side, key, time, value, number, floor)
        yield record, NO_WATERMARK if lowest == NO_WATERMARK else lowest - disorder - 1


@dataclass
class Seen:
    results: list[Any] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    watermark: int = NO_WATERMARK

    def take(self, batch: Batch) -> None:
        """A result is in time for the next operator, or carries the floor below which that does not take it."""
        assert batch.times is not None
        floors = batch.floors or [NO_FLOOR] * len(batch.times)
        for joined, time, floor in zip(batch.records, batch.times, floors, strict=True):
            assert time > self.watermark or floor >= self.watermark
            key, pair = joined.key, joined
            if isinstance(joined, Windowed):
                key, pair = f"{key} {joined.start.timestamp():.3f}", joined.value
            self.results.append((key, *map(_number, (pair.left, pair.right)), time))

    def take_late(self, batch: Batch) -> None:
        self.late += [origin.offset() or 0 for origin in batch.origins]


def _number(record: Any) -> int | None:
    return record.offset if isinstance(record, Arrived) else record


def operator_of(join: Join, seen: Seen, table: Any = None, watermarks: dict[int, int] | None = None) -> Any:
    kept = VersionedState(join.kept_state(Arrived, int if isinstance(join, AsOf) else Arrived))
    node = Node("j", Kind.JOIN, timed=join, key_type=str)
    parts = parts_of(node, kept, by_key=join.by_key, watermarks=watermarks, table=table)
    operator = OPERATORS[type(join)].made(parts)
    operator.downstream, operator.sides = [seen.take], {"late": [seen.take_late]}
    operator.late_output = operator.late_right_output = "late"
    return operator


def play(join: Join, arrivals: Arrivals, disorder: int, cuts: set[int], room: int, *, restores: bool = True) -> Seen:
    """*arrivals* in batches that end at *cuts* or where the side changes; a watermark comes at each cut."""
    seen = Seen()
    operator = operator_of(join, seen)
    waiting: list[Arrived] = []

    def push() -> None:
        if waiting:
            (operator.left if waiting[0].side == "l" else operator.right)(as_batch(waiting, join))
        waiting.clear()

    stream = list(arrived(arrivals, disorder))
    for number, (record, watermark) in enumerate(stream):
        if waiting and waiting[0].side != record.side:
            push()
        waiting.append(record)
        if number in cuts:
            push()
            seen.watermark = advance(operator, watermark, room)
            if restores:
                operator.settle()
                operator = operator_of(join, seen, operator.table)
    push()
    advance(operator, 1_000_000 if isinstance(join, AsOf) else END_OF_TIME, room)
    for slot, _, (_, versions) in operator.table.items():
        assert slot == join_operators.VERSIONS, "what is over leaves no state"
        assert versions[-1][-1] is not None, "a deletion goes once no earlier version may come"
    return seen


def as_batch(records: Sequence[Arrived], join: Join) -> Batch:
    floors = [record.late_at for record in records]
    by_value = isinstance(join, AsOf) and records[0].side == "r"
    return Batch(
        [record.value if by_value else record for record in records],
        [Coordinates("t", 0, record.offset) for record in records],
        [canonical_key(record.key) for record in records],
        [record.time for record in records],
        floors if any(floor != NO_FLOOR for floor in floors) else None,
    )


def expected(join: Join, records: Sequence[Arrived]) -> tuple[list[Any], list[int]]:
    """The results and the late records, by definition; the results of windows in order."""
    if isinstance(join, WindowJoin):
        return in_windows(join, records)
    keep = join.keep_ms if isinstance(join, AsOf) else 0
    late = [record.offset for record in records if record.time + keep <= record.floor]
    lefts, rights = ([one for one in records if one.side == side and one.offset not in late] for side in "lr")
    results = list[Any]()
    if isinstance(join, AsOf):
        for left in lefts:
            versions = [
                (one.time, one.offset, one.value) for one in rights
                if one.key == left.key and one.time <= left.time and one.late_at < left.time
            ]  # fmt: skip
            value = max(versions)[2] if versions else None
            if join.how == "left" or value is not None:
                results.append((left.key, left.offset, value, left.time))
        return results, late
    paired = set[int]()
    for left in lefts:
        for right in rights:
            if left.key == right.key and join.earliest_ms <= right.time - left.time <= join.latest_ms:
                results.append((left.key, left.offset, right.offset, max(left.time, right.time)))
                paired |= {left.offset, right.offset}
    for one in lefts if join.how in ("left", "full") else []:
        results += [(one.key, one.offset, None, one.time + max(0, join.latest_ms))] * (one.offset not in paired)
    for one in rights if join.how in ("right", "full") else []:
        results += [(one.key, None, one.offset, one.time + max(0, -join.earliest_ms))] * (one.offset not in paired)
    return results, late


def in_windows(join: WindowJoin, records: Sequence[Arrived]) -> tuple[list[Any], list[int]]:
    places = {one.offset: (one.time, one.offset) for one in records}
    groups, late = windowed(join.window, [Clicked(one.offset, one.key, one.time, one.floor) for one in records])
    results = list[Any]()
    for time, _, key, start, _, ids in sorted(groups, key=lambda of: (of[0], group_of(of[2]), of[2])):
        lefts, rights = (
            sorted({one.offset for one in records if one.side == side}.intersection(ids), key=places.__getitem__)
            for side in "lr"
        )
        alone = [None] if join.how in ("right", "full") else [], [None] if join.how in ("left", "full") else []
        name = f"{key} {start / 1000:.3f}"
        results += [(name, left, right, time) for left in lefts or alone[0] for right in rights or alone[1]]
    return results, sorted(late.elements())


JOINS = [
    *(IntervalJoin("-20ms", "40ms", how) for how in ("inner", "left", "right", "full")),
    IntervalJoin("0ms", "0ms", "full"), IntervalJoin("10ms", "30ms", "full"), IntervalJoin("-30ms", "-10ms", "left"),
    IntervalJoin("-320ms", "320ms"),
    *(AsOf(keep, how) for keep, how in (("0s", "left"), ("25ms", "inner"), ("1s", "left"))),
    *(WindowJoin(Tumbling("20ms"), how) for how in ("inner", "left", "right", "full")),
    WindowJoin(Hopping("50ms", every="20ms"), "full"), WindowJoin(Session("15ms"), "full"),
    WindowJoin(Session("15ms", wait="15ms"), "full"),
]  # fmt: skip
ARRIVALS = st.lists(
    st.tuples(st.sampled_from("lr"), st.sampled_from("ab"), st.integers(-60, 150), st.booleans()),
    min_size=1, max_size=40,
)  # fmt: skip

OLD_VERSION = [
    ("r", "a", 0, False), ("r", "a", 50, False), ("l", "a", 100, False), ("r", "a", 100, False),
    ("r", "a", 101, False), ("l", "a", 20, False),
]  # fmt: skip
"""The last record is late, and needs the first version, which three have replaced."""


def _order(result: Any) -> Any:
    return tuple((part is not None, part) for part in result)


@pytest.mark.parametrize("join", JOINS, ids=str)
@example(arrivals=OLD_VERSION, disorder=0, cuts={3}, room=1)
@given(arrivals=ARRIVALS, disorder=st.integers(0, 60), cuts=st.sets(st.integers(0, 39)), room=st.integers(1, 5))
def test_results_and_late_records_are_a_function_of_times_and_floors(
    join: Join, arrivals: Arrivals, disorder: int, cuts: set[int], room: int
) -> None:
    seen = play(join, arrivals, disorder, cuts, room)
    results, late = expected(join, [record for record, _ in arrived(arrivals, disorder)])
    if isinstance(join, WindowJoin):
        assert seen.results == results
    assert sorted(seen.results, key=_order) == sorted(results, key=_order)
    assert sorted(seen.late) == late


@pytest.mark.parametrize("join", JOINS, ids=str)
def test_each_key_group_goes_on_at_its_own_watermark(join: Join) -> None:
    seen = Seen()
    operator = operator_of(join, seen, watermarks=WATERMARKS)
    sides = [(side, key, time) for side in "rl" for key in "ab" for time in range(0, 200, 7)]
    records = [
        Arrived(side, key, time, offset, offset, WATERMARKS[group_of(key)])
        for offset, (side, key, time) in enumerate(sides)
    ]
    for side, take in (("r", operator.right), ("l", operator.left)):
        take(as_batch([replace(record, floor=NO_FLOOR) for record in records if record.side == side], join))
    for watermark in (100, 10_000):
        advance(operator, watermark, 1)
    results, late = expected(join, records)
    assert sorted(seen.results, key=_order) == sorted(results, key=_order)
    assert sorted(seen.late) == late


@example(
    arrivals=[(side, "a", time, False) for side, time in (("r", 13), ("r", 11), ("l", 12))], disorder=5, cuts={0, 1}
)
@given(arrivals=ARRIVALS, disorder=st.integers(0, 60), cuts=st.sets(st.integers(0, 39)))
def test_the_order_of_pairs_does_not_depend_on_what_is_in_the_table(
    arrivals: Arrivals, disorder: int, cuts: set[int]
) -> None:
    one, other = (
        play(IntervalJoin("-20ms", "40ms"), arrivals, disorder, cuts, 1, restores=restores)
        for restores in (True, False)
    )
    assert one.results == other.results


def test_a_segment_outlives_the_entries_that_it_names() -> None:
    """They went with an earlier one, and the key has a new entry since, which has its own segment."""
    join, seen = IntervalJoin("-10s", "10s"), Seen()
    operator = operator_of(join, seen)
    for offset, (time, watermark) in enumerate([(600, 0), (700, 10_800), (10_850, 11_300)]):
        operator.left(as_batch([Arrived("l", "a", time, offset, offset, NO_FLOOR)], join))
        advance(operator, watermark, 1)
    operator.right(as_batch([Arrived("r", "a", 11_400, 3, 3, NO_FLOOR)], join))
    assert seen.results == [("a", 2, 3, 11_400)]


def test_after_a_drain_an_as_of_join_goes_on_after_its_last_result() -> None:
    join, seen = AsOf(), Seen()
    operator = operator_of(join, seen)
    for (record, _), watermark in zip(
        arrived([("l", "a", 5, False), ("l", "a", 6, False)], 0), (END_OF_TIME, 99), strict=True
    ):
        operator.left(as_batch([record], join))
        advance(operator, watermark, 1)
        operator = operator_of(join, seen, operator.table)
    assert (seen.results, seen.late) == ([("a", 0, None, 5), ("a", 1, None, 6)], [])


def test_after_a_drain_windows_without_a_pair_are_over_too() -> None:
    join, seen = WindowJoin(Tumbling("20ms")), Seen()
    operator = operator_of(join, seen)
    for (record, _), watermark in zip(
        arrived([("l", "a", 5, False), ("r", "a", 6, False), ("l", "a", 25, False), ("r", "a", 26, False)], 0),
        (END_OF_TIME, 30, 31, 99), strict=True,
    ):  # fmt: skip
        (operator.left if record.side == "l" else operator.right)(as_batch([record], join))
        seen.watermark = NO_WATERMARK
        advance(operator, watermark, 1)
        operator = operator_of(join, seen, operator.table)
    assert ([result[1:3] for result in seen.results], seen.late) == ([(2, 3)], [1])


def test_a_session_of_both_sides_that_grows_leaves_the_state_that_a_snapshot_may_have() -> None:
    join = WindowJoin(Session("20ms"))
    operator = operator_of(join, Seen())
    records = [Arrived(side, "a", time, time, time, NO_FLOOR) for side, time in (("l", 0), ("r", 10))]
    operator.left(as_batch(records[:1], join))
    (before,) = [state for _, _, state in operator.table.items()]
    operator.right(as_batch(records[1:], join))
    assert [len(side) for side in before[2]] == [1, 0]


def test_at_one_time_the_place_counts_and_not_which_came_first() -> None:
    places = [("u", 0), ("t", 1), ("t", 0)]
    for order in (places, places[::-1]):
        seen = Seen()
        operator = operator_of(AsOf(), seen)
        for take, side in ((operator.right, "r"), (operator.left, "l")):
            for topic, partition in order:
                number = places.index((topic, partition))
                batch = as_batch([Arrived(side, "a", 5, number, number, NO_FLOOR)], AsOf())
                batch.origins = [Coordinates(topic, partition, 7)]
                take(batch)
        advance(operator, 9, 1)
        assert seen.results == [("a", 2, 0, 5), ("a", 1, 0, 5), ("a", 0, 0, 5)]


def _in_time(arrivals: Arrivals) -> Arrivals:
    """*arrivals* by time, whose order among equals stays."""
    return sorted(arrivals, key=lambda one: one[2])


def _rows(arrivals: Arrivals) -> duckdb.DuckDBPyConnection:
    """Tables `l` and `r` of *arrivals*: key, time, number, value."""
    session = duckdb.connect()
    for side in "lr":
        session.execute(f"create table {side} (key text, time bigint, number bigint, value bigint)")
        session.executemany(
            f"insert into {side} values (?, ?, ?, ?)",
            [[key, time, number, None if deletes else number] for number, (of, key, time, deletes) in
             enumerate(arrivals) if of == side] or [[None] * 4],
        )  # fmt: skip
        session.execute(f"delete from {side} where key is null")
    return session


IN_SQL = {
    "inner": "l join r", "left": "l left join r", "right": "l right join r", "full": "l full join r",
}  # fmt: skip


@pytest.mark.parametrize("join", [join for join in JOINS if isinstance(join, IntervalJoin)], ids=str)
@given(arrivals=ARRIVALS, cuts=st.sets(st.integers(0, 39)))
def test_pairs_within_an_interval_are_those_of_sql(join: IntervalJoin, arrivals: Arrivals, cuts: set[int]) -> None:
    arrivals = _in_time(arrivals)
    seen = play(join, arrivals, 0, cuts, 2)
    rows = _rows(arrivals).execute(
        f"select coalesce(l.key, r.key), l.number, r.number from {IN_SQL[join.how]} "
        "on l.key = r.key and r.time - l.time between ? and ?", [join.earliest_ms, join.latest_ms]
    ).fetchall()  # fmt: skip
    assert not seen.late
    assert sorted((result[:3] for result in seen.results), key=_order) == sorted(rows, key=_order)


@pytest.mark.parametrize("how", ["inner", "left"])
@given(arrivals=ARRIVALS, cuts=st.sets(st.integers(0, 39)))
def test_versions_as_of_a_time_are_those_of_duckdb(how: str, arrivals: Arrivals, cuts: set[int]) -> None:
    """Of several versions of one time the last one counts; one that is deleted is none, but hides those before."""
    arrivals = _in_time(arrivals)
    seen = play(AsOf("0s", how), arrivals, 0, cuts, 2)
    rows = _rows(arrivals).execute(
        "with versions as (select key, time, max(number) as number from r group by all) "
        "select l.key, l.number, r.value from l asof left join versions v on l.key = v.key and l.time >= v.time "
        "left join r on r.number = v.number where ? or r.value is not null", [how == "left"]
    ).fetchall()  # fmt: skip
    assert not seen.late
    assert sorted((result[:3] for result in seen.results), key=_order) == sorted(rows, key=_order)
