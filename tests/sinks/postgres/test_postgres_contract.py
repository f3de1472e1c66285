"""The PostgreSQL sink keeps the contract of a store: rows are added to a table, or replace each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from postgres_server import PASSWORD

from exactlyonce.sinks import PostgresSink
from exactlyonce.testing.sink_contract import StoreContract


class Counted(msgspec.Struct):
    number: int
    version: int
    note: str = ""


class OnPostgres(StoreContract):
    """What both have in common."""

    type = Counted
    mode = "append"
    awkward = (Counted(1, 2, 'line\nfeed, "quoted" \\ \\N \t é'), Counted(2, -(2**63), ""))
    misfits = (Counted(1, 2**63), Counted(1, 1, "\0"))

    @pytest.fixture(autouse=True)
    def _database(self, database: Any, running: Any) -> None:
        self.database, self.server = database, running
        self.secret = PASSWORD

    def sink(self) -> Any:
        key = ("number",) if self.mode == "upsert" else ()
        return PostgresSink("counted", dsn="env:TOTALS_DSN", mode=self.mode, key=key, create=True)

    def record(self, number: int, version: int = 0) -> Counted:
        return Counted(number, version)

    def read(self) -> list[Any]:
        return [Counted(*row) for row in self.database.execute("SELECT number, version, note FROM counted")]

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            self.server.start()

    def cut(self) -> None:
        self.database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )

    def clean_up(self) -> None:
        self.database.execute("VACUUM FULL")


class TestAppend(OnPostgres):
    """Rows are added."""


class TestUpsert(OnPostgres):
    """A row replaces the one with its key."""

    mode = "upsert"
    keyed = True
