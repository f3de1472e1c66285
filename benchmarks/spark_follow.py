"""From produced to visible on Spark: `catch-up --follow` of a running total under a small steady load, by one clock.

Feeder, driver, Spark, observer and broker share the machine. The first two chunks, which warm Spark up, are not timed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from bench import Bench
from figures import Figure
from job import Job
from visibility import CUSTOMERS, await_line, script, told

RATE = 500
"""Records a second."""
WARM_UP_RECORDS = 1_000
WARM_UP_S = 10
MASTER = "local[2]"


def scenario(bench: Bench) -> Iterator[Figure]:
    """With small chunks in the driver's process, and with all of them on Spark."""
    yield from follow(bench, "catch-up --follow")
    yield from follow(bench, "catch-up --follow --on spark", "--on", "spark")


def follow(bench: Bench, name: str, *options: str) -> Iterator[Figure]:
    """The two percentiles, and the units' time in a chunk."""
    source, sink = f"orders-{uuid.uuid4().hex[:8]}", f"totals-{uuid.uuid4().hex[:8]}"
    names = {"name": sink, "source": source, "sink": sink}
    bench.cluster.create(source, sink)
    with Job(bench.cluster.servers, "totals", "--until", "latest", **names) as job:
        job.finish()
    following = ("--follow", "--master", MASTER, *options)
    with (
        Job.of("catch-up", bench.cluster.servers, "totals", *following, **names) as job,
        script("observer.py", bench, sink, WARM_UP_S) as observer,
    ):
        await_line(observer)
        for _ in range(2):
            with script("paced.py", bench, source, CUSTOMERS, WARM_UP_RECORDS, 1) as feeder:
                await_line(feeder)
                told(feeder)
            job.next_checkpoint()
        with script("paced.py", bench, source, CUSTOMERS, RATE, bench.size(70, 20)) as feeder:
            await_line(feeder)
            fed = told(feeder)
        job.stop()
        seen = told(observer)
    bench.cluster.delete(source, sink)
    chunks = sorted(event["work_ms"] for event in job.checkpoints)
    timed = f"{seen['records']:,} of {fed['records']:,} records timed"
    latest = f"at most {seen['p100_ms']:,.0f} ms; p99 of the feeder's delays {fed['p99_late_ms']:.0f} ms"
    yield Figure(f"p50 from produce to visible, {name}", seen["p50_ms"], "ms", timed)
    yield Figure(f"p99 from produce to visible, {name}", seen["p99_ms"], "ms", latest)
    yield Figure(f"units of a chunk, {name}", chunks[len(chunks) // 2], "ms", f"{len(chunks)} chunks")
