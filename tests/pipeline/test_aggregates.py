"""Aggregates: results against a plain computation, whatever the order of records and of merged parts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from math import fsum, inf, isnan, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactlyonce.pipeline.aggregates import (
    Accumulator,
    Aggregate,
    Count,
    CountDistinct,
    First,
    Last,
    Max,
    Mean,
    Min,
    Misuse,
    Percentiles,
    Place,
    Placed,
    Sum,
    TopN,
    several,
)  # fmt: skip
from exactlyonce.pipeline.hints import UNKNOWN


class Order(msgspec.Struct, frozen=True):
    id: int
    amount: int
    weight: float = 1.0
    note: str | None = None


ORDERS = st.lists(
    st.builds(Order, st.integers(0, 5), st.integers(-100, 100), st.floats(-1e9, 1e9)), min_size=1, max_size=12
)


def result(accumulator: Accumulator, records: list[Any], parts: list[int]) -> Any:
    """The result of *records*, added in parts of their order as *parts* cut it, each part as a checkpoint keeps it."""
    cuts = [0, *sorted({min(part, len(records)) for part in parts}), len(records)]
    states = []
    for start, end in pairwise(cuts):
        if part := records[start:end]:
            state = reduce(accumulator.add, part, None)
            states.append(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=accumulator.state))
    assert accumulator.merge is not None
    state = reduce(accumulator.merge, states)
    return state if accumulator.result is None else accumulator.result(state)


def placed(records: list[Any]) -> list[Placed]:
    return [Placed(Place(record.id, "t", 0, offset), record) for offset, record in enumerate(records)]


CASES: list[tuple[Aggregate[Order, Any], Callable[[list[Placed]], Any]]] = [
    (Count(), len),
    (Sum("amount"), lambda these: sum(each.record.amount for each in these)),
    (Sum(lambda order: order.weight), lambda these: fsum(each.record.weight for each in these)),
    (Sum(lambda order: order.amount, type=int), lambda these: sum(each.record.amount for each in these)),
    (Sum(lambda order: order.amount > 0), lambda these: sum(each.record.amount > 0 for each in these)),
    (Sum(lambda order: order.amount > 0, type=int), lambda these: sum(each.record.amount > 0 for each in these)),
    (Mean("amount"), lambda these: sum(each.record.amount for each in these) / len(these)),
    (Mean("weight"), lambda these: fsum(each.record.weight for each in these) / len(these)),
    (Min("amount"), lambda these: min(each.record.amount for each in these)),
    (Max("weight"), lambda these: max(each.record.weight for each in these)),
    (First("amount"), lambda these: min(these, key=lambda each: each.place).record.amount),
    (Last(), lambda these: max(these, key=lambda each: each.place).record),
    (CountDistinct("amount"), lambda these: len({each.record.amount for each in these})),
    (
        TopN(3, "amount"),
        lambda these: [each.record for each in sorted(these, key=lambda it: (-it.record.amount, it.place))][:3],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("aggregate", "expected"), CASES, ids=[type(aggregate).__name__ for aggregate, _ in CASES])
@settings(max_examples=30)
@given(orders=ORDERS, data=st.data())
def test_a_result_is_that_of_all_records_in_any_order_and_any_parts(
    aggregate: Aggregate[Order, Any], expected: Callable[[list[Placed]], Any], orders: list[Order], data
) -> None:
    accumulator = aggregate.accumulator(Order, {})
    records: list[Any] = data.draw(st.permutations(placed(orders)))
    cuts = data.draw(st.lists(st.integers(0, len(orders)), max_size=3))
    given_ = records if accumulator.placed else [each.record for each in records]
    assert result(accumulator, given_, cuts) == expected(placed(orders))


SKETCHES: list[Aggregate[Any, Any]] = [
    CountDistinct(lambda number: number, error=0.1),
    Percentiles(lambda number: number, [0, 25, 50, 99, 100], error=0.05),
]


@pytest.mark.parametrize("aggregate", SKETCHES, ids=[aggregate.name for aggregate in SKETCHES])
@settings(max_examples=60)
@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60), data=st.data())
def test_a_sketch_depends_on_the_values_alone(aggregate: Aggregate[Any, Any], numbers: list[float], data) -> None:
    accumulator = aggregate.accumulator(UNKNOWN, {})
    shuffled = data.draw(st.permutations(numbers))
    approximate = result(accumulator, shuffled, data.draw(st.lists(st.integers(0, 60), max_size=3)))
    assert approximate == result(accumulator, numbers, [])
    if isinstance(aggregate, Percentiles):
        ranked = sorted(numbers)
        exact = [ranked[int(percent / 100 * (len(ranked) - 1))] for percent in aggregate.percents]
        for one, other in zip(approximate, exact, strict=True):
            assert one == pytest.approx(other, rel=0.0501, abs=1e-300)


@pytest.mark.parametrize("count", [100, 4_000, 60_000])
def test_the_number_of_different_values_is_within_a_few_standard_errors(count: int) -> None:
    """Also where the registers become dense, between parts and within one."""
    accumulator = CountDistinct(lambda number: number, error=0.02).accumulator(UNKNOWN, {})
    found = result(accumulator, [*range(count), *range(count // 2)], [count // 50, count])
    assert found == result(accumulator, [*reversed(range(count))], []) == pytest.approx(count, rel=0.06)


def test_a_percentile_of_nan_or_infinity_is_an_error() -> None:
    accumulator = Percentiles("weight", [50]).accumulator(Order, {})
    for number in (nan, inf):
        with pytest.raises(ValueError, match="filter such records"):
            accumulator.add(None, Order(1, 1, number))


def test_a_state_is_of_the_parameters_that_it_depends_on() -> None:
    """A checkpoint refuses the state of another name."""
    aggregates: list[Aggregate[Any, Any]] = [
        TopN(2, "amount"), TopN(3, "amount"), CountDistinct("id"), CountDistinct("id", error=0.1),
        Percentiles("amount", [50], error=0.02), Percentiles("amount", [50, 99]), Count(),
    ]  # fmt: skip
    assert [aggregate.named(Order, {}).name for aggregate in aggregates] == [
        "TopN(2)", "TopN(3)", "CountDistinct", "CountDistinct(0.1)", "Percentiles(0.02)", "Percentiles(0.01)", "Count",
    ]  # fmt: skip


@given(st.lists(st.floats(-1e300, 1e300) | st.integers(-(2**70), 2**70), min_size=1, max_size=9), st.data())
def test_a_sum_of_floats_is_exact_and_rounded_once(numbers: list[float], data) -> None:
    accumulator = Sum(lambda number: number).accumulator(UNKNOWN, {})
    state = reduce(accumulator.add, data.draw(st.permutations(numbers)), None)
    exact = sum(map(Fraction, numbers))
    assert accumulator.result is not None
    assert accumulator.result(state) == (float(exact) if float in map(type, numbers) else exact)


def test_sums_of_what_is_not_finite_or_not_of_the_type() -> None:
    accumulator = Sum(lambda number: number).accumulator(UNKNOWN, {})
    assert isnan(result(accumulator, [1.0, inf, -inf, 2], []))
    assert isnan(result(accumulator, [nan, 1], [1]))
    assert result(accumulator, [inf, 1.0, 1], [2]) == inf
    with pytest.raises(OverflowError, match="too large"):
        result(accumulator, [1e308, 1e308], [])
    with pytest.raises(TypeError, match="give type=Decimal"):
        result(accumulator, [Decimal(1)], [])
    assert result(Sum(lambda n: n, type=Decimal).accumulator(UNKNOWN, {}), [Decimal("1.5")] * 2, [1]) == 3
    seconds = Mean(lambda n: n, type=timedelta).accumulator(UNKNOWN, {})
    assert result(seconds, [timedelta(seconds=n) for n in (1, 2)], [1]) == timedelta(seconds=1.5)


@pytest.mark.parametrize("aggregate", [Min("weight"), Max("weight"), TopN(2, lambda order: order.weight)])
def test_nan_has_no_order(aggregate: Aggregate[Order, Any]) -> None:
    accumulator, order = aggregate.accumulator(Order, {}), Order(1, 1, nan)
    with pytest.raises(ValueError, match="has no order"):
        accumulator.add(None, Placed(Place(0, "t", 0, 0), order) if accumulator.placed else order)


def test_several_aggregates_give_a_record_with_their_names() -> None:
    aggregates: dict[str, Aggregate[Order, Any]] = {"n": Count(), "last": Last("amount"), "heavy": Max("weight")}
    accumulator = several("spent-by_day", None, aggregates, Order, {})
    value = result(accumulator, placed([Order(1, 10, 3.0), Order(2, 20, 2.0)]), [1])
    assert repr(value) == "SpentByDay(n=2, last=20, heavy=3.0)"
    assert type(value) is accumulator.value


class Color(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("aggregate", "problem"),
    [
        (Min(lambda order: order.amount), "the type of Min's values is unknown"),
        (First(lambda order: order.amount), "the type of First's values is unknown"),
        (Sum("amont"), "Order has no field 'amont': its fields are id, amount, weight, note"),
        (Max("note"), "Max is of values that may be None"),
        (Sum("note"), "Sum is of values that may be None"),
        (Mean(lambda order: order.note, type=str), "Mean is of numbers or timedeltas"),
        (TopN(0, "amount"), "TopN(0, ...) must be of 1 record or more"),
        (CountDistinct("id", error=0.0), "CountDistinct(error=0.0): it must be from 0.002 to 0.2"),
        (Max(lambda order: Color.RED, Color), "Max is of values with an order, and Color has none: give a function"),
        (Percentiles("note", [50]), "Percentiles is of values that may be None"),
        (Percentiles("amount", [101]), "give a list of numbers from 0 to 100"),
        (CountDistinct(lambda order: (yield order)), "the lambda must be a plain function of a record"),
    ],
)
def test_an_aggregate_that_cannot_be_is_refused_with_the_remedy(aggregate: Aggregate[Any, Any], problem: str) -> None:
    with pytest.raises(Misuse) as refused:
        aggregate.accumulator(Order, {})
    assert problem in str(refused.value)
