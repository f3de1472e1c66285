"""A pipeline whose sources have the types of topics; the tasks of Spark import this module."""

from datetime import datetime
from decimal import Decimal
from itertools import count
from typing import Any

import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.errors import Unavailable
from exactlyonce.pipeline.avro import AvroCodec
from exactlyonce.pipeline.codec import Codec
from exactlyonce.sinks import KafkaSink


class Item(msgspec.Struct):
    name: str
    price: Decimal


class Order(msgspec.Struct):
    customer: str
    total: int
    items: list[Item] = []
    at: datetime | None = None


class Refund(msgspec.Struct):
    customer: str
    total: int
    reason: str | None = None


class Strange:
    """A class that no codec of this package knows."""


lookups = count(1)


def number(data: bytes) -> int:
    """A codec's function that meets an outage, or fails, as the value says."""
    if data == b"away" or (data == b"unknown" and next(lookups) % 3):
        raise Unavailable("the registry is away")
    if data == b"broken":
        raise RuntimeError("a defect")
    return int(data)


def shown(record: object) -> str:
    return str(record)


def make(name: str) -> Pipeline:
    pipeline = Pipeline(name)
    sources: tuple[KafkaSource[Any], ...] = (
        KafkaSource.records(f"{name}-orders", value=Order, key=str),
        KafkaSource.records(f"{name}-orders-2", value=Order, key=str),
        KafkaSource(f"{name}-refunds", value=AvroCodec(Refund)),
        KafkaSource(f"{name}-numbers", value=Codec("number", int, encode=lambda n: b"%d" % n, decode=number)),
        KafkaSource(f"{name}-strange", value=Codec[Any]("strange", Strange, encode=bytes, decode=bytes)),
    )
    for place, source in enumerate(sources):
        records = pipeline.source(f"source-{place}", source)
        records.map(shown).sink(f"sink-{place}", KafkaSink(f"{name}-out"))
    refunds = pipeline.source("refunds", KafkaSource(f"{name}-more-refunds", value=Refund))
    by_total = Codec("number", int, encode=lambda n: b"%d" % n, decode=int)
    refunds.sink("totals", KafkaSink(f"{name}-totals", key=lambda refund: refund.total, key_codec=by_total))
    return pipeline
