"""Window operators on a real table: results are a plain function of times and floors, whatever the order of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from timed_rig import GROUPS, advance, group_of, parts_of
from window_clicks import insert

from exactlyonce.engines.runtime import window_operators
from exactlyonce.engines.runtime.batch import Batch, Coordinates
from exactlyonce.engines.runtime.timed_operators import TimedOperator
from exactlyonce.engines.runtime.window_operators import OPERATORS, WindowOperator
from exactlyonce.engines.runtime.window_operators import OPERATORS as REVISING
from exactlyonce.pipeline.aggregates import folded
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.graph import Kind, Node
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.pipeline.windows import Hopping, Revised, Session, Tumbling, Window, Windowed, kept_state


@pytest.fixture(autouse=True, scope="module")
def few_keys_are_many() -> Iterator[None]:
    """A firing puts sessions that go on back after a few keys, in the middle of its slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_operators, "SLICE_KEYS", 3)
        yield


Arrivals = Sequence[tuple[int, str, int]]
"""(partition, key, time in ms) of each record; its floor is that of its partition."""


@dataclass
class Arrived:
    id: int
    key: str
    time: int
    floor: int


def add(ids: list[int], record: Arrived) -> list[int]:
    ids.append(record.id)  # in place, as users do
    return ids


def merge(one: list[int], other: list[int]) -> list[int]:
    one += other
    return one


def floors(arrivals: Arrivals, disorder: int) -> Iterator[tuple[Arrived, int]]:
    """The records with the watermark after each, as two partitions give them."""
    greatest = {0: NO_WATERMARK, 1: NO_WATERMARK}
    for number, (partition, key, time) in enumerate(arrivals):
        before = greatest[partition]
        floor = NO_FLOOR if before == NO_WATERMARK else before - disorder - 1
        greatest[partition] = max(before, time)
        lowest = min(greatest.values())
        yield Arrived(number, key, time, floor), NO_WATERMARK if lowest == NO_WATERMARK else lowest - disorder - 1


def operator_of(
    window: Window | Revised,
    listen: Callable[[Batch], None],
    late: Callable[[Batch], None],
    watermarks: dict[int, int] | None = None,
    table: Any = None,
) -> WindowOperator[Any]:
    accumulator = folded(list, add, merge, list[int], {})
    node = Node("w", Kind.WINDOW, timed=window, accumulator=accumulator, key_type=str)
    kept = VersionedState(kept_state(window, accumulator.state))
    parts = parts_of(node, kept, by_key=isinstance(window, Session), watermarks=watermarks, table=table)
    operator: WindowOperator[Any] = (OPERATORS | REVISING)[type(window)].made(parts)
    operator.downstream, operator.sides, operator.late_output = [listen], {"late": [late]}, "late"
    return operator


def as_ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


@dataclass
class Seen:
    results: list[Windowed[Any, Any]] = field(default_factory=list)
    late: list[Arrived] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def take(self, batch: Batch) -> None:
        assert batch.times is not None
        assert batch.floors is None
        self.results += batch.records
        self.times += batch.times

    def counted(self) -> Counter[Any]:
        """The results, as `expected` gives them."""
        return Counter(
            (time, one.revision, one.key, *map(as_ms, (one.start, one.end)), tuple(sorted(one.value)))
            for time, one in zip(self.times, self.results, strict=True)
        )

    def take_late(self, batch: Batch) -> None:
        self.late += batch.records


def play(window: Window | Revised, arrivals: Arrivals, disorder: int, cuts: Collection[int], room: int) -> Seen:
    """*arrivals* in batches that end at *cuts*, each followed by its watermark."""
    seen = Seen()
    operator = operator_of(window, seen.take, seen.take_late)
    stream = list(floors(arrivals, disorder))
    stream[-1:] = [(record, END_OF_TIME) for record, _ in stream[-1:]]
    for batch, watermark in in_batches(stream, cuts):
        operator(batch)
        advance(operator, watermark, room)
    assert list(operator.table.items()) == [], "what is over leaves no state"
    return seen


def in_batches(stream: Sequence[tuple[Arrived, int]], cuts: Collection[int]) -> Iterator[tuple[Batch, int]]:
    """The records of *stream* in batches that end at *cuts*, and with it, each with the watermark after it."""
    waiting: list[Arrived] = []
    for number, (record, watermark) in enumerate(stream):
        waiting.append(record)
        if number in cuts or number == len(stream) - 1:
            yield as_batch(waiting), watermark
            waiting = []


def as_batch(records: list[Arrived]) -> Batch:
    late = [record.floor if record.time <= record.floor else NO_FLOOR for record in records]
    return Batch(
        list(records),
        [Coordinates("t", 0, record.id) for record in records],
        [canonical_key(record.key) for record in records],
        [record.time for record in records],
        late if any(floor != NO_FLOOR for floor in late) else None,
    )


def expected(window: Window | Revised, records: Sequence[Arrived]) -> tuple[Counter[Any], Counter[Any]]:
    """The results, and the late records, by definition."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    late = Counter[Any]()
    if isinstance(window, Revised):
        return revisions(window, records)
    if isinstance(window, Session):
        late.update(record.id for record in records if record.time + window.wait_ms <= record.floor)
        taken = sorted((record for record in records if record.id not in late), key=lambda record: record.time)
        for key in {record.key for record in taken}:
            session: list[Arrived] = []
            for record in [record for record in taken if record.key == key]:
                if session and record.time >= session[-1].time + window.gap_ms:
                    groups[key, session[0].time, session[-1].time + window.gap_ms] = [one.id for one in session]
                    session = []
                session.append(record)
            groups[key, session[0].time, session[-1].time + window.gap_ms] = [one.id for one in session]
    else:
        every = window.every_ms if isinstance(window, Hopping) else window.size_ms
        for record in records:
            starts = [s for s in range(record.time - window.size_ms + 1, record.time + 1) if s % every == 0]
            taking = [start for start in starts if start + window.size_ms - 1 > record.floor]
            late.update([] if taking else [record.id])
            for start in taking:
                groups.setdefault((record.key, start, start + window.size_ms), []).append(record.id)
    wait = window.wait_ms if isinstance(window, Session) else 0
    return Counter((named[2] - 1 + wait, 0, *named, tuple(sorted(ids))) for named, ids in groups.items()), late


def revisions(revised: Revised, records: Sequence[Arrived]) -> tuple[Counter[Any], Counter[Any]]:
    """Likewise: a window has a result at each moment at which it has more records than before."""
    window, early, lateness = revised.window, revised.early_ms, revised.lateness_ms
    every = window.every_ms if isinstance(window, Hopping) else window.size_ms
    added: dict[tuple[str, int], dict[int, list[int]]] = {}
    late = Counter[Any]()
    for record in records:
        since = max(record.time, record.floor + 1)
        starts = [s for s in range(record.time - window.size_ms + 1, record.time + 1) if s % every == 0]
        taking = [start for start in starts if since < start + window.size_ms + lateness]
        late.update([] if taking else [record.id])
        for start in taking:
            last = start + window.size_ms - 1
            ends = {last, last + lateness}.union(
                at for at in range(start, last + lateness) if early and not (at + 1) % early
            )
            at = since if since > last and not early else min(end for end in ends if end >= since)
            added.setdefault((record.key, start), {}).setdefault(at, []).append(record.id)
    results = Counter[Any]()
    for (key, start), by_time in added.items():
        for number, time in enumerate(sorted(by_time)):
            ids = [id for at in by_time if at <= time for id in by_time[at]]
            results[time, number, key, start, start + window.size_ms, tuple(sorted(ids))] += 1
    return results, late


WINDOWS = [Tumbling("20ms"), Hopping("40ms", every="20ms"), Hopping("50ms", every="20ms"), Session("15ms"),
           Session("15ms", wait="15ms"), Session("15ms", wait="4ms"),
           Revised(Tumbling("20ms"), early="6ms"), Revised(Tumbling("20ms"), lateness="15ms"),
           Revised(Hopping("50ms", every="20ms"), early="7ms", lateness="25ms")]  # fmt: skip
ARRIVALS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.integers(-60, 150)), min_size=1, max_size=40)
BRIDGE = [(0, "a", 0), (0, "a", 40), (0, "a", 20), (0, "a", 10), (0, "a", 30)]
"""Three sessions of 15 ms that the last two records unite."""


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@example(arrivals=BRIDGE, disorder=60, cuts={2}, room=1)
@example(arrivals=[(0, "a", 0), (0, "a", 15)], disorder=60, cuts={0}, room=1)  # a session ends where the next begins
@given(arrivals=ARRIVALS, disorder=st.integers(0, 60), cuts=st.sets(st.integers(0, 39)), room=st.integers(1, 5))
def test_results_and_late_records_are_a_function_of_times_and_floors(
    window: Window | Revised, arrivals: list[tuple[int, str, int]], disorder: int, cuts: set[int], room: int
) -> None:
    seen = play(window, arrivals, disorder, cuts, room)
    results, late = expected(window, [record for record, _ in floors(arrivals, disorder)])
    assert seen.counted() == results
    assert Counter(record.id for record in seen.late) == late


SQL = next(
    fence.partition("```")[0]
    for fence in (Path(__file__).parents[2] / "docs" / "event-time.md").read_text().split("```sql\n")[1:]
    if "AS session" in fence
)
"""Sessions of 5 s that wait as long, of a source with a disorder of 2 s."""


@given(seed=st.integers(0, 1_000), wait_ms=st.sampled_from([0, 5_000]))
def test_sessions_are_those_of_the_sql_in_the_docs(seed: int, wait_ms: int) -> None:
    chance = Random(seed)
    arrivals = [
        (chance.randrange(2), chance.choice("abcd"), 1_000_000 + n * 800 - chance.choice([0, 500, 2_000, 4_000, 9_000]))
        for n in range(60)
    ]
    window = Session("5s", wait=f"{wait_ms}ms")
    seen = play(window, arrivals, 2_000, set(range(60)), 1)
    rows = [(partition, number, key, time, number) for number, (partition, key, time) in enumerate(arrivals)]
    sql = SQL.replace("ts + 5000 > floor", f"ts + {wait_ms} > floor")
    with duckdb.connect() as database:
        database.execute('create table visits (partition int, "offset" int, page text, ts bigint, ms int)')
        insert(database, "visits", rows)
        results = database.sql(sql).fetchall()
    given = [(one.key, as_ms(one.start), as_ms(one.end), max(one.value)) for one in seen.results]
    assert sorted(given) == sorted(results)
    assert [time - as_ms(one.end) for time, one in zip(seen.times, seen.results, strict=True)] == (
        [wait_ms - 1] * len(given)
    )


def order(given: tuple[int, Windowed[Any, Any]]) -> tuple[Any, ...]:
    time, result = given
    return time, group_of(result.key), canonical_key(result.key), result.start


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_firing_goes_by_window_then_key_group_then_key_in_slices_of_the_room(window: Window | Revised) -> None:
    arrivals = [(0, key, time) for time in (100, 0, 60, 30) for key in "dacb"]
    for room in (1, 3, 100):
        seen = play(window, arrivals, 1_000, [], room)
        given = [*zip(seen.times, seen.results, strict=True)]
        assert given == sorted(given, key=order)


WATERMARKS = {group: 139 if group == group_of("b") else 39 for group in GROUPS}
"""Watermarks of key groups that subtasks at different ones had before a restore."""


def play_restored(operator: TimedOperator[Any], push: Callable[[Batch], None]) -> list[Arrived]:
    """The records that *push* gets, each with the one of `WATERMARKS` as its floor by which *operator* must go."""
    records = [(key, time) for time in range(0, 200, 7) for key in "abcd"]
    floored = [Arrived(number, key, time, WATERMARKS[group_of(key)]) for number, (key, time) in enumerate(records)]
    floored.append(Arrived(len(floored), "b", 135, 139))
    for batch, watermark in ((floored[:-1], 100), (floored[-1:], 10_000)):
        push(as_batch([replace(record, floor=NO_FLOOR) for record in batch]))
        advance(operator, watermark, 1)
    return floored


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_each_key_group_goes_on_at_its_own_watermark(window: Window | Revised) -> None:
    """No window of it is lost, fires again, or takes a record; others are not held back."""
    seen = Seen()
    operator = operator_of(window, seen.take, seen.take_late, WATERMARKS)
    results, late = expected(window, play_restored(operator, operator))
    assert (seen.counted(), Counter(record.id for record in seen.late)) == (results, late)
    assert late


def test_a_session_that_grows_leaves_the_state_as_it_is_that_a_snapshot_may_have() -> None:
    seen = Seen()
    operator = operator_of(Session("20ms"), seen.take, seen.take_late)
    operator(as_batch([Arrived(0, "a", 0, NO_FLOOR), Arrived(1, "a", 30, NO_FLOOR)]))
    before = [state for _, _, state in operator.table.items()]
    operator(as_batch([Arrived(2, "a", 15, NO_FLOOR)]))
    assert sorted(before) == [(0, 0, [0]), (30, 30, [1])]
    assert [state for _, _, state in operator.table.items()] == [(0, 30, [0, 2, 1])]


def test_a_later_result_leaves_the_state_as_it_is_that_a_snapshot_may_have() -> None:
    """Nor does it see what operators after it do to a result that was given."""
    seen = Seen()
    operator = operator_of(Revised(Tumbling("20ms"), early="5ms"), seen.take, seen.take_late)
    operator(as_batch([Arrived(0, "a", 0, NO_FLOOR), Arrived(1, "a", 7, NO_FLOOR)]))
    advance(operator, 4, 1)
    seen.results[0].value.clear()
    before = [state for _, _, state in operator.table.items()]
    advance(operator, 9, 1)
    assert (before, seen.results[1].value) == ([(None, {19: [1]}), ((1, [0]), {})], [0, 1])


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_what_changes_a_result_leaves_a_snapshot_as_it_is_that_is_being_written(window: Window | Revised) -> None:
    written = []
    for change in (list.copy, list.clear):
        seen = Seen()
        operator = operator_of(window, seen.take, seen.take_late)
        operator(as_batch([Arrived(0, "a", 0, NO_FLOOR), Arrived(1, "a", 7, NO_FLOOR)]))
        snapshot = operator.table.freeze(1, 0)
        advance(operator, 1_000, 1)
        for result in seen.results:
            change(result.value)
        written.append([block.body for block in snapshot.encode() if block is not None])
    assert written[0] == written[1]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_record_that_is_taken_as_the_accumulator_stays_as_it_is(window: Window | Revised) -> None:
    """Other windows may have it, and other branches of the stream."""
    seen = Seen()
    operator = operator_of(window, seen.take, seen.take_late)
    operator.accumulator = folded(list, _taken, merge, list[int], {})
    batch = as_batch([Arrived(0, "a", 2, NO_FLOOR), Arrived(1, "a", 3, NO_FLOOR), Arrived(2, "a", 4, NO_FLOOR)])
    records = batch.records = [[0], [1], [2]]
    operator(batch)
    advance(operator, 1_000, 1)
    assert records == [[0], [1], [2]]
    assert {tuple(sorted(result.value)) for result in seen.results} == {(0, 1, 2)}


def _taken(ids: list[int], record: list[int]) -> list[int]:
    if not ids:
        return record
    ids += record
    return ids


def nothing(one: list[int], other: list[int]) -> Any:
    one += other


@pytest.mark.parametrize("window", [Hopping("40ms", every="20ms"), Revised(Tumbling("40ms"), early="20ms")], ids=str)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda one, other: 1 // 0, "ZeroDivisionError: .*"),
        (lambda one, other: next(iter(())), "StopIteration: .*"),
        (nothing, "TypeError: nothing returned None: let it return the accumulator.*"),
    ],
)  # fmt: skip
def test_an_error_of_merge_names_operator_key_and_window(
    window: Window | Revised, wrong: Callable[[list[int], list[int]], list[int]], error: str
) -> None:
    seen = Seen()
    operator = operator_of(window, seen.take, seen.take_late)
    operator.accumulator = folded(list, add, wrong, list[int], {})
    operator(as_batch([Arrived(0, "a", 40, NO_FLOOR), Arrived(1, "a", 60, NO_FLOOR)]))
    raised = f"^merge\\(\\) of operator 'w' raised {error}, on two parts of the window of 'a' from "
    with pytest.raises(RecordError, match=raised + r"1970-01-01T00:00:00.040Z to 1970-01-01T00:00:00.080Z\. .*lost"):
        advance(operator, 1_000, 1)
