"""A write-ahead sink: the description, and the committer, which takes rows from the checkpoint topic to the store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import ConfigError, StoreError
from exactlyonce.pipeline.sink import EXACTLY_ONCE, Sink
from exactlyonce.sinks.committer import CommitsBySubtask, Committer, CommitterContext, StoreView
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.store import InspectableStore, RowEncoder, Store
from exactlyonce.sinks.write_ahead.writer import KIND, BoundedRows, DirectWriter, RowsWriter, staged_chunks
from exactlyonce.sinks.writer import Opened, WriterContext


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
        return self.store.apply(staged_chunks(committable, self.context.blocks), entry)

    def close(self) -> None:
        self.store.close()


T = TypeVar("T")


class WriteAheadSink(Sink[T]):
    """A sink whose rows wait in the checkpoint topic until their checkpoint is decided; see the package.

    If its `delivery` is at least once, its writers write to the store themselves.
    """

    @abstractmethod
    def store(self, type_: Any) -> Store:
        """A connection for rows of this type, not open yet."""

    @property
    def transactional(self) -> bool:
        """False: rows wait in no Kafka transaction."""
        return False

    @property
    def stages(self) -> bool:
        """Whether it is exactly once."""
        return self.delivery == EXACTLY_ONCE

    def open_committer(self, context: CommitterContext) -> Committer:
        return RowsCommitter(context, self.store(context.type), self.ledger_of(context.pipeline, context.sink))

    def ledger_of(self, pipeline: str, sink: str) -> str:
        """The place of the ledger of *sink* in *pipeline*: see `Committer.ledger`."""
        return f"in its store, of pipeline {pipeline!r} and sink {sink!r}"

    def open_writer(self, context: WriterContext) -> Opened:
        """See `Writable`; the store's encoder may ask the store."""
        encoder = encoder_of(self.store(context.type))
        if self.stages:
            return Opened(RowsWriter(context.sink, context.subtask, context.staging), BoundedRows(encoder))
        return Opened(DirectWriter(context.sink, self.store(context.type)), encoder)


def encoder_of(store: Store) -> RowEncoder:
    """The encoder of a store that is not open afterwards."""
    try:
        return store.encoder()
    finally:
        store.close()
