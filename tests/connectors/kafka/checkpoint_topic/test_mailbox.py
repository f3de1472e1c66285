"""The mailbox of a pipeline in a real cluster."""

from __future__ import annotations

import pytest
from waiting import succeeds, until

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.confluent import make_consumer
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import SAVEPOINT, Asked, Mailbox
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.group_offsets import GroupOffsets
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import KafkaCluster


def test_a_request_is_found_until_it_is_taken_away(kafka: KafkaCluster, topic_name: str) -> None:
    kafka.create_topic(checkpoint_topic(topic_name))
    kafka.create_topic(f"{topic_name}-in")
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    published = GroupOffsets(config, topic_name, pytest.fail)
    published.publish([SourceOffset("in", f"{topic_name}-in", "", 0, 7)])
    coordinator, person = Mailbox(config.confluent(), topic_name), Mailbox(config.confluent(), topic_name)
    until(lambda: succeeds(coordinator.look, unless=BrokerUnavailable))  # a new broker has no coordinator at first
    assert coordinator.look() is None
    first = Asked(id="a", incarnation=3, action=SAVEPOINT)
    person.ask(first)
    person.close()
    assert coordinator.look() == first
    again = Mailbox(config.confluent(), topic_name)
    second = Asked(id="b", incarnation=3, action=SAVEPOINT, stop=True)
    again.ask(second)
    published.publish([SourceOffset("in", f"{topic_name}-in", "", 0, 8)])
    assert coordinator.look() == second
    assert group_offsets.forget(config, topic_name, {coordinator.place[0]: [coordinator.place[1]]}) == []
    assert coordinator.look() is None
    for each in (again, coordinator, published):
        each.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_consumer_in_the_group(protocol: str, kafka: KafkaCluster, topic_name: str) -> None:
    kafka.create_topic(checkpoint_topic(topic_name))
    kafka.create_topic(f"{topic_name}-in")
    settings = {"bootstrap.servers": kafka.bootstrap_servers}
    member = make_consumer({**settings, "group.id": topic_name, "group.protocol": protocol})
    member.subscribe([f"{topic_name}-in"])
    until(member.assignment, meanwhile=lambda: member.poll(0.1))
    mailbox = Mailbox(settings, topic_name)
    with pytest.raises(ConfigError, match=rf"A consumer has joined group {topic_name}, .* give it another group\.id"):
        mailbox.ask(Asked(id="a", incarnation=3, action=SAVEPOINT))
    member.close()
    asked = Asked(id="b", incarnation=3, action=SAVEPOINT)
    until(lambda: succeeds(lambda: mailbox.ask(asked), unless=ConfigError))  # until the broker notices that it left
    assert mailbox.look() == asked
    mailbox.close()
