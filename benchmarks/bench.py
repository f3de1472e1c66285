"""The context of a scenario."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cluster import Cluster
from orders import uniform

T = TypeVar("T")


@dataclass
class Bench:
    """A cluster, and the size of the work."""

    cluster: Cluster
    quick: bool
    rounds: int | None
    _inputs: dict[tuple[int, int], str] = field(default_factory=dict)

    def size(self, full: int, quick: int) -> int:
        """The size of the work."""
        return quick if self.quick else full

    def some(self, cases: Sequence[T]) -> Sequence[T]:
        """All *cases*, or in a quick run the first."""
        return cases[:1] if self.quick else cases

    def input(self, records: int, customers: int) -> str:
        """A topic with *records* orders of any of *customers*."""
        if (records, customers) not in self._inputs:
            topic = self._inputs[records, customers] = f"orders-{uuid.uuid4().hex[:8]}"
            self.cluster.create(topic)
            self.cluster.feed(topic, uniform(records, customers))
        return self._inputs[records, customers]

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"  {text}", flush=True)
