"""Stores of tables on one server or the other, and what it says of them, for tests that are of both."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pytest
from sql_servers import OnMariaDB, OnPostgres, SqlServer
from statement_proxy import StatementProxy
from table_rows import ORIGIN, Total, key_of
from waiting import until

from exactlyonce.connectors.postgres.connection import Limits
from exactlyonce.sinks import MySQLSink, PostgresSink
from exactlyonce.sinks.mysql.store import MySQLStore
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
from exactlyonce.sinks.write_ahead.store import Store

on_postgres = pytest.mark.parametrize("tables", ["postgres"], indirect=True)
on_mariadb = pytest.mark.parametrize("tables", ["mariadb"], indirect=True)
TOTALS = [("ann", 1), ("bob", 2), ("cid", 3), ("dan", 4)]
"""The rows of `chunks`."""


class Tables(SqlServer):
    """A server with an empty database, and stores that write to its table `totals`."""

    commit: str
    """A COMMIT as it comes over the connection."""
    locked: str
    """The error about a lock that another holds for too long."""
    spoilt: bytes
    """A chunk that is no rows."""

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(server, monkeypatch)
        self.proxy = StatementProxy(self.port)
        monkeypatch.setenv("PROXIED_DSN", self.dsn(self.proxy.port))
        self._stores: list[Store] = []
        self.filled: list[Any] = []
        """Objects that a test keeps from one example to the next."""

    @abstractmethod
    def sink(self, table: str, **options: Any) -> WriteAheadSink[Any]:
        """The description of one; the variable TOTALS_DSN says where the server is."""

    @abstractmethod
    def _quick(self, sink: Any, type_: Any) -> Store:
        """A store that gives up locks soon."""

    @abstractmethod
    def waits_for_a_lock(self) -> bool:
        """Whether anybody does."""

    def until_a_lock_is_waited_for(self) -> None:
        until(self.waits_for_a_lock, pause_s=0.15)  # InnoDB shows new locks only to those who have not looked for 0.1 s

    def of(self, type_: Any, table: str = "totals", *, quick: bool = False, **options: Any) -> Store:
        """A store for rows of this type, in a table that is there; one that is *quick* gives up locks soon."""
        sink = self.sink(table, **{"dsn": "env:TOTALS_DSN", **options})
        assert list(sink.problems(type_)) == []
        self._stores.append(self._quick(sink, type_) if quick else sink.store(type_))
        return self._stores[-1]

    def store(self, mode: str = "append", *, quick: bool = False, proxied: bool = False) -> Store:
        dsn = "env:PROXIED_DSN" if proxied else "env:TOTALS_DSN"
        return self.of(Total, quick=quick, dsn=dsn, create=True, mode=mode, key=key_of(mode))

    def ready(self, mode: str = "append", **more: bool) -> Store:
        store = self.store(mode, **more)
        store.check()
        store.fence("p", "s", 1, ORIGIN)
        return store

    def chunks(self, store: Store) -> list[bytes]:
        encoded = store.encoder().encode([Total(*each) for each in TOTALS])
        return [b"".join(encoded[:2]), b"".join(encoded[2:])]

    def totals(self) -> list[tuple[Any, ...]]:
        return self.sql("SELECT customer, cents FROM totals ORDER BY 1, 2")

    def close(self) -> None:
        for each in self._stores:
            each.close()
        self.proxy.close()


class PostgresTables(OnPostgres, Tables):
    commit, locked = "COMMIT\0", "another session holds a lock"
    spoilt = b"no row\n"

    def sink(self, table: str, **options: Any) -> PostgresSink[Any]:
        return PostgresSink(table, **options)

    def _quick(self, sink: Any, type_: Any) -> Store:
        return PostgresStore(sink, type_, Limits(lock=0.3, grace=0.3))

    def waits_for_a_lock(self) -> bool:
        return self.sql("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted") == [(True,)]


class MariaDBTables(OnMariaDB, Tables):
    commit = "\x03COMMIT"
    locked = "waited too long for a lock"
    spoilt = b"(1,2,3,4),\f"

    def sink(self, table: str, **options: Any) -> MySQLSink[Any]:
        return MySQLSink(table, **options)

    def _quick(self, sink: Any, type_: Any) -> Store:
        return MySQLStore(sink, type_, timeout_s=3.0)

    def waits_for_a_lock(self) -> bool:
        waiting = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        return self.sql(waiting) != [(0,)]
