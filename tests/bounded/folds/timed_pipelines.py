"""A pipeline whose sink gives the times of its records."""

from pipelines import Order

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
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
