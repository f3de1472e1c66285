"""Fixtures of the tests of MySQL: a server for all of them in a process, which each finds running and empty."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(folder / "rig") for folder in Path(__file__).parents[:2]]


@pytest.fixture(scope="session")
def _server() -> Iterator[Any]:
    pytest.importorskip("pymysql")
    from mariadb_server import MariaDB, required

    required()
    server = MariaDB()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def mariadb(_server: Any) -> Any:
    """The server, with an empty database. A test that kills it starts it again."""
    _server.sql("DROP DATABASE shop")
    _server.sql("CREATE DATABASE shop CHARACTER SET utf8mb4", database=None)
    return _server


@pytest.fixture
def proxy(mariadb: Any) -> Iterator[Any]:
    """A proxy before the server."""
    from statement_proxy import StatementProxy

    made = StatementProxy(mariadb.port)
    yield made
    made.close()


@pytest.fixture
def stores(mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`stores(type_, dsn=..., table="totals", ...)`: a store of the sink with these arguments, closed with the test."""
    from exactlyonce.sinks.mysql.sink import MySQLSink
    from exactlyonce.sinks.mysql.store import MySQLStore
    from exactlyonce.sinks.sql.table import row_fields

    made: list[MySQLStore] = []

    def make(
        type_: Any, table: str = "totals", *, dsn: str = "", timeout_s: float = 30.0, **options: Any
    ) -> MySQLStore:
        variable = f"DSN_{len(made)}"
        monkeypatch.setenv(variable, dsn or mariadb.dsn)
        sink = MySQLSink[Any](table, dsn=f"env:{variable}", **options)
        assert list(sink.problems(type_)) == []
        made.append(
            MySQLStore(
                table,
                row_fields(type_, sink.mode, sink.key),
                address=sink.address,
                mode=sink.mode,
                key=sink.key,
                create=sink.create,
                with_ledger=sink.delivery == "exactly_once",
                timeout_s=timeout_s,
            )
        )
        return made[-1]

    yield make
    for store in made:
        store.close()
