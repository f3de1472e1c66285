"""The context that an operator with a resource is given when it is made on a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    """Where an operator runs: subtask 0 to parallelism - 1 of the operator with this id."""

    operator: str
    subtask: int
    parallelism: int


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
