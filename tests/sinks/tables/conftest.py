"""Fixtures of what the stores of tables have in common: each test runs on PostgreSQL and on MariaDB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(params=["postgres", "mariadb"])
def tables(
    request: pytest.FixtureRequest, database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A server with an empty database, and stores on it; see `Tables`."""
    for driver in ("psycopg", "pymysql"):
        pytest.importorskip(driver)
    from table_stores import MariaDBTables, PostgresTables

    kind = {"postgres": PostgresTables, "mariadb": MariaDBTables}[request.param]
    tables = kind(database_server(request.param), monkeypatch)
    yield tables
    tables.close()
