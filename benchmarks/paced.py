"""A feeder of a topic at an even pace, as a process of its own: `python paced.py SERVERS TOPIC CUSTOMERS RATE SECONDS`.

RATE is in records a second; `inf` is as many as the machine takes. Prints a line when it begins, feeds for SECONDS at
least and until its standard input ends: who started it closes that once it has seen enough. Each order says when it was
produced; a full queue is waited for, and what has become late meanwhile follows at once. Prints, as JSON, how many
there were, and how late the turns were, by the pace: a feeder that cannot keep it measures itself. It shares the
machine with what it feeds, so it does as little as it can.
"""

from __future__ import annotations

import itertools
import json
import select
import sys
import time
from typing import Any

from cluster import LIMIT_S, Cluster
from confluent_kafka import KafkaError, KafkaException, Producer
from orders import unfinished

TURN_S = 0.005
TURN_RECORDS = 10_000
BATCH_RECORDS = 1_000
DIFFERENT_RECORDS = 100_000
"""At least; a fifth of the customers, where that is more. They come round and round."""
FULL_WAIT_S = 0.01


def feed(cluster: Cluster, topic: str, customers: int, rate: float, seconds: float) -> tuple[int, list[float]]:
    """The number of records, and how many seconds late the first one of each turn was."""
    different = max(DIFFERENT_RECORDS, customers // 5)
    producer, orders = cluster.producer(), itertools.cycle(unfinished(different, customers))
    print("feeding", flush=True)
    sent, late_s, began = 0, [], time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds or not _is_enough():
        late_s.append(elapsed - sent / rate)
        due = int(min(elapsed * rate, sent + TURN_RECORDS))
        while sent < due:
            batch = list(itertools.islice(orders, min(BATCH_RECORDS, due - sent)))
            _produce(producer, topic, batch)
            sent += len(batch)
        producer.poll(0)
        time.sleep(max(0.0, began + elapsed + TURN_S - time.monotonic()))
    if producer.flush(LIMIT_S):
        raise TimeoutError(f"{topic}: not everything could be written")
    return sent, late_s


def _is_enough() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _produce(producer: Producer, topic: str, batch: list[tuple[bytes, bytes]]) -> None:
    """All of *batch*, as of now."""
    end = b"%d}" % (time.time_ns() // 1000)
    unsent: list[dict[str, Any]] = [{"key": key, "value": start + end} for key, start in batch]
    while unsent:
        producer.produce_batch(topic, unsent)
        unsent = [order for order in unsent if _is_refused(order.pop("_error", None))]
        if unsent:
            producer.poll(FULL_WAIT_S)


def _is_refused(error: KafkaError | None) -> bool:
    """Whether the queue was full; any other error is raised."""
    if error is None:
        return False
    if error.name() != "_QUEUE_FULL":
        raise KafkaException(error)
    return True


def main() -> None:
    """Feed and tell."""
    servers, topic, customers, rate, seconds = sys.argv[1:]
    records, late_s = feed(Cluster(servers), topic, int(customers), float(rate), float(seconds))
    late_s.sort()
    print(json.dumps({"records": records, "p99_late_ms": late_s[len(late_s) * 99 // 100] * 1000}))


if __name__ == "__main__":
    main()
