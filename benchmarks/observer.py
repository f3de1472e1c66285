"""A reader of totals as they become visible, as a process of its own: `python observer.py SERVERS TOPIC WARM_UP_S`.

Prints a line when it reads, reads until its standard input ends, then prints, as JSON, how long after it was produced
each record was seen, and the batches it read: both by the wall clock of this machine. Records of the first WARM_UP_S
seconds are left out. It shares the machine with what it observes, so it counts times as bytes, of which a batch has
few different ones.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections import Counter

from cluster import PARTITIONS, READER
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

WAIT_S = 0.005
BATCH_RECORDS = 10_000
TS_DIGITS = slice(-17, -1)
"""Where a `Total` in JSON has its time."""


Batch = tuple[int, list[tuple[int, int]]]
"""Microseconds since 1970: when it was seen, and when its records were produced, oldest first, with their numbers."""


def observe(servers: str, topic: str, warm_up_s: float) -> tuple[Counter[int], list[Batch]]:
    """How many records were seen how many microseconds after they were produced; and all batches."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "benchmark-observer",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 5,
            **READER,
        }
    )
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
    print("reading", flush=True)
    waits_us: Counter[int] = Counter()
    batches: list[Batch] = []
    from_us = 0
    while not _ended():
        messages = consumer.consume(BATCH_RECORDS, WAIT_S)
        now_us = time.time_ns() // 1000
        if not messages:
            continue
        times = Counter([(message.value() or b"")[TS_DIGITS] for message in messages])
        produced = sorted((int(text), count) for text, count in times.items())
        oldest_us = produced[0][0]
        from_us = from_us or oldest_us + int(warm_up_s * 1e6)
        for produced_us, count in produced:
            if produced_us >= from_us:
                waits_us[now_us - produced_us] += count
        if oldest_us >= from_us:
            batches.append((now_us, produced))
    return waits_us, batches


def _ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _shared_by(waits_us: Counter[int], percent: int) -> float:
    """Milliseconds within which *percent* of the records were seen."""
    left = waits_us.total() * percent / 100
    for wait_us in sorted(waits_us):
        left -= waits_us[wait_us]
        if left <= 0:
            return wait_us / 1000
    sys.exit("observer: no record was seen that was produced after the warm-up, so there is nothing to time")


def main() -> None:
    """Observe and tell."""
    servers, topic, warm_up_s = sys.argv[1:]
    waits_us, batches = observe(servers, topic, float(warm_up_s))
    shares = {f"p{percent}_ms": _shared_by(waits_us, percent) for percent in (50, 99, 100)}
    print(json.dumps({"records": waits_us.total(), **shares, "batches": batches}))


if __name__ == "__main__":
    main()
