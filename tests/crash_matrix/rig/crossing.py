"""The pipelines of the crash matrix; every worker imports this module.

Rows say which order they come of and what the total was after it, so that a fold of the input tells what they must be.
"""

from __future__ import annotations

from typing import Any

import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink, PostgresSink

DSN = "CRASH_MATRIX_DSN"
"""The variable that says where PostgreSQL is."""
SHAPES = ("chain", "diamond")
SINKS = ("kafka", "postgres", "both")


class Order(msgspec.Struct):
    """Unique by `id`."""

    id: int
    customer: str
    total: int


class Total(msgspec.Struct):
    """The running total of a customer after order `id`."""

    id: int
    customer: str
    sum: int


def table(name: str, content: str) -> str:
    """Where rows of *content* go: "totals" or "copies"."""
    return f"{name}_{content}".replace("-", "_")


def crossing(name: str, shape: str, sinks: str, commit: str = "write_ahead") -> Pipeline:
    """Topic NAME-in through a running total to the *sinks*; as a diamond united with NAME-more, and every order copied
    past the totals."""
    pipeline = Pipeline(name)
    orders = pipeline.source("left", KafkaSource(f"{name}-in", value=Order))
    if shape == "diamond":
        orders = orders.union(pipeline.source("right", KafkaSource(f"{name}-more", value=Order)))
        _sink(orders, name, "copies", sinks, commit)
    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    _sink(totals, name, "totals", sinks, commit)
    return pipeline


def add(total: int | None, order: Order) -> tuple[int, Total]:
    """The running total."""
    total = (total or 0) + order.total
    return total, Total(order.id, order.customer, total)


def _sink(stream: Any, name: str, content: str, sinks: str, commit: str) -> None:
    if sinks in ("kafka", "both"):
        stream.sink(f"{content}-kafka", KafkaSink(f"{name}-{content}", key=lambda row: row.customer))
    if sinks in ("postgres", "both"):
        target: PostgresSink[Any] = PostgresSink(table(name, content), dsn=f"env:{DSN}", mode="append", commit=commit)
        stream.sink(f"{content}-postgres", target)
