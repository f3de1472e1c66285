"""The Kafka image of docker/kafka, run by testcontainers."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from settled import await_readable

from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, kafka_container

pytestmark = pytest.mark.docker


def test_the_container_serves_transactions(container_kafka: KafkaCluster, topic_name: str) -> None:
    topic = container_kafka.create_topic(topic_name, partitions=2)
    producer = Producer({"bootstrap.servers": container_kafka.bootstrap_servers, "transactional.id": topic_name})
    producer.init_transactions(LIMIT_S)
    for key, end in [("aborted", producer.abort_transaction), ("committed", producer.commit_transaction)]:
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce(topic, b"value", key, partition)
        assert producer.flush(LIMIT_S) == 0
        end(LIMIT_S)
    await_readable(container_kafka, topic)
    assert [record.key for record in container_kafka.read_committed(topic)] == [b"committed", b"committed"]


def test_a_missing_image_is_an_error_that_says_how_to_make_it() -> None:
    with pytest.raises(BrokerUnavailable, match="make image"), kafka_container("exactlyonce-kafka:absent"):
        pass
