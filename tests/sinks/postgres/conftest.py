"""Fixtures of the PostgreSQL sink's tests: a server, a database for each test, and stores on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(folder / "rig") for folder in Path(__file__).parents[:2]]


@pytest.fixture(scope="session")
def running() -> Iterator[Any]:
    """A server that all tests share."""
    from postgres_server import PostgresServer

    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def own_server() -> Iterator[Any]:
    """A server that the test may kill and pause."""
    from postgres_server import PostgresServer

    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def database(running: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty database on the shared server."""
    from postgres_rows import Database

    database = Database(running, monkeypatch, "shared")
    yield database
    database.close()


@pytest.fixture
def own_database(own_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A database on a server that the test may kill and pause."""
    from postgres_rows import Database

    database = Database(own_server, monkeypatch, "own")
    yield database
    database.close()
