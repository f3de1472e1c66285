"""The seam of write-ahead sinks: what a store has to be able to do.

Invariant: rows and their ledger entry become visible together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger


class RowEncoder(Protocol):
    """Encodes records as the rows of a store."""

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """One entry for each record. An error names the field that does not fit, and why. There are no effects."""


class Store(Protocol):
    """A connection to the store of one sink, which keeps the sink's ledger. Made without effect; it connects when it is
    first asked, and again after it was lost. Used by one thread at a time.

    A store that cannot be reached, or has not answered, is `StoreUnavailable`. An error that another attempt would meet
    again is `StoreError`, which says what is missing and how to add it. Neither holds a secret. No library below may
    repeat a request by itself.
    """

    def check(self) -> None:
        """Raise `StoreError` unless rows of this sink can be written: table, columns, types and rights are checked,
        and created if the sink says so. Makes the ledger if there is none."""

    def encoder(self) -> RowEncoder:
        """The encoder for the target as it is now. It checks columns and types alone: `check` has seen the rest."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """Fence all older incarnations; -> by subtask, the checkpoint in the ledger.

        An apply of an older incarnation has ended when this returns, or will fail. *origin*, the id of the checkpoint
        topic, is noted with the first call. Raises `Fenced` if the ledger has a newer incarnation, `ForeignLedger` if
        it was begun for another checkpoint topic; then nothing is changed.
        """

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """Write *chunks*, each some encoded rows joined, and *entry*, in one transaction, if the ledger has an older
        checkpoint for the subtask; -> whether it did. False: they had been applied before.

        May be repeated after any outcome, by any process. Raises `Fenced` if the ledger has a newer incarnation,
        `LedgerBehind` if it has an older checkpoint than the previous one, `ForeignLedger` if it was begun for another
        checkpoint topic, or by nobody yet.
        """

    def write(self, chunks: Iterable[bytes]) -> None:
        """Write *chunks*, in one transaction, without the ledger: for sinks whose delivery is at least once."""

    def close(self) -> None:
        """Close the connection."""


@runtime_checkable
class InspectableStore(Protocol):
    """A `Store` that can be looked at beside a run, as `exactlyonce doctor` does. No call changes, locks or waits
    for anything."""

    def inspect(self) -> None:
        """As `Store.check`, but nothing is created."""

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        """The committed ledger of a sink; `SinkLedger()` if there is none."""
