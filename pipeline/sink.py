"""The description of a sink, which opens nothing. Engines know how to write to each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.delivery import EXACTLY_ONCE

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
    def transactional(self) -> bool:
        """Whether it writes in transactions that a checkpoint commits."""
        return self.delivery == EXACTLY_ONCE

    def problems(self, type_: Any) -> Iterator[str]:
        """What is wrong with this description for records of this type, each as a sentence that says how to fix it."""
        return iter(())

    @abstractmethod
    def describe(self, type_: Any) -> dict[str, Any]:
        """What makes two such sinks the same, as JSON values: part of the graph's fingerprint and of manifests."""
