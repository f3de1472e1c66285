"""Sn as the offsets of a consumer group, so that Kafka's own tools show a pipeline's lag.

Nothing reads them back: the truth is in the manifests. So a broker that does not take them now is asked again at the
next checkpoint, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import TopicPartition

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.checkpoint.store.confluent import make_consumer
from exactlyonce.connectors.kafka.client_config import ClientConfig


class GroupOffsets:
    """The offsets of group *group*, which has no members."""

    def __init__(self, config: ClientConfig, group: str) -> None:
        overrides = {"group.id": group, "enable.auto.commit": False, "enable.auto.offset.store": False}
        self._consumer = make_consumer(config.confluent(overrides))

    def publish(self, offsets: Iterable[SourceOffset]) -> None:
        """Set them, without waiting. Through the consumer: librdkafka's admin call for it aborts the process when an
        answer comes after its timeout, as after a minute without a broker."""
        places = [TopicPartition(each.topic, each.partition, each.offset) for each in offsets]
        if places:
            self._consumer.commit(offsets=places, asynchronous=True)
        self._consumer.poll(0)

    def close(self) -> None:
        """Let go of the connection."""
        self._consumer.close()
