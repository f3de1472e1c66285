"""Records with the answers of a service, against what the service and the limit of records in flight allow."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator

import msgspec
from bench import Bench
from benchmarked import ANSWER_S, IN_FLIGHT, price
from cluster import Digest
from figures import Figure
from job import Failed, Job
from orders import Order, uniform
from throughput import rate_of

CUSTOMERS = 1_000
BATCHES = (50, 1)
"""Records a call."""


def scenario(bench: Bench) -> Iterator[Figure]:
    """The share with several records a call, and with one."""
    records, possible = bench.size(200_000, 50_000), IN_FLIGHT / ANSWER_S
    source = bench.input(records, CUSTOMERS)
    for batch in BATCHES:
        rate = _rate(bench, source, records, batch)
        name = f"enrich by a service of {ANSWER_S * 1000:.0f} ms, {IN_FLIGHT} records in flight, {batch} a call, ratio"
        yield Figure(name, rate / possible, detail=f"{rate:,.0f} of {possible:,.0f} records/s")


def _rate(bench: Bench, source: str, records: int, batch: int) -> float:
    sink = f"enriched-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    params = {"name": sink, "source": source, "sink": sink, "batch": str(batch)}
    with Job(bench.cluster.servers, "enriched", "--until", "latest", **params) as job:
        checkpoints = job.finish()
    orders = (msgspec.json.decode(value, type=Order) for _, value in uniform(records, CUSTOMERS))
    expected = Digest(records, sum(zlib.crc32(msgspec.json.encode(price(order))) for order in orders))
    if (written := bench.cluster.digest(sink)) != expected:
        raise Failed(f"{records} orders with their answers should be {expected}, not {written}")
    bench.cluster.delete(sink)
    return rate_of(checkpoints, records)
