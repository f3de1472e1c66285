"""The encoding of an interval: slices, sections, images and increments."""

from __future__ import annotations

import copy
import random
from itertools import islice
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX
from exactlyonce.pipeline.keys import canonical_key, key_groups
from exactlyonce.state import interval
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.errors import ApplyFailed, StateUnstorable
from exactlyonce.state.hash_map import KeyedTable
from exactlyonce.state.key_groups import Merging
from exactlyonce.state.stored import StoredState


def _put(table: KeyedTable[Any], states: dict[bytes, Any]) -> None:
    table.apply(lambda _, state: (state, None), list(states), list(states.values()))


def _seal(table: KeyedTable[Any], topic: Any, checkpoint: int, base: int) -> list[EncodedBlock]:
    snapshot = table.freeze(checkpoint, base)
    blocks = [block for block in snapshot.encode() if block is not None]
    snapshot.seal([topic.put(block) for block in blocks])
    return blocks


class Counter(msgspec.Struct):
    count: int


class Derived(Counter):
    more: int


@pytest.mark.parametrize("place", [0, 1_000, 1_999])
@pytest.mark.parametrize(
    ("wrong", "turns"),
    [
        pytest.param("many", 1, id="class"),
        pytest.param(Derived(1, 2), 1, id="derived class"),
        pytest.param(Counter("many"), 8, id="value"),  # type: ignore[arg-type]  # that is the test
    ],
)
def test_a_wrong_state_is_found_wherever_it_is(
    wrong: Any, turns: int, place: int, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong class at once; a wrong value in the first checkpoint, and later once its key group's turn comes."""
    monkeypatch.setattr(interval, "CHECKED_ENTRIES", 250)
    keys = sorted(map(canonical_key, range(2_000)), key=lambda key: key_groups([key], 16))

    def checkpoints(table: KeyedTable[Any], numbers: range, state: Any) -> None:
        for number in numbers:
            states = [[Counter(1)] for _ in keys]
            states[place] = [state]
            table.apply(lambda _, boxed: (boxed[0], None), keys, states)
            _seal(table, topic, number, number - 1)

    stored = StoredState[Any](operator="totals", type=Counter, groups=range(16), max_parallelism=16)
    with pytest.raises(StateUnstorable):
        checkpoints(KeyedTable(stored), range(1, 2), wrong)
    table = KeyedTable[Any](stored)
    checkpoints(table, range(1, 2), Counter(1))
    with pytest.raises(StateUnstorable):
        checkpoints(table, range(2, 2 + turns), wrong)


def _count(counter: Counter | None, by: int) -> tuple[Counter | None, None]:
    """Counts in place; 0 deletes."""
    if by == 0:
        return None, None
    counter = counter or Counter(0)
    counter.count += by
    return counter, None


def _count_number(count: int | None, by: int) -> tuple[int | None, None]:
    """The same for a state that cannot change in place."""
    return ((count or 0) + by if by else None), None


@pytest.mark.parametrize(("type_", "fn"), [(Counter, _count), (int, _count_number)])
@pytest.mark.parametrize("merged", [set(), {0, 2}])
@pytest.mark.parametrize("part", [4, 170_000])
def test_records_at_any_instant_leave_a_snapshot_as_it_is(
    type_: Any, fn: Any, merged: set[int], part: int, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval, "PART_ENTRIES", part)
    monkeypatch.setattr(interval, "SLICE_ENTRIES", 3)
    monkeypatch.setattr(Merging, "choose", lambda *_: dict.fromkeys(merged))
    keys = [canonical_key(number) for number in range(40)]
    for instant in range(60):
        table: KeyedTable[Any] = KeyedTable(
            StoredState(operator="totals", type=type_, groups=range(4), max_parallelism=4)
        )
        table.apply(fn, keys, [1] * 40)
        _seal(table, topic, 1, 0)
        table.apply(fn, keys[:8], [1] * 7 + [0])
        table.apply(fn, keys[4:10], [1] * 5 + [0])
        expected = copy.deepcopy(dict(table.items()))
        snapshot = table.freeze(2, 1)
        steps = snapshot.encode()
        refs = [topic.put(block) for block in islice(steps, instant) if block is not None]
        for checkpoint in (3, 4):
            table.apply(fn, keys[8:], [checkpoint] * 27 + [0] * 5)
            table.apply(fn, keys[:9], [checkpoint] * 9)
            table.freeze(checkpoint, 1)
        newest = dict(table.items())
        refs += [topic.put(block) for block in steps if block is not None]
        assert dict(topic.restored(snapshot.seal(refs), 2, range(4), type_=type_).items()) == expected
        assert dict(table.items()) == newest
        assert not next(table._history.intervals[0]._later()).before, "what was kept for this snapshot alone is let go"


def test_values_of_all_sizes_fit(topic: Any) -> None:
    noise = random.Random(5)
    states = {canonical_key(number): noise.randbytes(10 ** noise.randrange(0, 6)) for number in range(400)}
    states[canonical_key("huge")] = noise.randbytes(850_000)
    table: KeyedTable[bytes] = KeyedTable(
        StoredState(operator="totals", type=bytes, groups=range(2), max_parallelism=2)
    )
    _put(table, states)
    snapshot = table.freeze(1, 0)
    index = topic.write(snapshot)
    assert len(snapshot.chain.blocks) > 10
    assert max(map(len, topic.bodies.values())) < BLOCK_SIZE_MAX
    assert dict(topic.restored(index, 1, range(2), type_=bytes).items()) == states


@pytest.mark.parametrize(
    ("type_", "state", "why"), [(bytes, bytes(900_001), "at most 900000"), (int, "x", "not a valid int")]
)
def test_a_state_that_cannot_be_stored_fails_for_good(type_: Any, state: Any, why: str) -> None:
    table: KeyedTable[Any] = KeyedTable(StoredState(operator="totals", type=type_, groups=range(2), max_parallelism=2))
    _put(table, {canonical_key(1): state})
    with pytest.raises(StateUnstorable, match=f"operator 'totals'.*{why}"):
        list(table.freeze(1, 0).encode())
    with pytest.raises(Exception, match="not encoded further"):
        list(table.freeze(2, 0).encode())


def test_many_long_keys_that_are_deleted(topic: Any) -> None:
    table: KeyedTable[int] = KeyedTable(StoredState(operator="totals", type=int, groups=range(1), max_parallelism=1))
    short = [canonical_key(number) for number in range(3_000)]
    long = [bytes(1_000) + bytes([first, second]) for first in range(16) for second in range(200)]
    _put(table, dict.fromkeys([*short, *long], 1))
    _seal(table, topic, 1, 0)
    table.apply(lambda state, record: (record, None), [*short[:2_500], *long], [2] * 2_500 + [None] * len(long))
    snapshot = table.freeze(2, 1)
    refs = [topic.put(block) for block in snapshot.encode() if block is not None]
    restored = topic.restored(snapshot.seal(refs), 2, range(1))
    assert dict(restored.items()) == dict.fromkeys(short, 1) | dict.fromkeys(short[:2_500], 2)


def test_a_function_that_returns_no_pair_is_located() -> None:
    def fn(_: int | None, record: int) -> Any:
        return (1, 1) if record else record

    with pytest.raises(ApplyFailed) as failure:
        KeyedTable(StoredState(operator="totals", type=int, groups=range(128), max_parallelism=128)).apply(
            fn, [canonical_key("ann")] * 3, [5, 7, 0]
        )
    assert failure.value.index == 2
    assert isinstance(failure.value.__cause__, TypeError)
