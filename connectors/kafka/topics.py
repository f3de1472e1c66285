"""Topics as the pipeline needs them: their description and settings, their creation, their first and last offsets.

Invariants: asking for a topic never creates it; a topic is known by its id, which a topic of the same name made later
does not have; offsets are those of all its partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

import msgspec
from kafka.protocol.admin.configs import DescribeConfigsRequest, IncrementalAlterConfigsRequest
from kafka.protocol.admin.topics import CreateTopicsRequest, DeleteTopicsRequest
from kafka.protocol.consumer.offsets import ListOffsetsRequest, OffsetForLeaderEpochRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID, Again, refuse
from exactlyonce.connectors.kafka.kafka_protocol import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Observe,
    PartitionLeader,
    Request,
    Wire,
    metadata_request,
    operation_names,
)
from exactlyonce.pipeline.errors import ConfigError, TopicError

TOPIC = 2  # DescribeConfigs' number for the kind of resource
EARLIEST, LATEST = -2, -1
TOPIC_REFUSED, TOPIC_ALREADY_EXISTS = 29, 36
REFUSED = {17: "name", 37: "partition count", 38: "replication factor", 39: "assignment", 40: "settings", 44: "policy"}
"""CreateTopics' answers that only another request can fix."""
REQUEST_TIMEOUT_MS, SETTLED_TIMEOUT_MS = 5_000, 60_000
"""For a creation or deletion: at the controller, and until the brokers know of it."""
SERVER_DEFAULT = -1
CONSUMER = -1  # in place of a replica's id
SET = 0  # IncrementalAlterConfigs' number for the operation


class Topic(msgspec.Struct, frozen=True):
    """A topic as it is now."""

    name: str
    topic_id: str
    """The cluster's own id of it, as UUID text."""
    partitions: int


class TopicFacts(msgspec.Struct, frozen=True):
    """A topic as a broker describes it."""

    name: str
    topic_id: str
    replicas: tuple[int, ...]
    """Their number by partition; empty for a topic that we may not describe."""
    in_sync: tuple[int, ...]
    """The number of replicas in sync, by partition."""
    operations: frozenset[str] | None
    """The operations that we may perform; None: the broker does not say."""

    @property
    def visible(self) -> bool:
        """Whether we may describe it."""
        return bool(self.replicas)


class Topics:
    """Describes, creates, alters and deletes topics. Used by one thread at a time.

    Every method raises `BrokerUnavailable` after *timeout_ms* without an answer, and `TopicError` for a missing topic.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        timeout_ms: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        observe: Observe | None = None,
    ) -> None:
        self._wire = Wire(config, timeout_ms=timeout_ms, clock=clock, sleep=sleep, observe=observe)

    def delete(self, topic: Topic) -> None:
        """Return once no broker has *topic*. It goes by its id: one of its name that was made since is another."""
        self._wire.retrying(lambda: _delete(self._wire, topic), f"Deleting topic {topic.name}")
        waiting = f"Waiting until topic {topic.name} is gone"
        self._wire.retrying(lambda: _require_gone(self._wire, topic), waiting, timeout_ms=SETTLED_TIMEOUT_MS)

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """Each topic by its name."""
        wanted = list(dict.fromkeys(names))
        return self._wire.retrying(lambda: self._describe(wanted), f"Asking for {', '.join(wanted)}")

    def facts(self, name: str) -> TopicFacts | None:
        """A topic with its replicas and our rights on it; None if it does not exist."""
        return self._wire.retrying(lambda: self._facts(name), f"Asking for topic {name}")

    def seen_by_each(self, names: Iterable[str], timeout_ms: int | None = None) -> dict[str, tuple[Topic | None, ...]]:
        """Each topic by its name, as every live broker knows it now; None: that broker knows of none.

        A broker that hands out a record of a topic knows the topic's id, so of a topic made anew that somebody has
        read from, at least one broker tells. In *timeout_ms*, if given.
        """
        wanted = list(dict.fromkeys(names))
        return self._wire.retrying(
            lambda: self._seen_by_each(wanted), f"Asking for {', '.join(wanted)}", timeout_ms=timeout_ms
        )

    def settings(self, name: str) -> dict[str, str | None]:
        """All settings of a topic, those left at their default as well."""
        return self._wire.retrying(lambda: self._settings(name), f"Asking for the settings of {name}")

    def alter(self, name: str, settings: Mapping[str, str]) -> None:
        """Set some settings of a topic; its brokers learn of them a little later."""
        entry = IncrementalAlterConfigsRequest.AlterConfigsResource
        changes = [
            entry.AlterableConfig(name=key, config_operation=SET, value=value) for key, value in settings.items()
        ]
        resource = entry(resource_type=TOPIC, resource_name=name, configs=changes)
        request = IncrementalAlterConfigsRequest(resources=[resource], validate_only=False)
        doing = f"Altering settings of topic {name}"
        self._wire.retrying(lambda: refuse(self._wire.ask(request).responses[0].error_code, doing), doing)

    def create(
        self,
        name: str,
        *,
        partitions: int = SERVER_DEFAULT,
        replication_factor: int = SERVER_DEFAULT,
        settings: Mapping[str, str] | None = None,
    ) -> bool:
        """Create a topic, and wait until every partition has a leader; False if it exists, whatever its settings.

        Raises `ConfigError` if the broker refuses its name, numbers or settings.
        """
        request = _create_request(name, partitions, replication_factor, settings or {})
        created = self._wire.retrying(lambda: self._create(name, request), f"Creating topic {name}")
        waiting = f"Waiting for the leaders of topic {name}"
        self._wire.retrying(lambda: self._await_leaders(name), waiting, timeout_ms=SETTLED_TIMEOUT_MS)
        return created

    def start_offsets(self, name: str, partitions: Iterable[int] | None = None) -> dict[int, int]:
        """By partition (None: all of them), the offset of the first record that is still there."""
        return self._offsets(name, EARLIEST, READ_UNCOMMITTED, partitions)

    def end_offsets(self, name: str, partitions: Iterable[int] | None = None, *, committed: bool) -> dict[int, int]:
        """By partition (None: all), the offset after the last record; *committed*: the last stable offset."""
        return self._offsets(name, LATEST, READ_COMMITTED if committed else READ_UNCOMMITTED, partitions)

    def offsets_at(self, name: str, timestamp_ms: int) -> dict[int, int]:
        """By partition, the first record of that time or later; where there is none, the last stable offset."""
        ends = self.end_offsets(name, committed=True)
        found = self._offsets(name, max(0, timestamp_ms), READ_COMMITTED)
        return {partition: ends[partition] if offset < 0 else offset for partition, offset in found.items()}

    def first_offsets(self, topic: Topic) -> dict[int, int] | None:
        """By partition of *topic*, the first record that is still there; None if it is gone, or another has its name.

        One round of requests, which go to the leaders that were right the last time.
        """

        def attempt() -> dict[int, int] | None:
            try:
                return self._wire.remembering(lambda: self._first_offsets(topic))
            except TopicError:
                return None

        return self._wire.retrying(attempt, f"Asking for the first offsets of {topic.name}")

    def epoch_ends(self, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        """By partition of *epochs*, the offset at which the records of that leader epoch, and of older ones, end.

        -1: the partition has no epoch that new. A reader that stands behind that end has read records that the log
        has lost.
        """
        return self._wire.retrying(lambda: self._epoch_ends(name, epochs), f"Asking for the leader epochs of {name}")

    def close(self) -> None:
        """Let go of the connections; the next question makes new ones."""
        self._wire.close()

    def _describe(self, names: Iterable[str]) -> dict[str, Topic]:
        topics = self._wire.topics(names).items()
        return {name: Topic(name, str(topic.topic_id), len(topic.partitions)) for name, topic in topics}

    def _facts(self, name: str) -> TopicFacts | None:
        topic = self._wire.ask(metadata_request([name], operations=True)).topics[0]
        if topic.error_code == UNKNOWN_TOPIC:
            return None
        if topic.error_code == TOPIC_REFUSED:
            return TopicFacts(name=name, topic_id="", replicas=(), in_sync=(), operations=frozenset())
        refuse(topic.error_code, f"Asking for topic {name}")
        partitions = sorted(topic.partitions, key=lambda partition: partition.partition_index)
        if not partitions:
            raise Again(f"topic {name} has no partitions yet")
        return TopicFacts(
            name=name,
            topic_id=str(topic.topic_id),
            replicas=tuple(len(partition.replica_nodes) for partition in partitions),
            in_sync=tuple(len(partition.isr_nodes) for partition in partitions),
            operations=operation_names(topic.authorized_operations),
        )

    def _seen_by_each(self, names: list[str]) -> dict[str, tuple[Topic | None, ...]]:
        answers = [{topic.name: topic for topic in each.topics} for each in self._wire.metadata_of_each(names)]
        return {name: tuple(_seen(name, answer[name]) for answer in answers) for name in names}

    def _settings(self, name: str) -> dict[str, str | None]:
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=TOPIC, resource_name=name, configuration_keys=None
        )
        result = self._wire.ask(DescribeConfigsRequest(resources=[resource])).results[0]
        refuse(result.error_code, f"Asking for the settings of topic {name}")
        return {setting.name: setting.value for setting in result.configs}

    def _create(self, name: str, request: CreateTopicsRequest) -> bool:
        answer = self._wire.ask(request).topics[0]
        if answer.error_code == TOPIC_ALREADY_EXISTS:
            return False
        if answer.error_code in REFUSED:
            raise ConfigError(
                f"The broker refuses to create topic {name} because of its {REFUSED[answer.error_code]}: "
                f"{answer.error_message.rstrip('.')}. Change that, or create the topic yourself."
            )
        refuse(answer.error_code, f"Creating topic {name}")
        return True

    def _await_leaders(self, name: str) -> None:
        try:
            topic = self._wire.topics([name])[name]
            self._wire.leaders([(name, partition.partition_index) for partition in topic.partitions])
        except TopicError as error:  # the broker asked has not heard of it yet
            raise Again(str(error)) from None

    def _offsets(
        self, name: str, timestamp_ms: int, isolation: int, partitions: Iterable[int] | None = None
    ) -> dict[int, int]:
        wanted = None if partitions is None else list(partitions)

        def attempt() -> dict[int, int]:
            asked = range(len(self._wire.topics([name])[name].partitions)) if wanted is None else wanted
            by_node = self._by_leader(name, asked)
            return _offsets(
                name,
                self._wire.ask_all(
                    [Request(_offsets_request(name, some, timestamp_ms, isolation), n) for n, some in by_node.items()]
                ),
            )

        return self._wire.retrying(attempt, f"Asking for the offsets of {name}")

    def _first_offsets(self, topic: Topic) -> dict[int, int] | None:
        leaders = self._wire.leaders_remembered([(topic.name, each) for each in range(topic.partitions)])
        questions = [
            Request(_offsets_request(topic.name, some, EARLIEST, READ_UNCOMMITTED), node)
            for node, some in _by_node(leaders).items()
        ]
        described, *answers = self._wire.ask_all([Request(metadata_request([topic.name])), *questions])
        found = described.topics[0]
        refuse(found.error_code, f"Asking for topic {topic.name}")
        return _offsets(topic.name, answers) if str(found.topic_id) == topic.topic_id else None

    def _by_leader(self, name: str, partitions: Iterable[int]) -> dict[int, list[int]]:
        """The *partitions* that each broker leads."""
        return _by_node(self._wire.leaders([(name, each) for each in partitions]))

    def _epoch_ends(self, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        by_node = self._by_leader(name, epochs)
        questions = [Request(_epochs_request(name, {p: epochs[p] for p in some}), n) for n, some in by_node.items()]
        ends = {}
        for answer in self._wire.ask_all(questions) if questions else []:
            for each in answer.topics[0].partitions:
                refuse(each.error_code, f"Asking for the leader epochs of {name}-{each.partition}")
                ends[each.partition] = each.end_offset
        return ends


def _by_node(leaders: Mapping[tuple[str, int], PartitionLeader]) -> dict[int, list[int]]:
    """The partitions that each broker leads."""
    by_node: dict[int, list[int]] = {}
    for (_, partition), leader in leaders.items():
        by_node.setdefault(leader.node_id, []).append(partition)
    return by_node


def _offsets(name: str, answers: Iterable[Any]) -> dict[int, int]:
    offsets = {}
    for answer in answers:
        for each in answer.topics[0].partitions:
            refuse(each.error_code, f"Asking for the offset of {name}-{each.partition_index}")
            offsets[each.partition_index] = each.offset
    return dict(sorted(offsets.items()))


def _seen(name: str, topic: Any) -> Topic | None:
    if topic.error_code in (UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID):
        return None
    refuse(topic.error_code, f"Asking for topic {name}")
    return Topic(name, str(topic.topic_id), len(topic.partitions))


def _delete(wire: Wire, topic: Topic) -> None:
    wanted = DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=UUID(topic.topic_id))
    answer = wire.ask(DeleteTopicsRequest(topics=[wanted], timeout_ms=REQUEST_TIMEOUT_MS))
    for each in answer.responses:
        if each.error_code not in (UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID):
            refuse(each.error_code, f"Deleting topic {topic.name}")


def _require_gone(wire: Wire, topic: Topic) -> None:
    for answer in wire.metadata_of_each([topic.name]):
        if any(each.error_code == 0 and str(each.topic_id) == topic.topic_id for each in answer.topics):
            raise Again("a broker has it yet")


def _create_request(name: str, partitions: int, replicas: int, settings: Mapping[str, str]) -> CreateTopicsRequest:
    entry = CreateTopicsRequest.CreatableTopic
    configs = [entry.CreatableTopicConfig(name=key, value=value) for key, value in settings.items()]
    topic = entry(name=name, num_partitions=partitions, replication_factor=replicas, assignments=[], configs=configs)
    return CreateTopicsRequest(topics=[topic], timeout_ms=REQUEST_TIMEOUT_MS, validate_only=False)


def _offsets_request(name: str, partitions: list[int], timestamp_ms: int, isolation: int) -> ListOffsetsRequest:
    entry = ListOffsetsRequest.ListOffsetsTopic
    wanted = [entry.ListOffsetsPartition(partition_index=each, timestamp=timestamp_ms) for each in partitions]
    return ListOffsetsRequest(isolation_level=isolation, topics=[entry(name=name, partitions=wanted)])


def _epochs_request(name: str, epochs: Mapping[int, int]) -> OffsetForLeaderEpochRequest:
    entry = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    wanted = [entry.OffsetForLeaderPartition(partition=each, leader_epoch=epoch) for each, epoch in epochs.items()]
    return OffsetForLeaderEpochRequest(replica_id=CONSUMER, topics=[entry(topic=name, partitions=wanted)])
