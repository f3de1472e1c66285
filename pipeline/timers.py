"""Handlers with timers: what `KeyedStream.process` and `co_process` take, what they give to their methods, and the
handler of `batches`.

Invariant: in order of time, the calls for a key are a function of its records: records and event timers come by time,
and at one time records come first, by topic, partition and offset.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args

from exactlyonce.pipeline import functions, hints
from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems
from exactlyonce.pipeline.event_time import END_OF_TIME, NoTime, ms_of
from exactlyonce.pipeline.functions import Emit, Function
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.sizes import is_count
from exactlyonce.pipeline.timed import Order, Timed
from exactlyonce.pipeline.versions import parameter_type
from exactlyonce.pipeline.windows import moment

K_contra = TypeVar("K_contra", contravariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
V_contra = TypeVar("V_contra", contravariant=True)
S = TypeVar("S")
U_co = TypeVar("U_co", covariant=True)

CLOCK = 1 << 62
"""The slots of timers by the clock begin here. No event is so late."""
FOREVER = END_OF_TIME
"""The slot of a key's state."""
TAKES = ("key", "state", "record", "timers", "emit")


class TimerSet:
    """The timers of one key that go by one time: event time, or the clock. A time is in UTC, or in ms since 1970.

    A timer goes off once, as often as it is set.
    """

    __slots__ = ("changes", "now_ms", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        """Where its time comes from, for an error without one."""
        self.now_ms: int | None = None
        self.changes: dict[int, bool] = {}
        """By time, in the order of the calls: whether the timer is set."""

    @property
    def now(self) -> datetime:
        """The time now; for events, the record's or the timer's."""
        if self.now_ms is None:
            raise TypeError(f"there is no time: {self.source}")
        return moment(self.now_ms)

    def set(self, at: datetime | int) -> None:
        """Call the handler at *at*; at once, after the present call, if that has passed."""
        self.changes[self._ms(at)] = True

    def delete(self, at: datetime | int) -> None:
        """Do not call the handler at *at*. Nothing happens if no such timer is set."""
        self.changes[self._ms(at)] = False

    def _ms(self, at: Any) -> int:
        if self.now_ms is None:
            raise TypeError(f"there is no time to set a timer by: {self.source}")
        try:
            return ms_of(at, "a timer's time")
        except NoTime as error:
            raise ValueError(str(error)) from None


class Timers:
    """The timers of one key, and the time."""

    __slots__ = ("clock", "event")

    def __init__(self) -> None:
        self.event = TimerSet("give the source time=, or use timers.clock")
        """Timers of event time, for `on_time`: they go off once no earlier record can come."""
        self.clock = TimerSet("the handler has no on_clock()")
        """Timers by the clock, for `on_clock`. Results then depend on the run."""


class Handler(Protocol[K_contra, T_contra, S, U_co]):
    """The shape of a handler of `KeyedStream.process`: `on_record`, and `on_time` and `on_clock` if it sets timers.

    Each takes the key's state, None at first, and returns the new one; None deletes it. ``emit(value)`` gives an
    output, ``emit(value, output)`` one to a side output.

        on_time(self, key, state, at: datetime, timers, emit) -> state
        on_clock(self, key, state, at: datetime, timers, emit) -> state
    """

    def on_record(
        self, key: K_contra, state: S | None, record: T_contra, timers: Timers, emit: Emit[U_co], /
    ) -> S | None: ...


class CoHandler(Protocol[K_contra, T_contra, V_contra, S, U_co]):
    """The shape of a handler of `KeyedStream.co_process`: a `Handler` with `on_left` and `on_right` for `on_record`."""

    def on_left(
        self, key: K_contra, state: S | None, record: T_contra, timers: Timers, emit: Emit[U_co], /
    ) -> S | None: ...
    def on_right(
        self, key: K_contra, state: S | None, record: V_contra, timers: Timers, emit: Emit[U_co], /
    ) -> S | None: ...


@dataclass(frozen=True)
class Handling(Timed):
    """How a handler is called."""

    takers: ClassVar[tuple[str, ...]] = ("on_record",)
    """The methods that take records, one for each input."""
    order: Order | Any
    on_time: bool = False
    """Whether the handler has this method."""
    on_clock: bool = False

    @property
    def needs_times(self) -> bool:
        return self.order != "arrival"

    @property
    def has_clock(self) -> bool:
        return self.on_clock

    @property
    def holds_records(self) -> bool:
        return self.needs_times

    @property
    def problems(self) -> list[str]:
        known = get_args(Order)
        return [] if self.order in known else [f"order={self.order!r} must be one of {', '.join(map(repr, known))}"]

    def state_of(self, entry: Any) -> Any:
        return get_args(entry)[0]

    def describe(self) -> dict[str, Any]:
        return {"process": self.order}

    def __str__(self) -> str:
        return f"in order of {self.order}"


class CoHandling(Handling):
    """How a handler of two inputs is called."""

    takers = ("on_left", "on_right")

    def describe(self) -> dict[str, Any]:
        return {"co_process": self.order}


@dataclass(frozen=True)
class ReadHandler:
    """A user's handler, read without making it."""

    call: Function
    takers: tuple[Function, ...]
    """Its methods that take records, with the state as their first parameter."""
    methods: frozenset[str]
    emitted: Any


def read_handler(handler: Any, takers: Sequence[str], names: Mapping[str, Any]) -> ReadHandler:
    """Read what makes a handler: a class, `functools.partial` of one, or a function that returns one; *takers* are the
    methods that take records, *names* the locals at the call."""
    made = handler.func if isinstance(handler, functools.partial) else handler
    cls = (
        made
        if isinstance(made, type)
        else hints.declared(made, names).get("return", UNKNOWN)
        if callable(made)
        else None
    )
    shown = getattr(cls, "__name__", None) or repr(handler)
    if not isinstance(cls, type) or not all(callable(getattr(cls, name, None)) for name in takers):
        wanted = " and ".join(f"{name}(self, {', '.join(TAKES)})" for name in takers)
        problem = f"expected a class with {wanted}, got {handler!r:.100}"
        return ReadHandler(Function(handler, shown, factory=True, problems=(problem,)), (), frozenset(), UNKNOWN)
    read = {}
    for name in (*takers, "on_time", "on_clock"):
        if callable(getattr(cls, name, None)):
            takes = tuple("at" if each == "record" and name not in takers else each for each in TAKES)
            read[name] = functions.read_method(handler, cls, name, takes, names)
    problems = tuple(problem for function in read.values() for problem in function.problems)
    if generator := next((function.name for function in read.values() if function.generator), ""):
        problems += (f"{generator} is a generator: call emit(value), and return the state",)
    taking = [read[name] for name in takers]
    emitted = {functions.emitted(function.parameters[4:5]): None for function in taking}
    return ReadHandler(
        Function(handler, shown, factory=True, problems=problems),
        tuple(replace(function, parameters=function.parameters[1:]) for function in taking),
        frozenset(read),
        hints.union(type_ for type_ in emitted if len(emitted) == 1 or type_ is not UNKNOWN),
    )


def kept_entry(state: Any, records: Sequence[Any], order: Any) -> Any:
    """The type of what is kept for a slot and key: (state, whether a timer is set, and by input: held records with
    their places). In order of arrival no records are held.

    The state of a key lies in a slot that never ends; *state* is its type, *records* are of the inputs.
    """
    records = () if order == "arrival" else records
    if UNKNOWN in (state, *records):
        return UNKNOWN
    held = (list[tuple[str, int, int, record]] for record in records)  # type: ignore[valid-type]  # types that are known here only
    return tuple[(hints.union((state, type(None))), bool, *held)]  # type: ignore[misc]  # likewise


def migrated_entry(migrate: Callable[[Any], Any], records: Sequence[Any], order: Any) -> Callable[[Any], Any]:
    """*migrate*, of a state, for an entry of `kept_entry`."""

    def migrated(entry: Any) -> Any:
        return (None if entry[0] is None else migrate(entry[0]), *entry[1:])

    migrated.__annotations__ = {"entry": kept_entry(parameter_type(migrate), records, order)}
    return migrated


def shown_entry(slot: int, entry: Any) -> tuple[int | None, Any]:
    """The time in ms at which an entry in *slot* is due, None for a key's state; and it for people.

    >>> shown_entry(FOREVER, ("state", False)), shown_entry(CLOCK + 7, (None, True))
    ((None, 'state'), (7, {'timer': 'clock'}))
    """
    if slot == FOREVER:
        return None, entry[0]
    shown = {"timer": "clock" if slot > CLOCK else "event"} if entry[1] else {}
    held = [record for records in entry[2:] for *_, record in records]
    return slot - CLOCK if slot > CLOCK else slot, shown | ({"held": held} if held else {})


T = TypeVar("T")
Begun = tuple[int, list[T]]
"""When a batch is given at the latest, in ms since 1970, and its records."""


@dataclass(frozen=True, kw_only=True)
class Batches(Handling):
    """How records are gathered."""

    count: int | Any
    timeout: Duration | None = None

    @property
    def problems(self) -> list[str]:
        problems = [] if self.timeout is None else duration_problems(self.timeout, "timeout")
        if not is_count(self.count):
            problems.insert(0, f"a batch of {self.count!r} records: give a whole number above 0")
        return problems

    @cached_property
    def timeout_ms(self) -> int | None:
        return None if self.timeout is None else duration_ms(self.timeout, "timeout")

    @property
    def function(self) -> Function:
        """Makes the handler."""
        return Function(partial(Gathers, self), "batches", factory=True)

    def kept_state(self, record: Any) -> Any:
        """The type of the state of a key."""
        return UNKNOWN if record is UNKNOWN else tuple[int, list[record]]

    def describe(self) -> dict[str, Any]:
        return {"batches": self.order}

    def __str__(self) -> str:
        return f"of {self.count}" + (f", after {self.timeout} at the latest" if self.timeout else "")


class Gathers(Generic[T]):
    """The handler."""

    def __init__(self, batches: Batches) -> None:
        self._count, self._timeout_ms = batches.count, batches.timeout_ms

    def on_record(
        self, key: Any, begun: Begun[T] | None, record: T, timers: Timers, emit: Emit[list[T]]
    ) -> Begun[T] | None:
        if begun is None:
            begun = (0 if self._timeout_ms is None else (timers.clock.now_ms or 0) + self._timeout_ms), []
            if self._timeout_ms is not None:
                timers.clock.set(begun[0])
        end_ms, records = begun
        records.append(record)
        if len(records) < self._count:
            return begun
        if self._timeout_ms is not None:
            timers.clock.delete(end_ms)
        emit(records)
        return None

    def on_clock(self, key: Any, begun: Begun[T] | None, at: datetime, timers: Timers, emit: Emit[list[T]]) -> None:
        if begun is not None:
            emit(begun[1])
