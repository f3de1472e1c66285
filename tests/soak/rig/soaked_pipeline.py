"""The pipeline of the soak: windows, a join and a running total of orders, to Kafka, PostgreSQL and a Delta table."""

from __future__ import annotations

import msgspec

from exactlyonce import Count, EventTime, Joined, Output, Pipeline, Sum, Tumbling, Windowed
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import DeltaSink, KafkaSink, PostgresSink


class Order(msgspec.Struct):
    id: int
    user: str
    at: int
    cents: int


class Payment(msgspec.Struct):
    id: int
    order: int
    at: int


class Total(msgspec.Struct):
    """An order, and the cents of its user with it."""

    id: int
    user: str
    cents: int


class Pair(msgspec.Struct):
    """An order and a payment of it, or None."""

    order: int
    payment: int | None


class Counts(msgspec.Struct):
    n: int
    cents: int


class Window(msgspec.Struct):
    user: str
    start: int
    """ms since 1970."""
    n: int
    cents: int


def add(total: int | None, order: Order) -> tuple[int, Total]:
    total = (total or 0) + order.cents
    return total, Total(order.id, order.user, total)


def paired(joined: Joined[int, Order, Payment | None]) -> Pair:
    return Pair(joined.left.id, joined.right.id if joined.right is not None else None)


def counted(window: Windowed[str, Counts]) -> Window:
    start_ms = round(window.start.timestamp() * 1000)
    return Window(window.key, start_ms, window.value.n, window.value.cents)


def soaked(name: str, lake: str) -> Pipeline:
    """The orders of NAME-orders and the payments of NAME-payments. *lake*: the folder of the Delta table."""
    pipeline = Pipeline(name, max_parallelism=12)
    time = EventTime("at", disorder="2s", idle=None, ahead=None)
    orders = pipeline.source("orders", KafkaSource(f"{name}-orders", value=Order, time=time))
    payments = pipeline.source("payments", KafkaSource(f"{name}-payments", value=Payment, time=time))
    by_user = orders.key_by(lambda order: order.user)

    late = Output("late", Order)
    counts = by_user.window(Tumbling("10s")).aggregate("counts", Counts, n=Count(), cents=Sum("cents"), late=late)
    counts.map(counted).sink("windows", KafkaSink(f"{name}-windows", key=lambda window: window.user))
    counts.side(late).sink("late", KafkaSink(f"{name}-late", key=lambda order: order.user))

    late_left, late_right = Output("late-left", Order), Output("late-right", Payment)
    joined = orders.key_by(lambda order: order.id).join(
        "joined", payments.key_by(lambda payment: payment.order), within=("-1s", "3s"), how="left",
        late=late_left, late_right=late_right,
    )  # fmt: skip
    pairs = joined.map(paired, id="as-pairs")
    pairs.sink("pairs", KafkaSink(f"{name}-pairs"))
    pairs.sink("pair-rows", PostgresSink("pairs", dsn="env:SOAK_DSN"))
    joined.side(late_left).sink("late-left", KafkaSink(f"{name}-late-left"))
    joined.side(late_right).sink("late-right", KafkaSink(f"{name}-late-right"))

    totals = by_user.stateful_map("running-totals", add)
    totals.sink("totals", PostgresSink("totals", dsn="env:SOAK_DSN"))
    orders.sink("lake", DeltaSink(lake, create=True))
    return pipeline
