"""The description of a write-ahead sink."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from exactlyonce.pipeline.sink import Sink
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.write_ahead.committer import RowsCommitter
from exactlyonce.sinks.write_ahead.store import Store
from exactlyonce.sinks.write_ahead.writer import BoundedRows, RowsWriter
from exactlyonce.sinks.writer import Opened, WriterContext

T = TypeVar("T")


class WriteAheadSink(Sink[T]):
    """A sink whose rows wait in the checkpoint topic until their checkpoint is decided; see the package."""

    @abstractmethod
    def store(self, type_: Any) -> Store:
        """A connection for rows of this type, not open yet."""

    @property
    def transactional(self) -> bool:
        """False: its rows need no transaction to wait in."""
        return False

    def open_committer(self, context: CommitterContext) -> RowsCommitter:
        """Who applies its rows to the store."""
        return RowsCommitter(context, self.store(context.type))

    def open_writer(self, context: WriterContext) -> Opened:
        """The writer of one subtask, and the store's encoder, which may look at the store."""
        encoder = BoundedRows(self.store(context.type).encoder())
        return Opened(RowsWriter(context.sink, context.subtask, context.staging), encoder)
