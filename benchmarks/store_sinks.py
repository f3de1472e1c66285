"""The sinks of PostgreSQL, MariaDB, Redis and DuckDB: throughput, and the time of a checkpoint's commit.

Each scenario starts the machine's own server; if that is not installed it says so, and has no figures. DuckDB has a
file and no server. Throughput is that from Kafka into the store, exactly once, against the same rows from memory into
the same table by the store's driver, which reads and decodes nothing, and may lose or double them.
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
from figures import Figure
from job import Event, Failed, Job
from paced import DIFFERENT_RECORDS
from store_servers import missing, running
from store_targets import TARGETS, Rows, Target
from throughput import LIMIT_S
from visibility import await_line, script, told

HERE = Path(__file__).parent
ROWS = 10_000
"""Rows a second, and so in a checkpoint whose commit is timed."""
INTERVAL_MS = 1_000
CUSTOMERS = 1_000
LOOP = "a loop from Kafka, COPY and commit every 0.5 s"
COMMITS = "only from decided to finalized counts"


class Place(NamedTuple):
    """A running server."""

    store: str
    target: Target
    url: str


def postgres(bench: Bench) -> Iterator[Figure]:
    """A table of PostgreSQL."""
    yield from scenario(bench, "postgres")


def mariadb(bench: Bench) -> Iterator[Figure]:
    """A table of MariaDB."""
    yield from scenario(bench, "mariadb")


def redis(bench: Bench) -> Iterator[Figure]:
    """Strings of Redis."""
    yield from scenario(bench, "redis")


def duckdb(bench: Bench) -> Iterator[Figure]:
    """A table in a file of DuckDB."""
    yield from scenario(bench, "duckdb")


def all_of_them(bench: Bench) -> Iterator[Figure]:
    """All stores."""
    for store in TARGETS:
        yield from scenario(bench, store)


def scenario(bench: Bench, store: str) -> Iterator[Figure]:
    """One store; no figures if its server is not installed."""
    if lacking := missing(store):
        bench.say(lacking)
        return
    with running(store) as url:
        place = Place(store, TARGETS[store], url)
        yield from throughput(bench, place)
        yield from commits(bench, place)


def throughput(bench: Bench, place: Place) -> Iterator[Figure]:
    """Rows a second from Kafka into the store, over the rows of each way by hand, which take turns to go first."""
    target = place.target
    records = bench.size(target.records, target.records // 5)
    source, ways = bench.input(records, CUSTOMERS), ("ours", *target.ways)
    rates: dict[str, list[float]] = {way: [] for way in (*ways, "commits")}
    for number in range(bench.rounds or bench.size(5, 1)):
        seen = set()
        for way in ways if number % 2 == 0 else reversed(ways):
            target.empty(place.url)
            if way == "ours":
                for name, rate in zip(("ours", "commits"), ours(bench, place, source, records), strict=True):
                    rates[name].append(rate)
            else:
                rates[way].append(by_hand(bench, place, way, source, records))
            seen.add(target.rows(place.url))
        _require_same(seen, records)
        shown = ", ".join(f"{way} {of_way[-1]:,.0f}" for way, of_way in rates.items())
        bench.say(f"round {number + 1}, rows/s: {shown}")
    yield from _compared(target, rates)


def _compared(target: Target, rates: dict[str, list[float]]) -> Iterator[Figure]:
    """The figures of the rates of each way and round."""
    for name, mine, other, words in (
        (f"Kafka to {target.title}, ratio", "ours", "memory", target.plain),
        (f"Kafka to {target.title}, against a loop by hand", "ours", "loop", LOOP),
        (f"commits to {target.title}, against the plain way", "commits", "memory", f"{target.plain}; {COMMITS}"),
    ):
        if other in rates:
            ratios = [a / b for a, b in zip(rates[mine], rates[other], strict=True)]
            spread = f"{len(ratios)} rounds, {min(ratios):.2f} to {max(ratios):.2f}"
            against = f"{median(rates[mine]):,.0f} rows/s against {median(rates[other]):,.0f} of {words}"
            yield Figure(name, median(ratios), detail=f"{against}; {spread}")


def ours(bench: Bench, place: Place, source: str, records: int) -> tuple[float, float]:
    """Rows a second of `exactlyonce run`: from its first record to the end of its last checkpoint; and while a decided
    checkpoint is committed."""
    with _job(bench, place, source, "--until", "latest") as job:
        first_ms, checkpoints = job.first_record_ms(), job.finish()
    if checkpoints[-1]["records_in"] != records:
        raise Failed(f"{records} records were not all read: {checkpoints[-1]}")
    whole_ms = max(_steps(job, "finalized").values()) - first_ms
    return records / whole_ms * 1000, records / sum(_commit_ms(job, checkpoints)) * 1000


def by_hand(bench: Bench, place: Place, way: str, source: str, records: int) -> float:
    """Rows a second of `store_by_hand.py`."""
    arguments = way, place.store, bench.cluster.servers, source, place.url, str(records)
    command = [sys.executable, "store_by_hand.py", *arguments]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise Failed(f"the rows by hand ended with {done.returncode}: {done.stderr}")
    return float(json.loads(done.stdout)["rate"])


def _require_same(seen: set[Rows], records: int) -> None:
    if len(seen) != 1 or next(iter(seen)).number != records:
        raise Failed(f"{records} rows were to be there, the same ones each time: {seen}")


def commits(bench: Bench, place: Place) -> Iterator[Figure]:
    """The time from `decided` to `finalized` of checkpoints of about 10,000 rows, one a second."""
    source, seconds = f"orders-{uuid.uuid4().hex[:8]}", bench.size(65, 10)
    bench.cluster.create(source)
    place.target.empty(place.url)
    with _job(bench, place, source, interval=f"{INTERVAL_MS}ms") as job:
        job.next_checkpoint()
        with script("paced.py", bench, source, CUSTOMERS, ROWS, seconds) as feeder:
            await_line(feeder)
            fed = told(feeder)
        job.next_checkpoint(fed["records"])
        job.stop()
    bench.cluster.delete(source)
    expected = min(fed["records"], DIFFERENT_RECORDS) if place.target.keyed else fed["records"]
    if (count := place.target.rows(place.url).number) != expected:
        raise Failed(f"{expected} rows are to be there, and there are {count}")
    whole = [event for event in job.checkpoints if event["records_committed"] >= ROWS * 0.9]
    times_ms = sorted(_commit_ms(job, whole))
    rows = f"{median(event['records_committed'] for event in whole):,.0f}"
    yield Figure(
        f"commit of a checkpoint to {place.target.title}, p99",
        times_ms[len(times_ms) * 99 // 100],
        "ms",
        f"{len(times_ms)} checkpoints of {rows} rows, p50 {median(times_ms):.0f} ms; from decided to finalized",
    )


def _job(bench: Bench, place: Place, source: str, *arguments: str, interval: str = "500ms") -> Job:
    params = {"name": bench.cluster.pipeline(), "source": source, "place": place.url}
    return Job(bench.cluster.servers, f"to_{place.store}", *arguments, interval=interval, **params)


def _commit_ms(job: Job, checkpoints: list[Event]) -> list[int]:
    """The times from decided to finalized, of checkpoints with rows."""
    decided, finalized = _steps(job, "decided"), _steps(job, "finalized")
    numbers = [event["checkpoint"] for event in checkpoints if event["records_committed"]]
    return [finalized[number] - decided[number] for number in numbers]


def _steps(job: Job, step: str) -> dict[int, int]:
    """By checkpoint, the time of *step*, in milliseconds."""
    return {event["checkpoint"]: event["at_ms"] for event in job.events if event.get("step") == step}
