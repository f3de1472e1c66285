"""Readers of the soak's input and outputs, as anybody has them: plain consumers, psycopg, delta-rs and Arrow.

Each looks all the time. What it has seen is remembered as a digest: at the end all is read again, and must be the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import deltalake
import msgspec
import psycopg
import pyarrow.parquet
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from plain_consumer import plain_consumer

LOOK_AGAIN_S = 0.3
COUNT_AGAIN_S = 10.0
OPEN_AGAIN_S = 20.0
"""A consumer that hears nothing for so long is replaced."""
SETTLED_S = 30.0
"""A row of a table is committed so long after it got its number, at most."""
LIMIT_S = 300
MASK = (1 << 64) - 1
Row = tuple[Any, ...]
Rows = list[Row]
Take = Callable[[Rows], None]


class View(threading.Thread):
    """A reader. Its rows go to *take*, in the order in which it sees them."""

    def __init__(self, name: str, take: Take) -> None:
        super().__init__(daemon=True, name=name)
        self._take = take
        self._is_over = threading.Event()
        self._digest = 0
        self.rows = 0
        self.failure = ""

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._look_once()
            self._look_once()
        except Exception as error:  # noted, and judged, where it is waited for
            self.failure = f"{type(error).__name__}: {error}"

    def _look_once(self) -> None:
        raise NotImplementedError

    def _see(self, rows: Rows, places: Rows) -> None:
        """Take new rows; the digest is of rows with their *places*."""
        for row, place in zip(rows, places, strict=True):
            self._digest = (self._digest + hash((row, place))) & MASK
        self.rows += len(rows)
        self._take(rows)

    def end(self) -> None:
        self._is_over.set()
        self.join()

    def difference(self) -> str:
        """What is wrong when all is read again, once it has ended; empty if it is what was seen."""
        if self.failure:
            return self.failure
        count = digest = 0
        for placed in self._everything():
            count, digest = count + 1, (digest + hash(placed)) & MASK
        if (count, digest) == (self.rows, self._digest):
            return ""
        return f"a reader has seen {self.rows} rows, and now finds {count} that are not the same"

    def _everything(self) -> Iterator[tuple[Row, Row]]:
        """All rows with their places, read again."""
        raise NotImplementedError


class TopicView(View):
    """A read_committed consumer of all partitions, also of those that are added."""

    def __init__(self, servers: str, topic: str, fields: tuple[str, ...], take: Take, *, with_partition: bool) -> None:
        """A row has the *fields* of a record's value, after the partition if *with_partition*."""
        super().__init__(topic, take)
        self._servers, self._topic, self._fields, self._with_partition = servers, topic, fields, with_partition
        self._partitions = 0
        self._looked_s = float("-inf")
        self._consumer = _consumer(servers)
        self._error = ""
        self._heard_s = time.monotonic()
        self._positions: dict[int, int] = {}

    def run(self) -> None:
        super().run()
        self._consumer.close()

    def _look_once(self) -> None:
        self._find_partitions()
        messages = self._consumer.consume(2_000, LOOK_AGAIN_S)
        if placed := self._placed(messages, self._positions):
            self._see([row for row, _ in placed], [place for _, place in placed])
        if messages:
            self._heard_s = time.monotonic()
        elif time.monotonic() > self._heard_s + OPEN_AGAIN_S:
            self._open_again()

    def _open_again(self) -> None:
        """Go on with another consumer: after faults of the broker one of librdkafka 2.16 may give nothing any more."""
        self._consumer.close()
        self._consumer, self._heard_s = _consumer(self._servers), time.monotonic()
        self._consumer.assign([
            TopicPartition(self._topic, partition, self._positions.get(partition, OFFSET_BEGINNING))
            for partition in range(self._partitions)
        ])  # fmt: skip

    def _find_partitions(self) -> None:
        if time.monotonic() < self._looked_s + 1:
            return
        self._looked_s = time.monotonic()
        try:
            known = self._consumer.list_topics(self._topic, timeout=10).topics[self._topic].partitions
        except KafkaException:  # the broker is away
            return
        for partition in range(self._partitions, len(known)):
            self._consumer.incremental_assign([TopicPartition(self._topic, partition, OFFSET_BEGINNING)])
        self._partitions = max(len(known), self._partitions)

    def _placed(self, messages: list[Any], positions: dict[int, int]) -> list[tuple[Row, Row]]:
        """Rows with (partition, offset). *positions*: how far each partition is read, also past markers."""
        placed: list[tuple[Row, Row]] = []
        for message in messages:
            partition, offset = message.partition(), message.offset()
            if message.error() is None:
                value = msgspec.json.decode(message.value())
                fields = tuple(value[field] for field in self._fields)
                placed.append(((partition, *fields) if self._with_partition else fields, (partition, offset)))
                positions[partition] = offset + 1
            elif message.error().code() == KafkaError._PARTITION_EOF:
                positions[partition] = offset
            else:
                self._error = str(message.error())
        return placed

    def end(self) -> None:
        """Read to the present end of the topic first."""
        ends, limit = _ends(self._servers, self._topic), time.monotonic() + LIMIT_S
        while self.is_alive() and _unread(ends, self._positions):
            if time.monotonic() > limit:
                self.failure = (
                    f"readers come to {self._positions} of {ends}; the last error was {self._error or 'none'}"
                )
                break
            self._is_over.wait(0.1)
        super().end()

    def _everything(self) -> Iterator[tuple[Row, Row]]:
        ends, limit = _ends(self._servers, self._topic), time.monotonic() + LIMIT_S
        positions: dict[int, int] = {}
        with closing(_consumer(self._servers)) as consumer:
            consumer.assign([TopicPartition(self._topic, partition, OFFSET_BEGINNING) for partition in ends])
            while _unread(ends, positions):
                yield from self._placed(consumer.consume(10_000, 0.3), positions)
                if time.monotonic() > limit:
                    raise AssertionError(f"{self._topic} cannot be read to its end {ends}")


def _unread(ends: Mapping[int, int], positions: Mapping[int, int]) -> bool:
    return any(positions.get(partition, 0) < end for partition, end in ends.items())


def _consumer(servers: str) -> Consumer:
    return plain_consumer(servers, {"enable.partition.eof": True, "reconnect.backoff.max.ms": 500})


def _ends(servers: str, topic: str) -> dict[int, int]:
    with closing(_consumer(servers)) as consumer:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        places = [TopicPartition(topic, partition) for partition in partitions]
        return {place.partition: consumer.get_watermark_offsets(place, 30)[1] for place in places}


class TableView(View):
    """A session that reads the rows by their number, the column `place`."""

    def __init__(self, dsn: str, table: str, columns: str, take: Take) -> None:
        super().__init__(table, take)
        self._dsn, self._table, self._columns = dsn, table, columns
        self._session: psycopg.Connection[Any] | None = None
        self._floor = self._next_floor = 0
        """All rows up to the floor were seen; the next floor is that of `SETTLED_S` ago."""
        self._above: set[int] = set()
        self._floored_s = self._counted_s = time.monotonic()

    def run(self) -> None:
        super().run()
        if self._session is not None:
            self._session.close()

    def _look_once(self) -> None:
        self._is_over.wait(LOOK_AGAIN_S)
        try:
            if self._session is None or self._session.closed:
                self._session = psycopg.connect(self._dsn, autocommit=True, connect_timeout=5, prepare_threshold=None)
            found = self._select(self._floor)
            self._count()
        except psycopg.OperationalError:  # the server is away
            if self._session is not None:
                self._session.close()
            self._is_over.wait(LOOK_AGAIN_S)
            return
        fresh = [row for row in found if row[0] not in self._above]
        if fresh:
            self._see([row[1:] for row in fresh], [row[:1] for row in fresh])
            self._above.update(row[0] for row in fresh)
        if time.monotonic() > self._floored_s + SETTLED_S:
            self._floored_s = time.monotonic()
            self._floor, self._next_floor = self._next_floor, max(self._above, default=self._next_floor)
            self._above = {place for place in self._above if place > self._floor}

    def _select(self, above: int) -> Rows:
        assert self._session is not None
        query = f"SELECT place, {self._columns} FROM {self._table} WHERE place > {above} ORDER BY place"
        return self._session.execute(query.encode()).fetchall()

    def _count(self) -> None:
        assert self._session is not None
        if time.monotonic() > self._counted_s + COUNT_AGAIN_S:
            self._counted_s = time.monotonic()
            ((count,),) = self._session.execute(f"SELECT count(*) FROM {self._table}".encode()).fetchall()
            if count < self.rows:
                raise AssertionError(f"{self.rows} rows were visible, and {count} are now")

    def _everything(self) -> Iterator[tuple[Row, Row]]:
        with psycopg.connect(self._dsn) as session, session.cursor("all") as cursor:
            cursor.itersize = 10_000
            for place, *row in cursor.execute(f"SELECT place, {self._columns} FROM {self._table}".encode()):
                yield tuple(row), (place,)


class LakeView(View):
    """The newest version of a Delta table, by delta-rs; the files that it adds are read by Arrow."""

    def __init__(self, folder: Path, columns: tuple[str, ...], take: Take) -> None:
        super().__init__("lake", take)
        self._folder, self._columns = folder, columns
        self._table: Any = None
        self._files: set[str] = set()

    def _look_once(self) -> None:
        self._is_over.wait(2 * LOOK_AGAIN_S)
        if self._table is None:
            if not (self._folder / "_delta_log").is_dir() or not deltalake.DeltaTable.is_deltatable(str(self._folder)):
                return
            self._table = deltalake.DeltaTable(str(self._folder))
        self._table.update_incremental()
        files = {*self._table.file_uris()}
        if gone := self._files - files:
            raise AssertionError(f"version {self._table.version()} lacks files of versions before: {sorted(gone)[:3]}")
        for file in sorted(files - self._files):
            rows = self._read(file)
            self._see(rows, [()] * len(rows))
        self._files = files

    def _read(self, file: str) -> Rows:
        table = pyarrow.parquet.read_table(file.removeprefix("file://"), columns=[*self._columns])
        return [*zip(*(table.column(name).to_pylist() for name in self._columns), strict=True)]

    def _everything(self) -> Iterator[tuple[Row, Row]]:
        if not deltalake.DeltaTable.is_deltatable(str(self._folder)):
            return
        for file in deltalake.DeltaTable(str(self._folder)).file_uris():
            for row in self._read(file):
                yield row, ()
