"""A file of JSON lines through a running total into a topic, against the loop by hand, in alternating rounds."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench import Bench
from cluster import Digest
from figures import Figure
from job import Failed, Job
from orders import uniform
from throughput import HERE, LIMIT_S, rate_of

CUSTOMERS = 1_000


def scenario(bench: Bench) -> Iterator[Figure]:
    """The ratio of records a second; both outputs are compared."""
    records = bench.size(3_000_000, 1_000_000)
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-") as folder:
        file = Path(folder, "orders.jsonl")
        with file.open("wb") as written:
            written.writelines(value + b"\n" for _, value in uniform(records, CUSTOMERS))
        for number in range(bench.rounds or bench.size(4, 1)):
            rates, digests = {}, set[Digest]()
            for runner in (_ours, _by_hand) if number % 2 == 0 else (_by_hand, _ours):
                sink = f"totals-{uuid.uuid4().hex[:8]}"
                bench.cluster.create(sink)
                rates[runner] = runner(bench, file, sink, records)
                digests.add(bench.cluster.digest(sink))
                bench.cluster.delete(sink)
            if len(digests) != 1:
                raise Failed(f"the outputs differ: {digests}")
            ratios.append(rates[_ours] / rates[_by_hand])
            bench.say(f"round {number + 1}: {rates[_ours]:,.0f} records/s, by hand {rates[_by_hand]:,.0f}")
    detail = f"{rates[_ours]:,.0f} against {rates[_by_hand]:,.0f} records/s in the last of {len(ratios)} rounds"
    yield Figure("running total of a file of JSON lines, ratio", median(ratios), detail=detail)


def _ours(bench: Bench, file: Path, sink: str, records: int) -> float:
    with Job(
        bench.cluster.servers, "file_totals", "--until", "latest", name=sink, folder=str(file.parent), sink=sink
    ) as job:
        return rate_of(job.finish(), records)


def _by_hand(bench: Bench, file: Path, sink: str, records: int) -> float:
    command = [sys.executable, "files_by_hand.py", bench.cluster.servers, str(file), sink]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise Failed(f"the loop by hand ended with {done.returncode}: {done.stderr}")
    rate: float = json.loads(done.stdout)["rate"]
    return rate
