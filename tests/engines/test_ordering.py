"""Sorting and deduplication on a real table: in order of time, results are a plain function of times and floors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_windows import ARRIVALS, WATERMARKS, Arrived, as_batch, floors, in_batches, play_restored
from timed_rig import advance, group_of, parts_of

from exactlyonce.engines.runtime import ordering
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.ordering import OPERATORS, Sorter
from exactlyonce.pipeline.event_time import END_OF_TIME
from exactlyonce.pipeline.graph import Kind, Node
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.timed import Deduplicate, InOrder
from exactlyonce.pipeline.versions import VersionedState

SPECS = [InOrder(), Deduplicate("30ms"), Deduplicate("50ms"), Deduplicate("1ms"), Deduplicate("50ms", "arrival")]


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records get into the table soon, and are in many buckets and blocks."""
    monkeypatch.setattr(ordering, "UNWRITTEN_MAX", 12)
    monkeypatch.setattr(ordering, "GIVEN_MAX", 5)
    monkeypatch.setattr(ordering, "STATE_KEYS_MAX", 2)
    monkeypatch.setattr(ordering, "_BUCKET_BITS", 3)
    monkeypatch.setattr(ordering, "_BLOCK_BITS", 5)


def operator_of(
    spec: Any, given: list[Any], late: list[Any], watermarks: dict[int, int] | None = None, table: Any = None
) -> Sorter:
    node = Node("s", Kind.IN_ORDER, timed=spec, key_type=str)
    kept = VersionedState(spec.kept_state(Arrived))
    parts = parts_of(node, kept, by_key=spec.by_key, watermarks=watermarks, table=table)
    operator: Sorter = OPERATORS[type(spec)].made(parts)

    def listen(batch: Batch) -> None:
        assert batch.keys is None
        assert batch.times == [record.time for record in batch.records]
        given.extend(batch.records)

    operator.downstream, operator.late_output = [listen], "late"
    operator.sides = {"late": [lambda batch: late.extend(batch.records)]}
    return operator


def expected(spec: Any, records: Sequence[Arrived]) -> list[Arrived]:
    """By definition: one record after the other."""
    by_time = not (isinstance(spec, Deduplicate) and spec.order == "arrival")
    records = sorted(records, key=lambda record: (record.time, record.id)) if by_time else records
    given: list[Arrived] = []
    for record in records:
        times = [other.time for other in given if other.key == record.key]
        if isinstance(spec, InOrder) or all(abs(record.time - time) >= spec.within_ms for time in times):
            given.append(record)
    return given


def order(record: Arrived) -> tuple[Any, ...]:
    """As earlier versions gave them, so that an audit may go back across an upgrade."""
    return record.time, group_of(record.key), canonical_key(record.key), record.id


@pytest.mark.parametrize("spec", SPECS, ids=str)
@settings(max_examples=2 * settings().max_examples)
@given(arrivals=ARRIVALS, disorder=st.integers(0, 60), cuts=st.sets(st.integers(0, 39)), room=st.integers(1, 5),
       barriers=st.lists(st.sampled_from([None, "after", "before", "restore"]), min_size=40, max_size=40),
       drains=st.booleans())  # fmt: skip
def test_results_are_a_function_of_times_and_floors(
    spec: Any, arrivals: list[tuple[int, str, int]], disorder: int, cuts: set[int], room: int, barriers: list[Any],
    drains: bool,
) -> None:  # fmt: skip
    """They are, wherever held records are: in memory, or in the table since a barrier before or after a watermark."""
    results: list[Arrived] = []
    late: list[Arrived] = []
    operator = operator_of(spec, results, late)
    stream = list(floors(arrivals, disorder))
    for (batch, watermark), barrier in zip(in_batches(stream, cuts), barriers, strict=False):
        operator(batch)
        if barrier == "before":
            operator.settle()
        advance(operator, watermark, room)
        if barrier in ("after", "restore"):
            operator.settle()
        if barrier == "restore":
            operator = operator_of(spec, results, late, table=operator.table)
    for watermark in (END_OF_TIME,) if drains else (10_000, 20_000):
        advance(operator, watermark, room)
    operator.settle()
    records = [record for record, _ in floors(arrivals, disorder)]
    assert late == [record for record in records if record.time <= record.floor]
    wanted = expected(spec, [record for record in records if record.time > record.floor])
    by_arrival = isinstance(spec, Deduplicate) and spec.order == "arrival"
    assert results == (wanted if by_arrival else sorted(wanted, key=order))
    if not drains:
        assert list(operator.table.items()) == [], "what has expired leaves no state"


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_key_group_goes_on_at_its_own_watermark(spec: Any) -> None:
    results: list[Arrived] = []
    late: list[Arrived] = []
    operator = operator_of(spec, results, late, WATERMARKS)
    records = play_restored(operator, operator)
    assert [record.id for record in late] == [record.id for record in records if record.time <= record.floor]
    wanted = expected(spec, [record for record in records if record.time > record.floor])
    assert sorted(record.id for record in results) == sorted(record.id for record in wanted)


@pytest.mark.parametrize("in_table", [False, True])
@pytest.mark.parametrize(
    ("spec", "given_ids", "late_ids"),
    [(InOrder(), [0, 1, 3, 4], [2]), (Deduplicate("30ms"), [0, 4], [2]), (Deduplicate("30ms", "arrival"), [0, 4], [])],
)
def test_a_run_after_a_drain_goes_on_after_the_last_result_and_remembers_it(
    spec: Any, given_ids: list[int], late_ids: list[int], in_table: bool
) -> None:
    results: list[Arrived] = []
    late: list[Arrived] = []
    operator = operator_of(spec, results, late)
    operator(as_batch([Arrived(0, "a", 10, -99), Arrived(1, "a", 12, -99)]))
    if in_table:
        operator.settle()
    advance(operator, END_OF_TIME, 1)
    operator.settle()
    later = operator_of(spec, results, late, table=operator.table)
    later(as_batch([Arrived(2, "a", 12, -99), Arrived(3, "a", 39, -99), Arrived(4, "a", 40, -99)]))
    advance(later, 100, 1)
    assert ([record.id for record in results], [record.id for record in late]) == (given_ids, late_ids)


@pytest.mark.parametrize("spec", [InOrder(), Deduplicate("1h")], ids=str)
def test_a_barrier_writes_a_state_for_each_key_group_and_never_for_each_record(
    spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordering, "UNWRITTEN_MAX", 1_000)
    monkeypatch.setattr(ordering, "GIVEN_MAX", 1_000)
    monkeypatch.setattr(ordering, "STATE_KEYS_MAX", 1_000)
    results: list[Any] = []
    operator = operator_of(spec, results, [])
    operator(as_batch([Arrived(number, f"key {number}", 2 + number % 28, -99) for number in range(100)]))
    operator.settle()
    groups = {group_of(f"key {number}") for number in range(100)}
    assert [slot for slot, _, _ in operator.table.items()] == [29] * len(groups), "what waits"
    advance(operator, 31, 1)
    operator.settle()
    remembered = len(groups) if isinstance(spec, Deduplicate) else 0
    assert (len(results), len([*operator.table.items()])) == (100, remembered), "what was given"


@pytest.mark.parametrize("spec", [InOrder(), Deduplicate("1ms")], ids=str)
def test_large_records_of_one_key_are_several_states(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one moment, too; what one barrier or several have found; a restore reads them all, in their order."""
    monkeypatch.setattr(ordering, "STATE_BYTES_MAX", 100)
    results: list[Any] = []
    operator = operator_of(spec, results, [])
    for first in (0, 30):
        numbers = range(first, first + 30)
        operator(as_batch([Arrived(number, "a", 2 + number % 9 // 3, -99) for number in numbers]))
        operator.settle()
    sizes = [operator.table.size(state) for _, _, state in operator.table.items()]
    assert len(sizes) > 5
    later = operator_of(spec, results, [], table=operator.table)
    advance(later, 1_000, 1)
    times = [record.time for record in results]
    assert times == ([2] * 21 + [3] * 21 + [4] * 18 if isinstance(spec, InOrder) else [2, 3, 4])
    assert isinstance(spec, Deduplicate) or [*later.table.items()] == []


@pytest.mark.parametrize("order", ["time", "arrival"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_drain_writes_nothing_into_a_slot_that_was_dropped(order: Any, waits: bool) -> None:
    """One key was written at a barrier; another one of its group and slot was given after that."""
    keys = [key for key in "abcdefghi" if group_of(key) == group_of("a")]
    results: list[Arrived] = []
    operator = operator_of(Deduplicate("50ms", order), results, [])
    operator(as_batch([Arrived(0, keys[0], 10, -99)]))
    advance(operator, 10)
    operator.settle()
    operator(as_batch([Arrived(1, keys[1], 11, -99)]))
    advance(operator, 100)
    operator(as_batch([Arrived(2, keys[0], 120, -99)] if waits else []))
    advance(operator, END_OF_TIME)
    operator.settle()
    later = operator_of(Deduplicate("50ms", order), results, [], table=operator.table)
    later(as_batch([Arrived(3, keys[1], 130, -99), Arrived(4, keys[0], 131, -99)]))
    advance(later, 200)
    assert [record.id for record in results] == ([0, 1, 2, 3] if waits else [0, 1, 3, 4])
