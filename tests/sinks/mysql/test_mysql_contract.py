"""The MySQL sink keeps the contract of a store: rows are added to a table, or replace each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from exactlyonce.sinks import MySQLSink
from exactlyonce.testing.sink_contract import StoreContract


class Counted(msgspec.Struct):
    number: int
    version: int
    note: str = ""


class OnMySQL(StoreContract):
    """What both have in common."""

    type = Counted
    mode = "append"
    awkward = (Counted(1, 2, 'line\nfeed, "quoted" \\ \\N \t é'), Counted(2, -(2**63), ""))
    misfits = (Counted(1, 2**63),)

    @pytest.fixture(autouse=True)
    def _database(self, mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = mariadb
        monkeypatch.setenv("CONTRACT_DSN", mariadb.dsn)

    def sink(self) -> Any:
        key = ("number",) if self.mode == "upsert" else ()
        return MySQLSink("counted", dsn="env:CONTRACT_DSN", mode=self.mode, key=key, create=True)

    def record(self, number: int, version: int = 0) -> Counted:
        return Counted(number, version)

    def read(self) -> list[Any]:
        return [Counted(*row) for row in self.server.sql("SELECT number, version, note FROM counted")]

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            self.server.start()

    def clean_up(self) -> None:
        self.server.sql("OPTIMIZE TABLE counted, exactlyonce_ledger")
        self.server.kill()
        self.server.start()

    def cut(self) -> None:
        shown = "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = DATABASE()"
        for (each,) in self.server.sql(shown):
            self.server.sql(f"KILL {each}")


class TestAppend(OnMySQL):
    """Rows are added."""


class TestUpsert(OnMySQL):
    """A row replaces the one with its key."""

    mode = "upsert"
    keyed = True
