"""Pipelines that read no topic, or not only one; tests run them as `exactlyonce run source_pipelines:...`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines import Order, copied, summed

from exactlyonce import DeadLetters, Pipeline, Stream
from exactlyonce.connectors import (
    FileSource,
    GeneratorSource,
    IterableSource,
    KafkaSource,
    MySQLTableSource,
    PostgresTableSource,
)
from exactlyonce.sinks import KafkaSink


def written(pipeline: Pipeline, orders: Stream[Order], name: str) -> Pipeline:
    copied(orders, name)
    summed(orders, name)
    return pipeline


def files(name: str, folder: str, watch: str = "", forget: str = "", format: Any = "jsonl") -> Pipeline:
    """The orders of a folder to NAME-copies and, summed, to NAME-out; small files are read in parts, too."""
    pipeline = Pipeline(name)
    source = FileSource(
        folder, value=Order, format=format, watch=watch or None, forget_removed=bool(forget), split_bytes=1 << 12
    )
    orders = pipeline.source("orders", source)
    return written(pipeline, orders, name)


def patterned(name: str, dead: str = "", out: str = "") -> Pipeline:
    """The orders of all topics NAME-in-... to NAME-copies, or NAME-OUT, and, summed, to NAME-out."""
    pipeline = Pipeline(name)
    on_error: Any = DeadLetters(f"{name}-dead") if dead else "fail"
    orders = pipeline.source("orders", KafkaSource(pattern=f"{name}-in-.*", value=Order, on_error=on_error))
    if out:
        orders.sink("copies", KafkaSink(f"{name}-{out}", key=lambda order: str(order.id)))
    else:
        copied(orders, name)
    summed(orders, name)
    return pipeline


def files_checked(name: str, folder: str) -> Pipeline:
    """The orders of a folder to NAME-copies, by a function behind a shuffle that refuses order 3."""

    def check(count: int | None, order: Order) -> tuple[int, Order]:
        if order.id == 3:
            raise ValueError("order 3")
        return 0, order

    pipeline = Pipeline(name)
    orders = pipeline.source("orders", FileSource(folder, value=Order))
    copied(orders.key_by(lambda order: order.customer).stateful_map("check", check), name)
    return pipeline


def joined(name: str, folder: str) -> Pipeline:
    """The orders of a folder, which end, and those of topic NAME-in, which go on."""
    pipeline = Pipeline(name)
    old = pipeline.source("old", FileSource(folder, value=Order))
    orders = old.union(pipeline.source("new", KafkaSource(f"{name}-in", value=Order)))
    return written(pipeline, orders, name)


def two_of_one(name: str, folder: str) -> Pipeline:
    """The orders and the refunds of one folder to NAME-copies."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", FileSource(folder, value=Order, files="orders-*"))
    refunds = pipeline.source("refunds", FileSource(folder, value=Order, files="refunds-*", name="refunds"))
    copied(orders.union(refunds), name)
    return pipeline


def order_of(number: int) -> Order:
    return Order(number, f"c{number * 7 % 17}", number % 90 + 1)


def generated(name: str, count: str = "", rate: str = "", splits: str = "1") -> Pipeline:
    pipeline = Pipeline(name)
    source = GeneratorSource(
        order_of, count=int(count) if count else None, rate=float(rate) if rate else None, splits=int(splits)
    )
    orders = pipeline.source("orders", source)
    return written(pipeline, orders, name)


def listed(name: str, count: str = "100") -> Pipeline:
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", IterableSource([order_of(number) for number in range(int(count))], value=Order))
    return written(pipeline, orders, name)


def table(name: str, kind: str, folder: str, one: str = "") -> Pipeline:
    """The orders of table `orders`, slowly until *folder* has a file `open`."""
    pipeline = Pipeline(name)
    kinds: dict[str, Any] = {"postgres": PostgresTableSource, "mariadb": MySQLTableSource}
    source = kinds[kind]("orders", dsn="env:SHOP_DSN", key="id", value=Order, one_snapshot=bool(one))
    orders: Stream[Order] = pipeline.source("orders", source).map(_slow_until(Path(folder) / "open"), id="slow")
    return written(pipeline, orders, name)


def _slow_until(opened: Path) -> Callable[[Order], Order]:
    def slow(order: Order) -> Order:
        if not opened.exists():
            time.sleep(0.003)
        return order

    return slow


def table_and_topic(name: str) -> Pipeline:
    """The orders of table `orders`, which end, and those of topic NAME-in, which go on."""
    pipeline = Pipeline(name)
    table = PostgresTableSource[Order]("orders", dsn="env:SHOP_DSN", key="id", value=Order)
    old = pipeline.source("old", table)
    orders = old.union(pipeline.source("new", KafkaSource(f"{name}-in", value=Order)))
    return written(pipeline, orders, name)
