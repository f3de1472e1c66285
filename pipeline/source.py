"""The description of a source, which opens no connection. Engines read it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from exactlyonce.pipeline import shape
from exactlyonce.pipeline.dead_letters import DeadLetterTarget, OnError
from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems, write_durations
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.hints import UNKNOWN, members, union, without_none
from exactlyonce.pipeline.location import caller, location

if TYPE_CHECKING:
    from typing_extensions import Self

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
AHEAD = "1h"


@dataclass(frozen=True)
class EventTime(Generic[T_contra]):
    """The event time of a source's records: ``EventTime("at", disorder="5s")``.

    - *at*: the time of a record, in ms since 1970 or as an aware datetime: the name of a field of its value, or a
      function of the record.
    - *disorder*: how far a record may lie behind the latest one of its partition before it is late.
    - *idle*: the time without new records after which a partition holds back no others; None: it always does.
    - *ahead*: how far a time may lie after the timestamp of its Kafka message; None: any. A record beyond it has no
      usable time, for it would make all others late. Records that are no messages have no such limit.
    - *max_drift*: how far a partition is read ahead of those whose records are still to come, in event time, so that
      little waits; sources that meet in an operator likewise. None: as far as it comes.
    - *on_error* for a record without a usable time: "fail", "skip" or ``DeadLetters("topic")``.
    """

    at: str | Callable[[T_contra], Any]
    _: KW_ONLY
    disorder: Duration = "0s"
    idle: Duration | None = "1m"
    ahead: Duration | None = AHEAD
    max_drift: Duration | None = "1m"
    on_error: OnError = "fail"

    if TYPE_CHECKING:  # the name of a field fits any record

        @overload
        def __init__(
            self: EventTime[object], at: str, *, disorder: Duration = ..., idle: Duration | None = ...,
            ahead: Duration | None = ..., max_drift: Duration | None = ..., on_error: OnError = ...,
        ) -> None: ...  # fmt: skip
        @overload
        def __init__(
            self, at: Callable[[T_contra], Any], *, disorder: Duration = ..., idle: Duration | None = ...,
            ahead: Duration | None = ..., max_drift: Duration | None = ..., on_error: OnError = ...,
        ) -> None: ...  # fmt: skip
        def __init__(self, at: Any, **settings: Any) -> None: ...

    def __post_init__(self) -> None:
        write_durations(self)

    @property
    def function(self) -> Callable[[Any], Any]:
        """Gives the time of a record."""
        return attrgetter(self.at) if isinstance(self.at, str) else self.at

    @property
    def disorder_ms(self) -> int:
        return duration_ms(self.disorder)

    @property
    def idle_ms(self) -> int | None:
        return None if self.idle is None else duration_ms(self.idle)

    @property
    def ahead_ms(self) -> int | None:
        return None if self.ahead is None else duration_ms(self.ahead)

    @property
    def max_drift_ms(self) -> int | None:
        return None if self.max_drift is None else duration_ms(self.max_drift)

    def problems(self, type_: Any) -> Iterator[str]:
        """The mistakes, each with its remedy; *type_* has the field that *at* may name."""
        if isinstance(self.at, str):
            yield from (f"time={problem}" for problem in time_problems(self.at, type_))
        elif not callable(self.at):
            yield f"time={self.at!r} must be the name of a field, a function of a record, or EventTime(...)"
        for name in ("disorder", "idle", "ahead", "max_drift"):
            if (duration := getattr(self, name)) is not None:
                yield from duration_problems(duration, name, least_ms=0)


TimeOf: TypeAlias = str | Callable[[T_contra], Any] | EventTime[T_contra]
"""An `EventTime`, or only its *at*."""

_MOVED = {"time": "at", "disorder": "disorder", "idle": "idle", "ahead": "ahead", "on_time_error": "on_error"}
"""The arguments that sources had, and what they are of `EventTime`."""


class Source(ABC, Generic[T_co]):
    """The origin of records."""

    start_group: str | None = None
    """The consumer group at whose offsets it begins, if any."""
    on_error: OnError = "fail"
    """The treatment of a record that does not decode."""
    time: TimeOf[Any] | None = None
    """The event time of a record; None: it has none."""
    metadata: bool = False
    """Whether it gives `Record`, whose values are of `timed_type`."""

    if not TYPE_CHECKING:  # a subclass says what its arguments are

        def __new__(cls, *_: Any, **arguments: Any) -> Source[Any]:
            """Raises `GraphError` where *arguments* are of an earlier version."""
            taken = (_MOVED.keys() - {"time"}) & arguments.keys()
            if taken and not taken <= set(inspect.signature(cls).parameters):
                moved = ((new, arguments[old]) for old, new in _MOVED.items() if old in arguments)
                given = ", ".join(
                    f"{new}={value!r}" if isinstance(value, str) else f"{new}=..." for new, value in moved
                )
                raise GraphError(
                    f"{location(caller())}: {cls.__name__}: {', '.join(f'{old}=' for old in sorted(taken))} "
                    f"belong to time= now: time=EventTime({given.removeprefix('at=')})"
                )
            placed = {"metadata", "key"} & arguments.keys()
            if placed and hasattr(cls, "records") and not placed <= set(inspect.signature(cls).parameters):
                given = ", key=..." if "key" in placed else ""
                raise GraphError(
                    f"{location(caller())}: {cls.__name__} gives values alone: for `Record`, with key and place, write "
                    f"{cls.__name__}.records(..., value=...{given}), without metadata="
                )
            return super().__new__(cls)

    @property
    def event_time(self) -> EventTime[Any] | None:
        """The event time of its records, by a function, if they have one."""
        event_time = self._given_time
        return None if event_time is None else replace(event_time, at=self.time_function(event_time.at))

    @property
    def _given_time(self) -> EventTime[Any] | None:
        return self.time if self.time is None or isinstance(self.time, EventTime) else EventTime(self.time)

    def time_function(self, at: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function that gives the time of a record; see `EventTime.at`."""
        of_value = time_of(at, self.timed_type)
        return (lambda record: of_value(record.value)) if self.metadata and isinstance(at, str) else of_value

    @property
    def timed_type(self) -> Any:
        """The type whose fields *time* may name."""
        return self.type

    @property
    def dead_letters(self) -> DeadLetterTarget | None:
        """The target of records that it cannot use, if there is one."""
        return next((on for on in self._on_errors().values() if isinstance(on, DeadLetterTarget)), None)

    def _on_errors(self) -> dict[str, OnError]:
        event_time = self._given_time
        return {"on_error": self.on_error} | ({"EventTime: on_error": event_time.on_error} if event_time else {})

    @property
    @abstractmethod
    def type(self) -> Any:
        """The type of the records."""

    @property
    def topic(self) -> str | None:
        """The Kafka topic of the input, by its name in its cluster, if there is one."""
        return None

    def reads(self, topic: str) -> bool:
        """Whether *topic* of the checkpoints' cluster is an input, or would be if there were one."""
        return topic == self.place

    @property
    def place(self) -> str:
        """Its name in checkpoints and errors: a topic in the cluster of the checkpoints, or a name with a colon, which
        no topic has."""
        return self.topic or ""

    @property
    def shown(self) -> str:
        """What it reads, for people: in `explain`, and on the page."""
        return self.place

    def grants(self, user: str) -> Grants | None:
        """The rights of *user* in its store; None: there is no such store, or nothing to grant."""
        return None

    @property
    def parts(self) -> Mapping[str, Source[T_co]]:
        """The sources of one topic each, by topic, whose union it is; {} if it reads one itself."""
        return {}

    @property
    def key_type(self) -> Any:
        """The type of the keys of `Record`, if it gives such."""
        return UNKNOWN

    def changelog(self) -> Source[Any] | None:
        """The source of the same records as a changelog: `Record` by key, whose value None deletes; or None."""
        return None

    def problems(self) -> Iterator[str]:
        """The mistakes in this description, each with its remedy."""
        for name, on_error in self._on_errors().items():
            if not isinstance(on_error, DeadLetterTarget) and on_error not in ("fail", "skip"):
                yield f'{name}={on_error!r} must be "fail", "skip" or DeadLetters("topic")'
        if any(isinstance(on, DeadLetterTarget) and on != self.dead_letters for on in self._on_errors().values()):
            yield "on_error= and that of EventTime have different dead letters, and a source has one topic for both"
        if (event_time := self._given_time) is not None:
            yield from event_time.problems(self.timed_type)

    def check_services(self) -> None:
        """Ask the services that its codecs use, such as a schema registry, before anything is read or written.

        Raises `ConfigError`, or `Unavailable` if one does not answer.
        """

    def describe_time(self) -> dict[str, Any]:
        """The part of `describe` that is about event time; {} without one."""
        event_time = self._given_time
        return {} if event_time is None else {"time": True, "disorder": event_time.disorder}

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The identity of the source, as JSON values: part of the graph's fingerprint and of manifests."""


class PartSource(Source[T_co]):
    """A source that is read together with others of its pipeline, as the tables of one slot."""

    @property
    @abstractmethod
    def mark(self) -> str:
        """The name of its records within the whole. Members with one mark get the same ones, each as its own type."""

    @abstractmethod
    def whole(self, pipeline: str) -> SharedSource:
        """The source that reads it in *pipeline*, as yet without members."""

    @property
    def stamp(self) -> Callable[[Any], Any] | None:
        """Gives the time of a record, where only other members have a time of their own."""
        return None


Routed: TypeAlias = tuple[tuple[str, ...], Any]
"""A record of a `SharedSource` with several members: the ids of those that get it, and the record; of several, a tuple
with a record for each. A plain tuple is made faster."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedSource(Source[Any]):
    """A source that is read once for all its members. It gives `Routed` if it has several."""

    dsn: str = field(repr=False)
    """The place of its database's connection string: two with one id read the same only if they have it in common."""
    members: Mapping[str, PartSource[Any]] = field(default_factory=dict)
    """By the id that the user gave."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The id of its node."""

    def with_member(self, id: str, member: PartSource[Any]) -> Self:
        """The same source with another member."""
        return replace(self, members={**self.members, id: member})

    @property
    def type(self) -> Any:
        return union(member.type for member in self.members.values())

    @property
    def routes(self) -> dict[str, tuple[str, ...]]:
        """The ids of the members by their mark."""
        marks = dict.fromkeys(member.mark for member in self.members.values())
        return {mark: tuple(id for id, member in self.members.items() if member.mark == mark) for mark in marks}

    @property
    def _given_time(self) -> EventTime[Any] | None:
        """Of each member its own; of one without any that of the commit."""
        if len(self.members) == 1:
            return next(iter(self.members.values()))._given_time
        given = [event_time for member in self.members.values() if (event_time := member.event_time) is not None]
        if not given:
            return None
        times = {ids: self._time_at(ids) for ids in self.routes.values()}
        return replace(given[0], at=lambda routed: times[routed[0]](routed[1]), ahead=None)

    def _time_at(self, ids: tuple[str, ...]) -> Callable[[Any], Any]:
        """The function that gives the time of a record of the members *ids*."""
        members = [self.members[id] for id in ids]
        place = next((place for place, member in enumerate(members) if member.time is not None), 0)
        event_time = members[place].event_time
        function = members[place].stamp if event_time is None else event_time.function
        if function is None:
            raise GraphError(f"{ids[place]!r} has no time=")  # one of `problems`
        return function if len(ids) == 1 else lambda records: function(records[place])

    def time_function(self, at: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
        only, *others = self.members.values()
        return super().time_function(at) if others else only.time_function(at)

    def problems(self) -> Iterator[str]:
        """The settings in which its members differ, and should not: their own mistakes are theirs."""
        members = list(self.members.values())
        if any(member.on_error != self.on_error for member in members):
            yield f"on_error= belongs to all that {self.place} reads: give {', '.join(self.members)} the same"
        given = {id: member._given_time for id, member in self.members.items()}
        times = [event_time for event_time in given.values() if event_time is not None]
        if len({(time.disorder_ms, time.idle_ms, time.max_drift_ms) for time in times}) > 1 or any(
            time.on_error != times[0].on_error for time in times
        ):
            yield (
                f"disorder=, idle=, max_drift= and on_error= of EventTime belong to all that {self.place} reads: give "
                f"{', '.join(id for id in given if given[id] is not None)} the same"
            )
        for id, member in self.members.items():
            if times and given[id] is None and member.stamp is None:
                yield f"{id!r} has no time=, and others that {self.place} reads have one: give it one"
        for ids in self.routes.values():
            if len({event_time.at for id in ids if (event_time := given[id]) is not None}) > 1:
                yield f"{' and '.join(ids)} are the same records with another time=: give both the same"


def time_of(at: str | Callable[[Any], Any], type_: Any) -> Callable[[Any], Any]:
    """The function that gives the time of a record of *type_*."""
    return itemgetter(at) if isinstance(at, str) and _is_mapping(type_) else EventTime(at).function


def _is_mapping(type_: Any) -> bool:
    return any((isinstance(member, type) and issubclass(member, dict)) or getattr(member, "__origin__", None) is dict
               for member in members(type_))  # fmt: skip


def field_problems(name: str, type_: Any) -> Iterator[str]:
    """The mistake in *name*, which is to be a field of *type_*."""
    for member in members(without_none(type_)):
        if member is UNKNOWN or (_is_mapping(member) and not hasattr(member, "__annotations__")):
            continue
        fields = [field.attribute for field in shape.record_fields(member)]
        if name not in fields:
            has = f"which has {', '.join(fields)}" if fields else "which has no fields"
            yield f"{name!r} is no field of {shape.type_name(member)}, {has}"


_NO_TIMES = {
    shape.Form.STR: "declare it as datetime, by which ISO 8601 is read, or give a function of the record",
    shape.Form.FLOAT: "give a function of the record: of seconds one that gives round(1000 * seconds)",
}
"""The forms of fields that are taken for times and are none, with what to do."""


def time_problems(name: str, type_: Any) -> Iterator[str]:
    """The mistake in *name*, which is to be a field of *type_* with times: ms since 1970 or aware datetimes."""
    yield from field_problems(name, type_)
    for member in members(without_none(type_)):
        for field_ in shape.record_fields(member) if member is not UNKNOWN else ():
            forms = {part.form for part in field_.shape.parts or (field_.shape,)} - {shape.Form.NULL}
            if field_.attribute == name and len(forms) == 1 and (remedy := _NO_TIMES.get(*forms)) is not None:
                yield f"{name!r} of {shape.type_name(member)} is a {forms.pop().value}, which is no time: {remedy}"
