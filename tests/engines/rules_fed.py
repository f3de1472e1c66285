"""A topic of rules that change and one of events, and the judge of their output, which is a reader."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

from confluent_kafka import Producer

from exactlyonce.testing.cluster import LIMIT_S, Committed, KafkaCluster

RULES = 6
PARTITIONS = 3
"""Of the events."""


class Rules:
    """Rules in two partitions of NAME-rules, events in three of NAME-in; a job writes each event with all rules."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name = kafka, name
        self.events: list[dict[str, Any]] = []
        self.partition_of: dict[int, int] = {}
        """By event."""
        self.versions: dict[str, list[int | None]] = {f"r{number}": [None] for number in range(RULES)}
        """The values of each rule, in order; None: there is none."""
        kafka.create_topic(f"{name}-rules", 2)

    def feed(self, events: int, changes: int) -> None:
        """So many *events* and *changes* of rules, one after the other."""
        chance = random.Random(len(self.events))
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers, "enable.idempotence": True})
        todo = ["event"] * events + ["change"] * changes
        chance.shuffle(todo)
        for kind in todo:
            if kind == "event":
                id, partition = len(self.events), chance.randrange(PARTITIONS)
                event = {"id": id, "kind": f"k{chance.randrange(7)}"}
                self.events.append(event)
                self.partition_of[id] = partition
                producer.produce(f"{self.name}-in", json.dumps(event), partition=partition)
            else:
                rule = chance.randrange(RULES)
                versions = self.versions[f"r{rule}"]
                value = None if versions[-1] is not None and chance.random() < 0.25 else len(versions)
                versions.append(value)
                body = None if value is None else json.dumps(value)
                producer.produce(f"{self.name}-rules", body, f"r{rule}", rule % 2)
        assert producer.flush(LIMIT_S) == 0

    @property
    def last(self) -> dict[str, int]:
        return {rule: versions[-1] for rule, versions in self.versions.items() if versions[-1] is not None}

    def assert_explained(self, *, after: int | None = None, in_order: bool = True) -> None:
        """Each event is there once, with rules that were; *in_order*: those of later events of a partition are not
        older. The events from *after* on have the last ones."""
        given = [json.loads(record.value or b"") for record in self._read()]
        assert sorted(ruled["id"] for ruled in given) == [event["id"] for event in self.events]
        given.sort(key=lambda ruled: ruled["id"])
        reached: dict[tuple[int, str], int] = defaultdict(int)
        for ruled in given:
            assert ruled["kind"] == self.events[ruled["id"]]["kind"]
            for rule, versions in self.versions.items():
                place = self.partition_of[ruled["id"]] if in_order else -1 - ruled["id"], rule
                reached[place] = self._version(versions, ruled["rules"].get(rule), reached[place])
            if after is not None and ruled["id"] >= after:
                assert ruled["rules"] == self.last, ruled

    def _read(self) -> list[Committed]:
        return self.kafka.read_committed(f"{self.name}-out")

    @staticmethod
    def _version(versions: list[int | None], value: int | None, least: int) -> int:
        """The place in *versions* of *value*, the first from *least* on."""
        place = next((at for at in range(least, len(versions)) if versions[at] == value), None)
        assert place is not None, f"{value} is older than version {least} of {versions}"
        return place
