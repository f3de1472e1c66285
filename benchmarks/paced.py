"""A feeder of a topic at an even pace, as a process of its own: `python paced.py SERVERS TOPIC CUSTOMERS RATE SECONDS`.

RATE is in records a second; `inf` is as many as the machine takes. Prints a line when it begins, feeds for SECONDS at
least and until its standard input ends: who started it closes that once it has seen enough. Each order says when it was
produced; a full queue is waited for, and what has become late meanwhile follows at once. Prints, as JSON, how many
there were, how late the turns were, by the pace, and of one record of each turn, when it was produced, and how long it
took to the broker and back: a feeder that cannot keep its pace measures itself. It shares the machine with what it
feeds, so it does as little as it can.
"""

from __future__ import annotations

import itertools
import json
import select
import sys
import time
from typing import Any, NamedTuple

from cluster import LIMIT_S, Cluster
from confluent_kafka import KafkaError, KafkaException, Producer
from orders import unfinished

TURN_S = 0.005
TURN_RECORDS = 10_000
BATCH_RECORDS = 1_000
DIFFERENT_RECORDS = 100_000
"""At least; a fifth of the customers, where that is more. They come round and round."""
FULL_WAIT_S = 0.01


class Delivered(NamedTuple):
    """A record that the broker has."""

    produced_us: int
    """Microseconds since 1970."""
    took_ms: float
    """To the broker and back."""


class Fed(NamedTuple):
    """Records, in turns."""

    records: int
    late_s: list[float]
    """How late the first record of each turn was."""
    delivered: list[Delivered]
    """One record of each turn."""


def feed(cluster: Cluster, topic: str, customers: int, rate: float, seconds: float) -> Fed:
    """Feed for *seconds* at least, and until standard input ends."""
    different = max(DIFFERENT_RECORDS, customers // 5)
    producer, orders = cluster.producer(), itertools.cycle(unfinished(different, customers))
    print("feeding", flush=True)
    sent, began = 0, time.monotonic()
    late_s: list[float] = []
    delivered: list[Delivered] = []
    while (elapsed := time.monotonic() - began) < seconds or not _is_enough():
        late_s.append(elapsed - sent / rate)
        due = int(min(elapsed * rate, sent + TURN_RECORDS))
        while sent < due:
            batch = list(itertools.islice(orders, min(BATCH_RECORDS, due - sent)))
            _produce(producer, topic, batch)
            sent += len(batch)
        if due > 0:
            _produce_timed(producer, topic, next(orders), delivered)
            sent += 1
        producer.poll(0)
        time.sleep(max(0.0, began + elapsed + TURN_S - time.monotonic()))
    if producer.flush(LIMIT_S):
        raise TimeoutError(f"{topic}: not everything could be written")
    return Fed(sent, late_s, delivered)


def _is_enough() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _produce(producer: Producer, topic: str, batch: list[tuple[bytes, bytes]]) -> None:
    """Send all of *batch*, as of now."""
    end = _now()
    unsent: list[dict[str, Any]] = [{"key": key, "value": start + end} for key, start in batch]
    while unsent:
        producer.produce_batch(topic, unsent)
        unsent = [order for order in unsent if _is_refused(order.pop("_error", None))]
        if unsent:
            producer.poll(FULL_WAIT_S)


def _produce_timed(producer: Producer, topic: str, order: tuple[bytes, bytes], delivered: list[Delivered]) -> None:
    """Send one *order*, as of now; appends to *delivered* how long it took."""
    key, start = order
    began, now = time.monotonic(), _now()
    value = start + now

    def note(error: KafkaError | None, _: object) -> None:
        if error is not None:
            raise KafkaException(error)
        delivered.append(Delivered(int(now[:-1]), (time.monotonic() - began) * 1000))

    while True:
        try:
            return producer.produce(topic, value, key, on_delivery=note)
        except BufferError:
            producer.poll(FULL_WAIT_S)


def _now() -> bytes:
    return b"%d}" % (time.time_ns() // 1000)


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
    fed = feed(Cluster(servers), topic, int(customers), float(rate), float(seconds))
    delays = {
        "p99_late_ms": _p99(fed.late_s) * 1000,
        "p99_delivered_ms": _p99([each.took_ms for each in fed.delivered]),
    }
    print(json.dumps({"records": fed.records, **delays, "delivered": fed.delivered}))


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


if __name__ == "__main__":
    main()
