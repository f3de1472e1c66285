"""From produced to visible to a read_committed reader, by one clock, at half of the rate that was measured before."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import throughput
from bench import Bench
from figures import Figure
from job import Failed, Job

HERE = Path(__file__).parent
INTERVAL_MS = 500
WARM_UP_S = 5
CUSTOMERS = 1_000


def visible(bench: Bench) -> Iterator[Figure]:
    """Running totals under a steady load."""
    if "totals" not in bench.rates:
        bench.say("how much is half of the rate?")
        list(throughput.totals(bench))
    rate, seconds = bench.rates["totals"] / 2, bench.size(65, 15)
    source, sink = f"orders-{uuid.uuid4().hex[:8]}", f"totals-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(source, sink)
    with Job(bench.cluster.servers, "totals", interval=f"{INTERVAL_MS}ms", name=sink, source=source, sink=sink) as job:
        observer = _script("observer.py", bench, sink, WARM_UP_S)
        fed = _told(_script("paced.py", bench, source, CUSTOMERS, rate, seconds))
        job.next_checkpoint(fed["records"])
        checkpoints = job.stop()
    seen = _told(observer)
    bench.cluster.delete(source, sink)
    bench.say(f"{fed['records']:,} records fed, {fed['late_ms']:.0f} ms late; {seen['records']:,} of them timed")
    durations = sorted(each["duration_ms"] for each in checkpoints)
    load = f"{rate:,.0f} records/s, interval {INTERVAL_MS} ms, {seconds} s"
    latest = f"at most {seen['max_ms'] - INTERVAL_MS:,.0f} ms"
    yield Figure("p50 visibility minus the interval", seen["p50_ms"] - INTERVAL_MS, "ms", load)
    yield Figure("p99 visibility minus the interval", seen["p99_ms"] - INTERVAL_MS, "ms", latest)
    yield Figure("duration of its checkpoints", durations[len(durations) // 2], "ms", f"at most {durations[-1]} ms")


def _script(name: str, bench: Bench, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, name, bench.cluster.servers, *map(str, arguments)]
    return subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the process prints once its standard input has ended."""
    output, _ = process.communicate()
    if process.returncode:
        raise Failed(f"{process.args!r} ended with {process.returncode}")
    told: dict[str, Any] = json.loads(output)
    return told
