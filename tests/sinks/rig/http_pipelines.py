"""Pipelines that send orders to a service over HTTP; every worker imports this module."""

from __future__ import annotations

import msgspec

from exactlyonce import DeadLetters, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import HttpSink


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


def customer(order: Order) -> str:
    return order.customer


def hooked(name: str, batch: int = 1, dead: str = "yes", in_flight: int = 8) -> Pipeline:
    """Orders of topic NAME-in, to the service at HOOK_URL; refused ones to NAME-dead."""
    pipeline = Pipeline(name)
    sink: HttpSink[Order] = HttpSink(
        "env:HOOK_URL", key=customer, headers={"Authorization": "env:HOOK_TOKEN"}, batch=int(batch),
        in_flight=int(in_flight),
    )  # fmt: skip
    target = DeadLetters(f"{name}-dead") if dead == "yes" else None
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order))
    orders.sink("hook", sink, on_error=target)
    return pipeline
