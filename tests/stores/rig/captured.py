"""Pipelines of a table's changes that the tests run as `exactlyonce run captured:...`."""

from __future__ import annotations

from typing import Any

import msgspec

from exactlyonce import Joined, KafkaSink, KafkaSource, Pipeline, Record
from exactlyonce.connectors import MySQLChanges, PostgresChanges, PostgresMessages
from exactlyonce.sinks import DeltaSink, IcebergSink, PostgresSink, RedisSink


class Customer(msgspec.Struct):
    customer: str
    tier: int


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


class Rated(msgspec.Struct):
    id: int
    customer: str
    tier: int | None


def customers(name: str) -> PostgresChanges[Customer]:
    """The changes of the pipeline's table."""
    return PostgresChanges(
        f"customers_{name[-8:]}", dsn="env:CAPTURED_DSN", key="customer", value=Customer, time="timestamp_ms"
    )


def rated(joined: Joined[str, Record[Order], Customer | None]) -> Rated:
    order, row = joined.left.value, joined.right
    return Rated(order.id, order.customer, None if row is None else row.tier)


def joined(name: str, join: str) -> Pipeline:
    """The orders of NAME-in, each with its customer's row, to NAME-out; *join* is lookup or as_of."""
    pipeline = Pipeline(name, max_parallelism=8)
    table = pipeline.table("customers", customers(name))
    read = KafkaSource.records(f"{name}-in", value=Order, time=lambda order: order.timestamp_ms)
    orders = pipeline.source("orders", read)
    keyed = orders.key_by(lambda order: order.value.customer)
    found = keyed.lookup("rated", table) if join == "lookup" else keyed.as_of("rated", table)
    found.map(rated).sink("out", KafkaSink(f"{name}-out"))
    return pipeline


TARGET = "target_of_changes"


def copied(name: str, redis: str = "", lakes: str = "") -> Pipeline:
    """The rows of the table to NAME-out, by their keys; and to a server of Redis, a table of its own database, and
    tables of both lakes in the folder *lakes*. Messages of the log go to NAME-notes."""
    pipeline = Pipeline(name)
    changes = pipeline.source("customers", customers(name))
    notes = pipeline.source("notes", PostgresMessages.records(name, dsn="env:CAPTURED_DSN", value=str))
    notes.sink("notes-out", KafkaSink(f"{name}-notes", create_partitions=1))
    changes.sink("out", KafkaSink(f"{name}-out", create_partitions=3))
    if redis:
        changes.sink("cache", RedisSink(redis, key=lambda change: f"{name}:{change.key}"))
    if lakes:
        upsert: Any = {"mode": "upsert", "key": ("customer",), "create": True}
        catalog = {"type": "sql", "uri": f"sqlite:///{lakes}/catalog.db", "warehouse": f"file://{lakes}"}
        changes.sink("table", PostgresSink(TARGET, dsn="env:CAPTURED_DSN", **upsert))
        changes.sink("iceberg", IcebergSink("shop.customers", catalog=catalog, **upsert))
        changes.sink("delta", DeltaSink(f"{lakes}/delta", **upsert))
    return pipeline


def copied_from_mariadb(name: str) -> Pipeline:
    """The rows of two tables of MariaDB to NAME-out, by their keys."""
    pipeline = Pipeline(name)
    for table in ("customers", "partners"):
        changes: MySQLChanges[Customer] = MySQLChanges(table, dsn="env:CAPTURED_DSN", key="customer", value=Customer)
        pipeline.source(table, changes).sink(f"out-{table}", KafkaSink(f"{name}-{table}", create_partitions=1))
    return pipeline
