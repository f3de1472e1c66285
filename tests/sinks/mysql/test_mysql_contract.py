"""The MySQL sink keeps the contract of a store: rows are added to a table, or replace each other."""

from __future__ import annotations

from typing import Any

import pytest
from contract_part import OF_KEYS, only
from table_contract import DSN, OnMySQL


class OnMariaDB(OnMySQL):
    secret = "s3cret-0f-the-writer"

    @pytest.fixture(autouse=True)
    def _database(self, mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = mariadb
        mariadb.sql(f"CREATE OR REPLACE USER writer IDENTIFIED BY '{self.secret}'")
        mariadb.sql("GRANT ALL ON shop.* TO writer")
        monkeypatch.setenv(DSN, mariadb.dsn.replace("root@", f"writer:{self.secret}@"))


class TestAppend(OnMariaDB):
    """Rows are added."""


@pytest.mark.exhaustive
@only(*OF_KEYS)
class TestUpsert(OnMariaDB):
    mode = "upsert"
    keyed = True
