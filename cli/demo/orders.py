"""The pipeline of `exactlyonce demo`: the number and the sum of the orders of each customer.

Each order gives one update with a running number, so that the output shows which order was missed or counted twice.
"""

import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    customer: str
    total: int
    """Cents."""


class Totals(msgspec.Struct, frozen=True):
    orders: int = 0
    sum: int = 0


class Update(msgspec.Struct):
    customer: str
    totals: Totals


def add(totals: Totals | None, order: Order) -> tuple[Totals, Update]:
    before = totals or Totals()
    after = Totals(before.orders + 1, before.sum + order.total)
    return after, Update(order.customer, after)


def pipeline(name: str) -> Pipeline:
    """From the topic NAME-orders to the topic NAME-totals."""
    made = Pipeline(name)
    (
        made.source("orders", KafkaSource(f"{name}-orders", value=Order))
        .key_by(lambda order: order.customer)
        .stateful_map("totals", add)
        .sink("updates", KafkaSink(f"{name}-totals", key=lambda update: update.customer))
    )
    return made
