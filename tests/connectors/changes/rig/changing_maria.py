"""A database of MariaDB whose changes are captured, and readers that may end anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from changing_table import Account, ChangingTable

from exactlyonce.connectors.mysql.binlog import covers, read_gtids
from exactlyonce.connectors.mysql.changes import MySQLBinlog, MySQLChanges
from exactlyonce.testing.servers.mariadb import MariaDB

LOGGING = (
    "--log-bin=bin", "--server-id=1", "--binlog-format=ROW", "--binlog-row-image=FULL", "--binlog-row-metadata=FULL"
)  # fmt: skip


class MariaShop(ChangingTable):
    """In MariaDB."""

    def __init__(self, server: MariaDB, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.server = server
        monkeypatch.setenv("SHOP_MYSQL", server.dsn)

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.server.sql(statement, values)

    def begin(self, columns: str = "id int PRIMARY KEY, owner text, amount int", **options: Any) -> None:
        """Make the table, and describe its source."""
        self.sql(f"CREATE TABLE accounts ({columns})")
        self.source = self.described(**options)

    def described(self, **options: Any) -> MySQLBinlog:
        source = MySQLChanges("accounts", **{"dsn": "env:SHOP_MYSQL", "key": "id", "value": Account, **options})
        assert list(source.problems()) == []
        return source.whole("shop").with_member("accounts", source)

    def insert(self, id: int) -> None:
        self.sql("INSERT INTO accounts VALUES (%s, 'ann', 1)", id)

    def end_of_log(self) -> Any:
        return read_gtids(self.sql("SELECT @@gtid_binlog_pos")[0][0])

    def is_read_to(self, end: Any) -> bool:
        return covers(read_gtids(self.cursor["gtids"]), end)

    def close(self) -> None:
        self.end()
        self.sql("DROP TABLE IF EXISTS accounts")
