"""Fixtures of what the stores of tables have in common: each test runs on PostgreSQL and on MariaDB."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SINKS = Path(__file__).parents[1]
sys.path[:0] = [str(SINKS / store / "rig") for store in ("", "postgres", "mysql", "tables")]


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, Any]]:
    """Those that were started, by name."""
    servers: dict[str, Any] = {}
    yield servers
    for each in servers.values():
        each.remove()


@pytest.fixture(params=["postgres", "mariadb"])
def tables(request: pytest.FixtureRequest, _servers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server with an empty database, and stores on it; see `Tables`."""
    pytest.importorskip("psycopg")
    pytest.importorskip("pymysql")
    from mariadb_server import MariaDB, required
    from postgres_server import PostgresServer
    from table_stores import MariaDBTables, PostgresTables

    if request.param not in _servers:
        if request.param == "mariadb":
            required()
        server = PostgresServer() if request.param == "postgres" else MariaDB()
        server.start()
        _servers[request.param] = server
    made = {"postgres": PostgresTables, "mariadb": MariaDBTables}[request.param](_servers[request.param], monkeypatch)
    yield made
    made.close()


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """`aside(function, ...)` runs it beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit
