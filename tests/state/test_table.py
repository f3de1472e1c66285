"""Tables: what the contract of a state backend does not say of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.table import KeyedTable

ANN = canonical_key("ann")


class Total(msgspec.Struct):
    sum: int


def _add(total: int | None, amount: int) -> tuple[int, str]:
    total = (total or 0) + amount
    return total, f"={total}"


def _table(type_: type) -> KeyedTable[Any]:
    return KeyedTable("totals", type_, range(128), 128)


def test_states_are_found_before_during_and_after_encoding() -> None:
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


def test_an_output_that_is_the_state_keeps_its_value() -> None:
    table = _table(Total)

    def add(total: Total | None, amount: int) -> tuple[Total, Total]:
        total = total or Total(0)
        total.sum += amount
        return total, total

    outputs = table.apply(add, [ANN] * 3, [1, 2, 3])
    assert [output.sum for output in outputs] == [1, 3, 6]


def test_a_function_that_returns_no_pair_is_located() -> None:
    def fn(_: int | None, record: int) -> Any:
        return (1, 1) if record else record

    with pytest.raises(ApplyFailed) as failure:
        _table(int).apply(fn, [ANN] * 3, [5, 7, 0])
    assert failure.value.index == 2
    assert isinstance(failure.value.__cause__, TypeError)
