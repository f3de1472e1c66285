"""Checkpoints a minute where records leave slowly: after shuffles, and into sinks that are held to a quota.

Each run begins with a backlog that it does not finish; its first checkpoints count, too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from bench import Bench
from cluster import LIMIT_S
from figures import Figure
from job import Failed, Job
from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Wire

SHUFFLES = (1, 2, 3)
COSTS_MS = (1, 50)
"""For each record, after the last shuffle."""
QUOTAS = (50_000, 200_000, 1_000_000)
"""Bytes a second for all clients of the job; its sink writes 1,000 bytes a record."""
OPTIONS = ("--parallelism", "2")


def scenario(bench: Bench) -> Iterator[Figure]:
    """Checkpoints with slow records, and with quotas."""
    source = bench.input(bench.size(1_000_000, 300_000), 1_000)
    rates = {
        f"{shuffles}, {cost_ms} ms": _checkpoints_a_minute(
            bench, bench.size(30, 8), "after_shuffles", source, shuffles=str(shuffles), ms=str(cost_ms)
        )
        for shuffles in bench.some(SHUFFLES)
        for cost_ms in COSTS_MS
    }
    yield _least("checkpoints a minute, slow records after shuffles", rates)
    rates = {}
    for quota in bench.some(QUOTAS):
        client_id = f"quota-{uuid.uuid4().hex[:8]}"
        with _quota(bench, client_id, quota):
            options = ("--kafka", f"client.id={client_id}")
            rates[f"{quota:,} B/s"] = _checkpoints_a_minute(bench, bench.size(90, 15), "padded", source, *options)
    yield _least("checkpoints a minute, sinks with a quota", rates)


def _least(name: str, rates: dict[str, float]) -> Figure:
    return Figure(name, min(rates.values()), "", "; ".join(f"{case}: {rate:.0f}" for case, rate in rates.items()))


def _checkpoints_a_minute(
    bench: Bench, seconds: int, pipeline: str, source: str, *options: str, **params: str
) -> float:
    """The rate over *seconds* from the moment when all workers are ready, or until the first checkpoint if later."""
    sink = f"{pipeline}-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    names = {"name": sink, "source": source, "sink": sink}
    with Job(bench.cluster.servers, pipeline, *OPTIONS, *options, interval="1s", **names, **params) as job:
        for _ in range(2):
            job.next(lambda event: event.get("step") == "restored")
        began = time.monotonic()
        time.sleep(seconds)
        job.next_checkpoint()
        measured_s = time.monotonic() - began
        if restarted := [event["text"] for event in job.events if "restarting" in event.get("text", "")]:
            raise Failed(restarted[0])
        count = len(job.checkpoints)
    bench.cluster.delete(sink)
    bench.say(f"{pipeline} {' '.join((*params.values(), *options))}: {count} checkpoints in {measured_s:.0f} s")
    return 60 * count / measured_s


@contextmanager
def _quota(bench: Bench, client_id: str, bytes_a_second: int) -> Iterator[None]:
    wire = Wire(ClientConfig({"bootstrap.servers": bench.cluster.servers}), timeout_ms=int(LIMIT_S * 1000))
    try:
        _alter(wire, client_id, bytes_a_second, remove=False)
        yield
        _alter(wire, client_id, 0, remove=True)
    finally:
        wire.close()


def _alter(wire: Wire, client_id: str, bytes_a_second: int, *, remove: bool) -> None:
    entry = AlterClientQuotasRequest.EntryData
    entity = [entry.EntityData(entity_type="client-id", entity_name=client_id)]
    change = entry.OpData(key="producer_byte_rate", value=float(bytes_a_second), remove=remove)
    request = AlterClientQuotasRequest(entries=[entry(entity=entity, ops=[change])], validate_only=False)
    for answer in wire.retrying(lambda: wire.ask(request), "Setting a quota").entries:
        if answer.error_code:
            raise Failed(f"the broker sets no quota: {answer.error_message}")
