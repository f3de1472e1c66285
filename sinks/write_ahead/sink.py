"""The description of a write-ahead sink."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.sink import Sink
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.write_ahead.committer import RowsCommitter
from exactlyonce.sinks.write_ahead.direct import DirectWriter
from exactlyonce.sinks.write_ahead.store import RowEncoder, Store
from exactlyonce.sinks.write_ahead.writer import BoundedRows, RowsWriter
from exactlyonce.sinks.writer import Opened, WriterContext

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
