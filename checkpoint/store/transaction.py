"""The writer of the decision log: transactions of one transactional id, one at a time, each with an outcome.

`NOT_WRITTEN` only where the commit was never asked for; `DONE` only where it was confirmed; everything between is
`UNKNOWN`, and ends the writer. `connectors.kafka.transactional_writer` writes to a real broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.pipeline.errors import ExactlyOnceError


class Write(NamedTuple):
    """A record to be written; a value of None is a tombstone."""

    partition: int
    key: str
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Writer(Protocol):
    """Writes to the checkpoint topic, from `open` until a newer writer of its transactional id is opened."""

    @property
    def refusal(self) -> str:
        """Why the last write was not written, in the broker's words."""

    def open(self) -> None:
        """Fence every older writer, and abort what it had open."""

    def write(self, writes: Sequence[Write], timeout_s: float) -> Outcome:
        """Write all of *writes*, or none. Raises what ended the writer: `Fenced`, or what else is beyond repair."""

    def end(self, reason: ExactlyOnceError) -> None:
        """Write nothing more, and end no transaction: whoever tries meets *reason*."""
