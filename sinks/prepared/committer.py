"""The committer of a prepared sink: transactions that wait in the store are committed by name, or rolled back.

Invariants: a transaction is committed only for a durable manifest that names it, and rolled back only where none can
name it any more; the table of prepared transactions and the ledger say whether it was committed, never an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import Fenced, InvariantViolation, StoreError
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.committer import CommitsBySubtask, CommitterContext, SetAside, StoreView
from exactlyonce.sinks.prepared.store import TABLE, PreparedRow, PreparingStore, TransactionName
from exactlyonce.sinks.write_ahead.committer import looked
from exactlyonce.sinks.write_ahead.store import ForeignLedger, LedgerEntry

KIND = "prepared"


@dataclass
class PreparedCommitter(CommitsBySubtask):
    """See the module."""

    context: CommitterContext
    store: PreparingStore
    ledger: str
    kind: str = KIND
    _origin: str = ""
    """Of the fence."""
    _cleaned: tuple[int, int] | None = None
    """Transactions of attempts before this one are named by nobody, ever."""
    _looked_at: int = 0
    """The checkpoint at whose commit they were looked for last."""

    def check(self) -> None:
        """See `PreparingStore.check`."""
        self.store.check()

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `PreparingStore.fence`."""
        self._origin, self._cleaned = origin, None  # what was cleaned for an incarnation before counts no more
        return self.store.fence(self.context.pipeline, self.context.sink, incarnation, origin)

    def clean(self, incarnation: int, attempt: int) -> None:
        """Roll back all that is prepared.

        No manifest that is not committed names any of it. One that is durable was committed before this was asked, with
        all that it carries. One to come is written by this incarnation alone, and names what workers of this attempt or
        of a later one acknowledge, none of which runs yet; what was undecided is forgotten when an attempt ends. So
        what a zombie of an older attempt prepares later may be rolled back whenever it is found.
        """
        self._cleaned = incarnation, attempt
        waiting, left = self._prepared(), self.store.left(self.context.pipeline, self.context.sink)
        self._roll_back(waiting, incarnation, self._origin)
        if left:
            raise StoreError(self._committed_by_hand(left[0]))

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        """See `CommitsBySubtask`. A committable without a name is one whose loss was accepted: it is only entered, and
        what may be prepared is rolled back with all else that is old."""
        entry = LedgerEntry.of(self.context.pipeline, self.context.sink, committable, incarnation, origin)
        if self.store.entered(entry):
            return False
        name = _named(committable.body.decode()) if committable.body else None
        done = name is not None and self.store.committed(name)
        if name is not None and not done:
            self.store.end(name, commit=True)
            if not self.store.committed(name) and not self.store.entered(entry):  # in this order: what is entered goes
                raise StoreError(_lost(name, committable))
        hit("store-entering")
        self.store.enter(entry, name)
        cleaned = self._cleaned
        if cleaned is None or (incarnation, origin) != (cleaned[0], self._origin):
            return not done  # another process of the one that leads has cleaned since, or will
        if committable.checkpoint > self._looked_at:
            self._looked_at = committable.checkpoint
            self._roll_back([each for each in self._prepared() if each.written_in < cleaned], incarnation, origin)
        return not done

    def look(self) -> StoreView | None:
        """See `Inspectable`."""
        view = looked(self.store, self.context)
        if view is None or view.problem:
            return view
        listed = self.store.prepared_at(self.store.owner(self.context.pipeline, self.context.sink))
        waiting = tuple(
            SetAside(
                name=str(each), subtask=each.subtask, incarnation=each.incarnation, attempt=each.attempt, since_ms=at_ms
            )
            for each, at_ms in sorted(listed.items(), key=lambda item: str(item[0]))
        )
        return replace(view, waiting=waiting)

    def roll_back(self, names: Collection[str], incarnation: int, origin: str) -> list[str]:
        """See `RollsBack`."""
        chosen = [each for each in self._prepared() if str(each) in names and each.incarnation <= incarnation]
        self._roll_back(chosen, incarnation, origin)
        return [str(each) for each in chosen]

    def _prepared(self) -> list[TransactionName]:
        return self.store.prepared(self.store.owner(self.context.pipeline, self.context.sink))

    def _roll_back(self, names: list[TransactionName], incarnation: int, origin: str) -> None:
        """Roll back transactions that were listed before: where nobody has taken over since, none of them is of a newer
        incarnation, or of a newer life of the pipeline, whose numbers are small again."""
        nothing = LedgerEntry(
            pipeline=self.context.pipeline, sink=self.context.sink, subtask=0, checkpoint=0, previous=0,
            incarnation=incarnation, origin=origin,
        )  # fmt: skip
        try:
            self.store.entered(nothing)
        except ForeignLedger:
            raise Fenced(
                f"The ledger of sink {self.context.sink!r} was begun anew since this instance fenced: the pipeline "
                f"was reset, and this instance is of its life before. It ends, and changes nothing."
            ) from None
        for each in names:
            self.store.end(each, commit=False)

    def close(self) -> None:
        """Let go of the connection."""
        self.store.close()

    def _committed_by_hand(self, row: PreparedRow) -> str:
        return (
            f"The transaction {row.name} of sink {self.context.sink!r}, subtask {row.subtask}, was committed although "
            f"its checkpoint {row.checkpoint} was never decided, and this program does not do that: somebody else "
            f"ended it. Its {row.records} records come again, so that the target has them twice. Delete what it wrote "
            f"from the target, then DELETE FROM {TABLE} WHERE name = '{row.name}', and run again."
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
        f"it can be had again by restoring the server as it was, do so and run again; else the records are lost to "
        f"this sink, and only a run with --accept-loss goes on without them."
    )
