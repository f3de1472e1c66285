"""Servers that prepare transactions, and writers and committers on them, for tests that are of both."""

from __future__ import annotations

from abc import abstractmethod
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pymysql
import pytest
from flushing import staged
from sql_servers import OnMariaDB, OnPostgres, SqlServer
from statement_proxy import StatementProxy
from table_rows import ORIGIN, Total
from waiting import until

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.sinks import MySQLSink, PostgresSink
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.mysql.prepared import lock_of
from exactlyonce.sinks.prepared.committer import PreparedCommitter
from exactlyonce.sinks.prepared.store import PreparingStore, TransactionName
from exactlyonce.sinks.prepared.writer import PreparedWriter
from exactlyonce.sinks.sql.sink import TableSink
from exactlyonce.sinks.write_ahead.store import RowEncoder

on_postgres = pytest.mark.parametrize("preparing", ["postgres"], indirect=True)
on_mariadb = pytest.mark.parametrize("preparing", ["mariadb"], indirect=True)
XAER_NOTA = 1397


class Preparing(SqlServer):
    """A server with an empty database, and the sink "s" of pipeline "p", which writes to `totals`."""

    numbered: str
    """The type of a column that numbers the rows."""
    words: ClassVar[dict[str, str]]
    """The first words of the statements."""

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(server, monkeypatch)
        self._opened: list[Any] = []
        self._encoder: RowEncoder | None = None

    @abstractmethod
    def sink(self, **more: Any) -> TableSink[Any]:
        """The description."""

    @abstractmethod
    def listed(self) -> list[str]:
        """Prepared transactions in the server, with names as they are in committables."""

    @abstractmethod
    def by_hand(self, name: str, *, commit: bool) -> None:
        """End a prepared transaction as an administrator would."""

    @abstractmethod
    def await_owner_gone(self, name: str) -> None:
        """Wait until the connection that prepared it keeps nobody from ending it."""

    @abstractmethod
    def end_connections(self) -> None:
        """End all but one's own."""

    def kill(self) -> None:
        """SIGKILL to the server, and start it again."""
        self.server.kill()
        self.server.start()

    def proxy(self) -> StatementProxy:
        proxy = StatementProxy(self.port)
        self._opened.append(proxy)
        return proxy

    def store(self) -> PreparingStore:
        store = self.sink().preparing_store(Total)
        self._opened.append(store)
        return store

    def committer(self, incarnation: int, attempt: int = 0, pipeline: str = "p") -> PreparedCommitter:
        """One that has checked, fenced and cleaned."""
        committer = self.committer_that_fenced(incarnation, pipeline)
        committer.clean(incarnation, attempt)
        return committer

    def committer_that_fenced(self, incarnation: int, pipeline: str = "p") -> PreparedCommitter:
        """One that has checked and fenced, and finishes what was decided before it cleans."""
        no_blocks: Any = None
        context = CommitterContext(pipeline=pipeline, sink="s", type=Total, blocks=no_blocks)
        committer = PreparedCommitter(context, self.store(), "")
        committer.check()
        committer.fence(incarnation, ORIGIN)
        return committer

    def writer(self, incarnation: int, attempt: int = 0, subtask: int = 0) -> PreparedWriter:
        context: Any = SimpleNamespace(
            pipeline="p", sink="s", subtask=subtask, incarnation=incarnation, attempt=attempt,
            clients=SimpleNamespace(clock=SystemClock()),
        )  # fmt: skip
        return PreparedWriter(self.store(), context)

    def prepare(self, writer: PreparedWriter, checkpoint: int, *customers: str, previous: int = 0) -> StoreCommittable:
        """Write rows, end the interval, and wait until it is prepared."""
        self.write(writer, *customers)
        writer.barrier(checkpoint)
        return msgspec.structs.replace(staged(writer, checkpoint), previous=previous)

    def write(self, writer: PreparedWriter, *customers: str) -> None:
        if self._encoder is None:
            self._encoder = self.store().encoder()
        writer.write(self._encoder.encode([Total(customer, 1) for customer in customers]))

    def rows(self) -> list[str]:
        return [customer for (customer,) in self.sql("SELECT customer FROM totals ORDER BY customer")]

    def ledger(self) -> dict[int, int]:
        return dict(self.sql("SELECT subtask, checkpoint FROM exactlyonce_ledger WHERE subtask >= 0"))

    def left(self) -> list[str]:
        """The names in the table of prepared transactions that are visible."""
        return [name for (name,) in self.sql("SELECT name FROM exactlyonce_prepared")]

    def close(self) -> None:
        """End all connections, and what is prepared."""
        for each in self._opened:
            each.close()
        for name in self.listed():
            self.by_hand(name, commit=False)


class PreparingPostgres(OnPostgres, Preparing):
    numbered = "bigserial"
    words: ClassVar = {"prepare": "PREPARE TRANSACTION", "commit": "COMMIT PREPARED", "enter": "COMMIT\0"}

    def sink(self, **more: Any) -> PostgresSink[Any]:
        return PostgresSink("totals", dsn="env:TOTALS_DSN", create=True, **{"commit": "prepared", **more})

    def listed(self) -> list[str]:
        return [name for (name,) in self.sql("SELECT gid FROM pg_prepared_xacts ORDER BY gid")]

    def by_hand(self, name: str, *, commit: bool) -> None:
        self.sql(f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{name}'")

    def await_owner_gone(self, name: str) -> None:
        pass  # it has let go once it has prepared

    def end_connections(self) -> None:
        self.sql("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name ~ '^exactlyonce'")


class PreparingMariaDB(OnMariaDB, Preparing):
    numbered = "bigint AUTO_INCREMENT"
    words: ClassVar = {"prepare": "XA PREPARE", "commit": "XA COMMIT", "enter": "\x03COMMIT"}

    def sink(self, **more: Any) -> MySQLSink[Any]:
        return MySQLSink("totals", dsn="env:TOTALS_DSN", create=True, **{"commit": "xa", **more})

    def listed(self) -> list[str]:
        rows = self.server.sql("XA RECOVER", database=None)
        return sorted(f"{data[:length].decode()}:{data[length:].decode()}" for _, length, _, data in rows)

    def by_hand(self, name: str, *, commit: bool) -> None:
        parsed = TransactionName.parse(name)
        assert parsed is not None
        xid = f"'{parsed.transaction}','{parsed.branch}',25967"
        until(lambda: self._ended(f"XA {'COMMIT' if commit else 'ROLLBACK'} {xid}"))

    def _ended(self, statement: str) -> bool:
        """False until the owner of the transaction is known to be gone."""
        try:
            self.server.sql(statement, database=None)
        except pymysql.err.OperationalError as error:
            if error.args[0] != XAER_NOTA:
                raise
            return False
        return True

    def await_owner_gone(self, name: str) -> None:
        parsed = TransactionName.parse(name)
        assert parsed is not None
        held = f"SELECT IS_USED_LOCK('{lock_of(parsed)}')"
        until(lambda: self.server.sql(held, database=None) == [(None,)])

    def end_connections(self) -> None:
        self.server.end_connections()
