"""States that expire: which record finds one is a plain function of times and floors, and none is left."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_windows import ARRIVALS, Arrived, as_batch, floors, in_batches
from timed_rig import advance, parts_of

from exactlyonce.engines.runtime import expiry
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.expiry import ExpiringOperator
from exactlyonce.pipeline.event_time import END_OF_TIME
from exactlyonce.pipeline.graph import Kind, Node
from exactlyonce.pipeline.joins import Lookup
from exactlyonce.pipeline.timed import Expiry, kept_until
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state.backend import require_meaning
from exactlyonce.state.errors import StateIncompatible

Out = tuple[int, tuple[int, ...]]
"""The id of a record, and those that its key's state had before it."""


def gathered(ids: list[int] | None, record: Arrived) -> tuple[list[int] | None, Out]:
    before = tuple(ids or ())
    ids = ids or []
    ids.append(record.id)
    return None if record.id % 7 == 6 else ids, (record.id, before)


def operator_of(ttl: str, out: list[Any], *, lookup: bool = False, table: Any = None) -> Any:
    kept = kept_until(VersionedState(int if lookup else list[int]))
    node = Node("e", Kind.STATEFUL_MAP, timed=Expiry(ttl), state_type=kept.type, key_type=str)
    node = replace(node, kind=Kind.LOOKUP, lookup=Lookup()) if lookup else node
    operator = ExpiringOperator.made(parts_of(node, kept, by_key=True, table=table, function=gathered))
    operator.downstream = [lambda batch: out.extend(batch.records)]
    return operator


def expected(records: list[Arrived], ttl_ms: int) -> list[Out]:
    """By definition, one record after the other."""
    states: dict[str, tuple[int, list[int]]] = {}
    out: list[Out] = []
    for record in records:
        now = max(record.time, record.floor)
        last, ids = states.pop(record.key, (now, []))
        if now >= last + ttl_ms:
            last, ids = now, []
        out.append((record.id, tuple(ids)))
        if record.id % 7 != 6:
            states[record.key] = max(last, now), [*ids, record.id]
    return out


TTLS = st.sampled_from([1, 15, 60, 100])


@pytest.fixture(autouse=True, scope="module")
def small_memory() -> Iterator[None]:
    """Entries get into the table before a barrier, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expiry, "ENTRIES_MAX", 2)
        yield


@settings(max_examples=2 * settings().max_examples)
@given(
    arrivals=ARRIVALS,
    disorder=st.integers(0, 60),
    ttl_ms=TTLS,
    cuts=st.sets(st.integers(0, 39)),
    barriers=st.sets(st.integers(0, 39)),
)
def test_which_record_finds_a_state_is_a_function_of_times_and_floors(
    arrivals: list[tuple[int, str, int]], disorder: int, ttl_ms: int, cuts: Collection[int], barriers: Collection[int]
) -> None:
    out: list[Out] = []
    operator = operator_of(f"{ttl_ms}ms", out)
    stream = list(floors(arrivals, disorder))
    for number, (batch, watermark) in enumerate(in_batches(stream, cuts)):
        operator(batch)
        advance(operator, watermark)
        if number in barriers:
            operator.settle()
            for slot, _, (last, _) in operator.table.items():
                assert slot > watermark
                assert last + ttl_ms <= slot < last + ttl_ms + max(1, ttl_ms // 16)
    assert out == expected([record for record, _ in stream], ttl_ms)
    advance(operator, 10_000)
    operator.settle()
    assert list(operator.table.items()) == [], "nothing is left once no record can find it"


@given(arrivals=ARRIVALS, disorder=st.integers(0, 60), ttl_ms=TTLS, barriers=st.sets(st.integers(0, 39)))
def test_a_version_is_found_until_it_has_expired(
    arrivals: list[tuple[int, str, int]], disorder: int, ttl_ms: int, barriers: Collection[int]
) -> None:
    out: list[Any] = []
    operator = operator_of(f"{ttl_ms}ms", out, lookup=True)
    versions: dict[str, tuple[int, int]] = {}
    found: list[tuple[int, int | None]] = []
    for record, watermark in floors(arrivals, disorder):
        batch, now = as_batch([record]), max(record.time, record.floor)
        last, version = versions.get(record.key, (now, None))
        version = version if now < last + ttl_ms else None
        if record.id % 2:
            operator.left(batch)
            found.append((record.id, version))
        else:
            operator.right(batch.of([None if record.id % 7 == 6 else record.id]))
            versions.pop(record.key, None)
            if record.id % 7 != 6:
                versions[record.key] = now if version is None else max(now, last), record.id
        advance(operator, watermark)
        if record.id in barriers:
            operator.settle()
    assert [(joined.left.id, joined.right) for joined in out] == found


def test_a_drain_keeps_the_states() -> None:
    out: list[Out] = []
    operator = operator_of("50ms", out)
    operator(as_batch([Arrived(1, "a", 10, -1)]))
    advance(operator, END_OF_TIME)
    operator.settle()
    assert [entry for _, _, entry in operator.table.items()] == [(10, [1])]


def test_a_shorter_ttl_goes_on_with_the_states_and_a_longer_one_is_refused() -> None:
    out: list[Out] = []
    before = operator_of("90ms", out)
    before(as_batch([Arrived(1, "a", 10, -1), Arrived(2, "b", 30, -1)]))
    before.settle()
    require_meaning("e", "ttl=90", "ttl=50")
    after = operator_of("50ms", out, table=before.table)
    advance(after, 55)
    after(as_batch([Arrived(3, "a", 60, -1), Arrived(4, "b", 60, -1)]))
    assert out[2:] == [(3, ()), (4, (2,))]
    with pytest.raises(StateIncompatible, match=r"'e' is kept for ttl=90 ms, .* Keep ttl=90ms, or a shorter one"):
        require_meaning("e", "ttl=90", "ttl=91")


@pytest.mark.parametrize("flat", [False, True])
def test_a_dead_letter_changes_no_state(flat: bool) -> None:
    class Letters:
        def __init__(self) -> None:
            self.added: list[int] = []

        def add(self, batch: Batch, failed: Any) -> Batch:
            self.added += [batch.records[place].id for place, _ in failed]
            return batch.where([place not in dict(failed) for place in range(len(batch.records))])

    def fails(ids: list[int] | None, record: Arrived) -> Any:
        ids, output = gathered(ids, record)
        if record.id == 2:
            raise ValueError
        return ids, [output] if flat else output

    out: list[Out] = []
    operator, letters = operator_of("50ms", out), Letters()
    operator.fn, operator.flat, operator.clone = fails, flat, list
    operator.dead_letters = letters
    operator(as_batch([Arrived(id, "a", time, -1) for id, time in ((1, 10), (2, 50), (3, 59), (4, 109))]))
    assert out == [(1, ()), (3, (1,)), (4, ())]
    assert letters.added == [2]
