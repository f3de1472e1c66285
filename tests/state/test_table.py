"""Tables, as operators use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.pipeline.errors import InvariantViolation
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.table import KeyedTable

ANN, BOB = canonical_key("ann"), canonical_key("bob")


class Total(msgspec.Struct):
    sum: int


def _add(total: int | None, amount: int) -> tuple[int, str]:
    total = (total or 0) + amount
    return total, f"={total}"


def _table(type_: type) -> KeyedTable[Any]:
    return KeyedTable("totals", type_, range(128), 128)


def test_apply_keeps_a_state_per_key() -> None:
    """Every record sees what the records of its key before it left, in one batch or in several."""
    table = _table(int)
    assert table.apply(_add, [ANN, BOB, ANN], [1, 10, 2]) == ["=1", "=10", "=3"]
    assert table.apply(_add, [BOB], [5]) == ["=15"]
    assert dict(table.items()) == {ANN: 3, BOB: 15}
    assert (table.get(ANN), table.get(canonical_key("eve"))) == (3, None)


def test_the_state_none_deletes_the_key() -> None:
    """A deleted key has no state for the next record of it, within the batch and after a barrier."""
    table = _table(int)

    def until_three(count: int | None, _: str) -> tuple[int | None, int | None]:
        count = (count or 0) + 1
        return (None, None) if count == 3 else (count, count)

    assert table.apply(until_three, [ANN] * 4, "abcd") == [1, 2, None, 1]
    table.freeze(1, 0)
    assert table.apply(until_three, [ANN] * 2, "ab") == [2, None]
    assert dict(table.items()) == {}
    assert table.get(ANN) is None


def test_states_are_found_before_during_and_after_encoding() -> None:
    """Wherever the state of a key lies (this interval, a frozen one, half encoded, the tables), records see it."""
    table = _table(int)
    keys = [canonical_key(number) for number in range(300)]
    table.apply(_add, keys, [1] * 300)
    older, newer = table.freeze(1, 0), None
    for checkpoint in (2, 3):
        table.apply(_add, keys[::2], [1] * 150)
        newer = table.freeze(checkpoint, 0)
    assert newer is not None
    steps = [*older.encode(), *newer.encode()]
    expected = [3 if number % 2 == 0 else 1 for number in range(300)]
    assert list(map(table.get, keys)) == expected
    table.apply(_add, keys, [0] * 300)
    assert list(map(table.get, keys)) == expected
    assert len(steps) > 300


def test_records_between_slices_do_not_disturb_what_is_encoded() -> None:
    """After every slice, all states are what the records made them."""
    table = _table(int)
    keys = [canonical_key(number) for number in range(50)]
    table.apply(_add, keys, [0] * 50)
    for round_, _ in enumerate(table.freeze(1, 0).encode(), 1):
        table.apply(_add, keys, [1] * 50)
        assert [table.get(key) for key in keys] == [round_] * 50


@pytest.mark.parametrize("fn", [lambda state, record: 1 // record, lambda state, record: record])
def test_a_failing_function_is_located(fn: Callable[..., Any]) -> None:
    """The error says which record of the batch failed and what the function raised."""
    table = _table(int)
    with pytest.raises(ApplyFailed) as failure:
        table.apply(lambda state, record: fn(state, record) if record == 0 else (1, 1), [ANN] * 3, [5, 7, 0])
    assert failure.value.index == 2
    assert isinstance(failure.value.__cause__, ZeroDivisionError | TypeError)


def test_reduce_starts_with_the_first_record() -> None:
    """The first record of a key is its accumulator; the function combines it with each later one."""
    table = _table(int)
    assert table.reduce(max, [ANN, BOB, ANN, ANN], [3, 1, 2, 9]) == [3, 1, 3, 9]
    with pytest.raises(ApplyFailed) as failure:
        table.reduce(lambda total, record: total // record, [BOB, ANN], [1, 0])
    assert failure.value.index == 1


def test_an_output_that_is_the_state_keeps_its_value() -> None:
    """A function may return its mutable state as output and go on changing it."""
    table = _table(Total)

    def add(total: Total | None, amount: int) -> tuple[Total, Total]:
        total = total or Total(0)
        total.sum += amount
        return total, total

    outputs = table.apply(add, [ANN] * 3, [1, 2, 3])
    assert [output.sum for output in outputs] == [1, 3, 6]


def test_reduce_in_place_spares_records_and_outputs() -> None:
    """A function may change its accumulator in place; records and earlier outputs stay as they were."""
    table = _table(Total)

    def add(total: Total, record: Total) -> Total:
        total.sum += record.sum
        return total

    records = [Total(1), Total(2), Total(3)]
    outputs = table.reduce(add, [ANN] * 3, records)
    assert [output.sum for output in outputs] == [1, 3, 6]
    assert [record.sum for record in records] == [1, 2, 3]


def test_keys_of_other_subtasks_are_refused() -> None:
    """A record that was sent to the wrong subtask is a defect, not a new key."""
    table: KeyedTable[int] = KeyedTable("totals", int, range(key_group(ANN, 128)), 128)
    with pytest.raises(InvariantViolation, match="key groups"):
        table.apply(_add, [ANN], [1])


def test_checkpoints_and_bases_only_grow() -> None:
    """Freezing an old checkpoint again, or naming a base that was never sealed or is given up, is a defect."""
    table = _table(int)
    for checkpoint in (1, 2):
        snapshot = table.freeze(checkpoint, 0)
        list(snapshot.encode())
        snapshot.seal(())
    for checkpoint, base in ((2, 0), (3, 7)):
        with pytest.raises(InvariantViolation):
            table.freeze(checkpoint, base)
    table.freeze(3, 2)
    with pytest.raises(InvariantViolation):
        table.freeze(4, 1)
