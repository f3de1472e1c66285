"""The seam of a prepared sink: what a store has to be able to do.

Beside the ledger of write-ahead sinks lies a table of prepared transactions. Each transaction inserts its row, under
its own name, so that none waits for another's; visible, the row proves that the transaction was committed. Whoever
commits then sets the ledger and deletes the row, in one step. Nothing else proves anything: "there is no such
transaction" is said of what was committed and of what is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from exactlyonce.sinks.prepared.names import TransactionName
from exactlyonce.sinks.write_ahead.store import LedgerEntry, RowEncoder

TABLE = "exactlyonce_prepared"


class PreparedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The row that a transaction inserts before it is prepared."""

    name: str
    """The transaction's."""
    pipeline: str
    sink: str
    subtask: int
    checkpoint: int
    """At whose barrier the transaction was prepared."""
    records: int


class PreparingStore(Protocol):
    """A connection to a store, for one sink; errors and connecting are as in `write_ahead.store.Store`, and so is what
    has the same name there. For a writer, or for a committer."""

    def check(self) -> None:
        """See `Store`; raise `StoreError` also where the server prepares no transactions."""

    def encoder(self) -> RowEncoder:
        """See `Store`."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store`; it keeps no writer from preparing."""

    def close(self) -> None:
        """See `Store`; the server rolls back what is open, and keeps what is prepared."""

    def owner(self, pipeline: str, sink: str) -> str:
        """Of the sink's transactions."""

    # --- for a writer -------------------------------------------------------------------------------------------

    def begin(self, name: TransactionName) -> None:
        """Begin a transaction; only one is open at a time."""

    def add(self, chunk: bytes) -> None:
        """Write some encoded rows into the transaction that is open. After an error there is none."""

    def keep(self) -> None:
        """Let the server know that the transaction that is open is still being written."""

    def prepare(self, row: PreparedRow) -> None:
        """Add *row* to the transaction that is open and prepare it: it outlives this connection, and the server."""

    # --- for a committer ----------------------------------------------------------------------------------------

    def prepared(self, owner: str) -> list[TransactionName]:
        """All transactions of *owner* that wait in the server."""

    def prepared_at(self, owner: str) -> dict[TransactionName, int | None]:
        """The same, each with when it was prepared, in milliseconds since 1970, where the server tells."""

    def end(self, name: TransactionName, *, commit: bool) -> None:
        """Commit or roll back a transaction; returns once the server has none of that name, whoever ended it."""

    def committed(self, name: TransactionName) -> bool:
        """Whether its row is visible."""

    def entered(self, entry: LedgerEntry) -> bool:
        """Whether the ledger has *entry*, or a newer one. Raises `Fenced` where it has a newer incarnation,
        `LedgerBehind` where it has an older checkpoint than the one before."""

    def enter(self, entry: LedgerEntry, name: TransactionName | None) -> None:
        """Set the ledger to *entry*, and delete the row of *name* (None: those of its subtask and checkpoint), in one
        transaction. Raises what `entered` raises."""

    def left(self, pipeline: str, sink: str) -> list[PreparedRow]:
        """The rows that are visible: of transactions that were committed, and are not in the ledger."""
