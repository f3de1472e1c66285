"""Fixtures of the PostgreSQL sink's tests: a database for each test, and stores on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def database(database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty database on the server of all tests. A test that kills that starts it again."""
    server = database_server("postgres")
    from postgres_rows import Database

    database = Database(server, monkeypatch, "shared")
    yield database
    database.close()


@pytest.fixture(scope="session")
def vector_server() -> Iterator[Any]:
    """A server with pgvector, started once for all tests of a process."""
    pytest.importorskip("psycopg")
    from vector_server import VectorServer

    server = VectorServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def vectors(vector_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty database with pgvector."""
    from postgres_rows import Database

    database = Database(vector_server, monkeypatch, "shared")
    database.execute("CREATE EXTENSION vector")
    yield database
    database.close()
