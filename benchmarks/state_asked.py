"""State asked by key: requests that a run answers at half load, what 1,000 a second cost it, and the first key of a
large state, asked without the run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench import Bench
from figures import Figure
from job import Failed, Job
from large_state import MANY, large
from throughput import rate_of
from visibility import await_line, script, told

from exactlyonce.connectors.embedded.broker import HOST, free_port
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.views import StateReader

HERE = Path(__file__).parent
CUSTOMERS = 1_000
HALF_LOAD = 60_000
"""Records a second."""
SAMPLED = 50_000
MAX_PARALLELISM = 128
PACE = 1_000
"""Requests a second of who asks all the time."""


def scenario(bench: Bench) -> Iterator[Figure]:
    """Beside a run; then a large state."""
    yield from _answers(bench)
    yield _cost(bench)
    yield from _alone(bench)


def _asking(address: str, rate: float, seconds: float, stderr: int | None = None) -> subprocess.Popen[str]:
    path = "/state/totals/c"
    line = [sys.executable, "asking.py", address, path, str(CUSTOMERS), str(rate), str(seconds)]
    return subprocess.Popen(line, cwd=HERE, stdout=subprocess.PIPE, stderr=stderr, text=True)


def _asked(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise Failed("a request was not answered")
    found: dict[str, Any] = json.loads(output)
    return found


def _answers(bench: Bench) -> Iterator[Figure]:
    source, sink, address = f"orders-{uuid.uuid4().hex[:8]}", f"asked-{uuid.uuid4().hex[:8]}", f"{HOST}:{free_port()}"
    bench.cluster.create(source, sink)
    with (
        Job(bench.cluster.servers, "totals", "--serve", address, name=sink, source=source, sink=sink) as job,
        script("paced.py", bench, source, CUSTOMERS, HALF_LOAD, bench.size(20, 8)) as feeder,
    ):
        await_line(feeder)
        job.next_checkpoint(10 * CUSTOMERS)
        asked = _asked(_asking(address, float("inf"), bench.size(15, 5)))
        told(feeder)
        job.stop()
    bench.cluster.delete(source, sink)
    detail = f"{asked['answers']:,} answers beside {HALF_LOAD:,} records/s, p50 {asked['p50_ms']:.1f} ms"
    yield Figure("answers of --serve a second, beside a run at half load", asked["per_s"], "", detail)
    yield Figure("p99 of them", asked["p99_ms"], "ms", detail)


def _cost(bench: Bench) -> Figure:
    records, rounds = bench.size(3_000_000, 1_000_000), bench.rounds or bench.size(4, 1)
    source, ratios = bench.input(records, CUSTOMERS), []
    for number in range(rounds):
        rates = {}
        for served in (False, True) if number % 2 else (True, False):
            sink, address = f"served-{uuid.uuid4().hex[:8]}", f"{HOST}:{free_port()}"
            bench.cluster.create(sink)
            options = ("--until", "latest", *(("--serve", address) if served else ()))
            with Job(bench.cluster.servers, "totals", *options, name=sink, source=source, sink=sink) as job:
                job.next_checkpoint(1)
                asking = _asking(address, PACE, 600, subprocess.DEVNULL) if served else None  # the run ends before
                rates[served] = rate_of(job.finish(), records)
                if asking is not None:
                    asking.kill()
                    asking.wait()
            bench.cluster.delete(sink)
        ratios.append(rates[True] / rates[False])
        bench.say(f"round {number + 1}: {rates[True]:,.0f} records/s asked, {rates[False]:,.0f} not: {ratios[-1]:.3f}")
    return Figure(
        "running total with --serve, asked 1,000 times a second, ratio", median(ratios), "", f"{rounds} rounds"
    )


def _alone(bench: Bench) -> Iterator[Figure]:
    """From the checkpoint topic, by a process that did not run the pipeline."""
    keys = bench.size(MANY, 500_000)
    with large(bench, keys) as state:
        state.load(None)
        groups = defaultdict[int, list[str]](list)
        for number in range(0, keys, max(1, keys // SAMPLED)):
            groups[key_group(canonical_key(key := f"c{number:07d}"), MAX_PARALLELISM)].append(key)
        first, *others = groups[0]
        with StateReader(state.sink, bootstrap_servers=bench.cluster.servers) as reader:
            first_s = _took_s(reader, first)
            others_s = sorted(_took_s(reader, key) for key in others)
    yield Figure(f"first key of {keys:,}, asked of the topic alone", first_s, "s")
    slowest_ms = 1000 * others_s[len(others_s) * 99 // 100]
    yield Figure(f"p99 of the next keys of its key group, of {keys:,}", slowest_ms, "ms", f"{len(others_s)} keys")


def _took_s(reader: StateReader, key: str) -> float:
    began_s = time.monotonic()
    if reader.get("totals", key) is None:
        raise Failed(f"{key} has no state")
    return time.monotonic() - began_s
