"""Records a second of our engine against the loop by hand, on the same input, in alternating rounds.

Both are whole processes, timed from their first commit to their last, so that start-up does not count. Their outputs
are counted and compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import Bench
from cluster import Digest
from figures import Figure
from job import Event, Failed, Job

HERE = Path(__file__).parent
LIMIT_S = 1800.0


class Result(NamedTuple):
    """One process's run over all of the input."""

    rate: float
    longest_gap_ms: float


def by_hand(bench: Bench, pipeline: str, source: str, sink: str, records: int) -> Result:
    """The loop by hand."""
    command = [sys.executable, "by_hand.py", pipeline, bench.cluster.servers, source, sink, str(records)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise Failed(f"the loop by hand ended with {done.returncode}: {done.stderr}")
    measured = json.loads(done.stdout)
    return Result(measured["rate"], measured["longest_gap_ms"])


def ours(bench: Bench, pipeline: str, source: str, sink: str, records: int) -> Result:
    """Our engine."""
    with Job(bench.cluster.servers, pipeline, "--until", "latest", name=sink, source=source, sink=sink) as job:
        checkpoints = job.finish()
    return Result(rate_of(checkpoints, records), max(event["longest_gap_ms"] for event in checkpoints[1:]))


def rate_of(checkpoints: list[Event], records: int) -> float:
    """Records a second of a job that read *records*, from its first commit to its last."""
    committing = [event for event in checkpoints if event["records_committed"]]
    if len(committing) < 2 or checkpoints[-1]["records_in"] != records:
        raise Failed(f"{records} records are too few for two commits, or were not all read: {checkpoints[-1:]}")
    first, *rest = committing
    committed = sum(event["records_committed"] for event in rest)
    share = committed / (first["records_committed"] + committed)
    return float(records * share / (rest[-1]["at_ms"] - first["at_ms"]) * 1000)


def compare(bench: Bench, pipeline: str, source: str, records: int, rounds: int) -> Iterator[tuple[Result, Result]]:
    """Pairs of (our engine, by hand), which take turns to go first."""
    digests: set[Digest] = set()
    for number in range(rounds):
        results = {}
        for runner in (ours, by_hand) if number % 2 == 0 else (by_hand, ours):
            sink = f"{runner.__name__.replace('_', '-')}-{uuid.uuid4().hex[:8]}"
            bench.cluster.create(sink)
            results[runner] = runner(bench, pipeline, source, sink, records)
            digests.add(bench.cluster.digest(sink))
            bench.cluster.delete(sink)
        a, b = results[ours], results[by_hand]
        bench.say(f"round {number + 1}: {a.rate:,.0f} records/s, by hand {b.rate:,.0f}: {a.rate / b.rate:.2f}")
        yield a, b
    if len(digests) != 1:
        raise Failed(f"the outputs differ: {digests}")


def scenario(bench: Bench, title: str, pipeline: str, records: int, customers: int, rounds: int) -> Iterator[Figure]:
    """One pipeline on one input."""
    source = bench.input(records, customers)
    pairs = list(compare(bench, pipeline, source, records, bench.rounds or rounds))
    rates = f"{median(a.rate for a, _ in pairs):,.0f} against {median(b.rate for _, b in pairs):,.0f} records/s"
    yield Figure(f"{title}, ratio", median(a.rate / b.rate for a, b in pairs), detail=f"{rates}, {len(pairs)} rounds")
    yield Figure(
        f"{title}, longest gap",
        max(a.longest_gap_ms for a, _ in pairs),
        "ms",
        f"by hand {max(b.longest_gap_ms for _, b in pairs):,.0f} ms",
    )


def passing(bench: Bench) -> Iterator[Figure]:
    """Bytes as they are."""
    yield from scenario(bench, "pass-through", "passing", *_few(bench))


def mapping(bench: Bench) -> Iterator[Figure]:
    """A filter and a map."""
    yield from scenario(bench, "map and filter", "mapping", *_few(bench))


def totals(bench: Bench) -> Iterator[Figure]:
    """A running total of few keys."""
    yield from scenario(bench, "running total, 1,000 keys", "totals", *_few(bench))


def many_totals(bench: Bench) -> Iterator[Figure]:
    """A running total of many keys."""
    size = bench.size(5_000_000, 2_000_000), 1_000_000, bench.size(2, 1)
    yield from scenario(bench, "running total, 1,000,000 keys", "totals", *size)


def _few(bench: Bench) -> tuple[int, int, int]:
    """Records, customers, rounds."""
    return bench.size(3_000_000, 1_000_000), 1_000, bench.size(4, 1)
