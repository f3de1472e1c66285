"""A pipeline that reads what transactions write: at the end nothing lags, and after a kill each record counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from running import Job, orders
from settled import await_readable

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

COUNT = 300


def write(job: Job, producer: Producer, *, committed: bool) -> None:
    """A transaction with orders in all partitions."""
    more = orders(COUNT, first=len(job.fed))
    producer.begin_transaction()
    for key, value in more:
        producer.produce(job.topic, value, key)
    producer.flush(LIMIT_S)
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
    """Aborted records are last; a kill after the decision, with more orders meanwhile, changes nothing."""
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
    write(job, producer, committed=True)
    job.finish_here()
    assert set(lags(kafka, job).values()) == {0}
    job.assert_totals()
