"""The running total in Avro and in Protobuf with a schema registry, against JSON by msgspec, on the same orders.

The registry is EXACTLYONCE_REGISTRY of the environment. The runs take turns, as in `throughput.py`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import msgspec
from bench import Bench
from benchmarked import avro_of
from figures import Figure
from job import Failed, Job
from orders import Order, uniform
from throughput import rate_of

from exactlyonce import ProtobufCodec
from exactlyonce.connectors.registry import opened

PIPELINES = {"json": "totals", "avro": "avro_totals", "protobuf": "protobuf_totals"}
CUSTOMERS = 1_000


def scenario(bench: Bench) -> Iterator[Figure]:
    """Rates of each format, as ratios."""
    registry = os.environ.get("EXACTLYONCE_REGISTRY", "")
    if not registry:
        raise Failed("There is no schema registry to measure with: set EXACTLYONCE_REGISTRY to its URL.")
    records = bench.size(2_000_000, 300_000)
    topics = {"json": bench.input(records, CUSTOMERS)}
    for format in ("avro", "protobuf"):
        topics[format] = f"orders-{format}-{uuid.uuid4().hex[:8]}"
        bench.cluster.create(topics[format])
        encode = _encoder(format, topics[format], registry)
        bench.cluster.feed(topics[format], ((key, encode(order)) for key, order in _orders(records)))
    rates: dict[str, list[float]] = {format: [] for format in PIPELINES}
    for number in range(bench.rounds or bench.size(4, 1)):
        for format in PIPELINES if number % 2 == 0 else reversed(PIPELINES):
            rates[format].append(_rate(bench, format, topics[format], registry, records))
        bench.say(f"round {number + 1}: " + ", ".join(f"{name} {of[-1]:,.0f} records/s" for name, of in rates.items()))
    for format in ("avro", "protobuf"):
        ratios = [rate / json for rate, json in zip(rates[format], rates["json"], strict=True)]
        detail = f"{median(rates[format]):,.0f} against {median(rates['json']):,.0f} records/s, {len(ratios)} rounds"
        yield Figure(f"running total in {format} with a registry, against JSON", median(ratios), detail=detail)


def _orders(records: int) -> Iterator[tuple[bytes, Order]]:
    decode = msgspec.json.Decoder(Order).decode
    for key, value in uniform(records, CUSTOMERS):
        yield key, decode(value)


def _encoder(format: str, topic: str, registry: str) -> Callable[[Order], bytes]:
    """Encodes an order for *topic*."""
    if format == "avro":
        return opened(avro_of(Order, registry), topic, "value").encode
    from messages import OrderMessage

    codec: Any = opened(ProtobufCodec(OrderMessage, registry=registry, register=True), topic, "value")
    return lambda order: bytes(codec.encode(OrderMessage(**msgspec.structs.asdict(order))))


def _rate(bench: Bench, format: str, source: str, registry: str, records: int) -> float:
    sink = f"totals-{format}-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    params = {} if format == "json" else {"registry": registry}
    pipeline = PIPELINES[format]
    with Job(
        bench.cluster.servers, pipeline, "--until", "latest", name=sink, source=source, sink=sink, **params
    ) as job:
        rate = rate_of(job.finish(), records)
    bench.cluster.delete(sink)
    return rate
