"""The consumer group of a pipeline: Sn as its offsets, so that Kafka's own tools show the lag; and our rights on it.

Nothing reads the offsets back: the truth is in the manifests. A broker that does not take them now gets the next ones
at the next checkpoint, and nothing waits for it. Only offsets of the pipeline's topics are deleted: others may use the
group as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from confluent_kafka import KafkaError, TopicPartition
from kafka.protocol.admin.groups import DescribeGroupsRequest
from kafka.protocol.consumer import OffsetDeleteRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.confluent import make_consumer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, Meaning, meaning_of, refuse
from exactlyonce.connectors.kafka.kafka_protocol import Wire, operation_names

GROUP_NOT_FOUND, GROUP_REFUSED, GROUP_IN_USE = 69, 30, (68, 86)
TIMEOUT_MS = 10_000
LAST_ANSWER_S = 5.0


class GroupOffsets:
    """The offsets of group *group*, which has no members, in one cluster. *topics*: the names by place of those of
    another cluster than that of the checkpoints. *note* hears once that we lack the right."""

    def __init__(
        self,
        config: ClientConfig,
        group: str,
        note: Callable[[str], None],
        topics: Mapping[str, str] | None = None,
    ) -> None:
        self._group, self._note, self._topics, self._is_noted = group, note, topics, False
        self._newest: list[TopicPartition] = []
        """What is to be published next."""
        self._is_asked = False
        """Whether an answer is awaited: an older request that the library repeats would overtake a newer one."""
        overrides = {
            "group.id": group, "enable.auto.commit": False, "enable.auto.offset.store": False,
            "on_commit": self._answered,
        }  # fmt: skip
        self._consumer = make_consumer(config.confluent(overrides))

    def publish(self, offsets: Iterable[SourceOffset]) -> None:
        """Set them, without waiting. Through the consumer: librdkafka's admin call for it aborts the process when an
        answer comes after its timeout, as after a minute without a broker."""
        if self._topics is None:
            here = [(at.topic, at) for read in offsets if (at := read.in_cluster) is not None]
        else:
            here = [(self._topics[read.topic], read) for read in offsets if read.topic in self._topics]
        places = [TopicPartition(topic, at.partition, at.offset) for topic, at in here]
        self._newest = places or self._newest
        self._go_on(0)

    def _go_on(self, wait_s: float) -> None:
        self._consumer.poll(wait_s)
        if self._newest and not self._is_asked:
            self._consumer.commit(offsets=self._newest, asynchronous=True)
            self._newest, self._is_asked = [], True

    def _answered(self, error: KafkaError | None, places: Sequence[TopicPartition]) -> None:
        self._is_asked = False
        errors = [each for each in (error, *(place.error for place in places)) if each is not None]
        if not self._is_noted and any(meaning_of(each) is Meaning.NOT_ALLOWED for each in errors):
            self._is_noted = True
            self._note(
                f"no offsets are published: our principal lacks Read on the group {self._group}. Nothing else needs "
                f"them than tools that show the lag."
            )

    def close(self) -> None:
        """Wait `LAST_ANSWER_S` at most until the last offsets are set."""
        until_s = time.monotonic() + LAST_ANSWER_S
        while (self._newest or self._is_asked) and time.monotonic() < until_s:
            self._go_on(0.01)
        self._consumer.close()


def forget(config: ClientConfig, group: str, partitions: Mapping[str, Sequence[int]]) -> list[str]:
    """Delete the offsets of *group* in *partitions* (by topic); the topics where a consumer of it has to keep them."""
    with closing(Wire(config, timeout_ms=TIMEOUT_MS)) as wire:
        return wire.retrying(lambda: _forget(wire, group, partitions), f"Deleting the offsets of group {group}")


def operations(config: ClientConfig, group: str) -> frozenset[str] | None:
    """The operations that we may perform on *group*; None: it does not exist yet, or the broker does not say."""
    with closing(Wire(config, timeout_ms=TIMEOUT_MS)) as wire:
        return wire.retrying(lambda: _operations(wire, group), f"Asking for group {group}")


def _operations(wire: Wire, group: str) -> frozenset[str] | None:
    found = coordinator(wire, group)
    if found.error_code == GROUP_REFUSED:
        return frozenset()
    refuse(found.error_code, f"Finding the coordinator of group {group}")
    message = DescribeGroupsRequest(
        groups=[group],
        include_authorized_operations=True,
        max_version=5,  # later ones say nothing of a group that does not exist
    )
    described = wire.ask(message, found.node_id).groups[0]
    if described.error_code == GROUP_REFUSED:
        return frozenset()
    refuse(described.error_code, f"Asking for group {group}")
    return operation_names(described.authorized_operations)


def coordinator(wire: Wire, group: str) -> Any:
    """The answer that names the broker of *group*; its error code is not looked at."""
    question = FindCoordinatorRequest(key_type=CoordinatorType.GROUP.value, coordinator_keys=[group])
    return wire.ask(question).coordinators[0]


def _forget(wire: Wire, group: str, partitions: Mapping[str, Sequence[int]]) -> list[str]:
    found = coordinator(wire, group)
    refuse(found.error_code, f"Finding the coordinator of group {group}")
    answer = wire.ask(_request(group, partitions), found.node_id)
    if answer.error_code == GROUP_NOT_FOUND:
        return []
    if answer.error_code in GROUP_IN_USE:
        return sorted(partitions)
    refuse(answer.error_code, f"Deleting the offsets of group {group}")
    kept = []
    for topic in answer.topics:
        codes = {partition.error_code for partition in topic.partitions}
        if codes.intersection(GROUP_IN_USE):
            kept.append(topic.name)
        for code in codes.difference((*GROUP_IN_USE, UNKNOWN_TOPIC)):
            refuse(code, f"Deleting the offsets of group {group} in {topic.name}")
    return kept


def _request(group: str, partitions: Mapping[str, Sequence[int]]) -> OffsetDeleteRequest:
    of_topic = OffsetDeleteRequest.OffsetDeleteRequestTopic
    of_partition = of_topic.OffsetDeleteRequestPartition
    topics = [
        of_topic(name=name, partitions=[of_partition(partition_index=partition) for partition in indexes])
        for name, indexes in partitions.items()
    ]
    return OffsetDeleteRequest(group_id=group, topics=topics)
