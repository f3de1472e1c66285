"""The seam of a prepared sink: what a store has to be able to do.

Beside the ledger lies a table of prepared transactions. Each transaction inserts its row, under its own name, so that
none waits for another's; a visible row proves that the transaction was committed. The committer then sets the ledger
and deletes the row, in one step. Nothing else proves anything: "there is no such transaction" is the answer for
committed and for lost ones.

A name has the sink of a transaction, and the attempt. Invariants: no two transactions have the same name, even if the
same work is done twice; a name is parsed whole, and transactions with other names are not touched; only its sink has
its owner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Protocol

import msgspec

from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.store import LedgerStore

TABLE = "exactlyonce_prepared"
_PATTERN = re.compile(r"eo:([A-Za-z0-9_.-]*~[0-9a-f]{16}):(\d+):(\d+):(\d+)\.(\d+):([0-9a-f]+)\Z", re.ASCII)


class TransactionName(msgspec.Struct, frozen=True):
    """`eo:<owner>:<subtask>:<number>:<incarnation>.<attempt>:<nonce>`.

    MySQL needs the name before the first row, when the checkpoint is not known yet: so it has a number of its own, and
    the checkpoint is in the row that the transaction inserts.
    """

    owner: str
    subtask: int
    number: int
    """Counts the subtask's transactions in this attempt."""
    incarnation: int
    attempt: int
    nonce: str
    """The writer's: bounded work may run twice in one attempt."""

    @property
    def transaction(self) -> str:
        """The first part of the name."""
        return f"eo:{self.owner}:{self.subtask}:{self.number}"

    @property
    def branch(self) -> str:
        """The second part of the name."""
        return f"{self.incarnation}.{self.attempt}:{self.nonce}"

    def __str__(self) -> str:
        return f"{self.transaction}:{self.branch}"

    @property
    def written_in(self) -> tuple[int, int]:
        """Incarnation and attempt: a later one is greater."""
        return self.incarnation, self.attempt

    @classmethod
    def parse(cls, text: str) -> TransactionName | None:
        """The name in *text*; None if it is not one as a whole.

        >>> TransactionName.parse("eo:totals.out~00112233aabbccdd:0:7:3.1:a0").written_in
        (3, 1)
        >>> TransactionName.parse("gtrid-of-somebody-else") is None
        True
        """
        match = _PATTERN.match(text)
        if match is None:
            return None
        owner, subtask, number, incarnation, attempt, nonce = match.groups()
        return cls(owner, int(subtask), int(number), int(incarnation), int(attempt), nonce)


def owner_of(pipeline: str, sink: str, place: str, length_max: int) -> str:
    """The unique owner of all transactions of *sink*, readable as far as there is room.

    *place*: that of the ledger in the server, since names of transactions are the server's.

    >>> owner_of("totals", "out", "public", 40)
    'totals.out~8ec45f955e54aa85'
    """
    digest = sha256("\0".join((pipeline, sink, place)).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{pipeline}.{sink}")
    return f"{readable[: length_max - 17]}~{digest}"


class PreparedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The row that a transaction inserts before it is prepared."""

    name: str
    """The transaction's."""
    pipeline: str
    sink: str
    subtask: int
    checkpoint: int
    """The one at whose barrier the transaction was prepared."""
    records: int


class PreparingStore(LedgerStore, Protocol):
    """A store that prepares transactions, for a writer or for a committer. A fence keeps no writer from preparing. When
    a connection ends, the server rolls back the open transaction, and keeps prepared ones."""

    def owner(self, pipeline: str, sink: str) -> str:
        """The owner of the sink's transactions."""

    # --- for a writer -------------------------------------------------------------------------------------------

    def begin(self, name: TransactionName) -> None:
        """Begin a transaction; only one is open at a time."""

    def add(self, chunk: bytes) -> None:
        """Write some encoded rows into the open transaction. After an error there is none."""

    def keep(self) -> None:
        """Let the server know that the open transaction is still being written."""

    def prepare(self, row: PreparedRow) -> None:
        """Add *row* to the open transaction and prepare it: it outlives this connection, and the server."""

    # --- for a committer ----------------------------------------------------------------------------------------

    def prepared(self, owner: str) -> Mapping[TransactionName, int | None]:
        """All transactions of *owner* that wait in the server, with the time of their preparation, in milliseconds
        since 1970, if the server tells it."""

    def end(self, name: TransactionName, *, commit: bool) -> None:
        """Commit or roll back a transaction; returns once the server has none of that name, whoever ended it."""

    def committed(self, name: TransactionName) -> bool:
        """Whether its row is visible."""

    def entered(self, entry: LedgerEntry) -> bool:
        """Whether the ledger has *entry*, or a newer one. Raises as `LedgerEntry.is_due` does."""

    def enter(self, entry: LedgerEntry, name: TransactionName | None) -> None:
        """Set the ledger to *entry*, and delete the row of *name* (None: those of its subtask and checkpoint), in one
        transaction. Raises as `entered` does."""

    def left(self, pipeline: str, sink: str) -> list[PreparedRow]:
        """The visible rows, of transactions that were committed and are not in the ledger."""
