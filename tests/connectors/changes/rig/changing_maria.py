"""A database of MariaDB whose changes are captured, and readers that may end anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from changing_table import Account
from waiting import until

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.mysql.binlog import covers, read_gtids
from exactlyonce.connectors.mysql.changes import MySQLBinlog, MySQLChanges
from exactlyonce.connectors.source import ReaderContext
from exactlyonce.pipeline.changes import Change
from exactlyonce.testing.servers.mariadb import MariaDB

LOGGING = (
    "--log-bin=bin", "--server-id=1", "--binlog-format=ROW", "--binlog-row-image=FULL", "--binlog-row-metadata=FULL"
)  # fmt: skip


class MariaShop:
    """A table, its source, and one reader at a time."""

    def __init__(self, server: MariaDB, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        monkeypatch.setenv("SHOP_MYSQL", server.dsn)
        self.positions: Sequence[SourceOffset] = ()
        self.changes: list[Change[Any]] = []
        self._reader: Any = None

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

    def find(self) -> Sequence[SourceOffset]:
        """The splits that are there for a leader with the newest positions."""
        finder = self.source.finder("accounts")
        try:
            return finder.find(self.positions)
        finally:
            finder.close()

    @property
    def reader(self) -> Any:
        """The reader at the newest positions."""
        if self._reader is None:
            self.positions = self.positions or self.find()
            context = ReaderContext(
                source="accounts", positions=self.positions, targets=None, clients=cast("Any", None)
            )
            self._reader = self.source.open_reader(context)
            self._reader.open()
        return self._reader

    def poll(self, records_max: int = 1000) -> list[Change[Any]]:
        """The next changes, which may be none."""
        decoder = self.source.decoder()
        polled = list(map(decoder.decode, decoder.parts(self.reader.poll(records_max, 0.0))))
        self.positions = self.reader.positions()
        self.changes += polled
        return polled

    def read_all(self, records_max: int = 1000) -> list[Change[Any]]:
        """What has been committed by now, and was not read."""
        count, end = len(self.changes), read_gtids(self.sql("SELECT @@gtid_binlog_pos")[0][0])

        def is_reached() -> bool:
            return not self.poll(records_max) and covers(read_gtids(self.cursor["gtids"]), end)

        until(lambda: is_reached() and self.reader.quiet(), pause_s=0)
        return self.changes[count:]

    @property
    def cursor(self) -> Any:
        return json.loads(self.positions[0].cursor)

    def end(self) -> None:
        """End the reader, as a killed worker does: what it has fetched is gone."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close(self) -> None:
        self.end()
        self.sql("DROP TABLE IF EXISTS accounts")
