"""Updates, expected and seen, counted without a line of the engine.

Invariant: nothing of exactlyonce is imported here, only a read_committed consumer.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, TopicPartition

Updates = Mapping[Any, Sequence[Hashable]]
"""The updates of each key, in their order."""


def verdict(servers: str, topic: str, expected: Updates, read: Callable[[Any], tuple[Hashable, Hashable]]) -> bool:
    """Compare the topic with *expected*, print the figures; -> whether they are equal, in order too.

    *read* gives key and update of a value of the topic.
    """
    seen: dict[Hashable, list[Hashable]] = defaultdict(list)
    for key, update in map(read, read_committed(servers, topic)):
        seen[key].append(update)
    keys = [*{*expected, *seen}]
    pairs = [(Counter(expected.get(key, ())), Counter(seen.get(key, ()))) for key in keys]
    disordered = sum(
        one == other and [*expected[key]] != seen[key] for key, (one, other) in zip(keys, pairs, strict=True)
    )
    for name, figure in (
        ("updates expected", sum(map(len, expected.values()))),
        ("updates seen", sum(map(len, seen.values()))),
        ("missing", sum((one - other).total() for one, other in pairs)),
        ("doubled or wrong", sum((other - one).total() for one, other in pairs)),
        ("keys out of order", disordered),
    ):
        print(f"  {name:<18} {figure:>9,}", flush=True)
    return seen == {key: [*updates] for key, updates in expected.items()}


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
