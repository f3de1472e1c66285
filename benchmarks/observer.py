"""Reads totals as they become visible, as a process of its own: `python observer.py SERVERS TOPIC WARM_UP_S`.

Reads until its standard input ends, then prints, as JSON, how long after it was produced each record was seen: both by
the wall clock of this machine. What was produced in the first WARM_UP_S seconds is left out.
"""

from __future__ import annotations

import json
import select
import sys
import time

from cluster import PARTITIONS, READER
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

WAIT_S = 0.005
TS_DIGITS = slice(-17, -1)
"""Where a `Total` in JSON has its time."""


def observe(servers: str, topic: str, warm_up_s: float) -> list[int]:
    """Microseconds from produced to seen, of each record in turn."""
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
    waits_us: list[int] = []
    from_us = 0
    while not _ended():
        messages = consumer.consume(2_000, WAIT_S)
        now_us = time.time_ns() // 1000
        times_us = [int((message.value() or b"")[TS_DIGITS]) for message in messages]
        if times_us and not from_us:
            from_us = times_us[0] + int(warm_up_s * 1e6)
        waits_us += [now_us - ts for ts in times_us if ts >= from_us]
    return waits_us


def _ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main() -> None:
    """Observe and tell."""
    servers, topic, warm_up_s = sys.argv[1:]
    waits_us = sorted(observe(servers, topic, float(warm_up_s)))
    count = len(waits_us)
    shares = {f"p{share}_ms": waits_us[min(count - 1, count * share // 100)] / 1000 for share in (50, 99)}
    print(json.dumps({"records": count, "max_ms": waits_us[-1] / 1000, **shares}))


if __name__ == "__main__":
    main()
