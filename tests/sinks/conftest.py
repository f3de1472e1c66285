"""The servers of databases: one of each for all tests of sinks that run in a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest


@pytest.fixture(scope="session")
def database_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """`database_server("postgres")`, or "mariadb" or "redis", which is started when it is first asked for."""
    servers: dict[str, Any] = {}

    def started(name: str) -> Any:
        if name not in servers:
            servers[name] = {"postgres": postgres, "mariadb": mariadb, "redis": redis}[name]()
        return servers[name]

    def postgres() -> Any:
        pytest.importorskip("psycopg")
        from postgres_server import PostgresServer

        server = PostgresServer()
        server.start()
        return server

    def mariadb() -> Any:
        pytest.importorskip("pymysql")
        from mariadb_server import MariaDB, required

        required()
        server = MariaDB()
        server.start()
        return server

    def redis() -> Any:
        pytest.importorskip("redis")
        from redis_server import RedisServer, skip_without_a_server

        skip_without_a_server()
        return RedisServer(tmp_path_factory.mktemp("redis"))

    yield started
    for server in servers.values():
        server.remove()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of files and folders that this process makes durable, as they come."""
    paths: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noted)
    return paths


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """`aside(function, ...)` runs it beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit
