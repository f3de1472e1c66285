"""A pipeline whose output goes to Kafka, PostgreSQL, MariaDB, DuckDB, Redis and files; workers import this module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pipelines import Total, add, copied_and_summed, reading

from exactlyonce import Pipeline
from exactlyonce.pipeline.sink import Sink, StoreDelivery
from exactlyonce.pipeline.stream import Stream
from exactlyonce.sinks import DuckDBSink, FileSink, MySQLSink, PostgresSink, RedisSink

POSTGRES, MARIADB, REDIS = "TOGETHER_POSTGRES", "TOGETHER_MARIADB", "TOGETHER_REDIS"
"""The variables that say where the servers are, with passwords."""
FILES = "TOGETHER_FILES"
"""The one that says in which folder the folders of files are, and the files of DuckDB."""


def table(name: str, mode: str) -> str:
    """The table of pipeline *name*, whose own name may be too long for one."""
    return f"t{name[-8:]}_{mode}"


def folder_of(files: str | os.PathLike[str], name: str, format: str) -> Path:
    return Path(files) / f"{name}-{format}"


RAISED = "c7"


def duckdb_file(files: str | os.PathLike[str], name: str) -> Path:
    return Path(files) / f"{name}.duckdb"


def together(name: str, folder: str = "") -> Pipeline:
    """`copied_and_summed`, whose totals go to every store, too."""
    pipeline, sums = copied_and_summed(name, folder, sink="kafka")
    _store(sums, name)
    return pipeline


def raised(name: str, folder: str = "") -> Pipeline:
    """The same, with other totals of customer `RAISED` in the stores."""
    pipeline, sums = copied_and_summed(name, folder, sink="kafka")

    def more(total: Total) -> Total:
        return Total(total.id, total.customer, total.sum + (total.customer == RAISED))

    _store(sums.map(more, id="more"), name)
    return pipeline


def _store(sums: Stream[Total], name: str) -> None:
    for store in ("postgres", "mariadb"):
        sums.sink(f"{store}-append", table_sink(store, table(name, "append")))
        sums.sink(f"{store}-upsert", table_sink(store, table(name, "upsert"), mode="upsert", key=("customer",)))
    duckdb = duckdb_file(os.environ[FILES], name)
    sums.sink("duckdb-append", DuckDBSink(duckdb, table="appended", create=True))
    sums.sink("duckdb-upsert", DuckDBSink(duckdb, table="upserted", mode="upsert", key="customer", create=True))
    formats: tuple[Literal["jsonl", "parquet"], ...] = ("jsonl", "parquet")
    for format in formats:
        sums.sink(f"files-{format}", file_sink(name, format))
    sums.sink("redis-string", RedisSink(f"env:{REDIS}", key=lambda total: f"{name}:{total.customer}"))
    sums.sink("redis-stream", RedisSink(f"env:{REDIS}", key=lambda total: f"{name}:totals", kind="stream"))


def file_sink(name: str, format: Literal["parquet", "jsonl"], **options: Any) -> FileSink[Total]:
    return FileSink(folder_of(os.environ[FILES], name, format), format=format, **options)


def running_totals(name: str) -> tuple[Pipeline, Stream[Total]]:
    pipeline, orders = reading(name)
    return pipeline, orders.key_by(lambda order: order.customer).stateful_map("totals", add)


def weaker(name: str) -> Pipeline:
    delivery: StoreDelivery = "at_least_once"
    pipeline, sums = running_totals(name)
    for store in ("postgres", "mariadb"):
        sums.sink(f"{store}-append", table_sink(store, table(name, "append"), delivery=delivery))
    formats: tuple[Literal["jsonl", "parquet"], ...] = ("jsonl", "parquet")
    for format in formats:
        sums.sink(f"files-{format}", file_sink(name, format, delivery=delivery))
    key = f"{name}:totals"
    sums.sink("redis-stream", RedisSink(f"env:{REDIS}", key=lambda total: key, kind="stream", delivery=delivery))
    return pipeline


def table_sink(store: str, target: str, **options: Any) -> Sink[Total]:
    if store == "postgres":
        return PostgresSink(target, dsn=f"env:{POSTGRES}", **options)
    return MySQLSink(target, dsn=f"env:{MARIADB}", **options)


def alone(name: str, store: str, target: str) -> Pipeline:
    pipeline, sums = running_totals(name)
    sums.sink("rows", table_sink(store, target))
    return pipeline


STORED_FORMATS: tuple[Literal["parquet", "avro", "jsonl"], ...] = ("parquet", "avro", "jsonl")


def filed(name: str, url: str) -> Pipeline:
    """Running totals go to files in S3 or HDFS."""
    pipeline, sums = running_totals(name)
    for format in STORED_FORMATS:
        sums.sink(format, FileSink(f"{url}/{format}", format=format))
    return pipeline
