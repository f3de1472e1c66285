"""The total of all orders by customer, each order counted exactly once."""

import msgspec

from exactlyonce import KafkaSink, KafkaSource, Pipeline


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


pipeline = Pipeline("order-totals")
(
    pipeline
    .source("orders", KafkaSource("orders", value=Order))
    .filter(lambda order: order.total > 0)
    .key_by(lambda order: order.customer)
    .stateful_map("totals", add)
    .sink("out", KafkaSink("order-totals", key=lambda total: total.customer))
)  # fmt: skip
