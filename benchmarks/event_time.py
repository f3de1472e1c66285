"""Windows of event time against the running total, on the same orders: records a second, in alternating rounds.

The event time of an order is its number in milliseconds, less up to 1.5 s; so each window of 10 s has some ten orders
of each of 1,000 customers. A rate counts what is read, from the first checkpoint to the last.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from statistics import median

from bench import Bench
from benchmarked import IDS
from figures import Figure
from job import Event, Failed, Job

CUSTOMERS = 1_000
WINDOWS = {
    "tumbling": "tumbling count, against the running total",
    "folded": "tumbling fold of a user's function, against the running total",
    "hopping": "hopping count of 60 s every 5 s, against the running total",
    "session": "session count, against the running total",
}
JOINS = {
    "as-of": "as-of join of 10 records with 1 version, against the running total",
    "interval": "interval join with 1 match each, against the running total",
}
DEDUPLICATION = {
    "time": f"deduplication of {IDS:,} ids, against the running total",
    "arrival": f"deduplication of {IDS:,} ids by arrival, against the running total",
}


def scenario(bench: Bench) -> Iterator[Figure]:
    """Rates of each window, as ratios."""
    records = bench.size(3_000_000, 1_000_000)
    source, kinds = bench.input(records, CUSTOMERS), ["totals", *WINDOWS, *JOINS, *DEDUPLICATION]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(bench.rounds or bench.size(4, 1)):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            rates[kind].append(_rate(bench, kind, source, records))
            bench.say(f"round {number + 1}: {kind} {rates[kind][-1]:,.0f} records/s")
    for kind, name in (WINDOWS | JOINS | DEDUPLICATION).items():
        ratios = [rate / total for rate, total in zip(rates[kind], rates["totals"], strict=True)]
        detail = f"{median(rates[kind]):,.0f} against {median(rates['totals']):,.0f} records/s, {len(ratios)} rounds"
        yield Figure(name, median(ratios), detail=detail)


def _rate(bench: Bench, kind: str, source: str, records: int) -> float:
    sink = f"windows-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    pipeline, params = (
        ("joined", {"kind": kind})
        if kind in JOINS
        else ("windowed", {"window": kind})
        if kind in WINDOWS
        else ("deduplicated", {"order": kind})
        if kind in DEDUPLICATION
        else (kind, {})
    )
    options = ("--until", "latest") if kind == "totals" else ("--until", "latest", "--drain")
    with Job(bench.cluster.servers, pipeline, *options, name=sink, source=source, sink=sink, **params) as job:
        checkpoints = job.finish()
    expected = {"totals": records, "as-of": records * 10 // 11, "interval": records // 2, "time": IDS, "arrival": IDS}
    if kind in expected and (written := bench.cluster.digest(sink).records) != expected[kind]:
        raise Failed(f"{kind} wrote {written} records, not {expected[kind]}")
    bench.cluster.delete(sink)
    return rate_of(checkpoints, records)


def rate_of(checkpoints: list[Event], records: int) -> float:
    """Records a second, from the first checkpoint with any to the last one that has read more."""
    reading = [event for event in checkpoints if event["records_in"]]
    if not reading or reading[-1]["records_in"] != records or not sum(each["records_committed"] for each in reading):
        raise Failed(f"{records} records were not all read, or gave no output: {checkpoints[-1:]}")
    first, last = reading[0], next(event for event in reading if event["records_in"] == records)
    if first is last:
        raise Failed(f"{records} records are too few for two checkpoints")
    return float((records - first["records_in"]) * 1000 / (last["at_ms"] - first["at_ms"]))
