"""State larger than memory: the backend `rocksdb` beside the hash map, its restarts, and its checkpoints.

The state is a running total with the name and address of a customer, 106 bytes with its key. What it takes in the
hash map is measured as the growth of that worker, and the budget is a half or a tenth of it: less than what the tables
of `rocksdb` then get, for the process and RocksDB are in the budget as well.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec
from bench import Bench
from benchmarked import Profile, add_to_profile
from figures import Figure
from job import Event, Failed, Job
from orders import Order, encoded, once_each, uniform, zipf

from exactlyonce.state.state_type import StateType

HERE = Path(__file__).parent
MANY = 10_000_000
SAMPLED = 10_000
"""Keys whose states are packed to tell how large all of them are."""
BUDGET_BYTES = 1 << 30
"""Of each worker, where the budget is not what is measured."""
CHANGED_PER_S = 50_000
SETTLING_S = 60
"""Until the process has read what it needs often, and has caught up with what was fed meanwhile."""


class Ran(NamedTuple):
    """What one run over all of the input came to, once each key had been there."""

    rate: float
    loaded_bytes: int
    """Of its worker, once all keys were there."""
    most_bytes: int


class Large:
    """A pipeline with so many keys: its topics, its local files, and how it is run."""

    def __init__(self, bench: Bench, keys: int, folder: str) -> None:
        self.bench, self.keys, self.folder = bench, keys, folder
        name = uuid.uuid4().hex[:8]
        self.source, self.sink = f"orders-{name}", f"profiles-{name}"
        bench.cluster.create(self.source, self.sink)
        bench.cluster.feed(self.source, once_each(0, keys, keys))

    def job(self, budget_bytes: int | None, *arguments: str, interval: str = "1s", name: str = "") -> Job:
        """Run it, from its last checkpoint on; another *name* is another pipeline. No budget: in the hash map."""
        state: tuple[str, ...] = ("--state-backend", "hashmap")
        if budget_bytes is not None:
            state = ("--state-backend", "rocksdb", "--state-memory", str(budget_bytes), "--state-folder", self.folder)
        params = {"name": name or self.sink, "source": self.source, "sink": self.sink}
        return Job(self.bench.cluster.servers, "profiles", *state, *arguments, interval=interval, **params)

    def load(self, budget_bytes: int | None) -> Event:
        """Read what there is, with two workers; the last checkpoint."""
        with self.job(budget_bytes, "--until", "latest", "--parallelism", "2", interval="5s") as job:
            return job.finish()[-1]

    def over_all(self, budget_bytes: int | None) -> Ran:
        """From the beginning to the end of the input."""
        name, sizes = f"{self.sink}-{uuid.uuid4().hex[:6]}", list[tuple[Event, int]]()
        with self.job(budget_bytes, "--until", "latest", name=name) as job:
            while not sizes or sizes[-1][0]["lag"] or not sizes[-1][0]["records_in"]:
                event = job.next(lambda event: event["event"] == "checkpoint")
                sizes.append((event, job.worker_bytes()))
            job.finish()
        loaded = [each for each in sizes if each[0]["records_in"] >= self.keys]
        first, last = loaded[0], loaded[-1]
        if first is last:
            raise Failed("all records were read between two checkpoints: feed more")
        records = last[0]["records_in"] - first[0]["records_in"]
        rate = 1000 * records / (last[0]["at_ms"] - first[0]["at_ms"])
        return Ran(rate, first[1], max(size for _, size in sizes))

    def delete(self) -> None:
        """Make room."""
        self.bench.cluster.delete(self.source, self.sink)


@contextmanager
def large(bench: Bench, keys: int) -> Iterator[Large]:
    """A pipeline whose local files are on a disk, until the end."""
    with tempfile.TemporaryDirectory(prefix="exactlyonce-state-") as folder:
        found = Large(bench, keys, folder)
        yield found
        found.delete()


def ratios(bench: Bench) -> Iterator[Figure]:
    """The backends in turns over the same input: each key once, then keys as the figure says."""
    keys, records = bench.size(2_000_000, 500_000), bench.size(4_000_000, 1_000_000)
    memory = []
    for title, divisor, orders in (("twice the budget, zipf", 2, zipf), ("ten times the budget, uniform", 10, uniform)):
        with large(bench, keys) as state:
            bench.cluster.feed(state.source, orders(records, keys))
            empty_bytes = _empty_bytes(state)
            pairs = []
            for _ in range(bench.rounds or 1):
                in_memory = state.over_all(None)
                budget_bytes = (in_memory.loaded_bytes - empty_bytes) // divisor
                pairs.append((in_memory, state.over_all(budget_bytes), budget_bytes))
        detail = "; ".join(
            f"{tiered.rate:,.0f} against {whole.rate:,.0f} records/s, {budget / 1e6:.0f} MB"
            for whole, tiered, budget in pairs
        )
        name = f"rocksdb against hashmap, state {title} keys"
        yield Figure(name, median(tiered.rate / whole.rate for whole, tiered, _ in pairs), detail=detail)
        memory += [(tiered.most_bytes, budget) for _, tiered, budget in pairs]
    yield from _within_budget(memory)


def _within_budget(memory: list[tuple[int, int]]) -> Iterator[Figure]:
    """Of budgets in which the worker itself finds room."""
    kept = [(most, budget) for most, budget in memory if budget >= 256 << 20]
    if kept:
        most, budget = max(kept, key=lambda each: each[0] / each[1])
        detail = f"at most {most / 1e6:.0f} MB of {budget / 1e6:.0f} MB"
        yield Figure("resident memory of a worker against its budget", most / budget, detail=detail)


def _empty_bytes(state: Large) -> int:
    """What a worker takes before its first record."""
    with state.job(None, name=f"{state.sink}-empty") as job:
        job.next(lambda event: event.get("step") == "restored")
        return job.worker_bytes()


def _state_bytes(keys: int) -> int:
    """Of all keys and their states, packed, without anything around them: from a sample."""
    orders = list(encoded(numbers := range(0, keys, max(1, keys // SAMPLED)), list(numbers)))
    packing: StateType[Profile] = StateType("profiles", Profile)
    states = [add_to_profile(None, msgspec.json.decode(value, type=Order))[0] for _, value in orders]
    sampled = sum(len(key) for key, _ in orders) + sum(map(len, packing.pack(states)))
    return keys * sampled // len(orders)


def restores(bench: Bench) -> Iterator[Figure]:
    """After SIGKILL, with the local files gone: how long until a record is through, and until all state is there; and
    the first record where the files are there."""
    keys = bench.size(MANY, 500_000)
    with large(bench, keys) as state:
        last = state.load(BUDGET_BYTES)
        gigabytes = _state_bytes(keys) / 1e9
        for lazily in (True, False):
            if lazily:
                shutil.rmtree(state.folder)
            with state.job(BUDGET_BYTES, "--parallelism", "2") as job:
                if lazily:
                    bench.cluster.feed(state.source, uniform(20_000, keys))
                    first_s = (job.first_record_ms() - job.started_ms) / 1000
                    for _ in range(2):
                        whole = job.next(lambda event: "is read whole" in event.get("text", ""))
                    whole_s = (whole["at_ms"] - job.started_ms) / 1000
                    job.next_checkpoint()
                    job.process.send_signal(signal.SIGKILL)
                else:
                    bench.cluster.feed(state.source, uniform(20_000, keys))
                    again_s = (job.first_record_ms() - job.started_ms) / 1000
    detail = f"with its local files {again_s:.1f} s; {last['state_bytes'] / 1e6:.0f} MB of blocks"
    yield Figure(f"SIGKILL to first new record, {keys:,} keys, lazily", first_s, "s", detail)
    detail = f"{whole_s:.1f} s for {gigabytes:.2f} GB, from the start of the process"
    yield Figure(f"all state restored, {keys:,} keys, per GB", whole_s / gigabytes, "s", detail)


def checkpoints(bench: Bench) -> Iterator[Figure]:
    """A steady load over many keys, a checkpoint each second, on either backend."""
    keys = bench.size(MANY, 500_000)
    for backend, budget_bytes in (("hashmap", None), ("rocksdb", BUDGET_BYTES)):
        with large(bench, keys) as state:
            found = _under_load(bench, state, budget_bytes)
        durations = [each["duration_ms"] for each in found]
        changed = sum(each["records_committed"] for each in found) / len(found)
        detail = f"p50 {median(durations):.0f} ms, {len(durations)} checkpoints of {changed:,.0f} records"
        p99 = quantiles(durations, n=100, method="inclusive")[98]
        yield Figure(f"trigger to finalized, 50,000 changed keys/s of {keys:,}, {backend}, p99", p99, "ms", detail)


def _under_load(bench: Bench, state: Large, budget_bytes: int | None) -> list[Event]:
    """The checkpoints of two minutes, once it has settled."""
    state.load(budget_bytes)
    feeder = [sys.executable, "paced.py", bench.cluster.servers, state.source, str(state.keys), str(CHANGED_PER_S), "0"]
    with (
        state.job(budget_bytes, "--parallelism", "2", "--unaligned") as job,
        subprocess.Popen(feeder, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as feeding,
    ):
        try:
            settled_s = time.monotonic() + bench.size(SETTLING_S, 10)
            while time.monotonic() < settled_s:
                job.next_checkpoint()
            found, until_s = list[Event](), time.monotonic() + bench.size(120, 30)
            while time.monotonic() < until_s:
                found.append(job.next_checkpoint())
        finally:
            feeding.kill()
    return found
