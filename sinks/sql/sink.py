"""The description of a database table as a sink, whatever the dialect. It opens nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.secrets import is_reference, reference_problem
from exactlyonce.sinks.sql.ledger import TABLE as LEDGER
from exactlyonce.sinks.sql.table import description_problems, row_problems
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink

T = TypeVar("T")
WRITE_AHEAD = "write_ahead"


class TableSink(WriteAheadSink[T]):
    """A write-ahead sink with the table, its mode and its key."""

    place_kind: ClassVar[str]
    """Schema or database: the ledger lies in that of the table."""
    table: str
    dsn: str
    mode: str
    key: tuple[str, ...]
    create: bool
    commit: str

    @abstractmethod
    def name_problems(self) -> Iterator[str]:
        """The problems of the table's name."""

    @abstractmethod
    def dsn_problems(self) -> Iterator[str]:
        """The problems of a *dsn* that is written out."""

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
        """Its rows in the table beside the target, as SQL."""
        rows = f"WHERE pipeline = '{pipeline}' AND sink = '{sink}'"
        return f"table {LEDGER} in the {self.place_kind} of {self.table}, {rows}"

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
        if self.commit != WRITE_AHEAD:
            yield (
                f"commit={self.commit!r} must be {WRITE_AHEAD!r}, as it is by itself: rows wait in the checkpoint "
                f"topic until their checkpoint is decided, in any mode, without locks or settings of the server"
            )
        if not wrong and type_ is not UNKNOWN:
            yield from row_problems(type_, self.key)
