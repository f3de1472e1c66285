"""A write-ahead sink over SQLite, as a user would write one, and pipelines that write to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import msgspec
from pipelines import Total, copied_and_summed, reading

from exactlyonce import Pipeline
from exactlyonce.pipeline.errors import Fenced, StoreError, StoreUnavailable
from exactlyonce.pipeline.sink import AT_MOST_ONCE, Delivery, StoreDelivery
from exactlyonce.sinks import KafkaSink
from exactlyonce.sinks.ledger import ForeignLedger, LedgerBehind, LedgerEntry
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink

SCHEMA = """
create table if not exists rows (place integer primary key, row text);
create table if not exists ledger (
    pipeline text, sink text, subtask int, checkpoint int, incarnation int, origin text,
    primary key (pipeline, sink, subtask)
)
"""


class SqliteStore:
    """Rows are JSON lines. A file `away` beside the database says that nobody answers, one `refuse` that it refuses."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def _connected(self) -> closing[sqlite3.Connection]:
        if self._path.with_suffix(".away").exists():
            raise StoreUnavailable(f"{self._path.name} is away.")
        return closing(sqlite3.connect(self._path, isolation_level=None, timeout=60))

    def check(self) -> None:
        with self._connected() as database:
            database.executescript(SCHEMA)

    def encoder(self) -> SqliteStore:
        return self

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        return [msgspec.json.encode(record) + b"\n" for record in records]

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        with self._connected() as database:
            database.execute("begin immediate")
            found = {
                subtask: row
                for subtask, *row in database.execute(
                    "select subtask, checkpoint, incarnation, origin from ledger where (pipeline, sink) = (?, ?)",
                    (pipeline, sink),
                )
            }
            if -1 in found and found[-1][2] != origin:
                raise ForeignLedger(found[-1][2])
            if -1 in found and found[-1][1] > incarnation:
                raise Fenced(f"incarnation {found[-1][1]} has taken over")
            database.execute(
                "insert or replace into ledger values (?, ?, -1, 0, ?, ?)", (pipeline, sink, incarnation, origin)
            )
            database.execute("commit")
        return {subtask: checkpoint for subtask, (checkpoint, _, _) in found.items() if subtask >= 0}

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        with self._connected() as database:
            database.execute("begin immediate")
            ledger = "select {} from ledger where (pipeline, sink, subtask) = (?, ?, ?)"
            writer = database.execute(ledger.format("incarnation, origin"), (entry.pipeline, entry.sink, -1)).fetchone()
            newest, origin = writer or (0, "")
            if origin != entry.origin:
                raise ForeignLedger(origin)
            if newest > entry.incarnation:
                raise Fenced(f"incarnation {newest} has taken over")
            found = database.execute(
                ledger.format("checkpoint"), (entry.pipeline, entry.sink, entry.subtask)
            ).fetchone() or (0,)
            if found[0] >= entry.checkpoint:
                return False
            if found[0] < entry.previous:
                raise LedgerBehind(found[0])
            self._insert(database, chunks)
            database.execute(
                "insert or replace into ledger values (?, ?, ?, ?, ?, '')",
                (entry.pipeline, entry.sink, entry.subtask, entry.checkpoint, entry.incarnation),
            )
            database.execute("commit")
        return True

    def _insert(self, database: sqlite3.Connection, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            if self._path.with_suffix(".refuse").exists():
                raise StoreError("the table has no column 'sum'.")
            lines = ((line.decode(),) for line in chunk.splitlines())
            database.executemany("insert into rows (row) values (?)", lines)

    def write(self, chunks: Iterable[bytes]) -> None:
        with self._connected() as database:
            database.execute("begin immediate")
            self._insert(database, chunks)
            database.execute("commit")

    def close(self) -> None:
        """Nothing is open between two calls."""


class SqliteSink(WriteAheadSink[Any]):
    def __init__(self, path: str, delivery: StoreDelivery = "exactly_once", label: str = "") -> None:
        self._path, self.delivery, self._label = path, delivery, label

    def describe(self, type_: Any) -> dict[str, Any]:
        return {"sink": "sqlite", "path": self._path, "label": self._label}

    def store(self, type_: Any) -> SqliteStore:
        return SqliteStore(self._path)


def totals(name: str, database: str, folder: str = "", label: str = "") -> Pipeline:
    """`copied_and_summed`, whose totals go to the database, too. *label* is part of the sink's description."""
    pipeline, sums = copied_and_summed(name, folder)
    sums.sink("rows", SqliteSink(database, label=label))
    return pipeline


def deliveries(name: str, folder: str) -> Pipeline:
    """Topic NAME-in, by every delivery, to a topic and, but at most once, to a database of its own in *folder*."""
    pipeline, orders = reading(name)
    for delivery in get_args(Delivery):
        orders.sink(f"kafka-{delivery}", KafkaSink(f"{name}-{delivery}", delivery=delivery))
    for delivery in get_args(StoreDelivery):
        orders.sink(f"rows-{delivery}", SqliteSink(f"{folder}/{delivery}.db", delivery))
    return pipeline


def changing(name: str, database: str, delivery: Delivery) -> Pipeline:
    pipeline, orders = reading(name)
    orders.sink("out", KafkaSink(f"{name}-out", delivery=delivery))
    orders.sink("rows", SqliteSink(database, "exactly_once" if delivery == AT_MOST_ONCE else delivery))
    return pipeline


def rows_of(database: Path) -> list[Total]:
    with closing(sqlite3.connect(database)) as reader:
        rows = reader.execute("select row from rows order by place")
        return [msgspec.json.decode(row, type=Total) for (row,) in rows]


def assert_rows(database: Path, fed: list[tuple[str, str]]) -> None:
    from running import assert_updates  # workers, which import this module, need none of it

    assert_updates([msgspec.to_builtins(row) for row in rows_of(database)], fed)
