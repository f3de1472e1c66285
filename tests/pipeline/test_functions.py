"""A user's function is read without calling it."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import pytest

from exactlyonce.pipeline.functions import Context, Emit, Function, Operator, read
from exactlyonce.pipeline.hints import UNKNOWN, admits_none, element, pair, without_none

T = TypeVar("T")


class Order(NamedTuple):
    id: int


class Total(NamedTuple):
    sum: int


def of_order(order: Order) -> Total:
    return Total(order.id)


def in_strings(order: "Order") -> "Total | None":
    return None


def with_more(order: Order, factor: int = 1, *, rounded: bool = False) -> Total:
    return Total(factor)


def traced(function: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(function)
    def call(*arguments: Any) -> T:
        return function(*arguments)

    return call


class Method:
    def __call__(self, order: Order) -> Total:
        return Total(order.id)

    def method(self, order: Order) -> Total:
        return Total(order.id)

    @staticmethod
    def static(order: Order) -> Total:
        return Total(order.id)

    @classmethod
    def of_class(cls, order: Order) -> Total:
        return Total(order.id)


class Resource(Operator):
    def __init__(self, path: str = "") -> None:
        self.path = path

    def __call__(self, order: Order) -> Total:
        return Total(order.id)


def make_resource() -> Resource:
    return Resource()


def read_one(fn: Any) -> Function:
    return read(fn, ("record",), {})


@pytest.mark.parametrize(
    "fn",
    [
        of_order, with_more, Method(), Method().method, Method.static, Method.of_class, traced(of_order),
        functools.partial(with_more, factor=2),
    ],
)  # fmt: skip
def test_the_return_type_of_whatever_can_be_called(fn: Any) -> None:
    function = read_one(fn)
    assert (function.returns, function.factory, function.problems) == (Total, False, ())


def test_annotations_in_strings_resolve() -> None:
    """A local of the same name as a class of the function's module does not hide it."""
    function = read_one(in_strings)
    assert function.parameters == (Order,)
    assert without_none(function.returns) is Total
    assert read(in_strings, ("record",), {"Order": int}).parameters == (Order,)


def test_classes_inside_functions_resolve_by_the_locals() -> None:
    class Local:
        pass

    def fn(record: "Local") -> "list[Local]":
        return [record]

    assert read(fn, ("record",), {}).returns is UNKNOWN
    assert read(fn, ("record",), locals()).returns == list[Local]


def test_one_bad_annotation_does_not_hide_the_others() -> None:
    def fn(record: "Missing") -> Total:  # type: ignore[name-defined]  # noqa: F821 - on purpose
        return Total(1)

    assert read_one(fn).returns is Total
    assert read_one(fn).parameters == (UNKNOWN,)


@pytest.mark.parametrize("fn", [Resource, functools.partial(Resource, "x"), make_resource])
def test_what_makes_an_operator_on_the_worker(fn: Any) -> None:
    function = read_one(fn)
    assert (function.factory, function.returns, function.parameters) == (True, Total, (Order,))
    assert function.problems == ()


def test_a_function_without_parameters_is_a_factory() -> None:
    function = read_one(lambda: Resource("x"))
    assert (function.factory, function.returns, function.problems) == (True, UNKNOWN, ())


def test_a_class_whose_instances_cannot_be_called_is_its_constructor() -> None:
    assert read_one(Total) == Function(Total, "Total", returns=Total)
    assert read_one(int).returns is int


@pytest.mark.parametrize("fn", [str.upper, print, len, max])
def test_builtins_are_functions(fn: Any) -> None:
    function = read_one(fn)
    assert (function.returns, function.problems) == (UNKNOWN, ())


async def waits(order: Order) -> Total:
    return Total(1)


class Waits:
    async def __call__(self, order: Order) -> Total:
        return Total(1)


class Opens:
    def open(self, context: Context) -> None:
        pass


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (5, r"expected a function of \(record\), got 5"),
        (None, "expected a function"),
        (waits, "waits is async"),
        (Waits, "Waits is async"),
        (functools.partial(waits), "waits is async"),
        (lambda left, right: left, r"the lambda\(left, right\) must take \(record\)"),
        (Opens, r"class Opens has open\(\) but no __call__\(self, record\)"),
        (Resource(), "pass the class, Resource"),
        (Order(1), "expected a function"),
        (functools.partial(of_order, Order(1)), "must take"),
    ],
)
def test_what_is_no_function_of_a_record(fn: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        raise ValueError(*read_one(fn).problems)


def test_generators_are_told() -> None:
    def yields(order: Order) -> Iterator[Total]:
        yield Total(1)

    assert read_one(yields).generator
    assert read_one(yields).item is Total
    assert not read_one(of_order).generator


def test_the_type_of_what_is_emitted() -> None:
    def route(order: Order, emit: Emit[Total]) -> None:
        emit(Total(1))

    assert read(route, ("record", "emit"), {}).emitted is Total
    assert read(lambda record, emit: None, ("record", "emit"), {}).emitted is UNKNOWN


@pytest.mark.parametrize(
    ("type_", "item"),
    [
        (list[int], int), (Iterable[int | None], int | None), (Generator[str, None, None], str),
        (tuple[int, ...], int), (tuple[int, str], int | str), (list, UNKNOWN), (list[Any], UNKNOWN),
        (dict[str, int], UNKNOWN), (int, UNKNOWN), (UNKNOWN, UNKNOWN),
    ],
    ids=repr,
)  # fmt: skip
def test_the_items_of_a_type(type_: Any, item: Any) -> None:
    assert element(type_) == item


@pytest.mark.parametrize(
    ("type_", "both"),
    [
        (tuple[int, str], (int, str)),
        (tuple[int | None, str], (int | None, str)),
        (tuple[int, str] | tuple[None, None], (int | None, str | None)),
        (tuple[Any, str], (UNKNOWN, str)),
        (tuple[int, ...], (UNKNOWN, UNKNOWN)),
        (tuple[int, str, str], (UNKNOWN, UNKNOWN)),
        (int, (UNKNOWN, UNKNOWN)),
        (UNKNOWN, (UNKNOWN, UNKNOWN)),
    ],
    ids=repr,
)
def test_the_pair_that_a_stateful_function_returns(type_: Any, both: Any) -> None:
    assert pair(type_) == both


def test_none_among_the_values() -> None:
    assert admits_none(int | None)
    assert admits_none(None)
    assert not admits_none(int)
    assert without_none(int | str | None) == int | str
    assert without_none(type(None)) is UNKNOWN
    assert without_none(UNKNOWN) is UNKNOWN
