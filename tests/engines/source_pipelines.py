"""Pipelines that read no topic, or not only one; tests run them as `exactlyonce run source_pipelines:...`."""

from __future__ import annotations

from pipelines import Order, copied, summed

from exactlyonce import Pipeline
from exactlyonce.connectors import FileSource, GeneratorSource, IterableSource, KafkaSource


def files(name: str, folder: str, watch: str = "", forget: str = "") -> Pipeline:
    """The orders of a folder to NAME-copies and, summed, to NAME-out; small files are read in parts, too."""
    pipeline = Pipeline(name)
    source = FileSource(folder, value=Order, watch=watch or None, forget_removed=bool(forget), split_bytes=1 << 12)
    orders = pipeline.source("orders", source)
    copied(orders, name)
    summed(orders, name)
    return pipeline


def joined(name: str, folder: str) -> Pipeline:
    """The orders of a folder, which end, and those of topic NAME-in, which go on."""
    pipeline = Pipeline(name)
    old = pipeline.source("old", FileSource(folder, value=Order))
    orders = old.union(pipeline.source("new", KafkaSource(f"{name}-in", value=Order)))
    copied(orders, name)
    summed(orders, name)
    return pipeline


def two_of_one(name: str, folder: str) -> Pipeline:
    """The orders and the refunds of one folder to NAME-copies."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", FileSource(folder, value=Order, files="orders-*"))
    refunds = pipeline.source("refunds", FileSource(folder, value=Order, files="refunds-*", name="refunds"))
    copied(orders.union(refunds), name)
    return pipeline


def order_of(number: int) -> Order:
    return Order(number, f"c{number * 7 % 17}", number % 90 + 1)


def generated(name: str, count: str, rate: str = "", splits: str = "1") -> Pipeline:
    pipeline = Pipeline(name)
    source = GeneratorSource(order_of, count=int(count), rate=float(rate) if rate else None, splits=int(splits))
    orders = pipeline.source("orders", source)
    copied(orders, name)
    summed(orders, name)
    return pipeline


def listed(name: str, count: str = "100") -> Pipeline:
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", IterableSource([order_of(number) for number in range(int(count))], value=Order))
    copied(orders, name)
    summed(orders, name)
    return pipeline
