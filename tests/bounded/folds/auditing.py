"""The common part of tests of audits: a run of the pipeline that does wrong, and a look at the input."""

from __future__ import annotations

import json

from bounded import Fed, Silent, run_local
from flawed_pipelines import FLAWED

from exactlyonce.testing.cluster import KafkaCluster

TARGET = "flawed_pipelines:flawed"


class Quiet(Silent):
    def passed(self, offsets: int) -> None:
        pass


def run_flawed(fed: Fed, *arguments: str, parallelism: int = 2, interval: str = "200ms") -> None:
    run_local(fed, parallelism, TARGET, *arguments, interval=interval, env={FLAWED: "1"})


def order_at(kafka: KafkaCluster, topic: str, partition: int, offset: int) -> int:
    records = kafka.read_committed(topic)
    (found,) = [each for each in records if (each.partition, each.offset) == (partition, offset)]
    return int(json.loads(found.value or b"")["id"])
