"""A database whose changes are captured, and readers that may end anywhere."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import psycopg
import pytest
from waiting import until

from exactlyonce import KafkaSink, Pipeline
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors import PostgresChanges
from exactlyonce.connectors.changes import ChangeLog, logs_of
from exactlyonce.connectors.postgres.change_stream import read_lsn
from exactlyonce.connectors.source import ReaderContext
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.errors import Halt, StoreUnavailable
from exactlyonce.pipeline.source import PartSource
from exactlyonce.testing.servers.postgres import PostgresServer


class Account(msgspec.Struct):
    id: int
    owner: str
    amount: int


class ChangingTable(ABC):
    """The table `accounts`, its source, and one reader at a time."""

    source: ChangeLog

    def __init__(self) -> None:
        self.positions: Sequence[SourceOffset] = ()
        self.changes: list[Any] = []
        self.records: list[Any] = []
        """These as read."""
        self._reader: Any = None

    @abstractmethod
    def insert(self, id: int) -> None:
        """Insert a row and commit it."""

    @abstractmethod
    def end_of_log(self) -> Any:
        """How far the server's log is."""

    @abstractmethod
    def is_read_to(self, end: Any) -> bool:
        """Whether the newest positions are at this end of the log, or after it."""

    def find(self) -> Sequence[SourceOffset]:
        """The splits that are there for a leader with the newest positions."""
        finder = self.source.finder(self.source.id)
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
                source=self.source.id, positions=self.positions, targets=None, clients=cast("Any", None)
            )
            self._reader = self.source.open_reader(context)
            self._reader.open()
        return self._reader

    def left_over(self) -> Any:
        """The reader, which is not ended and not used any more."""
        reader, self._reader = self.reader, None
        return reader

    def poll(self, records_max: int = 1000) -> list[Any]:
        """The next changes, which may be none."""
        decoder = self.source.decoder()
        records = self.reader.poll(records_max, 0.0)
        self.records += records
        polled = list(map(decoder.decode, decoder.parts(records)))
        self.positions = self.reader.positions()
        self.changes += polled
        return polled

    def halt(self) -> Halt:
        """The error with which the reader ends, once all that it has read is in a finalized checkpoint."""
        final: Sequence[SourceOffset] = self.positions
        for number in range(1_000_000):
            try:
                self.poll()
            except Halt as error:
                assert [position.cursor for position in final] == [position.cursor for position in self.positions]
                self.end()
                return error
            if number % 50 == 0:
                final = self.positions
                self.reader.finalized(final)
        raise AssertionError("it goes on")

    def read_all(self, records_max: int = 1000) -> list[Any]:
        """What has been committed by now, and was not read."""
        count, end = len(self.changes), self.end_of_log()

        def is_reached() -> bool:
            return not self.poll(records_max) and self.is_read_to(end)

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


class Shop(ChangingTable):
    """In PostgreSQL."""

    def __init__(self, server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.server = server
        self.sql = server.execute
        monkeypatch.setenv("SHOP_DSN", server.dsn())

    def begin(self, columns: str = "id int PRIMARY KEY, owner text, amount int", **options: Any) -> None:
        """Make the table, its publication and its slot."""
        self.sql(f"CREATE TABLE accounts ({columns})")
        self.source = self.described(**options)
        self.source.setup()

    def described(self, **options: Any) -> ChangeLog:
        """The slot of a pipeline of the one table."""
        return self.shared(accounts=self.accounts(**options))

    def accounts(self, table: str = "accounts", **options: Any) -> PostgresChanges[Any]:
        return PostgresChanges(table, **{"dsn": "env:SHOP_DSN", "key": "id", "value": Account, **options})

    def shared(self, **members: PartSource[Any]) -> ChangeLog:
        """The slot of a pipeline of these sources."""
        pipeline = Pipeline("shop")
        for id, source in members.items():
            pipeline.source(id, source).sink(f"{id}-out", KafkaSink(f"{id}-out"))
        (slot,) = logs_of(pipeline.build())
        return slot

    def insert(self, id: int) -> None:
        self.sql("INSERT INTO accounts VALUES (%s, 'ann', 1)", id)

    def end_of_log(self) -> int:
        return read_lsn(self.sql("SELECT pg_current_wal_flush_lsn()::text")[0][0])

    def is_read_to(self, end: int) -> bool:
        return int(self.cursor["lsn"]) >= end

    def session(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.server.dsn())

    def confirmed(self) -> str:
        ((confirmed,),) = self.sql("SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
        return str(confirmed)

    def close(self) -> None:
        self.end()
        self.sql("ALTER SYSTEM RESET ALL")
        self.sql("SELECT pg_reload_conf()")
        self.sql(
            "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE active_pid IS NOT NULL"
        )
        self.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        self.sql("DROP PUBLICATION IF EXISTS exactlyonce_shop")
        self.sql("DROP TABLE IF EXISTS accounts, savings")


def a_left_over_reader_is_ended(shop: ChangingTable) -> None:
    """It does not take the log back."""
    shop.insert(1)
    shop.read_all()
    left_over = shop.left_over()
    assert shop.read_all() == []
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        until(lambda: left_over.poll(10, 0.0))
    left_over.close()
    shop.insert(2)
    assert [change.key for change in shop.read_all()] == [2]


def of_table(changes: Sequence[Any], table: str) -> list[Change[Any]]:
    """The changes of one table among records of a slot of several."""
    return [record for _, record in changes if record.table == table]


def rows_of(changes: Sequence[Change[Any]]) -> dict[Any, Any]:
    """The table that *changes* make of none. Each must fit what was before it."""
    rows: dict[Any, Any] = {}
    for change in changes:
        if change.op == "truncate":
            rows.clear()
        elif change.op in ("read", "insert"):
            assert change.key not in rows, f"{change} comes twice, or a delete before it is missing"
            rows[change.key] = change.after
        else:
            assert change.key in rows, f"{change} has no row before it"
            if change.op == "update":
                rows[change.key] = change.after
            else:
                del rows[change.key]
    return rows
