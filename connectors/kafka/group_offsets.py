"""The offsets of consumer groups: of the pipeline's own, and of those at which a source begins or ends.

Sn is published as the offsets of the pipeline's group, so that Kafka's own tools show the lag. Nothing reads them back:
the truth is in the manifests. A broker that does not take them now gets the next ones at the next checkpoint, and
nothing waits for it. Only offsets of the pipeline's topics are deleted: others may use the group as well.

A source may begin or end at the offsets of a group, so that a pipeline can replace a plain consumer. Such a group is
only read; its offsets are taken while it has no members, and none while a transaction that commits some is open; an
offset whose records are not all there is an error, never moved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from confluent_kafka import KafkaError, TopicPartition
from kafka.protocol.admin.groups import DescribeGroupsRequest, ListGroupsRequest
from kafka.protocol.consumer import OffsetDeleteRequest, OffsetFetchRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.confluent import make_consumer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, Meaning, meaning_of, refuse
from exactlyonce.connectors.kafka.kafka_protocol import Wire, operation_names
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.positions import Group

GROUP_NOT_FOUND, GROUP_REFUSED, GROUP_IN_USE = 69, 30, (68, 86)
TIMEOUT_MS = 10_000
LAST_ANSWER_S = 5.0
START_GROUP = "start_group"
"""The argument of a source that names a group."""
WITHOUT_MEMBERS = ("Empty", "Dead")
"""The states of a group, of any type, that nobody is in."""
NAMES_VERSION = 9
"""The last version of OffsetFetch that names topics."""


class GroupOffsets:
    """The offsets of group *group*, which has no members, in one cluster. *topics*: the names by place of the topics
    of another cluster than the checkpoints'. *note* hears once of a refusal, as for want of a right."""

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
        for refusal in (error, *(place.error for place in places)):
            if refusal is None or self._is_noted:
                continue
            if meaning_of(refusal) is Meaning.NOT_ALLOWED:
                reason = f"our principal lacks Read on the group {self._group}"
            elif meaning_of(refusal) is Meaning.REFUSED and refusal.code() > 0:  # by the broker, as for its members
                reason = f"the broker refuses them for the group {self._group} ({refusal.name()}: {refusal.str()})"
            else:
                continue
            self._is_noted = True
            self._note(f"no offsets are published: {reason}. Nothing else needs them than tools that show the lag.")

    def settle(self) -> None:
        """Wait `LAST_ANSWER_S` at most until the last offsets are set."""
        until_s = time.monotonic() + LAST_ANSWER_S
        while (self._newest or self._is_asked) and time.monotonic() < until_s:
            self._go_on(0.01)

    def close(self) -> None:
        """End, once the last offsets are set, as `settle` says."""
        self.settle()
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


# --- where a source begins or ends ------------------------------------------------------------------------------------


def committed(topics: Topics, source: str, group: str, topic: str, setting: str, place: str) -> dict[int, int]:
    """The offset by partition of *topic* at which *group* would go on; partitions without one are left out.

    For errors: *source* is the id, *setting* the one that names the group, START_GROUP or one of `Position`, *place*
    the topic's name there. Raises `ConfigError` if the group has members, has no offset in the topic, or has one that
    is not in the log; `BrokerUnavailable` as `Topics` does, or if a transaction with its offsets stays open.
    """
    written = f"{setting}={group!r}" if setting == START_GROUP else f"{setting}={str(Group(group))!r}"
    wanted = f"Source {source!r}, with {written}"
    first, end = topics.start_offsets(topic), topics.end_offsets(topic, committed=False)
    offsets, epochs = _read(topics.config, wanted, group, topic, list(first))
    if not offsets:
        elsewhere = "begin elsewhere, as by start=" if setting == START_GROUP else f"give {setting} another position"
        raise ConfigError(
            f"{wanted}: the group has no offset in topic {topic!r}: its name is wrong, it never committed any, or they "
            f"have expired (offsets.retention.minutes). Correct the group's name, or {elsewhere}."
        )
    problems = [
        f"{topic}[{partition}] offset {offset}: {problem}"
        for partition, offset in offsets.items()
        if (problem := _problem(offset, first[partition], end[partition]))
    ]
    if not problems:
        ends = topics.epoch_ends(topic, epochs)
        problems = [
            f"{topic}[{partition}] offset {offsets[partition]}: the log was truncated, and what leader epoch "
            f"{epochs[partition]} wrote before it " + ("is gone" if end < 0 else f"ends at offset {end}")
            for partition, end in ends.items()
            if end < offsets[partition]
        ]
    if problems:
        within = {p: min(max(offset, first[p]), end[p]) for p, offset in offsets.items()}
        accepting = f"leave out {START_GROUP}= and accept it with start={within}"
        if setting != START_GROUP:
            accepting = f"accept it with {setting}='{json.dumps({place: {**first, **within}})}'"
        raise ConfigError(
            f"{wanted}: that leaves a gap or a double: {'; '.join(problems)}.\n"
            f"  Choices: restore the records from a replica or backup; set the group's offsets anew "
            f"(kafka-consumer-groups --reset-offsets); or {accepting}."
        )
    return offsets


def _problem(offset: int, first: int, end: int) -> str:
    if offset < first:
        return f"the topic begins at {first} now, so that retention has taken offsets {offset} to {first - 1}"
    return f"the topic ends at {end}: it was truncated or made anew" if offset > end else ""


def _read(
    config: ClientConfig, wanted: str, group: str, topic: str, partitions: list[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The offsets, and the leader epochs that came with them, by partition."""
    with closing(Wire(config, timeout_ms=TIMEOUT_MS)) as wire:
        answer = wire.retrying(
            lambda: _ask(wire, wanted, group, topic, partitions), f"Asking for the offsets of group {group}"
        )
    known = [entry for entry in answer if entry.committed_offset >= 0]
    return (
        {entry.partition_index: entry.committed_offset for entry in known},
        {entry.partition_index: entry.committed_leader_epoch for entry in known if entry.committed_leader_epoch >= 0},
    )


def _ask(wire: Wire, wanted: str, group: str, topic: str, partitions: list[int]) -> list[Any]:
    """The answer by partition. The members are asked for first: what the last one commits is seen."""
    found = coordinator(wire, group)
    refuse(found.error_code, f"Finding the coordinator of group {group}")
    listed = wire.ask(ListGroupsRequest(), found.node_id)
    refuse(listed.error_code, f"Asking for the members of group {group}")
    _require_no_members(wanted, group, {entry.group_id: entry.group_state for entry in listed.groups})
    of_group = OffsetFetchRequest.OffsetFetchRequestGroup
    wanted = of_group.OffsetFetchRequestTopics(name=topic, partition_indexes=partitions)
    message = OffsetFetchRequest(
        groups=[of_group(group_id=group, topics=[wanted])], require_stable=True, max_version=NAMES_VERSION
    )
    answer = wire.ask(message, found.node_id).groups[0]
    doing = f"Asking for the offsets of group {group}"
    refuse(answer.error_code, doing)
    entries = [entry for answered in answer.topics for entry in answered.partitions]
    for entry in entries:
        refuse(entry.error_code, f"{doing} in {topic}-{entry.partition_index}")
    return sorted(entries, key=lambda entry: entry.partition_index)


def _require_no_members(wanted: str, group: str, states: Mapping[str, str]) -> None:
    state = states.get(group, WITHOUT_MEMBERS[0])
    if state not in WITHOUT_MEMBERS:
        raise ConfigError(
            f"{wanted}: the group still has members (it is {state}): what they read from now on would be read twice. "
            f"Stop every consumer of the group and start again. One that died without leaving counts until its session "
            f"times out."
        )
