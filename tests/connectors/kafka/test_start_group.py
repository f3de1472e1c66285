"""The offsets at which a source takes over from a consumer group, read on a broker."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from waiting import until

from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster


class Groups:
    """A topic with ten records in each of three partitions, and the groups that read it."""

    def __init__(self, kafka: KafkaCluster, topic: str) -> None:
        self.kafka, self.topic = kafka, kafka.create_topic(topic, 3, cleanup_policy="delete")
        for partition in range(3):
            kafka.produce(topic, [str(number) for number in range(10)], partition)

    def consumer(self, group: str, **settings: object) -> Consumer:
        config: dict[str, Any] = {"bootstrap.servers": self.kafka.bootstrap_servers, "group.id": group}
        return Consumer({**config, "auto.offset.reset": "earliest", "enable.auto.commit": False, **settings})

    def commit(self, group: str, offsets: Mapping[int, int], epoch: int = -1) -> None:
        places = [
            TopicPartition(self.topic, partition, offset, leader_epoch=epoch) for partition, offset in offsets.items()
        ]
        with closing(self.consumer(group)) as consumer:
            until(lambda: _committed(consumer, places))

    def first_offsets(self, group: str, **options: Any) -> dict[int, int]:
        source: KafkaSource[bytes] = KafkaSource(self.topic, value=bytes, start_group=group, **options)
        config = ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers})
        with closing(Topics(config)) as topics:
            return source.first_offsets("orders", topics)


def _committed(consumer: Consumer, places: list[TopicPartition]) -> bool:
    """Commit; False: the broker is new, and has not looked at its groups yet."""
    try:
        consumer.commit(offsets=places, asynchronous=False)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.COORDINATOR_LOAD_IN_PROGRESS:
            raise
        return False
    return True


@pytest.fixture
def groups(kafka: KafkaCluster, topic_name: str) -> Groups:
    return Groups(kafka, topic_name)


def test_start_counts_where_the_group_has_no_offset(groups: Groups) -> None:
    groups.commit("g1-" + groups.topic, {0: 4, 2: 10})
    assert groups.first_offsets("g1-" + groups.topic) == {0: 4, 1: 0, 2: 10}
    assert groups.first_offsets("g1-" + groups.topic, start="latest") == {0: 4, 1: 10, 2: 10}
    assert groups.first_offsets("g1-" + groups.topic, start={0: 1, 1: 7}) == {0: 4, 1: 7, 2: 10}


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_with_members_is_refused_until_they_are_gone(protocol: str, groups: Groups) -> None:
    group = f"{protocol}-{groups.topic}"
    member = groups.consumer(group, **{"group.protocol": protocol})
    member.subscribe([groups.topic])
    until(lambda: member.poll(0.1) and member.assignment())
    member.commit(offsets=[TopicPartition(groups.topic, 1, 3)], asynchronous=False)
    with pytest.raises(ConfigError, match=f"Source 'orders', with start_group='{group}': .*still has members .*Stop "):
        groups.first_offsets(group)
    member.close()
    assert groups.first_offsets(group) == {0: 0, 1: 3, 2: 0}


def test_a_group_without_offsets_is_refused(groups: Groups) -> None:
    with pytest.raises(ConfigError, match=r"start_group='nobody': the group has no offset .*Correct the group's name"):
        groups.first_offsets("nobody")


def test_offsets_that_are_not_in_the_log_are_refused(groups: Groups) -> None:
    group = "gone-" + groups.topic
    groups.commit(group, {0: 2, 1: 5, 2: 11})
    groups.kafka.delete_records(groups.topic, {0: 6})
    with pytest.raises(ConfigError) as raised:
        groups.first_offsets(group)
    text = str(raised.value)
    assert f"{groups.topic}[0] offset 2: the topic begins at 6 now, so that retention has taken offsets 2 to 5" in text
    assert f"{groups.topic}[2] offset 11: the topic ends at 10" in text
    assert "start={0: 6, 1: 5, 2: 10}" in text


def test_offsets_of_a_leader_epoch_that_the_log_has_lost_are_refused(groups: Groups) -> None:
    group = "epoch-" + groups.topic
    groups.commit(group, {0: 2}, epoch=0)
    assert groups.first_offsets(group) == {0: 2, 1: 0, 2: 0}
    groups.commit(group, {0: 2}, epoch=7)
    with pytest.raises(ConfigError, match=r"\[0\] offset 2: the log was truncated, and what leader epoch 7 wrote"):
        groups.first_offsets(group)


def test_offsets_of_an_open_transaction_are_waited_for(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    group = "pending-" + groups.topic
    groups.commit(group, {0: 2})
    settings = {"bootstrap.servers": groups.kafka.bootstrap_servers, "transactional.id": f"plain-{groups.topic}"}
    producer = Producer(settings)
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    with closing(groups.consumer(group)) as consumer:
        metadata = consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction([TopicPartition(groups.topic, 0, 8)], metadata, LIMIT_S)
    monkeypatch.setattr(group_offsets, "TIMEOUT_MS", 300)
    with pytest.raises(BrokerUnavailable, match="UnstableOffsetCommit"):
        groups.first_offsets(group)
    producer.commit_transaction(LIMIT_S)
    monkeypatch.undo()
    assert groups.first_offsets(group) == {0: 8, 1: 0, 2: 0}
