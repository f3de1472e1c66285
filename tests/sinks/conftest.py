"""The servers of databases: one of each for all tests of sinks that run in a process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / store / "rig") for store in ("", "postgres", "mysql")]


@pytest.fixture(scope="session")
def database_server() -> Iterator[Callable[[str], Any]]:
    """`database_server("postgres")`, or "mariadb", which is started when it is first asked for."""
    servers: dict[str, Any] = {}

    def started(name: str) -> Any:
        if name in servers:
            return servers[name]
        if name == "postgres":
            pytest.importorskip("psycopg")
            from postgres_server import PostgresServer

            server: Any = PostgresServer()
        else:
            pytest.importorskip("pymysql")
            from mariadb_server import MariaDB, required

            required()
            server = MariaDB()
        server.start()
        servers[name] = server
        return server

    yield started
    for server in servers.values():
        server.remove()


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """`aside(function, ...)` runs it beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit
