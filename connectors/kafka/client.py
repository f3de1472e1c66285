"""The checkpoint store's use of confluent-kafka.

Of the settings it is given, only those that say how to reach the broker and who asks are used: what a user tunes for
sources and sinks never changes how checkpoints are kept. Whatever the client library raises leaves the store as an
error of exactlyonce that says what to do. Every wait is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # it is not in its stubs

from exactlyonce.connectors.confluent import make_admin, make_consumer, make_producer
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, ExactlyOnceError, TopicError

REQUEST_TIMEOUT_S = 8.0
_PAUSE_S = 0.05
MESSAGE_SIZE_MAX = 2 * 1024 * 1024
"""Of a record batch: a block of the largest size, its key and what Kafka adds."""
BLOCKS_KILOBYTES = 256 * 1024
"""What the producer of blocks holds at most: far more than those that are written at once."""
FETCH_SIZE_MAX = 2 * MESSAGE_SIZE_MAX
"""Of what is fetched of a partition at once. A batch that is larger comes nevertheless, alone."""

_CONNECTION = (
    "bootstrap.servers",
    "broker.",
    "client.",
    "connections.",
    "debug",
    "enable.sasl.",
    "enable.ssl.",
    "https.",
    "log",
    "metadata.",
    "oauth_cb",
    "reconnect.",
    "sasl.",
    "security.",
    "socket.",
    "ssl.",
    "topic.metadata.",
)
_UNREACHABLE = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._SSL,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
}
_MOVED = {
    KafkaError._NOENT,  # a partition has no leader now
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_COORDINATOR,  # nobody is that of the group now
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.KAFKA_STORAGE_ERROR,  # a disk of its leader has failed, and another broker takes over
}
_NOT_ALLOWED = {
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
REMOVED = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}
DAMAGED = {
    KafkaError._BAD_MSG,  # its checksum is not that of its bytes, or it has not the form of a batch
    KafkaError._BAD_COMPRESSION,
    KafkaError._NOT_IMPLEMENTED,  # its version or its codec is none that there is
    KafkaError.INVALID_MSG,  # the broker itself cannot read it
}
"""What a batch meets that cannot be read, of any topic: a scan skips it, whoever needs what is in it halts."""


def settings(config: Mapping[str, Any], **own: object) -> dict[str, Any]:
    """The connection part of *config* and our *own* settings, whose underscores stand for dots."""
    chosen = {name: value for name, value in config.items() if name.startswith(_CONNECTION)}
    return chosen | {name.replace("_", "."): value for name, value in own.items()}


def admin(config: Mapping[str, Any]) -> AdminClient:
    """A client for topics and offsets, to which a broker has answered; else `BrokerUnavailable` says what is wrong."""
    reasons: list[str] = []
    client = make_admin(settings(config) | {"error_cb": lambda error: reasons.append(error.str())})
    try:
        client.describe_cluster(request_timeout=REQUEST_TIMEOUT_S).result()
    except KafkaException as error:
        client.poll(0)
        said = reasons[0] if reasons else error.args[0].str()
        raise BrokerUnavailable(
            f"No broker answers at {config.get('bootstrap.servers')}: {said}. Check that it runs, that the address and "
            f"port are right, and that the security settings match the listener's."
        ) from error
    return client


def producer(config: Mapping[str, Any], **own: object) -> Producer:
    """A producer that acknowledges a record only when it is as durable as the topic's settings make it."""
    return make_producer(
        settings(
            {"reconnect.backoff.ms": 20, **config},  # half of it passes before the first connection
            acks="all",
            enable_idempotence=True,
            linger_ms=0,
            message_max_bytes=MESSAGE_SIZE_MAX,
            queue_buffering_max_kbytes=BLOCKS_KILOBYTES,
            **own,
        )
    )


def connect(producer: Producer, topic: str | None, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
    """Return once *producer*, a sink's too, is connected to the broker itself; raises `KafkaException`.

    The library asks for its producer's id 0.5 s later if it is not connected when it wants it, else it has it in 3 ms.
    The first look at *topic* (None: at all topics) may still be answered over the connection to a bootstrap address.
    """
    for _ in range(2):
        producer.list_topics(topic, timeout=timeout_s)


def consumer(
    config: Mapping[str, Any], topic: str, isolation: str, *, partition_bytes: int = FETCH_SIZE_MAX
) -> Consumer:
    """A consumer for assigned partitions and explicit offsets; a removed offset is an error, never a reset.

    It joins no group: the library asks for the coordinator of one, so it is the one that the pipeline may read anyway.
    *partition_bytes*: what is wanted of a partition, if that is known: not much more is fetched ahead.
    """
    return make_consumer(
        settings(
            config,
            group_id=topic.removesuffix(".checkpoints"),
            isolation_level=isolation,
            enable_auto_commit=False,
            enable_auto_offset_store=False,
            enable_partition_eof=True,
            auto_offset_reset="error",
            check_crcs=True,
            fetch_wait_max_ms=10,
            fetch_message_max_bytes=min(partition_bytes, FETCH_SIZE_MAX),
            queued_max_messages_kbytes=32 * 1024,
        )
    )


def first_offsets(client: AdminClient, topic: str, partitions: Iterable[int]) -> dict[int, int]:
    """By partition, the first offset that was not removed."""
    spec: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]  # the library's own lack
    return _offsets(client, topic, partitions, spec, IsolationLevel.READ_UNCOMMITTED)


def end_offsets(
    client: AdminClient,
    topic: str,
    partitions: Iterable[int],
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[int, int]:
    """By partition, the offset up to which a reader of *isolation* can read."""
    spec: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # the library's own lack
    return _offsets(client, topic, partitions, spec, isolation)


def _offsets(
    client: AdminClient, topic: str, partitions: Iterable[int], spec: OffsetSpec, isolation: IsolationLevel
) -> dict[int, int]:
    wanted = {TopicPartition(topic, partition): spec for partition in partitions}

    deadline, leaders_known = time.monotonic() + REQUEST_TIMEOUT_S, True
    while True:
        try:
            if not leaders_known:  # the library does not look for the new leader by itself
                client.list_topics(topic, REQUEST_TIMEOUT_S)
            answers = client.list_offsets(wanted, isolation_level=isolation, request_timeout=REQUEST_TIMEOUT_S)
            return {where.partition: answer.result().offset for where, answer in answers.items()}
        except KafkaException as error:
            if not is_passing(error.args[0]) or time.monotonic() > deadline:
                raise
        leaders_known = False
        client.poll(_PAUSE_S)


def is_passing(error: KafkaError) -> bool:
    """Whether *error* may go away by itself: a broker is away or changes its role. The one list for all that reads."""
    return error.code() in _UNREACHABLE | _MOVED or error.retriable()


@contextmanager
def explained(config: Mapping[str, Any], doing: str) -> Iterator[None]:
    """Turn what the client library raises within into our errors; *doing* says what was being done."""
    try:
        yield
    except KafkaException as error:
        raise explanation(config, doing, error.args[0]) from error


def explanation(config: Mapping[str, Any], doing: str, error: KafkaError) -> ExactlyOnceError:
    """The error of exactlyonce that says what *error* means while *doing* something."""
    servers = config.get("bootstrap.servers", "?")
    code, said = error.code(), f"{error.str()} ({error.name()})"
    if is_passing(error) or code == KafkaError._AUTHENTICATION:
        return BrokerUnavailable(
            f"No answer from the broker at {servers} while {doing}: {said}. Check that it runs, that the address and "
            f"port are right, and that its security settings match."
        )
    if code in _NOT_ALLOWED:
        return ConfigError(f"The broker at {servers} did not allow {doing}: {said}. Grant the missing permission.")
    if code in _MISSING:
        return TopicError(f"The checkpoint topic was missing while {doing}: {said}. Was it deleted?")
    return TopicError(f"The broker at {servers} refused {doing}: {said}.")
