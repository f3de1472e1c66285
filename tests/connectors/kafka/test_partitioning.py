"""librdkafka's partitioners, against librdkafka itself."""

from __future__ import annotations

import random

import pytest
from confluent_kafka import Message, Producer

from exactlyonce.connectors.kafka.partitioning import DEFAULT, PARTITIONERS, partitioner
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

PARTITIONS = 7


def keys(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [b"", *(rng.randbytes(rng.randint(1, 40)) for _ in range(300)), *(b"customer-%d" % n for n in range(100))]


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_a_record_goes_where_the_client_puts_it(kafka: KafkaCluster, topic_name: str, name: str) -> None:
    kafka.create_topic(topic_name, PARTITIONS)
    found: list[tuple[bytes | None, int | None]] = []

    def delivered(error: object, message: Message) -> None:
        assert error is None
        found.append((message.key(), message.partition()))

    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "partitioner": name})
    sent = keys(len(name))
    for key in sent:
        producer.produce(topic_name, b"", key, on_delivery=delivered)
    assert producer.flush(LIMIT_S) == 0
    assert len(found) == len(sent)
    foretold = [(PARTITIONERS[name](key, PARTITIONS), partition) for key, partition in found]
    assert all(ours in (None, theirs) for ours, theirs in foretold)
    at_random = {key for key in sent if PARTITIONERS[name](key, PARTITIONS) is None}
    assert at_random == (set(sent) if name == "random" else {b""} if name == DEFAULT else set())


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_a_null_key_is_dealt_out_at_random_unless_the_partitioner_says_otherwise(name: str) -> None:
    expected = None if "random" in name else PARTITIONERS[name](b"", PARTITIONS)
    assert PARTITIONERS[name](None, PARTITIONS) == expected


def test_the_default_is_the_clients() -> None:
    assert partitioner({}) is PARTITIONERS[DEFAULT]
    assert partitioner({"partitioner": "murmur2"}) is PARTITIONERS["murmur2"]
    with pytest.raises(ConfigError, match=r"partitioner=my_own is unknown.*consistent_random"):
        partitioner({"partitioner": "my_own"})
