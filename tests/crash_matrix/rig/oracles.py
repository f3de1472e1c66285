"""Oracles: conditions that hold after any crash, checked by plain clients and folds that share no code with the engine.

`unreferenced` is the exception: it reads manifests and blocks by the product's readers, to know what refers to a block.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import duckdb_ext
import psycopg
from confluent_kafka import OFFSET_BEGINNING, IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # not in its stubs
from kafka.admin import KafkaAdminClient
from plain_consumer import plain_consumer
from waiting import until

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster
from exactlyonce.testing.servers.postgres import PostgresServer

LOOK_AGAIN_S = 0.4
OPEN = ["Ongoing", "PrepareCommit", "PrepareAbort"]
"""States of transactions that hold readers back."""

Row = tuple[Any, ...]


class Seen(NamedTuple):
    """A record that a reader has seen, in its order; of a topic with its place."""

    place: tuple[int, ...]
    row: Row


class Reader(threading.Thread):
    """Reads a target all the time, as any reader may: what it has once seen never goes, changes or comes again."""

    def __init__(self, where: str, look: Callable[[], Iterable[Seen]], close: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._where, self._look, self._close = where, look, close
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self.seen: dict[tuple[int, ...], Row] = {}

    def run(self) -> None:
        try:
            pause_s = LOOK_AGAIN_S
            while not self._ended.wait(pause_s):
                began = time.monotonic()
                self._note(self._look())
                pause_s = max(LOOK_AGAIN_S, 4 * (time.monotonic() - began))  # others want the processor, too
        except Exception as failure:  # raised where it is waited for
            self._failure = failure
        finally:
            self._close()

    def _note(self, found: Iterable[Seen]) -> None:
        for place, row in found:
            assert self.seen.setdefault(place, row) == row, f"{self._where}: what is at {place} has changed"

    def end(self) -> None:
        self._ended.set()
        self.join()

    def assert_kept(self, now: Mapping[tuple[int, ...], Row]) -> None:
        until(
            lambda: not self.is_alive() or now.keys() <= self.seen.copy().keys(),
            told=lambda: f"{self._where}: its reader has seen {len(self.seen)} of {len(now)}",
        )
        self.end()
        if self._failure is not None:
            raise self._failure
        gone = [place for place, row in self.seen.items() if now.get(place) != row]
        assert not gone, f"{self._where}: {len(gone)} rows were visible and are not any more, {gone[:3]} for one"


class TopicReader:
    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        self._consumer = plain_consumer(servers)
        self._consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for each in range(partitions)])

    def __call__(self) -> Iterable[Seen]:
        for message in self._consumer.consume(1000, timeout=0.1):
            if message.error() is None:  # whoever ends the reader waits until it has seen all
                yield Seen((message.partition() or 0, message.offset() or 0), values(message.value()))

    def close(self) -> None:
        self._consumer.close()


def assert_ledger(postgres: PostgresServer, pipeline: str, decided: Iterable[tuple[str, int, int]]) -> None:
    rows = postgres.execute(
        "SELECT sink, subtask, checkpoint FROM exactlyonce_ledger WHERE pipeline = %s AND subtask >= 0", pipeline
    )
    assert sorted(rows) == sorted(decided), "the ledger of PostgreSQL is that of the decisions"


class TableReader:
    def __init__(self, postgres: PostgresServer, table: str) -> None:
        self._session = psycopg.connect(postgres.dsn("postgres"), autocommit=True)
        self._statement = f"SELECT * FROM {table} ORDER BY place"

    def __call__(self) -> list[Seen]:
        return [Seen((place,), tuple(row)) for place, *row in self._session.execute(self._statement.encode())]

    def close(self) -> None:
        self._session.close()


class LakeReader:
    """A table of a lake as DuckDB reads it, which shares no code with the sinks; a row's place is its id."""

    def __init__(self, folder: Path, lake: str, table: str) -> None:
        self._folder, self._lake, self._table = folder, lake, table
        self._database = duckdb.connect()
        duckdb_ext.init(self._database)

    def __call__(self) -> list[Seen]:
        scan = self._iceberg() if self._lake == "iceberg" else self._delta()
        rows = self._database.execute(f"SELECT * FROM {scan}").fetchall() if scan else []
        return [Seen((row[0],), row) for row in rows]

    def _delta(self) -> str | None:
        table = self._folder / self._table
        return f"delta_scan('{table}')" if [*table.glob("_delta_log/*.json")] else None

    def _iceberg(self) -> str | None:
        """The newest metadata is that which the catalog names."""
        if not (catalog := self._folder / "catalog.db").exists():
            return None
        with closing(sqlite3.connect(catalog)) as database:
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'iceberg_tables'").fetchone():
                return None
            query = "SELECT metadata_location FROM iceberg_tables WHERE table_name = ?"
            row = database.execute(query, (self._table,)).fetchone()
        if row is None:
            return None
        metadata = Path(row[0].removeprefix("file://"))
        version = metadata.name.removesuffix(".metadata.json")
        return f"iceberg_scan('{metadata.parent.parent}', version = '{version}', allow_moved_paths = true)"

    def close(self) -> None:
        self._database.close()


def assert_rows(found: Counter[Row], expected: Counter[Row], where: str) -> None:
    missing, more = expected - found, found - expected
    doubled = {row: times for row, times in more.items() if row in expected}
    foreign = more.keys() - doubled.keys()
    wrong = {"missing": missing, "doubled": doubled, "foreign": foreign}
    told = {name: (len(rows), list(rows)[:3]) for name, rows in wrong.items()}
    assert not any(wrong.values()), f"{where}: how many rows, and some: {told}"


def assert_order(rows: Iterable[Row], partitions: Iterable[Iterable[int]], where: str) -> None:
    """Rows of one customer that come from one partition of the input are in its order.

    A row is the id of an order, its customer, and more; *partitions* are the ids in each.
    """
    places = {id: (number, place) for number, ids in enumerate(partitions) for place, id in enumerate(ids)}
    last: dict[tuple[str, int], int] = {}
    for id, customer, *_ in rows:
        number, place = places[id]
        after = last.get((customer, number), -1)
        assert place > after, f"{where}: order {id} of {customer} comes after a later one of its partition"
        last[customer, number] = place


def values(record: bytes | None) -> Row:
    return tuple(json.loads(record or b"null").values())


def await_no_open_transaction(kafka: KafkaCluster, pipeline: str, topics: Mapping[str, int]) -> None:
    with closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)) as client:
        until(lambda: not _open(client, pipeline), told=lambda: _open(client, pipeline), pause_s=0.1)
    until(lambda: not _held_back(kafka, topics), told=lambda: _held_back(kafka, topics), pause_s=0.1)


def _open(client: KafkaAdminClient, pipeline: str) -> list[str]:
    listed = [each for found in client.list_transactions(state_filters=OPEN).values() for each in found]
    return [each.transactional_id for each in listed if each.transactional_id.startswith(f"eo:{pipeline}:")]


def _held_back(kafka: KafkaCluster, topics: Mapping[str, int]) -> list[str]:
    places = [TopicPartition(topic, each) for topic, partitions in topics.items() for each in range(partitions)]
    latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # it is in no stubs
    admin, ends = kafka.admin(), dict[IsolationLevel, dict[TopicPartition, int]]()
    for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED):
        asked = admin.list_offsets(dict.fromkeys(places, latest), isolation_level=level)
        ends[level] = {place: future.result(LIMIT_S).offset for place, future in asked.items()}
    stable, newest = ends.values()
    return [f"{place.topic}[{place.partition}]" for place in places if stable[place] != newest[place]]
