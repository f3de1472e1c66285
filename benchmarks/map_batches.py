"""Records a second of `map_batches` with a function that returns its batch, against `map` with one that returns its
record, on the same input. The runs take turns, as in `throughput.py`, and their outputs are the same."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from statistics import median

from bench import Bench
from cluster import Digest
from figures import Figure
from job import Failed, Job
from throughput import rate_of

PIPELINES = ("same_batches", "same_records")
CUSTOMERS = 1_000


def scenario(bench: Bench) -> Iterator[Figure]:
    """The median of the ratios."""
    records, ratios, digests = bench.size(3_000_000, 1_000_000), [], set[Digest]()
    source = bench.input(records, CUSTOMERS)
    rates: dict[str, list[float]] = {pipeline: [] for pipeline in PIPELINES}
    for number in range(bench.rounds or bench.size(4, 1)):
        for pipeline in PIPELINES if number % 2 else reversed(PIPELINES):
            sink = f"same-{uuid.uuid4().hex[:8]}"
            bench.cluster.create(sink)
            with Job(bench.cluster.servers, pipeline, "--until", "latest", name=sink, source=source, sink=sink) as job:
                rates[pipeline].append(rate_of(job.finish(), records))
            digests.add(bench.cluster.digest(sink))
            bench.cluster.delete(sink)
        batches, single = (rates[pipeline][-1] for pipeline in PIPELINES)
        ratios.append(batches / single)
        bench.say(f"round {number + 1}: {batches:,.0f} records/s, map {single:,.0f}: {ratios[-1]:.2f}")
    if len(digests) != 1:
        raise Failed(f"the outputs differ: {digests}")
    both = " against ".join(f"{median(rates[pipeline]):,.0f}" for pipeline in PIPELINES)
    yield Figure(
        "map_batches of the same, against map", median(ratios), detail=f"{both} records/s, {len(ratios)} rounds"
    )
