"""The description of a sink, which opens nothing, and how the functions in it are called. Engines know how to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.errors import USERS_ERRORS, ConfigError, StoreError, StoreUnavailable, require_whole

T = TypeVar("T")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)


class Sink(ABC, Generic[T_contra]):
    """Where records go."""

    delivery: str = EXACTLY_ONCE
    """What a failure does to an output: a `pipeline.delivery.Delivery`."""

    @property
    def needs_type(self) -> bool:
        """Whether it must know the type of the records to encode them."""
        return True

    @property
    def topic(self) -> str | None:
        """The Kafka topic that is written to, if one is."""
        return None

    @property
    def shown(self) -> str:
        """What it writes to, and how, for people: a topic, or a table with mode and key."""
        return self.topic or ""

    @property
    def transactional(self) -> bool:
        """Whether it writes in transactions that a checkpoint commits."""
        return self.delivery == EXACTLY_ONCE

    def problems(self, type_: Any) -> Iterator[str]:
        """What is wrong with this description for records of this type, each as a sentence that says how to fix it."""
        return iter(())

    @abstractmethod
    def describe(self, type_: Any) -> dict[str, Any]:
        """What makes two such sinks the same, as JSON values: part of the graph's fingerprint and of manifests."""


@contextmanager
def naming(sink: str) -> Iterator[None]:
    """What a store refuses within, or does not answer, is told as that of *sink*: stores do not know whose they are."""
    try:
        yield
    except (StoreError, StoreUnavailable, ConfigError) as error:
        kind = next(each for each in (StoreError, StoreUnavailable, ConfigError) if isinstance(error, each))
        raise kind(f"Sink {sink!r}: {error}") from error


class FunctionRaised(Exception):
    """A function that a sink was given, as its *argument*, raised on a record: see `__cause__`."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument)
        self.argument = argument


def mapped(argument: str, function: Callable[[T], R], outputs: Sequence[T]) -> list[R]:
    """What the user's *function*, which a sink was given as *argument*, makes of each output."""
    try:
        made = list(map(function, outputs))
        require_whole(made, len(outputs))
    except USERS_ERRORS as error:
        raise FunctionRaised(argument) from error
    return made
