"""The committer of a write-ahead sink: rows from the checkpoint topic to the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exactlyonce.checkpoint.records.manifest import BlockRef, StoreCommittable
from exactlyonce.pipeline.errors import ConfigError, StoreError
from exactlyonce.sinks.committer import CommitsBySubtask, CommitterContext, StoreView
from exactlyonce.sinks.write_ahead.store import InspectableStore, LedgerEntry, Store
from exactlyonce.sinks.write_ahead.writer import INDEXED, KIND, decode_index


@dataclass(frozen=True)
class RowsCommitter(CommitsBySubtask):
    """Applies rows in the order in which they were set aside; they are the bytes that were written then."""

    context: CommitterContext
    store: Store
    ledger: str
    kind: str = KIND

    def check(self) -> None:
        """See `Store.check`."""
        self.store.check()

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store.fence`."""
        return self.store.fence(self.context.pipeline, self.context.sink, incarnation, origin)

    def clean(self, incarnation: int, attempt: int) -> None:
        """Nothing: what nobody names in the checkpoint topic goes as every orphan does."""

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        """See `Store.apply`."""
        entry = LedgerEntry.of(self.context.pipeline, self.context.sink, committable, incarnation, origin)
        return self.store.apply(self._chunks(committable), entry)

    def look(self) -> StoreView | None:
        """See `Inspectable`."""
        return looked(self.store, self.context)

    def _chunks(self, committable: StoreCommittable) -> Iterator[bytes]:
        """All blocks of a subtask are of one key group, so that they come in the order in which they were put."""
        refs = list(committable.blocks)
        if committable.body == INDEXED:
            refs = [ref for body in self._bodies(refs) for ref in decode_index(body)]
        return self._bodies(refs)

    def _bodies(self, refs: list[BlockRef]) -> Iterator[bytes]:
        return (block.body for _, block in self.context.blocks.fetch(refs))

    def close(self) -> None:
        """Let go of the connection."""
        self.store.close()


def looked(store: object, context: CommitterContext) -> StoreView | None:
    """A look at *store* beside a run, which changes nothing: its ledger, and why it does not take rows; None where it
    cannot be looked at so."""
    if not isinstance(store, InspectableStore):
        return None
    try:
        store.inspect()
        problem = ""
    except (StoreError, ConfigError) as error:
        problem = str(error)
    try:
        ledger = store.ledger_of(context.pipeline, context.sink)
    except StoreError as error:
        return StoreView(problem=problem or str(error))
    return StoreView(
        incarnation=ledger.incarnation, origin=ledger.origin, ledger=dict(ledger.checkpoints), problem=problem
    )
