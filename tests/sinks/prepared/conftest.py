"""Fixtures of the tests of prepared sinks: each test runs on PostgreSQL and on MariaDB."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SINKS = Path(__file__).parents[1]
sys.path[:0] = [str(SINKS / store / "rig") for store in ("postgres", "mysql", "prepared")]


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, Any]]:
    """Those that were started, by name."""
    servers: dict[str, Any] = {}
    yield servers
    for each in servers.values():
        each.remove()


@pytest.fixture(params=["postgres", "mariadb"])
def preparing(request: pytest.FixtureRequest, _servers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server, empty; see `Preparing`."""
    pytest.importorskip("psycopg")
    pytest.importorskip("pymysql")
    from mariadb_server import MariaDB, required
    from postgres_server import PostgresServer
    from preparing import PreparingMariaDB, PreparingPostgres

    name = request.param
    if name not in _servers:
        if name == "mariadb":
            required()
        server = PostgresServer() if name == "postgres" else MariaDB()
        server.start()
        _servers[name] = server
    made = {"postgres": PreparingPostgres, "mariadb": PreparingMariaDB}[name](_servers[name], monkeypatch)
    yield made
    made.close()
