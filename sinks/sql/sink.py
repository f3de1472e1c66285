"""The description of a database table as a sink, whatever the dialect. It opens nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.secrets import is_reference, reference_problem
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.prepared.committer import PreparedCommitter
from exactlyonce.sinks.prepared.store import TABLE as PREPARED
from exactlyonce.sinks.prepared.store import PreparingStore
from exactlyonce.sinks.prepared.writer import PreparedWriter
from exactlyonce.sinks.sql.ledger import TABLE as LEDGER
from exactlyonce.sinks.sql.table import description_problems, row_problems
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink, encoder_of
from exactlyonce.sinks.writer import Opened, WriterContext

T = TypeVar("T")
WRITE_AHEAD = "write_ahead"


class TableSink(WriteAheadSink[T]):
    """A write-ahead sink, unless its *commit* is *prepares*: then rows wait in transactions of the database."""

    prepares: ClassVar[str]
    """The *commit* with which transactions are prepared."""
    place_kind: ClassVar[str]
    """Schema or database: the ledger lies in that of the table."""
    table: str
    dsn: str
    mode: str
    key: tuple[str, ...]
    create: bool
    commit: str

    @abstractmethod
    def preparing_store(self, type_: Any) -> PreparingStore:
        """A connection for rows of this type that prepares transactions, not open yet."""

    @abstractmethod
    def name_problems(self) -> Iterator[str]:
        """The problems of the table's name."""

    @abstractmethod
    def dsn_problems(self) -> Iterator[str]:
        """The problems of a *dsn* that is written out."""

    def open_committer(self, context: CommitterContext) -> Committer:
        if self.commit == WRITE_AHEAD:
            return super().open_committer(context)
        ledger = self.ledger_of(context.pipeline, context.sink)
        return PreparedCommitter(context, self.preparing_store(context.type), ledger)

    def open_writer(self, context: WriterContext) -> Opened:
        """See `Writable`; the store's encoder asks the store."""
        if self.commit == WRITE_AHEAD:
            return super().open_writer(context)
        store = self.preparing_store(context.type)
        return Opened(PreparedWriter(store, context), encoder_of(store))

    @property
    def shown(self) -> str:
        """Table, mode and key: ``shop.totals upsert by customer``."""
        by = f" by {', '.join(self.key)}" if self.key else ""
        return f"{self.full_name} {self.mode}{by}"

    @property
    def full_name(self) -> str:
        """The table, with its schema if that is given apart."""
        return self.table

    def ledger_of(self, pipeline: str, sink: str) -> str:
        """Its rows in the tables beside the target, as SQL."""
        tables = f"table {LEDGER}" if self.commit != self.prepares else f"tables {LEDGER} and {PREPARED}"
        rows = f"WHERE pipeline = '{pipeline}' AND sink = '{sink}'"
        return f"{tables} in the {self.place_kind} of {self.table}, {rows}"

    # --- problems ---------------------------------------------------------------------------------------------------

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the arguments, and of the type as rows of a table."""
        yield from self.name_problems()
        if not isinstance(self.dsn, str) or not self.dsn:
            yield 'dsn= is not set: say where the connection string is: dsn="env:ORDERS_DSN", or file:/path'
        elif problem := reference_problem(self.dsn):
            yield f"dsn={self.dsn!r}: {problem}"
        elif not is_reference(self.dsn):
            yield from self.dsn_problems()
        wrong = list(description_problems(self.mode, self.key, self.create))
        yield from wrong
        yield from self._commit_problems()
        if not wrong and type_ is not UNKNOWN:
            yield from row_problems(type_, self.key)

    def _commit_problems(self) -> Iterator[str]:
        """The problems of *commit*, and of arguments that it excludes."""
        if self.commit not in (WRITE_AHEAD, self.prepares):
            yield (
                f"commit={self.commit!r} must be {WRITE_AHEAD!r}: rows wait in the checkpoint topic, or "
                f"{self.prepares!r}: they wait in transactions of the server"
            )
        elif self.commit == self.prepares and self.mode != "append":
            yield (
                f"commit={self.commit!r} needs mode='append': rows that a prepared transaction has changed stay locked "
                f"until its checkpoint is committed; the next interval would wait for them, and where a checkpoint "
                f"was aborted, the one that is to commit them would wait as well. Use commit={WRITE_AHEAD!r}"
            )
        elif self.commit == self.prepares and self.delivery != EXACTLY_ONCE:
            yield f"commit={self.commit!r} is for delivery={EXACTLY_ONCE!r}: with {self.delivery!r} nothing waits"
