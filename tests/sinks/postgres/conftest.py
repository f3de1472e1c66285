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
