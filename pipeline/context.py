"""What an operator that holds a resource is told when it is made on a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def _uncounted(name: str, amount: int) -> None:
    """Counts nothing: what an engine without metrics gives."""


@dataclass(frozen=True)
class Context:
    """Where an operator runs.

    `count` adds to a metric of this operator: ``context.count("cache_misses", 1)``. It is a metric, not state: after a
    recovery, records that are replayed are counted again.
    """

    operator: str
    subtask: int = 0
    parallelism: int = 1
    params: Mapping[str, str] = field(default_factory=dict)
    count: Callable[[str, int], None] = _uncounted


class Operator:
    """A base for operators with a resource: made on the worker, opened before the first record, closed after the last.

    Pass the class, or ``functools.partial(Class, argument)``, where a function is expected:

        class Enrich(Operator):
            def open(self, context: Context) -> None:
                self.names = sqlite3.connect("names.db")

            def __call__(self, order: Order) -> Enriched: ...

    Deriving from it is not needed: any class with `__call__` will do, and `open` and `close` are called if it has them.
    `close` is not called when a worker is killed.
    """

    def open(self, context: Context) -> None:
        """Make the resource."""

    def close(self) -> None:
        """Release the resource."""
