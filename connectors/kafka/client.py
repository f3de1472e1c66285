"""The clients of confluent-kafka for the checkpoint topic.

They take only the connection and the identity from the user's settings: tuning for sources and sinks never changes how
checkpoints are kept. `errors.explained` turns their exceptions into errors of ours. Every wait is bounded.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, Producer

from exactlyonce.connectors.confluent import make_producer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.reader import exact_consumer

REQUEST_TIMEOUT_S = 8.0
REACH_TIMEOUT_S = 0.5
MESSAGE_SIZE_MAX = 2 * 1024 * 1024
"""The size of a record batch: the largest block, its key and Kafka's overhead."""
BLOCKS_KILOBYTES = 256 * 1024
"""The queue of the producer of blocks: far more than are written at once."""
FETCH_SIZE_MAX = 2 * MESSAGE_SIZE_MAX
"""The size of one fetch from a partition. A larger batch comes nevertheless, alone."""

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
    """The connection settings of *config* and our *own* settings, with underscores for dots."""
    chosen = {name: value for name, value in config.items() if name.startswith(_CONNECTION)}
    return chosen | {name.replace("_", "."): value for name, value in own.items()}


def can_reach(config: ClientConfig) -> bool:
    """Whether some broker that `bootstrap.servers` names takes a connection. Whether it answers is not asked."""
    for address in config.addresses:
        host, _, port = address.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S):
            return True
    return False


def producer(config: Mapping[str, Any], **own: object) -> Producer:
    """An idempotent producer with acks=all."""
    return make_producer(
        settings(
            config,
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

    Without a connection the library waits 0.5 s before it asks for a producer id. The first look at *topic* (None: at
    all topics) may be answered over the connection to a bootstrap address, so there is a second one.
    """
    for _ in range(2):
        producer.list_topics(topic, timeout=timeout_s)


def consumer(
    config: Mapping[str, Any], topic: str, isolation: str, *, partition_bytes: int = FETCH_SIZE_MAX
) -> Consumer:
    """A consumer for assigned partitions and explicit offsets; a removed offset is an error, never a reset.

    It joins no group; `group.id` is the pipeline's, since the library asks for its coordinator. *partition_bytes*
    bounds the bytes fetched ahead of a partition.
    """
    return exact_consumer(
        settings(
            config,
            group_id=topic.removesuffix(".checkpoints"),
            isolation_level=isolation,
            fetch_wait_max_ms=10,
            fetch_message_max_bytes=min(partition_bytes, FETCH_SIZE_MAX),
            queued_max_messages_kbytes=32 * 1024,
        )
    )
