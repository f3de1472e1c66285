"""Pipelines whose sinks give the times, or the partitions, of their records."""

from pipelines import Order

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.delivery import Delivery
from exactlyonce.sinks import KafkaSink

FIRST_MS = 1_600_000_000_000


def timed(name: str, later_ms: int = 0) -> Pipeline:
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order))
    by_id: KafkaSink[Order] = KafkaSink(
        f"{name}-out", key=lambda order: str(order.id), timestamp=lambda order: FIRST_MS + order.id + later_ms
    )
    orders.sink("out", by_id)
    orders.sink("loose", KafkaSink(f"{name}-loose", timestamp=lambda order: FIRST_MS + order.id + later_ms))
    return pipeline


def placed(name: str, shift: int = 0, wrong: int = -1, delivery: Delivery = "exactly_once") -> Pipeline:
    """Each order goes to partition id % 3 of three; with *shift* to one further on, and order *wrong* to none."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order))

    def partition(order: Order) -> int:
        return (order.id + shift) % 3 if order.id != wrong else 3

    keyed: KafkaSink[Order] = KafkaSink(
        f"{name}-out", key=lambda order: str(order.id % 2), partition=partition, create_partitions=3, delivery=delivery
    )
    orders.sink("out", keyed)
    orders.sink("loose", KafkaSink(f"{name}-loose", partition=partition, create_partitions=3, delivery=delivery))
    return pipeline
