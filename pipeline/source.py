"""The description of a source, which opens no connection. Engines read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar

from msgspec import inspect

from exactlyonce.pipeline import schema
from exactlyonce.pipeline.dead_letters import DeadLetterTarget, OnError
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.hints import UNKNOWN, members, without_none

T_co = TypeVar("T_co", covariant=True)

DISORDER, IDLE, AHEAD = "0s", "1m", "1h"
"""The defaults of what a source says about event time."""

TimeOf = str | Callable[[Any], Any]
"""The name of a field, or a function of a record that gives its time: ms since 1970, or an aware datetime."""


@dataclass(frozen=True, kw_only=True)
class EventTime:
    """The event time of a source's records: *time* of each, in any order within *disorder* in its split."""

    time: Callable[[Any], Any]
    """Gives ms since 1970 or an aware datetime."""
    disorder: str
    idle: str | None
    """A split without new records for so long does not hold back others; None: it always does."""
    ahead: str | None
    """How far a time may lie after the timestamp of the record's message; None: any."""
    on_error: OnError
    """The treatment of a record without a usable time."""

    @property
    def disorder_ms(self) -> int:
        return duration_ms(self.disorder)

    @property
    def idle_ms(self) -> int | None:
        return None if self.idle is None else duration_ms(self.idle)

    @property
    def ahead_ms(self) -> int | None:
        return None if self.ahead is None else duration_ms(self.ahead)


class Source(ABC, Generic[T_co]):
    """The origin of records."""

    start_group: str | None = None
    """The consumer group at whose offsets it begins, if any."""
    on_error: OnError = "fail"
    """The treatment of a record that does not decode."""
    time: TimeOf | None = None
    """The event time of a record; None: it has none. The next ones are about it."""
    disorder: str = DISORDER
    """How far a record may lie behind the latest one of its split before it is late."""
    idle: str | None = IDLE
    """The time without new records after which a split holds back no others; None: it always does."""
    ahead: str | None = None
    """How far a time may lie after the timestamp of the record's message; None: any."""
    on_time_error: OnError = "fail"
    """The treatment of a record without a usable time."""

    @property
    def event_time(self) -> EventTime | None:
        """The event time of its records, if they have one."""
        if self.time is None:
            return None
        return EventTime(
            time=self.time_function(self.time),
            disorder=self.disorder,
            idle=self.idle,
            ahead=self.ahead,
            on_error=self.on_time_error,
        )

    def time_function(self, time: TimeOf) -> Callable[[Any], Any]:
        """The function that gives the time of a record."""
        return time_of(time, self.type)

    @property
    def timed_type(self) -> Any:
        """The type whose fields *time* may name."""
        return self.type

    @property
    def dead_letters(self) -> DeadLetterTarget | None:
        """The target of records that it cannot use, if there is one."""
        return next((on for on in (self.on_error, self.on_time_error) if isinstance(on, DeadLetterTarget)), None)

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
        for name, on_error in (("on_error", self.on_error), ("on_time_error", self.on_time_error)):
            if not isinstance(on_error, DeadLetterTarget) and on_error not in ("fail", "skip"):
                yield f'{name}={on_error!r} must be "fail", "skip" or DeadLetters("topic")'
        if isinstance(self.on_time_error, DeadLetterTarget) and self.dead_letters != self.on_time_error:
            yield "on_error= and on_time_error= have different dead letters, and a source has one topic for both"
        yield from time_problems(self.time, self.timed_type, disorder=self.disorder, idle=self.idle, ahead=self.ahead)

    def check_services(self) -> None:
        """Ask the services that its codecs use, such as a schema registry, before anything is read or written.

        Raises `ConfigError`, or `Unavailable` if one does not answer.
        """

    def describe_time(self) -> dict[str, Any]:
        """The part of `describe` that is about event time; {} without one."""
        return {} if self.time is None else {"time": True, "disorder": self.disorder}

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The identity of the source, as JSON values: part of the graph's fingerprint and of manifests."""


def time_of(time: TimeOf, type_: Any) -> Callable[[Any], Any]:
    """The function that gives the time of a record of *type_*."""
    if not isinstance(time, str):
        return time
    return itemgetter(time) if _is_mapping(type_) else attrgetter(time)


def _is_mapping(type_: Any) -> bool:
    return any((isinstance(member, type) and issubclass(member, dict)) or getattr(member, "__origin__", None) is dict
               for member in members(type_))  # fmt: skip


def time_problems(
    time: TimeOf | None, type_: Any, *, disorder: str, idle: str | None, ahead: str | None
) -> Iterator[str]:
    """The mistakes in a source's description of its event time."""
    if time is None:
        given = {"disorder": disorder != DISORDER, "idle": idle != IDLE}
        yield from (
            f"{name}= is about the times of records: give time=, too" for name, is_given in given.items() if is_given
        )
        return
    if isinstance(time, str):
        yield from _field_problems(time, type_)
    elif not callable(time):
        yield f"time={time!r} must be the name of a field, or a function of a record"
    for name, duration in (("disorder", disorder), ("idle", idle), ("ahead", ahead)):
        if duration is None and name != "disorder":
            continue
        try:
            duration_ms(str(duration), f"{name}=")
        except ConfigError as error:
            yield str(error)


def _field_problems(name: str, type_: Any) -> Iterator[str]:
    for member in members(without_none(type_)):
        if member is UNKNOWN or (_is_mapping(member) and not hasattr(member, "__annotations__")):
            continue
        try:
            info = inspect.type_info(member)
        except TypeError:
            continue
        fields = [field.name for field in getattr(info, "fields", ())]
        if name not in fields:
            has = f"which has {', '.join(fields)}" if fields else "which has no fields"
            yield f"time={name!r} is no field of {schema.type_name(member)}, {has}"
