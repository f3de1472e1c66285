"""The pipelines of the crash matrix; every worker imports this module.

Each row names its order and the total after it, so that a fold of the input gives the expected rows.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from exactlyonce import Pipeline, Stream
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink, PostgresSink

DSN = "CRASH_MATRIX_DSN"
"""The variable that says where PostgreSQL is."""
SLOW = "CRASH_MATRIX_SLOW_S"
"""The variable that says how long a record takes behind the shuffle; without it, no longer than it must."""
SLOW_S = float(os.environ.get(SLOW, "0"))
SHAPES = ("chain", "diamond", "cycle")
SINKS = ("kafka", "postgres", "both")


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


class Round(msgspec.Struct):
    """An order that has gone round so many times; its total once it goes round no more."""

    order: Order
    rounds: int = 0
    sum: int | None = None


class Total(msgspec.Struct):
    id: int
    customer: str
    sum: int


def table(name: str, content: str) -> str:
    return f"{name}_{content}".replace("-", "_")


def crossing(name: str, shape: str, sinks: str) -> Pipeline:
    """Topic NAME-in through a running total to the *sinks*; as a diamond united with NAME-more, and every order copied
    past the totals; as a cycle, orders go round up to three times before they are added."""
    pipeline = Pipeline(name)
    orders = pipeline.source("left", KafkaSource(f"{name}-in", value=Order))
    if shape == "diamond":
        orders = orders.union(pipeline.source("right", KafkaSource(f"{name}-more", value=Order)))
        _sink(orders, name, "copies", sinks)
    if shape == "cycle":
        totals = _added_after_rounds(pipeline, orders)
    else:
        totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    _sink(totals, name, "totals", sinks)
    return pipeline


def add(total: int | None, order: Order) -> tuple[int, Total]:
    if SLOW_S:
        time.sleep(SLOW_S)
    total = (total or 0) + order.total
    return total, Total(order.id, order.customer, total)


def _added_after_rounds(pipeline: Pipeline, orders: Stream[Order]) -> Stream[Total]:
    loop = pipeline.feedback("rounds", Round, pause="1s")
    rounds = orders.map(Round).union(loop).key_by(lambda each: each.order.customer).stateful_map("totals", add_at_last)
    rounds.filter(lambda each: each.sum is None).feed(loop)
    return rounds.filter(lambda each: each.sum is not None).map(as_total)


def add_at_last(total: int | None, each: Round) -> tuple[int | None, Round]:
    if each.rounds < each.order.id % 4:
        return total, Round(each.order, each.rounds + 1)
    total = (total or 0) + each.order.total
    return total, Round(each.order, each.rounds, total)


def as_total(each: Round) -> Total:
    return Total(each.order.id, each.order.customer, each.sum or 0)


def _sink(stream: Any, name: str, content: str, sinks: str) -> None:
    if sinks in ("kafka", "both"):
        stream.sink(f"{content}-kafka", KafkaSink(f"{name}-{content}", key=lambda row: row.customer))
    if sinks in ("postgres", "both"):
        target: PostgresSink[Any] = PostgresSink(table(name, content), dsn=f"env:{DSN}", mode="append")
        stream.sink(f"{content}-postgres", target)
