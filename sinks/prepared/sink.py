"""The description of a sink whose rows may wait in the store's own transactions, where it is told to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.prepared.committer import PreparedCommitter
from exactlyonce.sinks.prepared.store import PreparingStore
from exactlyonce.sinks.prepared.writer import open_writer
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
from exactlyonce.sinks.writer import Opened, WriterContext

T = TypeVar("T")
WRITE_AHEAD = "write_ahead"


class PreparableSink(WriteAheadSink[T]):
    """A write-ahead sink, unless its *commit* is *prepares*."""

    prepares: ClassVar[str]
    """The *commit* with which transactions are prepared."""
    commit: str

    @abstractmethod
    def preparing_store(self, type_: Any) -> PreparingStore:
        """A connection for rows of this type that prepares transactions, not open yet."""

    def open_committer(self, context: CommitterContext) -> Committer:
        """Who applies its rows to the store, or commits its transactions there."""
        if self.commit == WRITE_AHEAD:
            return super().open_committer(context)
        ledger = self.ledger_of(context.pipeline, context.sink)
        return PreparedCommitter(context, self.preparing_store(context.type), ledger)

    def open_writer(self, context: WriterContext) -> Opened:
        """The writer of one subtask, and the store's encoder, which may look at the store."""
        if self.commit == WRITE_AHEAD:
            return super().open_writer(context)
        store = self.preparing_store(context.type)
        try:
            encoder = store.encoder()
        finally:
            store.close()
        return Opened(open_writer(store, context), encoder)

    def commit_problems(self, mode: str) -> Iterator[str]:
        """What is wrong with *commit*, or does not go with it."""
        if self.commit not in (WRITE_AHEAD, self.prepares):
            yield (
                f"commit={self.commit!r} must be {WRITE_AHEAD!r}: rows wait in the checkpoint topic, or "
                f"{self.prepares!r}: they wait in transactions of the server"
            )
        elif self.commit == self.prepares and mode != "append":
            yield (
                f"commit={self.commit!r} needs mode='append': rows that a prepared transaction has changed stay locked "
                f"until its checkpoint is committed; the next interval would wait for them, and where a checkpoint "
                f"was aborted, the one that is to commit them would wait as well. Use commit={WRITE_AHEAD!r}"
            )
        elif self.commit == self.prepares and self.delivery != EXACTLY_ONCE:
            yield f"commit={self.commit!r} is for delivery={EXACTLY_ONCE!r}: with {self.delivery!r} nothing waits"
