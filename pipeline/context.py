"""The context of an operator with a resource, on its worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    """The place of an operator: subtask 0 to parallelism - 1 of the operator with this id."""

    operator: str
    subtask: int
    parallelism: int


class Operator:
    """A base for operators with a resource: made on the worker, opened before the first record, closed after the last.

    Pass the class, or ``functools.partial(Class, argument)``, in place of a function:

        class Enrich(Operator):
            def open(self, context: Context) -> None:
                self.names = sqlite3.connect("names.db")

            def __call__(self, order: Order) -> Enriched: ...

    The base class is optional: any class with `__call__` will do, and `open` and `close` are called if it has them.
    `close` is not called when a worker is killed.
    """

    def open(self, context: Context) -> None:
        """Make the resource."""

    def close(self) -> None:
        """Release the resource."""
