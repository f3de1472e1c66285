"""Resident memory of all processes of a job, early and late in its life, with the same keys."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench import Bench
from figures import Figure
from job import Job

HERE = Path(__file__).parent
INTERVAL_MS = 100
CUSTOMERS, RATE = 10_000, 10_000
EARLY, LATE = 30, 300
AROUND = 5
"""Checkpoints before and after, for the median."""


def resident(bench: Bench) -> Iterator[Figure]:
    """A running total under a steady load, with many checkpoints."""
    late = bench.size(LATE, 60)
    source, sink = f"orders-{uuid.uuid4().hex[:8]}", f"totals-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(source, sink)
    feeder = [sys.executable, "paced.py", bench.cluster.servers, source, str(CUSTOMERS), str(RATE), "0"]
    sizes: list[int] = []
    with (
        Job(bench.cluster.servers, "totals", interval=f"{INTERVAL_MS}ms", name=sink, source=source, sink=sink) as job,
        subprocess.Popen(feeder, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as feeding,
    ):
        try:
            while len(sizes) <= late + AROUND:
                job.next_checkpoint()
                sizes.append(job.resident_bytes())
        finally:
            feeding.kill()
    bench.cluster.delete(source, sink)
    before, after = (median(sizes[number - AROUND : number + AROUND]) for number in (EARLY, late))
    detail = f"{before / 1e6:.0f} MB, then {after / 1e6:.0f} MB"
    yield Figure(f"resident memory, checkpoint {late} against {EARLY}", after / before, "", detail)
