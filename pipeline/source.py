"""The description of a source, which opens no connection. Engines read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.dead_letters import DeadLetterTarget
from exactlyonce.pipeline.event_time import EventTime

T_co = TypeVar("T_co", covariant=True)


class Source(ABC, Generic[T_co]):
    """The origin of records."""

    start_group: str | None = None
    """The consumer group at whose offsets it begins, if any."""
    event_time: EventTime | None = None
    """The event time of its records, if they have one."""

    @property
    def dead_letters(self) -> DeadLetterTarget | None:
        """The target of records that do not decode, if there is one."""
        return None

    @property
    @abstractmethod
    def type(self) -> Any:
        """The type of the records."""

    @property
    def topic(self) -> str | None:
        """The Kafka topic of the input, if there is one."""
        return None

    @property
    def place(self) -> str:
        """Its name in checkpoints and errors: the topic, or a name with a colon, which no topic has."""
        return self.topic or ""

    @property
    def parts(self) -> Mapping[str, Source[T_co]]:
        """The sources of one topic each, by topic, whose union it is; {} if it reads one itself."""
        return {}

    def problems(self) -> Iterator[str]:
        """The mistakes in this description, each with its remedy."""
        return iter(())

    def check_services(self) -> None:
        """Ask the services that its codecs use, such as a schema registry, before anything is read or written.

        Raises `ConfigError`, or `Unavailable` if one does not answer.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The identity of the source, as JSON values: part of the graph's fingerprint and of manifests."""
