"""A join of tables by a foreign key against the running total, on the same orders: records a second, in alternating
rounds.

Each order is a new row, and refers to one of 100,000 customers, each of which has one row. A rate counts what is read,
from the first checkpoint to the last.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from statistics import median

from bench import Bench
from event_time import rate_of
from figures import Figure
from job import Failed, Job
from orders import uniform

CUSTOMERS = 100_000
FIGURE = "join of tables by a foreign key, 100,000 customers, against the running total"


def scenario(bench: Bench) -> Iterator[Figure]:
    """The ratio of the rates."""
    records = bench.size(1_000_000, 300_000)
    orders, customers = (f"{table}-{uuid.uuid4().hex[:8]}" for table in ("orders", "customers"))
    bench.cluster.create(orders, customers)
    bench.cluster.feed(
        orders, ((b"%d" % number, order) for number, (_, order) in enumerate(uniform(records, CUSTOMERS)))
    )
    rows = ((b"c%07d" % customer, b'{"name":"Customer %d"}' % customer) for customer in range(CUSTOMERS))
    bench.cluster.feed(customers, rows)
    rates: dict[str, list[float]] = {"totals": [], "named": []}
    for number in range(bench.rounds or bench.size(4, 1)):
        for kind in rates if number % 2 == 0 else reversed(rates):
            rates[kind].append(_rate(bench, kind, orders, customers, records))
            bench.say(f"round {number + 1}: {kind} {rates[kind][-1]:,.0f} records/s")
    ratios = [rate / total for rate, total in zip(rates["named"], rates["totals"], strict=True)]
    detail = f"{median(rates['named']):,.0f} against {median(rates['totals']):,.0f} records/s, {len(ratios)} rounds"
    yield Figure(FIGURE, median(ratios), detail=detail)


def _rate(bench: Bench, kind: str, orders: str, customers: str, records: int) -> float:
    sink = f"named-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    params = {"customers": customers} if kind == "named" else {}
    with Job(
        bench.cluster.servers, kind, "--until", "latest", name=sink, source=orders, sink=sink, **params
    ) as job:  # fmt: skip
        checkpoints = job.finish()
    if (written := bench.cluster.digest(sink).records) != records:
        raise Failed(f"{kind} wrote {written} records, not {records}")
    bench.cluster.delete(sink)
    return rate_of(checkpoints, records + (CUSTOMERS if kind == "named" else 0))
