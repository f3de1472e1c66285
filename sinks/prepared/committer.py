"""The committer of a prepared sink: transactions that wait in the store are committed by name, or rolled back.

Invariants: a transaction is committed only for a durable manifest that names it, and rolled back only if none can name
it any more; the table of prepared transactions and the ledger say whether it was committed, never an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import Fenced, InvariantViolation, StoreError
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.committer import SetAside, StoreView
from exactlyonce.sinks.ledger import ForeignLedger, LedgerEntry
from exactlyonce.sinks.prepared.store import TABLE, PreparedRow, PreparingStore, TransactionName
from exactlyonce.sinks.write_ahead.committer import StoreCommitter

KIND = "prepared"


@dataclass
class PreparedCommitter(StoreCommitter[PreparingStore]):
    """See the module."""

    kind: str = KIND
    _origin: str = ""
    """As fenced."""
    _cleaned: tuple[int, int] | None = None
    """The incarnation and attempt before which no manifest names any transaction."""
    _searched_at: int = 0
    """The checkpoint at whose commit such transactions were last searched."""

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        self._origin, self._cleaned = origin, None  # `clean` comes again for this incarnation
        return super().fence(incarnation, origin)

    def clean(self, incarnation: int, attempt: int) -> None:
        """Roll back all prepared transactions.

        No uncommitted manifest names them. A durable one was committed before, with all that it carries. A later one is
        written by this incarnation alone, and names transactions of this attempt's workers, none of which runs yet, or
        of a later attempt's; undecided ones are forgotten when an attempt ends. So a transaction that a zombie of an
        older attempt prepares later may be rolled back whenever it is found.
        """
        self._cleaned = incarnation, attempt
        waiting, left = self._prepared(), self.store.left(self.context.pipeline, self.context.sink)
        self._roll_back(waiting, incarnation, self._origin)
        if left:
            raise StoreError(self._committed_by_hand(left[0]))

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        """See `CommitsBySubtask`. A committable without a name is an accepted loss: it is only entered, and its
        transaction, if there is one, is rolled back with all old ones."""
        entry = LedgerEntry.of(self.context.pipeline, self.context.sink, committable, incarnation, origin)
        if self.store.entered(entry):
            return False
        name = _named(committable.body.decode()) if committable.body else None
        done = name is not None and self.store.committed(name)
        if name is not None and not done:
            self.store.end(name, commit=True)
            if not self.store.committed(name) and not self.store.entered(entry):  # in this order: entering deletes it
                raise StoreError(_lost(name, committable))
        hit("store-entering")
        self.store.enter(entry, name)
        cleaned = self._cleaned
        if cleaned is None or (incarnation, origin) != (cleaned[0], self._origin):
            return not done  # another process of the leader has cleaned since, or will
        if committable.checkpoint > self._searched_at:
            self._searched_at = committable.checkpoint
            self._roll_back([name for name in self._prepared() if name.written_in < cleaned], incarnation, origin)
        return not done

    def look(self) -> StoreView | None:
        """See `Inspectable`; with the prepared transactions."""
        view = super().look()
        if view is None or view.problem:
            return view
        waiting = tuple(
            SetAside(
                name=str(name), subtask=name.subtask, incarnation=name.incarnation, attempt=name.attempt, since_ms=at_ms
            )
            for name, at_ms in sorted(self._prepared().items(), key=lambda item: str(item[0]))
        )
        return replace(view, waiting=waiting)

    def roll_back(self, names: Collection[str], incarnation: int, origin: str) -> list[str]:
        chosen = [name for name in self._prepared() if str(name) in names and name.incarnation <= incarnation]
        self._roll_back(chosen, incarnation, origin)
        return [str(name) for name in chosen]

    def _prepared(self) -> Mapping[TransactionName, int | None]:
        return self.store.prepared(self.store.owner(self.context.pipeline, self.context.sink))

    def _roll_back(self, names: Iterable[TransactionName], incarnation: int, origin: str) -> None:
        """Roll back transactions that were listed before. Unless another leader has taken over since, none is of a
        newer incarnation, or of a newer life of the pipeline, which counts from 1 again."""
        probe = LedgerEntry(
            pipeline=self.context.pipeline, sink=self.context.sink, subtask=0, checkpoint=0, previous=0,
            incarnation=incarnation, origin=origin,
        )  # fmt: skip
        try:
            self.store.entered(probe)
        except ForeignLedger:
            raise Fenced(
                f"The ledger of sink {self.context.sink!r} was begun anew since this instance fenced: the pipeline "
                f"was reset, and this instance is of its life before. It ends, and changes nothing."
            ) from None
        for name in names:
            self.store.end(name, commit=False)

    def _committed_by_hand(self, row: PreparedRow) -> str:
        return (
            f"The transaction {row.name} of sink {self.context.sink!r}, subtask {row.subtask}, was committed although "
            f"its checkpoint {row.checkpoint} was never decided, and this program does not do that: somebody else "
            f"ended it. Its {row.records} records come again, so that the target has them twice. Delete its rows from "
            f"the target, then DELETE FROM {TABLE} WHERE name = '{row.name}', and run again."
        )


def _named(text: str) -> TransactionName:
    name = TransactionName.parse(text)
    if name is None:
        raise InvariantViolation(f"{text!r} is not the name of a prepared transaction")
    return name


def _lost(name: TransactionName, committable: StoreCommittable) -> str:
    return (
        f"The prepared transaction {name} with {committable.records} records is gone, and was not committed: somebody "
        f"else has rolled it back, or the server was restored from a backup, or a standby took over that lacked it. If "
        f"you can restore the server with it, do so and run again; else the records are lost to this sink, and only a "
        f"run with --accept-loss goes on without them."
    )
