"""Feeds a topic at an even pace, as a process of its own: `python paced.py SERVERS TOPIC CUSTOMERS RATE SECONDS`.

Each order says when it was produced. Prints, as JSON, how many there were, and how late the last ones were: a feeder
that cannot keep the pace measures itself.
"""

from __future__ import annotations

import json
import random
import sys
import time

from cluster import Cluster
from orders import encoded

TURN_S = 0.005


def feed(cluster: Cluster, topic: str, customers: int, rate: float, seconds: float) -> tuple[int, float]:
    """The number of records, and how much longer than *seconds* it took."""
    producer = cluster.producer()
    dice, sent, began = random.Random(1), 0, time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        due = int(min(elapsed, seconds) * rate)
        for key, value in encoded(range(sent, due), dice.choices(range(customers), k=due - sent)):
            producer.produce(topic, value, key)
        sent = due
        producer.poll(0)
        time.sleep(max(0.0, began + elapsed + TURN_S - time.monotonic()))
    producer.flush()
    return sent, time.monotonic() - began - seconds


def main() -> None:
    """Feed and tell."""
    servers, topic, customers, rate, seconds = sys.argv[1:]
    records, late_s = feed(Cluster(servers), topic, int(customers), float(rate), float(seconds))
    print(json.dumps({"records": records, "late_ms": late_s * 1000}))


if __name__ == "__main__":
    main()
