"""A pipeline that reads what transactions write: at the end nothing lags, and after a kill each record counts once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from running import Job, orders
from settled import await_readable

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.embedded.jars import KAFKA_VERSION
from exactlyonce.connectors.embedded.programs import find_java
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.group_offsets import GroupOffsets
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster
from exactlyonce.testing.servers.programs import copy_jars, downloaded

COUNT = 300


def begin(job: Job, producer: Producer) -> list[tuple[str, str]]:
    """A transaction with orders in all partitions."""
    more = orders(COUNT, first=len(job.fed))
    producer.begin_transaction()
    for key, value in more:
        producer.produce(job.topic, value, key)
    producer.flush(LIMIT_S)
    return more


def write(job: Job, producer: Producer, *, committed: bool) -> None:
    more = begin(job, producer)
    if committed:
        producer.commit_transaction(LIMIT_S)
        job.fed += more
    else:
        producer.abort_transaction(LIMIT_S)
    await_readable(job.kafka, job.topic)


def lags(kafka: KafkaCluster, job: Job) -> dict[int, int]:
    """The lag by partition, as Kafka's own tool computes it."""
    topics = Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))
    try:
        ends = topics.end_offsets(job.topic, committed=False)
    finally:
        topics.close()
    admin = kafka.admin()
    answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(job.name)])[job.name].result(LIMIT_S)
    read = {place.partition: place.offset for place in answer.topic_partitions}
    return {partition: end - read[partition] for partition, end in ends.items()}


def test_no_partition_lags_behind_a_marker(
    kafka: KafkaCluster, job_of: Callable[..., Job], failpoint: Callable[..., Any]
) -> None:
    """Aborted records are last; a kill after the decision, with more orders meanwhile, changes nothing. Records of an
    open transaction count once it is committed."""
    job = job_of("linear")
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{job.name}-orders"})
    producer.init_transactions(LIMIT_S)
    write(job, producer, committed=True)
    write(job, producer, committed=False)
    job.finish("--inline", env=failpoint("coordinator-decided"), code=-9)
    write(job, producer, committed=True)
    write(job, producer, committed=False)
    job.finish_here()
    assert set(lags(kafka, job).values()) == {0}
    job.assert_totals()
    opened = begin(job, producer)
    job.finish_here()
    job.assert_totals()
    producer.commit_transaction(LIMIT_S)
    await_readable(kafka, job.topic)
    job.fed += opened
    job.finish_here()
    assert set(lags(kafka, job).values()) == {0}
    job.assert_totals()


@pytest.mark.exhaustive  # two requests to a group that is new overtook each other one time in thirty
def test_the_newest_offsets_stay(kafka: KafkaCluster, topic_name: str) -> None:
    kafka.create_topic(topic_name, 1)
    admin, config = kafka.admin(), ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(150):
        name = f"{topic_name}-{number}"
        group = GroupOffsets(config, name, pytest.fail)
        group.publish([SourceOffset("s", topic_name, "id", 0, 1)])
        time.sleep(number / 2_500)
        group.publish([SourceOffset("s", topic_name, "id", 0, 7)])
        group.close()
        answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(name)])[name].result(LIMIT_S)
        assert [place.offset for place in answer.topic_partitions] == [7]


@pytest.mark.exhaustive
def test_kafkas_own_tool_shows_the_lag(kafka: KafkaCluster, job_of: Callable[..., Job], tmp_path: Path) -> None:
    job = job_of("linear")
    job.feed(COUNT)
    job.finish_here()
    job.feed(5)
    tools = downloaded(
        f"kafka-tools-{KAFKA_VERSION}",
        lambda part: copy_jars([f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}"], part, tmp_path, "LAG NOT TESTED"),
    )
    tool = [str(find_java()), "-cp", f"{tools}/*", "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"]
    asked = [*tool, "--bootstrap-server", kafka.bootstrap_servers, "--describe", "--group", job.name]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    header, *rows = (line.split() for line in done.stdout.splitlines() if line.strip())
    shown = [dict(zip(header, row, strict=False)) for row in rows]
    assert {(row["GROUP"], row["TOPIC"]) for row in shown} == {(job.name, job.topic)}
    assert {int(row["PARTITION"]): int(row["LAG"]) for row in shown} == lags(kafka, job)
    assert sum(int(row["LAG"]) for row in shown) >= 5  # markers of transactions count, too
