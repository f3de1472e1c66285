"""The offsets that a pipeline publishes in a consumer group of its own name, for tools that show lag.

Invariant: only offsets of the topics named are deleted; the group may be used for others as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafka.protocol.consumer import OffsetDeleteRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import UNKNOWN_TOPIC, Wire, refuse

GROUP_NOT_FOUND, GROUP_IN_USE = 69, (68, 86)
TIMEOUT_MS = 10_000


def forget(config: ClientConfig, group: str, partitions: Mapping[str, Sequence[int]]) -> list[str]:
    """Delete the offsets of *group* in *partitions* (by topic); the topics where a consumer of it has to keep them."""
    wire = Wire(config, timeout_ms=TIMEOUT_MS)
    try:
        return wire.retrying(lambda: _forget(wire, group, partitions), f"Deleting the offsets of group {group}")
    finally:
        wire.close()


def _forget(wire: Wire, group: str, partitions: Mapping[str, Sequence[int]]) -> list[str]:
    question = FindCoordinatorRequest(key_type=CoordinatorType.GROUP.value, coordinator_keys=[group])
    coordinator = wire.ask(question).coordinators[0]
    refuse(coordinator.error_code, f"Finding the coordinator of group {group}")
    answer = wire.ask(_request(group, partitions), coordinator.node_id)
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
        of_topic(name=name, partitions=[of_partition(partition_index=each) for each in some])
        for name, some in partitions.items()
    ]
    return OffsetDeleteRequest(group_id=group, topics=topics)
