"""Topics: what they are, making one, and their offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from exactlyonce.connectors.kafka.topics import LogOffsets, Topics
from exactlyonce.pipeline.errors import ConfigError, TopicError
from exactlyonce.testing.cluster import LIMIT_S


def write(cluster: Any, topic: str, timestamps_ms: list[int]) -> None:
    producer = Producer(cluster.config.confluent())
    for timestamp_ms in timestamps_ms:
        producer.produce(topic, b"value", partition=0, timestamp=timestamp_ms)
    assert producer.flush(LIMIT_S) == 0


def test_create_and_describe(cluster: Any, topic_name: str) -> None:
    settings = {"cleanup.policy": "compact", "segment.ms": "600000"}
    assert cluster.topics.create(topic_name, partitions=3, settings=settings)
    assert not cluster.topics.create(topic_name, partitions=5)
    assert cluster.topics.describe([topic_name])[topic_name].partitions == 3
    shown = cluster.topics.settings(topic_name)
    assert {name: shown[name] for name in settings} == settings
    assert len(shown) > 20


def test_all_topics(cluster: Any, topic: str) -> None:
    """They are those of users: the brokers' own are left out."""
    own = Producer({**cluster.config.confluent(), "transactional.id": topic})
    own.init_transactions(LIMIT_S)  # makes __transaction_state
    found = cluster.topics.all()
    assert found[topic] == cluster.topics.describe([topic])[topic]
    assert not any(name.startswith("__") for name in found)


def test_spans_of_several_topics(cluster: Any, topic_name: str) -> None:
    """They are those of each topic alone; a missing topic is an error, and no topics are none."""
    names = [f"{topic_name}-{partitions}" for partitions in (1, 3)]
    for partitions, name in zip((1, 3), names, strict=True):
        cluster.topics.create(name, partitions=partitions)
        write(cluster, name, [1_000] * partitions)
    described = cluster.topics.describe(names)
    spans = cluster.topics.spans(described.values())
    for name in names:
        assert spans[name].first == cluster.topics.start_offsets(name)
        assert spans[name].end == cluster.topics.end_offsets(name, committed=True)
    assert spans[names[1]].end == {0: 3, 1: 0, 2: 0}
    missing = msgspec.structs.replace(described[names[0]], name=f"{topic_name}-missing")
    with pytest.raises(TopicError):
        cluster.topics.spans([described[names[0]], missing])
    assert cluster.topics.spans([]) == {}


def test_missing(cluster: Any, topic: str) -> None:
    missing = f"{topic}-missing"
    questions: list[Callable[[], object]] = [
        lambda: cluster.topics.describe([topic, missing]),
        lambda: cluster.topics.settings(missing),
        lambda: cluster.topics.start_offsets(missing),
        lambda: cluster.topics.end_offsets(missing, committed=True),
        lambda: cluster.topics.log_offsets(missing),
        lambda: cluster.topics.offsets_at(missing, 0),
    ]
    for ask in questions:
        with pytest.raises(TopicError, match=rf"{missing}.*Create it"):
            ask()
    with pytest.raises(TopicError, match=rf"topic {topic}-absent, {missing} failed"):
        cluster.topics.describe([missing, topic, f"{topic}-absent"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replication_factor": 99}, "replication factor"),
        ({"partitions": 0}, "partition count"),
        ({"settings": {"segment.ms": "often"}}, "settings: .*segment.ms"),
        ({"settings": {"no.such.setting": "1"}}, "settings: .*no.such.setting"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_what_the_broker_refuses(cluster: Any, topic_name: str, arguments: dict[str, Any], message: str) -> None:
    given = {"name": topic_name, **arguments}
    with pytest.raises(ConfigError, match=f"{given['name']} because of its {message}"):
        cluster.topics.create(**given)


def test_offsets(cluster: Any, topic: str) -> None:
    write(cluster, topic, [1_000, 2_000, 3_000])
    cluster.open(topic, topic, [b"open", b"open"])
    assert cluster.topics.start_offsets(topic) == {0: 0, 1: 0}
    assert cluster.topics.end_offsets(topic, committed=False) == {0: 4, 1: 1}
    assert cluster.topics.end_offsets(topic, committed=True) == {0: 3, 1: 0}
    assert cluster.topics.log_offsets(topic) == LogOffsets({0: 0, 1: 0}, {0: 3, 1: 0}, {0: 4, 1: 1})
    assert cluster.topics.log_offsets(topic, [1]) == LogOffsets({1: 0}, {1: 0}, {1: 1})
    assert cluster.topics.offsets_at(topic, 0) == {0: 0, 1: 0}
    assert cluster.topics.offsets_at(topic, 1_500) == {0: 1, 1: 0}
    assert cluster.topics.offsets_at(topic, 2_000) == {0: 1, 1: 0}
    assert cluster.topics.offsets_at(topic, 4_000) == {0: 3, 1: 0}


def test_what_each_broker_knows(cluster: Any, topic: str) -> None:
    found = cluster.topics.seen_by_each([topic, f"{topic}-missing"])
    assert found == {topic: (cluster.topics.describe([topic])[topic],), f"{topic}-missing": (None,)}


def test_first_offsets_are_those_of_the_very_topic(cluster: Any, topic: str) -> None:
    described = cluster.topics.describe([topic])[topic]
    assert cluster.topics.first_offsets(described) == cluster.topics.start_offsets(topic)
    other = msgspec.structs.replace(described, topic_id="00000000-0000-0000-0000-000000000000")
    assert cluster.topics.first_offsets(other) is None
    assert cluster.topics.first_offsets(msgspec.structs.replace(described, name=f"{topic}-missing")) is None


def test_a_topic_that_was_made_anew_is_not_deleted(cluster: Any, topic: str) -> None:
    topics = Topics(cluster.config)
    first = topics.describe([topic])[topic]
    topics.delete(first)
    with pytest.raises(TopicError):
        topics.describe([topic])
    topics.delete(first)
    assert topics.create(topic, partitions=2)
    second = topics.describe([topic])[topic]
    topics.delete(first)
    assert topics.describe([topic])[topic] == second != first
