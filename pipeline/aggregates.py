"""Aggregates of the records of a window: how a record is added, how two parts of a window are merged, and the result.

Invariant: a result depends on the records alone, never on the order in which they or the parts of a window came. So
sums of floats are kept exact and rounded once, and ties are broken by the records' places in their topics.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from inspect import signature
from math import fsum, isfinite
from operator import add, attrgetter, itemgetter, pos
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast, overload

import msgspec

from exactlyonce.pipeline import functions, hints
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.keys import explained_key
from exactlyonce.pipeline.shape import UnsupportedType, record_fields, shape_of, type_name
from exactlyonce.pipeline.sketches import Buckets, DDSketch, HyperLogLog, Registers

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
V = TypeVar("V")
T_contra = TypeVar("T_contra", contravariant=True)
V_co = TypeVar("V_co", covariant=True)


class Misuse(Exception):
    """An aggregate that cannot be of such records; the text says what to do."""


class Place(NamedTuple):
    """The place of a record in event time, and among records of the same time."""

    time: int
    topic: str
    partition: int
    offset: int


class Placed(NamedTuple):
    """A record with its place."""

    place: Place
    record: Any


@dataclass(frozen=True)
class Accumulator:
    """An aggregate of records of a known type."""

    state: Any
    """The type of a state."""
    value: Any
    """The type of a result."""
    add: Callable[[Any, Any], Any]
    """(state or None, record) -> state; it may change the state in place."""
    merge: Callable[[Any, Any], Any] | None
    """(state, state) -> state, of two parts of one window. None: it cannot be merged."""
    result: Callable[[Any], Any] | None = None
    """The result of a state; None: the state itself."""
    placed: bool = False
    """Whether *add* takes `Placed` records."""
    name: str = ""
    """What it computes, for checkpoints: a state of ``Count`` is none of ``Sum``. Empty: what the user's functions do.
    """


class Aggregate(ABC, Generic[T_contra, V_co]):
    """A result of many records, of type V."""

    def named(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        """`accumulator`, with its name."""
        return replace(self.accumulator(record, names), name=self.name)

    @property
    def name(self) -> str:
        """What it computes, for checkpoints, with all that a state depends on."""
        return type(self).__name__

    @abstractmethod
    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        """It for records of type *record*; *names* are those at the user's line. Raises `Misuse`."""


class _Value(NamedTuple):
    """A function of a record, and the type that it returns."""

    get: Callable[[Any], Any]
    type: Any


def _value(of: Any, given: Any, record: Any, names: Mapping[str, Any]) -> _Value:
    if of is None:
        return _Value(lambda it: it, record if given is None else given)
    if isinstance(of, str):
        return _field(of, given, record)
    read = functions.read(of, ("record",), names)
    problem = next(iter(read.problems), "")
    if read.factory or read.generator:
        problem = problem or f"{read.name} must be a plain function of a record"
    if problem:
        raise Misuse(problem)
    return _Value(of, hints.known(read.returns if given is None else given))


def _field(name: str, given: Any, record: Any) -> _Value:
    if record is UNKNOWN:
        raise Misuse(f"the type of the records is unknown, so they have no known field {name!r}: give a function")
    fields = [field.attribute for field in record_fields(record)]
    if name not in fields:
        known = f"its fields are {', '.join(fields)}" if fields else "it has no fields"
        raise Misuse(f"{type_name(record)} has no field {name!r}: {known}")
    get: Any = itemgetter(name) if shape_of(record).is_mapping else attrgetter(name)
    return _Value(get, _field_type(record, name) if given is None else given)


def _field_type(record: Any, name: str) -> Any:
    try:
        return hints.known(typing.get_type_hints(record, include_extras=True)[name])
    except (TypeError, NameError):  # of a generic class with its arguments, say
        return UNKNOWN


def _known(value: _Value, aggregate: str) -> _Value:
    if value.type is UNKNOWN:
        raise Misuse(
            f"the type of {aggregate}'s values is unknown, and they are kept in checkpoints: name a field of the "
            f"record, annotate what its function returns, or give type="
        )
    return value


class Count(Aggregate[Any, int]):
    """The number of records."""

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        return Accumulator(int, int, _counted, add)


def _counted(state: int | None, record: Any) -> int:
    return 1 if state is None else state + 1


class _OfValues(Aggregate[T, V]):
    """An aggregate of a value of each record."""

    def __init__(self, of: Any, type: Any = None) -> None:
        self.value = of
        self.type = type


class Sum(_OfValues[T, V]):
    """The sum of numbers, or of other values with ``+``: ``Sum("amount")`` or ``Sum(lambda order: order.amount)``.

    *of* is a field, or a function of a record; *type* the type of the values, where nothing else tells it. A sum of
    floats is exact, and rounded once: it is the same in any order.
    """

    @overload
    def __init__(self: Sum[Any, Any], of: str) -> None: ...
    @overload
    def __init__(self, of: Callable[[T], V], type: TypeForm[V] | None = ...) -> None: ...
    @overload
    def __init__(self: Sum[Any, V], of: str, type: TypeForm[V]) -> None: ...
    def __init__(self, of: Any, type: Any = None) -> None:
        super().__init__(of, type)

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get, type_ = _value(self.value, self.type, record, names)
        type_ = _summed(type_, "Sum")
        adding = _adding(type_)
        return Accumulator(adding.state, type_, adding.of(get), adding.merge, adding.result)


class Mean(_OfValues[T, V]):
    """The mean of numbers, or of timedeltas; *of* and *type* as of `Sum`. A mean of int and float is a float."""

    @overload
    def __init__(self: Mean[Any, float], of: str) -> None: ...
    @overload
    def __init__(self: Mean[T, float], of: Callable[[T], float], type: TypeForm[float] | None = ...) -> None: ...
    @overload
    def __init__(self: Mean[T, V], of: Callable[[T], V], type: TypeForm[V] | None = ...) -> None: ...
    @overload
    def __init__(self: Mean[Any, V], of: str, type: TypeForm[V]) -> None: ...
    def __init__(self, of: Any, type: Any = None) -> None:
        super().__init__(of, type)

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get, type_ = _value(self.value, self.type, record, names)
        type_ = _summed(type_, "Mean")
        if type_ not in (Decimal, timedelta) and not _numeric(type_):
            raise Misuse(f"Mean is of numbers or timedeltas, and these values are {type_name(type_)}")
        adding = _adding(type_)
        add, plus, total = adding.of(get), adding.merge, adding.result or (lambda state: state)

        def mean(state: Any, record: Any) -> Any:
            return (1, add(None, record)) if state is None else (state[0] + 1, add(state[1], record))

        return Accumulator(
            tuple[int, adding.state],  # type: ignore[name-defined]  # a type that is made here
            float if _numeric(type_) else type_,
            mean,
            lambda one, other: (one[0] + other[0], plus(one[1], other[1])),
            lambda state: total(state[1]) / state[0],
        )


def _summed(type_: Any, aggregate: str) -> Any:
    """The type of a sum of values of *type_*."""
    _refuse_none(type_, aggregate)
    if type_ is UNKNOWN:
        return int | float
    if unordered := [member for member in hints.members(type_) if member in (str, bytes, list, tuple, datetime, date)]:
        name = type_name(unordered[0])
        raise Misuse(f"{aggregate} is of numbers or timedeltas, added up in any order, and these values are {name}")
    return int if type_ is bool else type_


def _refuse_none(type_: Any, aggregate: str) -> None:
    if hints.admits_none(type_):
        raise Misuse(
            f"{aggregate} is of values that may be None ({type_name(type_)}): give a function that says what "
            f"None counts as, or filter such records"
        )


def _numeric(type_: Any) -> bool:
    return set(hints.members(type_)) <= {int, float, bool}


@dataclass(frozen=True)
class _Adding:
    """How values of one type are added up."""

    state: Any
    merge: Callable[[Any, Any], Any]
    result: Callable[[Any], Any] | None = None
    first: Callable[[Any], Any] | None = None
    """The state of a value; None: it is one."""

    def of(self, get: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """Adds the value of a record to a state."""
        first, merge = self.first, self.merge
        if first is None:
            return lambda state, record: get(record) if state is None else state + get(record)
        if merge is add:
            return lambda state, record: first(get(record)) if state is None else state + get(record)
        return lambda state, record: first(get(record)) if state is None else merge(state, first(get(record)))


def _adding(type_: Any) -> _Adding:
    if _numeric(type_) and float in hints.members(type_):
        return _Adding(int | tuple[float, ...], _exactly, _rounded, _exact)
    if _numeric(type_):
        return _Adding(type_, add, first=pos)  # a bool becomes an int, also one that stays alone
    return _Adding(type_, add)


def _exact(number: Any) -> Any:
    if isinstance(number, int):
        return int(number)
    if not isinstance(number, float):
        raise TypeError(f"a value is {number!r:.100}: convert it to int or float, or give type={type(number).__name__}")
    return (number,)


def _exactly(one: Any, other: Any) -> Any:
    """The exact sum of two states: an int, or floats that do not overlap (Shewchuk, "Adaptive Precision
    Floating-Point Arithmetic", 1997), whose sum it is."""
    if type(one) is not tuple and type(other) is not tuple:
        return one + other
    partials = list(_partials(one))
    for number in _partials(other):
        kept = 0
        for partial in partials:
            low, high = (number, partial) if abs(number) < abs(partial) else (partial, number)
            number = high + low
            if not isfinite(number):
                if isfinite(low) and isfinite(high):
                    raise OverflowError("the sum of floats is too large for a float")
            elif rest := low - (number - high):
                partials[kept] = rest
                kept += 1
        partials[kept:] = [number]
    return tuple(partials)


def _partials(state: Any) -> tuple[float, ...]:
    """*state* as floats, exactly."""
    if type(state) is tuple:
        return cast("tuple[float, ...]", state)
    partials: list[float] = []
    while state:
        partials.append(float(state))
        state -= int(partials[-1])
    return tuple(reversed(partials)) or (0.0,)


def _rounded(state: Any) -> Any:
    return fsum(state) if type(state) is tuple else state


class Min(_OfValues[T, V]):
    """The least value; *of* and *type* as of `Sum`. Values need an order; NaN has none, and is an error."""

    @overload
    def __init__(self: Min[Any, Any], of: str) -> None: ...
    @overload
    def __init__(self, of: Callable[[T], V], type: TypeForm[V] | None = ...) -> None: ...
    @overload
    def __init__(self: Min[Any, V], of: str, type: TypeForm[V]) -> None: ...
    def __init__(self, of: Any, type: Any = None) -> None:
        super().__init__(of, type)

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get, type_ = _ordered(_known(_value(self.value, self.type, record, names), "Min"), "Min")

        def least(state: Any, record: Any) -> Any:
            value = get(record)
            return value if state is None or value < state else state

        return Accumulator(type_, type_, least, min)


class Max(_OfValues[T, V]):
    """The greatest value; *of* and *type* as of `Sum`. Values need an order; NaN has none, and is an error."""

    @overload
    def __init__(self: Max[Any, Any], of: str) -> None: ...
    @overload
    def __init__(self, of: Callable[[T], V], type: TypeForm[V] | None = ...) -> None: ...
    @overload
    def __init__(self: Max[Any, V], of: str, type: TypeForm[V]) -> None: ...
    def __init__(self, of: Any, type: Any = None) -> None:
        super().__init__(of, type)

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get, type_ = _ordered(_known(_value(self.value, self.type, record, names), "Max"), "Max")

        def greatest(state: Any, record: Any) -> Any:
            value = get(record)
            return value if state is None or value > state else state

        return Accumulator(type_, type_, greatest, max)


_less = attrgetter("__lt__")


def _ordered(value: _Value, aggregate: str) -> _Value:
    """*value*, of a known type; a NaN is an error."""
    get, type_ = value
    _refuse_none(type_, aggregate)
    for member in hints.members(type_):
        if isinstance(member, type) and member is not Any and _less(member) is _less(object):
            raise Misuse(
                f"{aggregate} is of values with an order, and {type_name(member)} has none: give a function of "
                f"the record that returns one that has, as a number"
            )
    if type_ is not UNKNOWN and float not in hints.members(type_):
        return value

    def no_nan(record: Any) -> Any:
        value = get(record)
        if value != value:
            raise ValueError(f"{aggregate} of NaN, which has no order: filter such records")
        return value

    return _Value(no_nan, type_)


class First(_OfValues[T, V]):
    """The record, or a value of it, with the least event time; of equal ones the first in its topic."""

    @overload
    def __init__(self: First[T, T]) -> None: ...
    @overload
    def __init__(self: First[Any, Any], of: str) -> None: ...
    @overload
    def __init__(self, of: Callable[[T], V], type: TypeForm[V] | None = ...) -> None: ...
    @overload
    def __init__(self: First[Any, V], of: str, type: TypeForm[V]) -> None: ...
    def __init__(self, of: Any = None, type: Any = None) -> None:
        super().__init__(of, type)

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get, type_ = _known(_value(self.value, self.type, record, names), "First")

        def first(state: Any, placed: Placed) -> Any:
            return (placed.place, get(placed.record)) if state is None or placed.place < state[0] else state

        return _kept_with_place(type_, first, lambda one, other: other if other[0] < one[0] else one)


class Last(_OfValues[T, V]):
    """The record, or a value of it, with the greatest event time; of equal ones the last in its topic."""

    @overload
    def __init__(self: Last[T, T]) -> None: ...
    @overload
    def __init__(self: Last[Any, Any], of: str) -> None: ...
    @overload
    def __init__(self, of: Callable[[T], V], type: TypeForm[V] | None = ...) -> None: ...
    @overload
    def __init__(self: Last[Any, V], of: str, type: TypeForm[V]) -> None: ...
    def __init__(self, of: Any = None, type: Any = None) -> None:
        super().__init__(of, type)

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get, type_ = _known(_value(self.value, self.type, record, names), "Last")

        def last(state: Any, placed: Placed) -> Any:
            return (placed.place, get(placed.record)) if state is None or placed.place >= state[0] else state

        return _kept_with_place(type_, last, lambda one, other: other if other[0] >= one[0] else one)


def _kept_with_place(type_: Any, add: Callable[[Any, Placed], Any], merge: Callable[[Any, Any], Any]) -> Accumulator:
    return Accumulator(tuple[Place, type_], type_, add, merge, itemgetter(1), placed=True)


class TopN(_OfValues[T, V]):
    """The *count* records with the greatest values, greatest first, as a list; of equal ones the earlier record.

    *by* is the value: a field, or a function of a record. ``TopN(3, "amount")``.
    """

    @overload
    def __init__(self: TopN[Any, list[Any]], count: int, by: str) -> None: ...
    @overload
    def __init__(self: TopN[T, list[T]], count: int, by: Callable[[T], Any]) -> None: ...
    def __init__(self, count: int, by: Any) -> None:
        super().__init__(by)
        self.count = count

    @property
    def name(self) -> str:
        return f"TopN({self.count})"

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        by = _ordered(_value(self.value, None, record, names), "TopN").get
        if not isinstance(self.count, int) or self.count < 1:
            raise Misuse(f"TopN({self.count!r}, ...) must be of 1 record or more")
        if record is UNKNOWN:
            raise Misuse("TopN keeps records, and their type is unknown: annotate what the operator before returns")

        def best(entries: Any) -> Any:
            ranked = sorted(entries, key=itemgetter(0))  # earliest first; the second sort is stable
            return tuple(sorted(ranked, key=lambda entry: by(entry[1]), reverse=True)[: self.count])

        def add(state: Any, placed: Placed) -> Any:
            value = by(placed.record)
            if state is None:
                return (tuple(placed),)
            if len(state) == self.count and value < by(state[-1][1]):
                return state
            return best((*state, tuple(placed)))

        return Accumulator(
            tuple[tuple[Place, record], ...],
            list[record],
            add,
            lambda one, other: best((*one, *other)),
            lambda state: [entry[1] for entry in state],
            placed=True,
        )


class CountDistinct(_OfValues[T, int]):
    """The number of different values; *of* is a field, or a function of a record.

    Without *error* it is exact, and all values are kept until the window closes. With one it is approximate:
    ``CountDistinct("user", error=0.01)`` has a relative standard error of 1 %, in 16 KB at most (HyperLogLog). It still
    depends on the values alone, not on their order. Values are told apart as keys are: 1, 1.0 and True are three.
    """

    def __init__(self, of: Callable[[T], Any] | str, error: float | None = None) -> None:
        super().__init__(of)
        self.error = error

    @property
    def name(self) -> str:
        return "CountDistinct" if self.error is None else f"CountDistinct({self.error})"

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get = _value(self.value, object, record, names).get
        if self.error is None:
            return Accumulator(set[bytes], int, _distinct(get), lambda one, other: one | other, len)
        sketch = HyperLogLog(_in_bounds(self.error, "CountDistinct", 0.002))
        return Accumulator(
            Registers,
            int,
            lambda state, record: sketch.add(state, explained_key(get(record))),
            sketch.merge,
            lambda state: round(sketch.result(state)),
        )


def _distinct(get: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def add(state: Any, record: Any) -> Any:
        if state is None:
            return {explained_key(get(record))}
        state.add(explained_key(get(record)))
        return state

    return add


def _in_bounds(error: Any, aggregate: str, least: float) -> float:
    if not isinstance(error, float) or not least <= error <= 0.2:
        raise Misuse(f"{aggregate}(error={error!r}): it must be from {least} to 0.2, as 0.01 for 1 %")
    return error


class Percentiles(_OfValues[T, list[float]]):
    """Percentiles of numbers, as a list in the order of *percents*: ``Percentiles("ms", [50, 99.9])``.

    They are approximate: each is the value at its rank, but for a relative error of *error* at most (DDSketch). They
    depend on the values alone, not on their order. *of* is as of `Sum`. Memory grows with the logarithm of the range
    of the values; from 1 to 1,000,000 there are 700 counts. NaN and infinity are errors.
    """

    def __init__(self, of: Callable[[T], float] | str, percents: Sequence[float], error: float = 0.01) -> None:
        super().__init__(of)
        self.percents, self.error = percents, error

    @property
    def name(self) -> str:
        return f"Percentiles({self.error})"

    def accumulator(self, record: Any, names: Mapping[str, Any]) -> Accumulator:
        get, type_ = _value(self.value, None, record, names)
        _refuse_none(type_, "Percentiles")
        if type_ is not UNKNOWN and not _numeric(type_):
            raise Misuse(f"Percentiles is of int or float, and these values are {type_name(type_)}")
        if not self.percents or not all(0 <= percent <= 100 for percent in self.percents):
            raise Misuse(f"Percentiles(..., {self.percents!r}): give a list of numbers from 0 to 100, as [50, 99.9]")
        sketch = DDSketch(_in_bounds(self.error, "Percentiles", 0.0005))
        quantiles = [percent / 100 for percent in self.percents]
        return Accumulator(
            Buckets,
            list[float],
            lambda state, record: sketch.add(state, get(record)),
            sketch.merge,
            lambda state: sketch.result(state, quantiles),
        )


def folded(new: Any, add: Any, merge: Any, state: Any, names: Mapping[str, Any]) -> Accumulator:
    """The accumulator of the user's functions; *state* is its type, if it was given."""
    if isinstance(state, Codec):
        raise Misuse(f"state= is a codec, {state.name!r}: give the type of the accumulator")
    if not callable(new):
        raise Misuse(f"new is {new!r}, and must be a function without parameters, or a class")
    for problem in functions.misfit(new, ()):
        raise Misuse(problem)
    adding = functions.read(add, ("accumulator", "record"), names)
    merging = [functions.read(merge, ("accumulator", "other"), names)] if merge is not None else []
    for function in (adding, *merging):
        for problem in function.problems:
            raise Misuse(problem)
        if function.factory or function.generator:
            raise Misuse(f"{function.name} must be a plain function")
    made = new if isinstance(new, type) else hints.declared(new, names).get("return", UNKNOWN)
    stated = [hints.known(state)] if state is not None else []
    types = [*stated, adding.returns, *adding.parameters[:1], *(read.returns for read in merging), hints.known(made)]
    type_ = next((hints.without_none(type_) for type_ in types if type_ is not UNKNOWN), UNKNOWN)
    if type_ is UNKNOWN:
        raise Misuse("the type of the accumulator is unknown: annotate what add returns, or give state=")

    def added(state: Any, record: Any) -> Any:
        state = add(new() if state is None else state, record)
        if state is None:
            raise TypeError(f"{adding.name} returned None: let it return the accumulator")
        return state

    def merged(state: Any, other: Any) -> Any:
        state = merge(state, other)
        if state is None:
            raise TypeError(f"{merging[0].name} returned None: let it return the accumulator")
        return state

    return Accumulator(type_, type_, added, merged if merging else None)


def held(record: Any, names: Mapping[str, Any]) -> Accumulator:
    """All records of a window, by time, topic, partition and offset."""
    if record is UNKNOWN:
        raise Misuse("the records of a window are kept, and their type is unknown: annotate what makes them")

    def hold(state: Any, placed: Placed) -> Any:
        if state is None:
            return [tuple(placed)]
        state.append(tuple(placed))
        return state

    def merge(one: Any, other: Any) -> Any:
        one += other
        return one

    def in_order(state: Any) -> Any:
        return [record for _, record in sorted(state, key=itemgetter(0))]

    return Accumulator(list[tuple[Place, record]], list[record], hold, merge, in_order, placed=True, name="Records")


def several(
    id: str, class_: Any, aggregates: Mapping[str, Aggregate[Any, Any]], record: Any, names: Mapping[str, Any]
) -> Accumulator:
    """All of *aggregates* at once, by their fields: the result is one of *class_*, the user's, or, if that is None, a
    record of a class named after *id*. The state is the same."""
    for field, part in aggregates.items():
        if not isinstance(part, Aggregate) or not str(field).isidentifier():
            raise Misuse(f"the aggregate {field!r}: {part!r} must be a field's name with an aggregate, as Count()")
    accumulators = {field: part.named(record, names) for field, part in aggregates.items()}
    values = {field: accumulator.value for field, accumulator in accumulators.items()}
    if class_ is None:
        name = "".join(part[:1].upper() + part[1:] for part in id.replace("_", "-").split("-"))
        class_ = msgspec.defstruct(name, list(values.items()), frozen=True)
    else:
        _check_fields(class_, values)
    fields = list(values)
    parts = list(accumulators.values())
    placed = any(part.placed for part in parts)
    adds = [part.add if part.placed or not placed else _unplaced(part.add) for part in parts]
    merges = [cast("Callable[[Any, Any], Any]", part.merge) for part in parts]
    results = [part.result or (lambda state: state) for part in parts]

    def add(state: Any, record: Any) -> Any:
        if state is None:
            return tuple([add(None, record) for add in adds])
        return tuple([add(part, record) for add, part in zip(adds, state, strict=True)])

    return Accumulator(
        tuple[tuple(part.state for part in parts)],  # type: ignore[misc]  # likewise
        class_,
        add,
        lambda one, other: tuple([merge(*both) for merge, *both in zip(merges, one, other, strict=True)]),
        lambda state: class_(
            **{field: result(part) for field, result, part in zip(fields, results, state, strict=True)}
        ),
        placed=placed,
        name=",".join(f"{field}:{part.name}" for field, part in accumulators.items()),
    )


_OPTIONS = ("id", "aggregate", "late", "lateness", "early")


def _check_fields(class_: Any, values: Mapping[str, Any]) -> None:
    """Raise `Misuse` unless the fields of *class_* can hold *values*, types by field."""
    name = type_name(class_)
    try:
        fields = shape_of(class_).fields if isinstance(class_, type) else ()
    except UnsupportedType as error:
        raise Misuse(str(error)) from None
    known = {field.attribute: field for field in fields}
    if not known:
        raise Misuse(
            f'expected an aggregate, as Count(), {{"name": Count(), ...}}, or a class with a field for each, as a '
            f"dataclass, got {name}"
        )
    if taken := [field for field in known if field in _OPTIONS]:
        raise Misuse(f"{name}.{taken[0]} has the name of an option of aggregate(): rename the field")
    if missing := [name for name, field in known.items() if field.required and name not in values]:
        raise Misuse(f"{name} needs {', '.join(missing)}: give an aggregate for each field, as {missing[0]}=Count()")
    if foreign := [field for field in values if field not in known]:
        raise Misuse(f"{name} has no field {foreign[0]!r}: its fields are {', '.join(known)}")
    types = _types_of(class_)
    for field, given in values.items():
        if not _holds(declared := types.get(field, UNKNOWN), given):
            raise Misuse(
                f"{name}.{field} is {type_name(declared)}, and its aggregate gives {type_name(given)}: "
                f"declare the field so, or give an aggregate of a function that returns {type_name(declared)}"
            )
    try:
        signature(class_).bind(**values)
    except (TypeError, ValueError) as error:
        raise Misuse(f"{name} cannot be made of its fields by name: {error}") from None


def _types_of(class_: Any) -> dict[str, Any]:
    """The types of the fields of *class_* that are known, without their constraints."""
    try:
        return {name: hints.known(type_) for name, type_ in typing.get_type_hints(class_).items()}
    except (TypeError, NameError):  # of a class that refers to names of a function, say
        return {}


def _holds(declared: Any, given: Any) -> bool:
    """Whether values of type *given* may be in a field of type *declared*, by the rules of type checkers."""
    if UNKNOWN in (declared, given):
        return True
    taken = {*hints.members(declared)} | ({int} if float in hints.members(declared) else set())
    classes = tuple(member for member in taken if isinstance(member, type) and typing.get_origin(member) is None)
    return all(
        member in taken or (isinstance(of := typing.get_origin(member) or member, type) and issubclass(of, classes))
        for member in hints.members(given)
    )


def _unplaced(add: Callable[[Any, Any], Any]) -> Callable[[Any, Placed], Any]:
    return lambda state, placed: add(state, placed.record)
