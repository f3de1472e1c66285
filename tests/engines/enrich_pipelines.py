"""Pipelines that ask a service, which the tests run as `exactlyonce run enrich_pipelines:...`."""

from __future__ import annotations

import asyncio
import json
import os

import msgspec

from exactlyonce import DeadLetters, Enriched, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int
    customer: str


class Answered(msgspec.Struct):
    id: int
    customer: str
    number: int


class Busy(Exception):
    pass


async def numbers(orders: list[Order]) -> list[int]:
    """What the service at port SERVICE_PORT says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["SERVICE_PORT"]))
    body = json.dumps([order.id for order in orders]).encode()
    writer.write(b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    answer = await reader.read()
    writer.close()
    head, _, said = answer.partition(b"\r\n\r\n")
    status = head.split()[1]
    if status == b"422":
        raise ValueError("one of the ids is refused")
    if status != b"200":
        raise Busy(status.decode())
    return msgspec.json.decode(said, type=list[int])


def answered(pair: Enriched[Order, int]) -> Answered:
    return Answered(pair.record.id, pair.record.customer, pair.answer)


def newer(last: Answered, this: Answered) -> Answered:
    return Answered(this.id, this.customer, last.number + this.number)


def linear(name: str, timeout: str = "30s", retries: int = 3) -> Pipeline:
    """NAME-in with numbers to NAME-out, their sums by customer to NAME-sums, refused orders to NAME-dead."""
    pipeline = Pipeline(name, max_parallelism=8)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order))
    enriched = orders.enrich(
        "ask", numbers, batch=10, in_flight=40, timeout=timeout, retries=retries, on_error=DeadLetters(f"{name}-dead")
    )
    out = enriched.map(answered)
    out.sink("out", KafkaSink(f"{name}-out", key=lambda order: order.customer))
    sums = out.key_by(lambda order: order.customer).reduce("sum", newer)
    sums.sink("sums", KafkaSink(f"{name}-sums", key=lambda order: order.customer))
    return pipeline
