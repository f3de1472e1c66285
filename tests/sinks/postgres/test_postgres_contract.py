"""The PostgreSQL sink keeps the contract of a store: rows are added to a table, or replace each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from contract_part import OF_KEYS, only
from postgres_rows import Database
from table_contract import DSN, OnPostgres

from exactlyonce.testing.servers.postgres import PASSWORD


class OneDatabase:
    """The database of a test as a `table_contract.Server`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.kill, self.start = database.server.kill, database.server.start

    def sql(self, statement: str, values: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        return self._database.execute(statement, *values)


class OnOneDatabase(OnPostgres):
    secret = PASSWORD

    @pytest.fixture(autouse=True)
    def _database(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = OneDatabase(database)
        monkeypatch.setenv(DSN, database.server.dsn(database.name))


class TestAppend(OnOneDatabase):
    """Rows are added."""


@pytest.mark.exhaustive
@only(*OF_KEYS)
class TestUpsert(OnOneDatabase):
    mode = "upsert"
    keyed = True
