"""Pipelines whose state is read as DataFrames; the tasks of Spark import this module."""

import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    customer: str
    total: int


class Total(msgspec.Struct):
    """A total in euros, and the last two orders."""

    sum: int
    last: list[int]


class TotalToday(msgspec.Struct):
    cents: int
    last: list[int]


def of_whom(order: Order) -> str:
    return order.customer


def add(total: Total | None, order: Order) -> tuple[Total, int]:
    total = total or Total(0, [])
    total = Total(total.sum + order.total, [*total.last, order.total][-2:])
    return total, total.sum


def add_today(total: TotalToday | None, order: Order) -> tuple[TotalToday, int]:
    total = total or TotalToday(0, [])
    total = TotalToday(total.cents + 100 * order.total, [*total.last, order.total][-2:])
    return total, total.cents


def in_cents(total: Total) -> TotalToday:
    return TotalToday(100 * total.sum, total.last)


def count(seen: int | None, order: Order) -> tuple[int, int]:
    return (seen or 0) + 1, 0


def make(name: str, totals: str = "totals", today: bool = False) -> Pipeline:
    """Totals by customer, and a count by the orders' totals. *today*: states have another type."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-orders", value=Order))
    keyed = orders.key_by(of_whom)
    if today:
        summed = keyed.stateful_map(totals, add_today, state_version=2, migrations={1: in_cents})
    else:
        summed = keyed.stateful_map(totals, add)
    summed.sink("out", KafkaSink(f"{name}-totals"))
    orders.key_by(lambda order: order.total).stateful_map("counts", count).sink("more", KafkaSink(f"{name}-counts"))
    return pipeline
