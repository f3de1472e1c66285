"""A pipeline whose sinks give the times and the partitions of their records."""

from pipelines import Order

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.sink import Delivery
from exactlyonce.sinks import KafkaSink

FIRST_MS = 1_600_000_000_000


def placed(
    name: str, shift: int = 0, wrong: int = -1, later_ms: int = 0, delivery: Delivery = "exactly_once"
) -> Pipeline:
    """Each order goes to partition id % 3 of three; with *shift* to one further on, and order *wrong* to none."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order))

    def partition(order: Order) -> int:
        return (order.id + shift) % 3 if order.id != wrong else 3

    def timestamp(order: Order) -> int:
        return FIRST_MS + order.id + later_ms

    keyed: KafkaSink[Order] = KafkaSink(
        f"{name}-out", key=lambda order: str(order.id % 2), partition=partition, timestamp=timestamp,
        create_partitions=3, delivery=delivery,
    )  # fmt: skip
    orders.sink("out", keyed)
    loose: KafkaSink[Order] = KafkaSink(
        f"{name}-loose", partition=partition, timestamp=timestamp, create_partitions=3, delivery=delivery
    )
    orders.sink("loose", loose)
    return pipeline
