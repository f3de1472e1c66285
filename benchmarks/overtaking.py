"""Unaligned checkpoints against aligned ones: with back-pressure, and without.

With it, both run after a shuffle that is always full, for a number of checkpoints; without, both process the same input
to its end, and their outputs are compared. They take turns to go first.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from statistics import median

from bench import Bench
from cluster import Digest
from figures import Figure
from job import Event, Failed, Job
from throughput import rate_of

PARALLELISM = 2
INTERVAL_MS = 500
SETTLING = 6
"""Checkpoints until channels are as full as they get."""
ALIGNED: tuple[str, ...] = ()
UNALIGNED = ("--unaligned",)


def scenario(bench: Bench) -> Iterator[Figure]:
    """Checkpoints with back-pressure, and without."""
    yield from under_pressure(bench)
    yield from without_pressure(bench)


def under_pressure(bench: Bench) -> Iterator[Figure]:
    """The time from trigger to finalized, with 1 ms a record after full channels."""
    source, rounds = bench.input(bench.size(1_000_000, 300_000), 1_000), bench.rounds or bench.size(3, 1)
    pairs = []
    for number in range(rounds):
        durations_ms = {}
        for mode in (ALIGNED, UNALIGNED) if number % 2 == 0 else (UNALIGNED, ALIGNED):
            durations_ms[mode] = median(event["duration_ms"] for event in _slow(bench, source, mode))
        pairs.append((durations_ms[ALIGNED], durations_ms[UNALIGNED]))
        bench.say(f"round {number + 1}: aligned {pairs[-1][0]:,.0f} ms, unaligned {pairs[-1][1]:,.0f} ms")
    aligned, unaligned = map(median, zip(*pairs, strict=True))
    detail = f"{aligned:,.0f} ms against {unaligned:,.0f} ms, {rounds} rounds"
    yield Figure("unaligned checkpoints under back-pressure, times sooner", median(a / u for a, u in pairs), "", detail)


def _slow(bench: Bench, source: str, mode: tuple[str, ...]) -> list[Event]:
    """The checkpoints of a job whose channels are full."""
    sink = f"totals-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    arguments = ("--parallelism", str(PARALLELISM), *mode)
    params = {"name": sink, "source": source, "sink": sink}
    with Job(bench.cluster.servers, "slow_totals", *arguments, interval=f"{INTERVAL_MS}ms", **params) as job:
        for _ in range(SETTLING):
            job.next_checkpoint(1)
        checkpoints = [job.next_checkpoint(1) for _ in range(bench.size(12, 5))]
    bench.cluster.delete(sink)
    return checkpoints


def without_pressure(bench: Bench) -> Iterator[Figure]:
    """Records a second of a running total, which is as fast as the source."""
    records, rounds = bench.size(3_000_000, 1_000_000), bench.rounds or bench.size(4, 1)
    source, pairs, digests = bench.input(records, 1_000), [], set[Digest]()
    for number in range(rounds):
        rates = {}
        for mode in (ALIGNED, UNALIGNED) if number % 2 == 0 else (UNALIGNED, ALIGNED):
            sink = f"totals-{uuid.uuid4().hex[:8]}"
            bench.cluster.create(sink)
            arguments = ("--parallelism", str(PARALLELISM), "--until", "latest", *mode)
            with Job(bench.cluster.servers, "totals", *arguments, name=sink, source=source, sink=sink) as job:
                rates[mode] = rate_of(job.finish(), records)
            digests.add(bench.cluster.digest(sink))
            bench.cluster.delete(sink)
        pairs.append((rates[UNALIGNED], rates[ALIGNED]))
        unaligned, aligned = pairs[-1]
        bench.say(f"round {number + 1}: unaligned {unaligned:,.0f} records/s, aligned {aligned:,.0f}")
    if len(digests) != 1:
        raise Failed(f"the outputs differ: {digests}")
    detail = f"{median(u for u, _ in pairs):,.0f} against {median(a for _, a in pairs):,.0f} records/s, {rounds} rounds"
    yield Figure("unaligned checkpoints without back-pressure, ratio", median(u / a for u, a in pairs), "", detail)
