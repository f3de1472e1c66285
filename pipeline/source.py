"""The description of a source, which opens nothing. Engines know how to read each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Source(ABC, Generic[T_co]):
    """Where records come from."""

    @property
    @abstractmethod
    def type(self) -> Any:
        """The type of the records that it gives."""

    @property
    def topic(self) -> str | None:
        """The Kafka topic that is read, if one is."""
        return None

    def problems(self) -> Iterator[str]:
        """What is wrong with this description, each as a sentence that says how to fix it."""
        return iter(())

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What makes two such sources the same, as JSON values: part of the graph's fingerprint and of manifests."""
