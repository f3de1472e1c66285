"""The doctor's requests to brokers: facts of topics, and permitted operations. None changes anything.

Invariant: a fact that a broker does not tell is None, and not taken for "nothing" or "all".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafka.protocol.admin.groups import DescribeGroupsRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, Again, refuse
from exactlyonce.connectors.kafka.kafka_protocol import Wire

OPERATIONS = {
    2: "All", 3: "Read", 4: "Write", 5: "Create", 6: "Delete", 7: "Alter", 8: "Describe", 9: "ClusterAction",
    10: "DescribeConfigs", 11: "AlterConfigs", 12: "IdempotentWrite",
}  # fmt: skip
"""As the protocol numbers them."""
TOPIC_REFUSED, GROUP_REFUSED = 29, 30
TIMEOUT_MS = 10_000


@dataclass(frozen=True)
class TopicFacts:
    """A topic as a broker describes it."""

    name: str
    topic_id: str
    replicas: tuple[int, ...]
    """The number of replicas by partition."""
    in_sync: tuple[int, ...]
    """The number of replicas in sync by partition."""
    operations: frozenset[str] | None
    """Permitted operations; None: the broker does not say."""

    @property
    def visible(self) -> bool:
        """Whether we may describe it."""
        return bool(self.replicas)


class Questions:
    """Each request raises `BrokerUnavailable` if it has no answer after ten seconds. One thread at a time."""

    def __init__(self, config: ClientConfig) -> None:
        self._wire = Wire(config, timeout_ms=TIMEOUT_MS)

    def topic(self, name: str) -> TopicFacts | None:
        """The facts of a topic; None: there is none."""
        return self._wire.retrying(lambda: self._topic(name), f"Asking for topic {name}")

    def group_operations(self, group: str) -> frozenset[str] | None:
        """Permitted operations on a consumer group; None: there is none yet, or the broker does not say."""
        return self._wire.retrying(lambda: self._group(group), f"Asking for group {group}")

    def close(self) -> None:
        self._wire.close()

    def _topic(self, name: str) -> TopicFacts | None:
        wanted = [MetadataRequest.MetadataRequestTopic(name=name)]
        answer = self._wire.ask(
            MetadataRequest(topics=wanted, allow_auto_topic_creation=False, include_topic_authorized_operations=True)
        )
        return _facts(answer.topics[0])

    def _group(self, group: str) -> frozenset[str] | None:
        question = FindCoordinatorRequest(key_type=CoordinatorType.GROUP.value, coordinator_keys=[group])
        coordinator = self._wire.ask(question).coordinators[0]
        if coordinator.error_code == GROUP_REFUSED:
            return frozenset()
        refuse(coordinator.error_code, f"Finding the coordinator of group {group}")
        message = DescribeGroupsRequest(
            groups=[group],
            include_authorized_operations=True,
            max_version=5,  # later ones do not report a missing group
        )
        description = self._wire.ask(message, coordinator.node_id).groups[0]
        if description.error_code == GROUP_REFUSED:
            return frozenset()
        refuse(description.error_code, f"Asking for group {group}")
        return _named(description.authorized_operations)


def _facts(topic: Any) -> TopicFacts | None:
    if topic.error_code == UNKNOWN_TOPIC:
        return None
    if topic.error_code == TOPIC_REFUSED:
        return TopicFacts(name=topic.name, topic_id="", replicas=(), in_sync=(), operations=frozenset())
    refuse(topic.error_code, f"Asking for topic {topic.name}")
    partitions = sorted(topic.partitions, key=lambda partition: partition.partition_index)
    if not partitions:
        raise Again(f"topic {topic.name} has no partitions yet")
    return TopicFacts(
        name=topic.name,
        topic_id=str(topic.topic_id),
        replicas=tuple(len(partition.replica_nodes) for partition in partitions),
        in_sync=tuple(len(partition.isr_nodes) for partition in partitions),
        operations=_named(topic.authorized_operations),
    )


def _named(operations: set[int] | None) -> frozenset[str] | None:
    return None if operations is None else frozenset(OPERATIONS.get(number, str(number)) for number in operations)
