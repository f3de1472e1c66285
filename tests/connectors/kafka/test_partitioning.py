"""librdkafka's partitioners, against librdkafka itself."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
from confluent_kafka import Message, Producer
from kafka.partitioner.default import murmur2

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import (
    DEFAULT,
    KEYS_MIN,
    OF_LIBRARY,
    PARTITIONERS,
    fitting,
    partitioner,
)
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.visible import other_partitioner
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
    assert at_random == (set(sent) if name == "random" else {b""} if name == OF_LIBRARY else set())


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_a_null_key_is_dealt_out_at_random_unless_the_partitioner_says_otherwise(name: str) -> None:
    expected = None if "random" in name else PARTITIONERS[name](b"", PARTITIONS)
    assert PARTITIONERS[name](None, PARTITIONS) == expected


def test_the_default_is_that_of_javas_clients() -> None:
    """The hash is kafka-python's, which follows Java's; an empty key has its hash, and a null one goes anywhere."""
    for key in keys(3):
        assert partitioner(DEFAULT)(key, PARTITIONS) == (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
    assert partitioner(DEFAULT)(None, PARTITIONS) is None


def test_an_unknown_partitioner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'my_own' is unknown.*consistent_random.*murmur2_random"):
        partitioner("my_own")


def placed(name: str, count: int = 40) -> list[tuple[bytes | None, int]]:
    return [(b"c%d" % n, PARTITIONERS[name](b"c%d" % n, PARTITIONS) or 0) for n in range(count)]


def test_keys_tell_the_partitioner_that_has_put_them_where_they_are() -> None:
    """Nothing is told of too few keys, of records without keys, nor where two writers have mixed theirs."""
    assert fitting(placed(OF_LIBRARY), PARTITIONS, DEFAULT) == OF_LIBRARY
    assert fitting(placed(DEFAULT), PARTITIONS, OF_LIBRARY) == DEFAULT
    assert fitting(placed(DEFAULT), PARTITIONS, DEFAULT) == ""
    assert fitting(placed(OF_LIBRARY, KEYS_MIN - 1), PARTITIONS, DEFAULT) == ""
    assert fitting([(None, n % 3) for n in range(40)], PARTITIONS, DEFAULT) == ""
    assert fitting([*placed(OF_LIBRARY), *placed(DEFAULT)], PARTITIONS, "murmur2") == ""


def test_a_topic_tells_by_which_other_partitioner_its_keys_lie(kafka: KafkaCluster, topic_name: str) -> None:
    kafka.create_topic(topic_name, PARTITIONS)
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    with closing(Topics(config)) as topics:
        topic = topics.describe([topic_name])[topic_name]
        assert other_partitioner(topics, topic, DEFAULT) == "", "it is empty"
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "partitioner": OF_LIBRARY})
        for key, _ in placed(OF_LIBRARY, 400):
            producer.produce(topic_name, b"", key)
        assert producer.flush(LIMIT_S) == 0
        assert other_partitioner(topics, topic, DEFAULT) == OF_LIBRARY
        assert other_partitioner(topics, topic, OF_LIBRARY) == ""
