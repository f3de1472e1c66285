"""The committer of a write-ahead sink: rows from the checkpoint topic to the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exactlyonce.checkpoint.records.manifest import BlockRef, StoreCommittable
from exactlyonce.pipeline.errors import ConfigError, StoreError
from exactlyonce.sinks.committer import CommitsBySubtask, CommitterContext, StoreView
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.store import InspectableStore, Store
from exactlyonce.sinks.write_ahead.writer import INDEXED, KIND, decode_index


@dataclass
class RowsCommitter(CommitsBySubtask):
    """Applies rows in the order in which they were staged, byte for byte."""

    kind = KIND

    context: CommitterContext
    store: Store
    ledger: str
    """See `Committer.ledger`."""

    def check(self) -> None:
        self.store.check()

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        return self.store.fence(self.context.pipeline, self.context.sink, incarnation, origin)

    def look(self) -> StoreView | None:
        """See `Inspectable`: the ledger, and why the store does not take rows."""
        store = self.store
        if not isinstance(store, InspectableStore):
            return None
        try:
            store.inspect()
            problem = ""
        except (StoreError, ConfigError) as error:
            problem = str(error)
        try:
            ledger = store.ledger_of(self.context.pipeline, self.context.sink)
        except StoreError as error:
            return StoreView(problem=problem or str(error))
        return StoreView.of(ledger, problem=problem)

    def clean(self, incarnation: int, attempt: int) -> None:
        """Nothing: blocks that no manifest names are dropped with all other orphans."""

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        entry = LedgerEntry.of(self.context.pipeline, self.context.sink, committable, incarnation, origin)
        return self.store.apply(self._chunks(committable), entry)

    def _chunks(self, committable: StoreCommittable) -> Iterator[bytes]:
        """All blocks of a subtask are of one key group, so they come in the order in which they were put."""
        refs = list(committable.blocks)
        if committable.body == INDEXED:
            refs = [ref for body in self._bodies(refs) for ref in decode_index(body)]
        return self._bodies(refs)

    def _bodies(self, refs: list[BlockRef]) -> Iterator[bytes]:
        return (block.body for _, block in self.context.blocks.fetch(refs))

    def close(self) -> None:
        self.store.close()
