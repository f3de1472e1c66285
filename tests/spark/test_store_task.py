"""A task of a write to a store whose rows take long to come, on real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType
from targets import Row, Target, rows_of

from exactlyonce.engines.spark.sink.driver import SinkDriver
from exactlyonce.engines.spark.sink.options import parse_sink_options
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.store_task import write_store_task
from exactlyonce.sinks.mysql.prepared import PreparingMySQLStore
from exactlyonce.sinks.postgres.prepared import PreparingPostgresStore
from exactlyonce.sinks.prepared import writer
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker
SCHEMA = StructType().add("id", LongType()).add("customer", StringType()).add("total", LongType())
WAYS: dict[str, tuple[str, Any]] = {
    "prepared": ("postgres", PreparingPostgresStore),
    "xa": ("mariadb", PreparingMySQLStore),
}


@pytest.mark.exhaustive(but=["prepared"])
@pytest.mark.parametrize("commit", WAYS)
def test_rows_that_take_long_to_come(
    commit: str, kafka: KafkaCluster, topic_name: str, servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a task waits for its next rows its writer shows that it lives, so that the store does not end its
    transaction, as it does with that of a dead client."""
    store, class_ = WAYS[commit]
    kept, keep = threading.Event(), class_.keep

    def keeping(self: Any) -> None:
        keep(self)
        kept.set()

    monkeypatch.setattr(class_, "keep", keeping)
    monkeypatch.setattr(writer, "KEEP_INTERVAL_MS", 100)
    monkeypatch.setattr(writer, "CHUNK_SIZE", 1)  # so that the first rows begin a transaction
    target = Target(store, servers, topic_name, tmp_path)
    options = {"sinkId": topic_name, "kafka.bootstrap.servers": kafka.bootstrap_servers, "commit": commit}
    driver = SinkDriver(parse_sink_options({**target.options, **options}, SCHEMA, streaming=False), "a")

    def batches() -> Iterator[pa.RecordBatch]:
        for part in range(2):
            rows = [Row._asdict(each) for each in rows_of(0, part)]
            yield pa.RecordBatch.from_pylist(rows)
            assert kept.wait(LIMIT_S)

    try:
        assignment, job = driver.assign(), Job("a-query", 0)
        flushed = write_store_task(driver.options, assignment, job, 0, False, batches())
        driver.commit(job, [flushed])
    finally:
        driver.close()
    assert target.found() == sorted([*rows_of(0, 0), *rows_of(0, 1)])
