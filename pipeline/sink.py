"""The description of a sink, which opens no connection, and the call of its functions. Engines write to it.

The delivery of a sink is the effect of a failure on an output:

- exactly once: every output is in the store once, after its checkpoint was decided;
- at least once: none is missing; output since the last checkpoint is repeated;
- at most once, to Kafka alone: none comes twice; output not yet written when its checkpoint was decided may be missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, get_args

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable, require_whole, users_errors
from exactlyonce.pipeline.grants import Grants

Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]
StoreDelivery = Literal["exactly_once", "at_least_once"]
"""Of a sink that is no topic of Kafka."""

EXACTLY_ONCE: Final = "exactly_once"
AT_LEAST_ONCE: Final = "at_least_once"
AT_MOST_ONCE: Final = "at_most_once"


def delivery_problems(delivery: object, *, to_kafka: bool) -> Iterator[str]:
    """The mistake in a value, with its remedy.

    >>> list(delivery_problems("at_most_once", to_kafka=True)), list(delivery_problems("once", to_kafka=False))
    ([], ["delivery='once' must be one of 'exactly_once', 'at_least_once'"])
    """
    choices = get_args(Delivery if to_kafka else StoreDelivery)
    if delivery == AT_MOST_ONCE and not to_kafka:
        yield (
            f"delivery={delivery!r} is for Kafka alone: take 'exactly_once', by which nothing comes twice either, and "
            f"nothing is lost"
        )
    elif delivery not in choices:
        yield f"delivery={delivery!r} must be one of {', '.join(map(repr, choices))}"


T = TypeVar("T")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)


class StoredRow(NamedTuple):
    """A row that a sink writes to its store, without what the store makes of it."""

    key: tuple[Any, ...] | None
    """The values by which the store finds the row; None: each record is a row of its own."""
    content: Any
    """The record as the sink gets it, or its columns by name if it writes columns; None: the row is deleted."""


@dataclass(frozen=True)
class StoredRows(Generic[T]):
    """The rows that a sink writes of records of one type, to compare two versions of a pipeline."""

    place: str
    """The table, folder or server, for people."""
    found_by: str
    """The columns or the function that find a row, for people; empty: each record is a row of its own."""
    rows: Callable[[Sequence[T]], list[StoredRow]]
    """The row of each record, by the same rule by which the store finds it. Raises what the sink's encoder raises for
    a key or a field that is no value of its type."""


class Sink(ABC, Generic[T_contra]):
    """The destination of records."""

    delivery: str = EXACTLY_ONCE
    """A `Delivery`."""

    @property
    def needs_type(self) -> bool:
        """Whether it needs the type of the records, to encode them."""
        return True

    @property
    def topic(self) -> str | None:
        """The Kafka topic of the output, if there is one."""
        return None

    @property
    def routes(self) -> Routes[T_contra] | None:
        """The sinks among which it chooses for each record; None: it writes itself."""
        return None

    @property
    def shown(self) -> str:
        """The target for people: a topic, or a table with mode and key."""
        return self.topic or ""

    @property
    def transactional(self) -> bool:
        """Whether it writes in transactions that a checkpoint commits."""
        return self.delivery == EXACTLY_ONCE

    def problems(self, type_: Any) -> Iterator[str]:
        """The mistakes in this description for records of this type, each with its remedy."""
        return iter(())

    def check_services(self, type_: Any) -> None:
        """Ask the services that its codecs use, such as a schema registry, before anything is written.

        Raises `ConfigError`, or `Unavailable` if one does not answer.
        """

    def stored_rows(self, type_: Any) -> StoredRows[T_contra] | None:
        """The rows that it writes of records of this type; None: it writes to a topic, or nobody can tell."""
        return None

    def grants(self, user: str, type_: Any, *, creates: bool) -> Grants | None:
        """The rights of *user* in its store, with *creates* also those to create its table; None: there is no such
        store, or nothing to grant."""
        return None

    @abstractmethod
    def describe(self, type_: Any) -> dict[str, Any]:
        """The identity of the sink, as JSON values: part of the graph's fingerprint and of manifests."""


@dataclass(frozen=True)
class Routes(Generic[T_contra]):
    """A choice of a topic for each record."""

    choose: Callable[[T_contra], str]
    sinks: Mapping[str, Sink[T_contra]]
    """The sinks of one topic each, by topic."""

    def topic(self, record: T_contra) -> str:
        """The chosen topic; ValueError if it is not declared."""
        topic = self.choose(record)
        if topic not in self.sinks:
            declared = ", ".join(self.sinks)
            raise ValueError(f"topic= has given {topic!r:.100}, which is not in topics=: {declared}")
        return topic


@contextmanager
def naming(sink: str) -> Iterator[None]:
    """Add the name of *sink* to the errors of its store, which does not know it."""
    try:
        yield
    except (StoreError, StoreUnavailable, ConfigError) as error:
        kind = next(kind for kind in (StoreError, StoreUnavailable, ConfigError) if isinstance(error, kind))
        raise kind(f"Sink {sink!r}: {error}") from error


class FunctionRaised(Exception):
    """The user's function in *argument* of a sink raised on a record: see `__cause__`."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self.argument = argument


def mapped(argument: str, function: Callable[[T], R], outputs: Sequence[T]) -> list[R]:
    """The results of the user's *function*, in *argument* of a sink, for each output."""
    try:
        made = list(map(function, outputs))
        require_whole(made, len(outputs))
    except users_errors() as error:
        raise FunctionRaised(argument) from error
    return made
