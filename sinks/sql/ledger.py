"""The ledger of SQL stores: a table beside the target, with a row for each subtask of a sink, and one for the sink.

The sink's own row, of subtask -1, has the incarnation that may write, and the id of the checkpoint topic. A subtask's
row has the checkpoint whose rows are in the target. Invariant: a claim locks the sink's row shared until its
transaction ends, a fence locks it exclusively, and both before any other row. So the claims of older incarnations have
ended when a fence returns, and later ones find the newer incarnation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger

TABLE = "exactlyonce_ledger"
COLUMNS = ("pipeline", "sink", "subtask", "checkpoint", "incarnation", "origin")
KEY = COLUMNS[:3]
SINK_ITSELF = -1
"""The subtask of the sink's own row."""
_OF_SINK = "WHERE pipeline = %s AND sink = %s"
_ROW = f"{_OF_SINK} AND subtask = %s"

Row = tuple[Any, ...]


class Session(Protocol):
    """A connection to a server, made with the first request, and again after it was lost; never in a transaction."""

    def ask(self, sql: str, *values: object) -> list[Row]:
        """The rows of one statement; each %s in it stands for a value. Outside of a transaction it is one by itself."""

    def changed_by(self, sql: str, *values: object) -> int:
        """The number of rows that one statement has inserted or changed."""

    def transaction(self, name: str, lock_s: float | None = None) -> AbstractContextManager[None]:
        """A transaction, committed unless its body raises. Its session is called *name* meanwhile, if the server names
        sessions. *lock_s*: the timeout for locks, unless the usual one."""

    def close(self) -> None:
        """Close the connection; the server rolls back the open transaction."""


class OwnTable(Protocol):
    """A table of exactlyonce beside the target."""

    @property
    def name(self) -> str:
        """The name as SQL."""

    @property
    def shown(self) -> str:
        """The name for people, with its place."""

    @property
    def exists(self) -> bool: ...

    def create(self) -> None:
        """Create it, unless it exists, or another session creates it at the same time."""

    def check(self) -> None:
        """Raise `StoreError` unless it has its columns, keeps its rows, and may be written to."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The ledger in one schema or database."""

    session: Session
    table: OwnTable
    unless_there: str
    """The end of an INSERT that leaves an existing row as it is."""
    shared: str
    """The end of a SELECT that locks rows against changes."""

    def of_sink(self, pipeline: str, sink: str) -> SinkLedger:
        """The committed ledger of the sink, without waiting for locks."""
        rows = self._ask(f"SELECT subtask, checkpoint, incarnation, origin FROM {{}} {_OF_SINK}", pipeline, sink)
        by_subtask = {int(subtask): rest for subtask, *rest in rows}
        _, incarnation, origin = by_subtask.pop(SINK_ITSELF, (0, 0, ""))
        checkpoints = {subtask: _position(checkpoint) for subtask, (checkpoint, *_) in by_subtask.items()}
        return SinkLedger(incarnation=int(incarnation), origin=origin, checkpoints=checkpoints)

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> dict[int, int]:
        """Part of a transaction: note *incarnation*, once every claim has ended; -> the checkpoint of each subtask.
        Raises as `Store.fence` does."""
        self._insert(pipeline, sink, SINK_ITSELF, 0, origin)
        self._ask(f"SELECT incarnation FROM {{}} {_ROW} FOR UPDATE", pipeline, sink, SINK_ITSELF)
        ledger = self.of_sink(pipeline, sink)
        ledger.fenced(pipeline, sink, incarnation, origin)
        self._ask(f"UPDATE {{}} SET incarnation = %s {_ROW}", incarnation, pipeline, sink, SINK_ITSELF)
        return dict(ledger.checkpoints)

    def claim(self, entry: LedgerEntry) -> bool:
        """First part of a transaction that writes the rows of *entry*: lock the subtask's row and set it to *entry*;
        False, with nothing changed, if it is there already. Raises as `LedgerEntry.is_due` does."""
        row = (entry.pipeline, entry.sink, entry.subtask)
        of_sink = (entry.pipeline, entry.sink, SINK_ITSELF)
        writer = self._ask(f"SELECT incarnation, origin FROM {{}} {_ROW} {self.shared}", *of_sink)
        if not writer:
            raise self._emptied(entry)
        lock = f"SELECT checkpoint, incarnation FROM {{}} {_ROW} FOR UPDATE"
        locked = self._ask(lock, *row)
        if not locked:  # two may insert it at once: the second waits for the first, and finds its row
            self._insert(*row, 0, entry.origin)
            locked = self._ask(lock, *row)
        ((checkpoint, incarnation),), ((newest, origin),) = locked, writer
        newest = max(newest, incarnation)
        if not entry.is_due(checkpoint=_position(checkpoint), incarnation=newest, origin=origin):
            return False
        changed = self.session.changed_by(
            self._named(f"UPDATE {{}} SET checkpoint = %s, incarnation = %s {_ROW} AND checkpoint = %s"),
            entry.checkpoint, entry.incarnation, *row, checkpoint,
        )  # fmt: skip
        if changed != 1:
            raise StoreError(
                f"The ledger {self.table.shown} has been changed although its row was locked: it has no transactions, "
                f"or a proxy sends statements to several servers. Give it an engine with transactions, and let the dsn "
                f"name the server itself."
            )
        return True

    def _insert(self, pipeline: str, sink: str, subtask: int, incarnation: int, origin: str) -> None:
        """Insert a row unless it exists. Not all servers lock an existing one: `FOR UPDATE` does."""
        statement = f"INSERT INTO {{}} ({', '.join(COLUMNS)}) VALUES (%s, %s, %s, 0, %s, %s) {self.unless_there}"
        self._ask(statement, pipeline, sink, subtask, incarnation, origin)

    def _ask(self, statement: str, *values: object) -> list[Row]:
        return self.session.ask(self._named(statement), *values)

    def _named(self, statement: str) -> str:
        return statement.format(self.table.name.replace("%", "%%"))

    def _emptied(self, entry: LedgerEntry) -> StoreError:
        return StoreError(
            f"The ledger {self.table.shown} has no row of sink {entry.sink!r}, pipeline {entry.pipeline!r}, which "
            f"every run writes when it begins: it was emptied, or the database was restored from a backup. Run again: "
            f"the ledger is compared with the checkpoints before anything is written."
        )


def _position(checkpoint: int) -> int:
    """The checkpoint of a row; 0: none. Old ledgers of MySQL had -1 for none."""
    return max(int(checkpoint), 0)
