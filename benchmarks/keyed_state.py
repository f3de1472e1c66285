"""Checkpoints and restarts of a running total, by the number of its keys."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from statistics import mean, median

from bench import Bench
from figures import Figure
from job import Event, Failed, Job
from orders import once_each, uniform

MANY = 1_000_000
TRIES = 10
"""Feedings for each increment that is to be measured, on a machine so slow that barriers come between."""


class KeyedTotals:
    """A running total of *keys* keys, or another *pipeline* with them: its topics, and what was fed."""

    def __init__(self, bench: Bench, keys: int, pipeline: str = "totals", **params: str) -> None:
        self.bench = bench
        self.keys = keys
        self.pipeline = pipeline
        name = uuid.uuid4().hex[:8]
        self.source, self.sink = f"orders-{name}", f"{pipeline}-{name}"
        self.params = {"name": self.sink, "source": self.source, "sink": self.sink, **params}
        self.fed = 0
        bench.cluster.create(self.source, self.sink)

    def feed(self, records: int) -> None:
        """One record for each of *records* keys, the next in turn."""
        self.bench.cluster.feed(self.source, once_each(self.fed, records, self.keys))
        self.fed += records

    def job(self, *arguments: str, interval: str = "1s") -> Job:
        """Run it, from its last checkpoint on."""
        return Job(self.bench.cluster.servers, self.pipeline, *arguments, interval=interval, **self.params)

    def delete(self) -> None:
        """Make room."""
        self.bench.cluster.delete(self.source, self.sink)


def checkpoints(bench: Bench) -> Iterator[Figure]:
    """What a full image and what increments take, and how long a restart from both."""
    for keys in (10_000, 100_000, *([] if bench.quick else [MANY])):
        state = KeyedTotals(bench, keys)
        yield from _images(state)
        state.delete()


def _images(state: KeyedTotals) -> Iterator[Figure]:
    keys = f"{state.keys:,} keys"
    state.feed(state.keys)
    with state.job("--until", "latest", interval="10m") as job:
        full = job.finish()[-1]
    yield Figure(f"full image, {keys}", full["bytes"] / 1e6, "MB", f"in {full['duration_ms']} ms")
    state.feed(1)
    with state.job() as job:
        clean_s = _recovery_s(job)
        increments = list(_increments(state, job))
        state.feed(state.keys // 100)
        job.next(lambda event: event.get("step") == "triggered")
    sizes = [each["bytes"] / full["bytes"] for each in increments]
    duration_ms = median(each["duration_ms"] for each in increments)
    detail = f"at most {max(sizes):.3f}; in {duration_ms:.0f} ms; {len(sizes)} of them"
    yield Figure(f"1 % of {keys} changed, bytes against all", mean(sizes), detail=detail)
    state.feed(1)
    with state.job() as job:
        killed_s = _recovery_s(job)
    detail = f"killed; after a clean end {clean_s:.2f} s"
    yield Figure(f"start to first new record, {keys}", killed_s, "s", detail)


def _recovery_s(job: Job) -> float:
    return (job.first_record_ms() - job.started_ms) / 1000


def _increments(state: KeyedTotals, job: Job) -> Iterator[Event]:
    """Checkpoints in which exactly one key in a hundred changed: no barrier came between their feedings."""
    job.next_checkpoint(1)
    wanted = state.bench.size(20, 5)
    for _ in range(TRIES * wanted):
        read = state.fed
        state.feed(state.keys // 100)
        event = job.next_checkpoint()
        while not event["records_committed"]:
            event = job.next_checkpoint()
        if event["records_committed"] == state.fed - read:
            yield event
            wanted -= 1
            if not wanted:
                return
        else:
            job.next(lambda event: event["event"] == "checkpoint" and not event["lag"])
    raise Failed(f"barriers came into most of {TRIES} feedings for each increment: this machine feeds too slowly")


def gap(bench: Bench) -> Iterator[Figure]:
    """The longest pause at full load: all keys in the first image, then increments and merging.

    Every key comes once, which takes less than the first interval; then any key.
    """
    state = KeyedTotals(bench, bench.size(MANY, 250_000))
    state.feed(state.keys)
    bench.cluster.feed(state.source, uniform(4 * state.keys, state.keys))
    with state.job("--until", "latest", interval="8s" if state.keys == MANY else "2s") as job:
        found = job.finish()
    state.delete()
    gaps = [each["longest_gap_ms"] for each in found]
    detail = ", ".join(f"{each['longest_gap_ms']:.0f} ms with {each['bytes'] / 1e6:.1f} MB" for each in found)
    yield Figure(f"longest gap between batches, {state.keys:,} keys", max(gaps), "ms", detail)
