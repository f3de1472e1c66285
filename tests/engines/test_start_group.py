"""A pipeline takes over from a plain consumer: each record is read by one of them, also if it dies at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from running import Job, assert_once, ids_in

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

COUNT = 600
ROOT = Path(__file__).parents[2]


def read_some(kafka: KafkaCluster, group: str, topic: str, count: int) -> list[int]:
    """The ids of at least *count* records, which a plain consumer of *group* has read and committed."""
    settings: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": group}
    ids: list[int] = []
    with closing(Consumer({**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False})) as consumer:
        consumer.subscribe([topic])
        while len(ids) < count:
            ids += [json.loads(message.value() or b"")["id"] for message in consumer.consume(50, 1.0)]
        consumer.commit(asynchronous=False)
    return ids


def committed(kafka: KafkaCluster, group: str) -> list[TopicPartition]:
    admin = kafka.admin()  # which takes its answers with it
    answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(LIMIT_S)
    return list(answer.topic_partitions)


def test_a_kill_before_the_first_checkpoint(
    kafka: KafkaCluster, topic_name: str, job_of: Callable[..., Job], failpoint: Callable[..., Any]
) -> None:
    """The offsets are read once. A commit of the group between kill and restart changes nothing."""
    group = f"{topic_name}-old"
    job = job_of("moved_over", "--param", f"group={group}")
    job.feed(COUNT)
    before = read_some(kafka, group, job.topic, COUNT // 3)
    offsets = committed(kafka, group)
    job.finish("--inline", env=failpoint("coordinator-checked"), code=-9)
    assert job.history().latest is not None
    assert sorted(job.history().manifests) == [0]
    assert committed(kafka, group) == offsets
    with closing(Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": group})) as consumer:
        consumer.commit(offsets=[TopicPartition(job.topic, 0, 0)], asynchronous=False)
    job.feed(COUNT)
    job.finish_here()
    after = ids_in(kafka, f"{job.name}-copies", 2 * COUNT - len(before))
    assert_once([*before, *after], job.fed)
