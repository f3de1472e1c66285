"""The total of all orders by customer in a table of PostgreSQL, each order counted exactly once."""

import msgspec

from exactlyonce import KafkaSource, Pipeline
from exactlyonce.sinks import PostgresSink


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


class Total(msgspec.Struct):
    customer: str
    sum: int


def add(total: int | None, order: Order) -> tuple[int, Total]:
    """The new state of the customer, and what is written; a new customer has no state yet."""
    total = (total or 0) + order.total
    return total, Total(order.customer, total)


table = PostgresSink[Total]("order_totals", dsn="env:ORDERS_DSN", mode="upsert", key="customer", create=True)
pipeline = Pipeline("orders-to-postgres")
(
    pipeline
    .source("orders", KafkaSource("orders", value=Order))
    .key_by(lambda order: order.customer)
    .stateful_map("totals", add)
    .sink("table", table)
)  # fmt: skip
