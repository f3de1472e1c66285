"""Fixtures of the tests of MySQL: the server with an empty database, and stores on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def mariadb(database_server: Callable[[str], Any]) -> Any:
    """The server, with an empty database. A test that kills it starts it again."""
    server = database_server("mariadb")
    server.sql("DROP DATABASE shop")
    server.sql("CREATE DATABASE shop CHARACTER SET utf8mb4", database=None)
    return server


@pytest.fixture
def stores(mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`stores(type_, dsn=..., table="totals", ...)`: a store of the sink with these arguments, closed with the test."""
    from exactlyonce.sinks.mysql.sink import MySQLSink
    from exactlyonce.sinks.mysql.store import MySQLStore

    made: list[MySQLStore] = []

    def make(type_: Any, table: str = "totals", *, dsn: str = "", **options: Any) -> MySQLStore:
        variable = f"DSN_{len(made)}"
        monkeypatch.setenv(variable, dsn or mariadb.dsn)
        sink = MySQLSink[Any](table, dsn=f"env:{variable}", **options)
        assert list(sink.problems(type_)) == []
        made.append(MySQLStore(sink, type_))
        return made[-1]

    yield make
    for store in made:
        store.close()
