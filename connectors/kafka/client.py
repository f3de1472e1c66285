"""The clients of confluent-kafka for the checkpoint topic.

Of the settings it is given, only those that say how to reach the broker and who asks are used: what a user tunes for
sources and sinks never changes how checkpoints are kept. `errors.explained` turns what they raise into errors of
ours. Every wait is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # it is not in its stubs

from exactlyonce.connectors.confluent import make_admin, make_consumer, make_producer
from exactlyonce.connectors.kafka.errors import until_it_passes
from exactlyonce.pipeline.errors import BrokerUnavailable

REQUEST_TIMEOUT_S = 8.0
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
    leaders_known = True

    def attempt() -> dict[int, int]:
        nonlocal leaders_known
        if not leaders_known:  # the library does not look for the new leader by itself
            client.list_topics(topic, REQUEST_TIMEOUT_S)
        leaders_known = False
        answers = client.list_offsets(wanted, isolation_level=isolation, request_timeout=REQUEST_TIMEOUT_S)
        return {where.partition: answer.result().offset for where, answer in answers.items()}

    return until_it_passes(attempt, REQUEST_TIMEOUT_S)
