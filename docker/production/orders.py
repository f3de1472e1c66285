"""The pipeline of the examples for production: the total of each customer, in a topic and in a table of PostgreSQL."""

import msgspec

from exactlyonce import DeadLetters, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink, PostgresSink


class Order(msgspec.Struct):
    customer: str
    total: int


class Total(msgspec.Struct):
    customer: str
    sum: int


def add(total: int | None, order: Order) -> tuple[int, Total]:
    total = (total or 0) + order.total
    return total, Total(order.customer, total)


DEAD = DeadLetters("order-totals-dead")
pipeline = Pipeline("order-totals")
totals = (
    pipeline.source("orders", KafkaSource("orders", value=Order, on_error=DEAD))
    .key_by(lambda order: order.customer)
    .stateful_map("totals", add)
)
totals.sink("topic", KafkaSink("order-totals", key=lambda total: total.customer))
totals.sink("table", PostgresSink("order_totals", dsn="env:ORDERS_DSN", mode="upsert", key=("customer",), create=True))
