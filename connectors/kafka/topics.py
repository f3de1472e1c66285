"""Topics as the pipeline needs them: their description and settings, their creation, their first and last offsets.

Invariants: a question for a topic never creates it; a topic is identified by its id, which a recreated one does not
have; offsets are of all its partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any
from uuid import UUID

import msgspec
from kafka.protocol.admin.configs import DescribeConfigsRequest, IncrementalAlterConfigsRequest
from kafka.protocol.admin.topics import CreateTopicsRequest, DeleteTopicsRequest
from kafka.protocol.consumer.offsets import ListOffsetsRequest, OffsetForLeaderEpochRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID, Again, NotAuthorized, refuse
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
"""The errors of CreateTopics that only another request can fix."""
REQUEST_TIMEOUT_MS, SETTLED_TIMEOUT_MS = 5_000, 60_000
"""The timeouts of a creation or deletion: at the controller, and until the brokers know of it."""
NAMED_MAX = 5
"""The topics that the text about a request names."""
SERVER_DEFAULT = -1
CONSUMER = -1  # in place of a replica's id
SET = 0  # IncrementalAlterConfigs' number for the operation


class Topic(msgspec.Struct, frozen=True):
    """The identity of a topic, with its present number of partitions."""

    name: str
    topic_id: str
    """A UUID as text."""
    partitions: int


class TopicSpan(msgspec.Struct, frozen=True):
    """The offsets of a topic for readers of committed records, by partition."""

    first: Mapping[int, int]
    """Of the first remaining record."""
    end: Mapping[int, int]
    """The last stable offset."""


class LogOffsets(msgspec.Struct, frozen=True):
    """The offsets of a topic's logs, by partition."""

    first: Mapping[int, int]
    """Of the first remaining record."""
    stable: Mapping[int, int]
    """The last stable offset."""
    end: Mapping[int, int]
    """After the last record."""


class TopicFacts(msgspec.Struct, frozen=True):
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

    @property
    def config(self) -> ClientConfig:
        """The settings of the cluster's clients."""
        return self._wire.config

    def delete(self, topic: Topic) -> None:
        """Delete *topic* by its id, and return once no broker has it. A recreated topic of its name stays."""
        self._wire.retrying(lambda: _delete(self._wire, topic), f"Deleting topic {topic.name}")
        waiting = f"Waiting until topic {topic.name} is gone"
        self._wire.retrying(lambda: _require_gone(self._wire, topic), waiting, timeout_ms=SETTLED_TIMEOUT_MS)

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        wanted = list(dict.fromkeys(names))
        return self._wire.retrying(lambda: self._describe(wanted), f"Asking for {', '.join(wanted)}")

    def all(self) -> dict[str, Topic]:
        """Every topic that we may describe, by its name, without the brokers' internal ones."""
        return self._wire.retrying(self._all, "Asking for all topics")

    def facts(self, name: str) -> TopicFacts | None:
        """A topic with its replicas and our rights on it; None if it does not exist."""
        return self._wire.retrying(lambda: self._facts(name), f"Asking for topic {name}")

    def seen_by_each(self, names: Iterable[str], timeout_ms: int | None = None) -> dict[str, tuple[Topic | None, ...]]:
        """Each topic by its name, as every live broker knows it now; None: unknown to that broker.

        A broker that serves a record of a topic knows its id: if records of a recreated topic were read, at least one
        broker shows that.
        """
        wanted = list(dict.fromkeys(names))
        return self._wire.retrying(
            lambda: self._seen_by_each(wanted), f"Asking for {', '.join(wanted)}", timeout_ms=timeout_ms
        )

    def settings(self, name: str) -> dict[str, str | None]:
        """All settings of a topic, defaults included."""
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
        """The offset of the first remaining record, by partition (None: all of them)."""
        return self._offsets(name, EARLIEST, READ_UNCOMMITTED, partitions)

    def end_offsets(self, name: str, partitions: Iterable[int] | None = None, *, committed: bool) -> dict[int, int]:
        """The offset after the last record, by partition (None: all); *committed*: the last stable offset."""
        return self._offsets(name, LATEST, READ_COMMITTED if committed else READ_UNCOMMITTED, partitions)

    def log_offsets(self, name: str, partitions: Iterable[int] | None = None) -> LogOffsets:
        """The offsets of *partitions* (None: all of them), by one round of requests.

        A leader gives the end before the last stable offset, so that no later record seems to be held back, and last
        the offset of the first record.
        """
        wanted = None if partitions is None else list(partitions)
        return self._wire.retrying(lambda: self._log_offsets(name, wanted), f"Asking for the offsets of {name}")

    def spans(self, topics: Iterable[Topic]) -> dict[str, TopicSpan]:
        """The offsets of each topic, by its name: two requests to each leader, however many topics there are."""
        wanted = {topic.name: range(topic.partitions) for topic in topics}
        shown = ", ".join(wanted) if len(wanted) <= NAMED_MAX else f"{len(wanted)} topics"
        return self._wire.retrying(lambda: self._spans(wanted), f"Asking for the offsets of {shown}")

    def offsets_at(self, name: str, timestamp_ms: int) -> dict[int, int]:
        """The offset by partition of the first record of that time or later, else the last stable offset."""
        ends = self.end_offsets(name, committed=True)
        offsets = self._offsets(name, max(0, timestamp_ms), READ_COMMITTED)
        return {partition: ends[partition] if offset < 0 else offset for partition, offset in offsets.items()}

    def first_offsets(self, topic: Topic) -> dict[int, int] | None:
        """The first remaining offset by partition of *topic*; None if it is gone or was recreated.

        One round of requests, to remembered leaders.
        """

        def attempt() -> dict[int, int] | None:
            try:
                return self._wire.remembering(lambda: self._first_offsets(topic))
            except TopicError:
                return None

        return self._wire.retrying(attempt, f"Asking for the first offsets of {topic.name}")

    def epoch_ends(self, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        """The end offset by partition of the given leader epoch and older ones; -1: the partition has no such epoch.

        A reader past that end has read records that the log has lost.
        """
        return self._wire.retrying(lambda: self._epoch_ends(name, epochs), f"Asking for the leader epochs of {name}")

    def close(self) -> None:
        self._wire.close()

    def _describe(self, names: Iterable[str]) -> dict[str, Topic]:
        topics = self._wire.topics(names).items()
        return {name: Topic(name, str(topic.topic_id), len(topic.partitions)) for name, topic in topics}

    def _all(self) -> dict[str, Topic]:
        topics = [topic for topic in self._wire.ask(metadata_request(None)).topics if not topic.is_internal]
        for topic in topics:
            refuse(topic.error_code, f"Asking for topic {topic.name}")
        return {topic.name: Topic(topic.name, str(topic.topic_id), len(topic.partitions)) for topic in topics}

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
        answers = [{topic.name: topic for topic in answer.topics} for answer in self._wire.metadata_of_each(names)]
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
        if answer.error_code == TOPIC_REFUSED:
            raise NotAuthorized(
                f"The topic {name} is missing, and our principal lacks Create on it: grant it by an ACL, or create the "
                f"topic yourself."
            )
        if answer.error_code in REFUSED:
            raise ConfigError(
                f"The broker refuses to create topic {name} because of its {REFUSED[answer.error_code]}: "
                f"{answer.error_message.rstrip('.')}. Change that, or create the topic yourself."
            )
        refuse(answer.error_code, f"Creating topic {name}")
        return True

    def _await_leaders(self, name: str) -> None:
        try:
            self._wire.leaders_of(name)
        except TopicError as error:  # this broker does not know it yet
            raise Again(str(error)) from None

    def _offsets(
        self, name: str, timestamp_ms: int, isolation: int, partitions: Iterable[int] | None = None
    ) -> dict[int, int]:
        wanted = None if partitions is None else list(partitions)

        def attempt() -> dict[int, int]:
            (offsets,) = self._offsets_of(self._leaders_of(name, wanted), (timestamp_ms, isolation))
            return offsets.get(name, {})

        return self._wire.retrying(attempt, f"Asking for the offsets of {name}")

    def _spans(self, wanted: Mapping[str, Iterable[int]]) -> dict[str, TopicSpan]:
        first, end = self._offsets_of(self._leaders(wanted), (EARLIEST, READ_UNCOMMITTED), (LATEST, READ_COMMITTED))
        return {name: TopicSpan(first[name], end[name]) for name in wanted}

    def _log_offsets(self, name: str, partitions: Sequence[int] | None) -> LogOffsets:
        kinds = (LATEST, READ_UNCOMMITTED), (LATEST, READ_COMMITTED), (EARLIEST, READ_UNCOMMITTED)
        end, stable, first = self._offsets_of(self._leaders_of(name, partitions), *kinds)
        return LogOffsets(first[name], stable[name], end[name])

    def _leaders_of(self, name: str, partitions: Sequence[int] | None) -> dict[tuple[str, int], PartitionLeader]:
        return self._wire.leaders_of(name) if partitions is None else self._leaders({name: partitions})

    def _leaders(self, wanted: Mapping[str, Iterable[int]]) -> dict[tuple[str, int], PartitionLeader]:
        return self._wire.leaders(
            [(name, partition) for name, partitions in wanted.items() for partition in partitions]
        )

    def _offsets_of(
        self, leaders: Mapping[tuple[str, int], PartitionLeader], *kinds: tuple[int, int]
    ) -> list[dict[str, dict[int, int]]]:
        """For each kind, a time with an isolation, the offsets by topic and partition. Each leader answers in order."""
        by_node = _by_node(leaders)
        questions = [
            Request(_offsets_request(partitions, timestamp_ms, isolation), node)
            for timestamp_ms, isolation in kinds
            for node, partitions in by_node.items()
        ]
        answers = iter(self._wire.ask_all(questions) if questions else ())
        return [_offsets(islice(answers, len(by_node))) for _ in kinds]

    def _first_offsets(self, topic: Topic) -> dict[int, int] | None:
        leaders = self._wire.leaders_remembered([(topic.name, partition) for partition in range(topic.partitions)])
        questions = [
            Request(_offsets_request(partitions, EARLIEST, READ_UNCOMMITTED), node)
            for node, partitions in _by_node(leaders).items()
        ]
        described, *answers = self._wire.ask_all([Request(metadata_request([topic.name])), *questions])
        now = described.topics[0]
        refuse(now.error_code, f"Asking for topic {topic.name}")
        return _offsets(answers)[topic.name] if str(now.topic_id) == topic.topic_id else None

    def _epoch_ends(self, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        questions = [
            Request(_epochs_request(name, {p: epochs[p] for p in partitions[name]}), node)
            for node, partitions in _by_node(self._leaders({name: epochs})).items()
        ]
        ends = {}
        for answer in self._wire.ask_all(questions) if questions else []:
            for partition in answer.topics[0].partitions:
                refuse(partition.error_code, f"Asking for the leader epochs of {name}-{partition.partition}")
                ends[partition.partition] = partition.end_offset
        return ends


def _by_node(leaders: Mapping[tuple[str, int], PartitionLeader]) -> dict[int, dict[str, list[int]]]:
    """The partitions of each topic, by their leader."""
    by_node: dict[int, dict[str, list[int]]] = {}
    for (name, partition), leader in leaders.items():
        by_node.setdefault(leader.node_id, {}).setdefault(name, []).append(partition)
    return by_node


def _offsets(answers: Iterable[Any]) -> dict[str, dict[int, int]]:
    """By topic and partition, in the order of partitions."""
    offsets: dict[str, dict[int, int]] = {}
    for answer in answers:
        for topic in answer.topics:
            for partition in topic.partitions:
                refuse(partition.error_code, f"Asking for the offset of {topic.name}-{partition.partition_index}")
                offsets.setdefault(topic.name, {})[partition.partition_index] = partition.offset
    return {name: dict(sorted(by_partition.items())) for name, by_partition in offsets.items()}


def _seen(name: str, topic: Any) -> Topic | None:
    if topic.error_code in (UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID):
        return None
    refuse(topic.error_code, f"Asking for topic {name}")
    return Topic(name, str(topic.topic_id), len(topic.partitions))


def _delete(wire: Wire, topic: Topic) -> None:
    wanted = DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=UUID(topic.topic_id))
    answer = wire.ask(DeleteTopicsRequest(topics=[wanted], timeout_ms=REQUEST_TIMEOUT_MS))
    for response in answer.responses:
        if response.error_code not in (UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID):
            refuse(response.error_code, f"Deleting topic {topic.name}")


def _require_gone(wire: Wire, topic: Topic) -> None:
    for answer in wire.metadata_of_each([topic.name]):
        if any(known.error_code == 0 and str(known.topic_id) == topic.topic_id for known in answer.topics):
            raise Again("a broker still has it")


def _create_request(name: str, partitions: int, replicas: int, settings: Mapping[str, str]) -> CreateTopicsRequest:
    entry = CreateTopicsRequest.CreatableTopic
    configs = [entry.CreatableTopicConfig(name=key, value=value) for key, value in settings.items()]
    topic = entry(name=name, num_partitions=partitions, replication_factor=replicas, assignments=[], configs=configs)
    return CreateTopicsRequest(topics=[topic], timeout_ms=REQUEST_TIMEOUT_MS, validate_only=False)


def _offsets_request(partitions: Mapping[str, list[int]], timestamp_ms: int, isolation: int) -> ListOffsetsRequest:
    entry = ListOffsetsRequest.ListOffsetsTopic
    partition, wanted = entry.ListOffsetsPartition, []
    for name, indexes in partitions.items():
        asked = [partition(partition_index=index, timestamp=timestamp_ms) for index in indexes]
        wanted.append(entry(name=name, partitions=asked))
    return ListOffsetsRequest(isolation_level=isolation, topics=wanted)


def _epochs_request(name: str, epochs: Mapping[int, int]) -> OffsetForLeaderEpochRequest:
    entry = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    wanted = [
        entry.OffsetForLeaderPartition(partition=partition, leader_epoch=epoch) for partition, epoch in epochs.items()
    ]
    return OffsetForLeaderEpochRequest(replica_id=CONSUMER, topics=[entry(topic=name, partitions=wanted)])
