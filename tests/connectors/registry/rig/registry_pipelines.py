"""Pipelines that tests run as `exactlyonce run registry_pipelines:...`, with a schema registry."""

from __future__ import annotations

from pipelines import Order as Order
from pipelines import Total, add

from exactlyonce import AvroCodec, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def totals(name: str, registry: str, register: bool = True) -> Pipeline:
    """The running totals of NAME-in, to NAME-out: Avro on both sides, and keys in Avro."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=AvroCodec(Order, registry=registry)))
    summed = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    value = AvroCodec(Total, registry=registry, register=register)
    keys = AvroCodec(str, registry=registry, register=register)
    summed.sink("out", KafkaSink(f"{name}-out", value=value, key=lambda total: total.customer, key_codec=keys))
    return pipeline
