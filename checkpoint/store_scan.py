"""Reading one partition of the checkpoint topic from one offset to another.

Transaction markers and what compaction removed take offsets but are never seen: a range is read to its end when the
client reports the end of the partition at or past it, or hands out a record at or past it; never when a certain record
was seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from exactlyonce.checkpoint import store_client
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt

IDLE_TIMEOUT_S = 30.0
REMOVED = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}


def read_range(
    config: Mapping[str, Any],
    topic: str,
    partition: int,
    start: int,
    end: int,
    isolation: str,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> Iterator[Message]:
    """The records at offsets from *start* up to, not including, *end* that a reader of *isolation* may see."""
    if start >= end:
        return
    consumer = store_client.consumer(config, topic, isolation)
    try:
        consumer.assign([TopicPartition(topic, partition, start)])
        position, deadline = start, time.monotonic() + idle_timeout_s
        while position < end:
            message = consumer.poll(0.1)
            reached = next_offset(config, message) if message is not None else None
            if reached is not None and reached > position:
                position, deadline = reached, time.monotonic() + idle_timeout_s
            if message is not None and message.error() is None and position <= end:
                yield message
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"{topic}[{partition}] could not be read from offset {position} on, up to {end}, for "
                    f"{idle_timeout_s:.0f} s. Check the broker, and that no other program has a transaction open there."
                )
    finally:
        consumer.close()


def next_offset(config: Mapping[str, Any], message: Message) -> int | None:
    """The offset up to which *message*, a record or an event, shows the partition; None: nothing was learnt.

    Raises what needs a person; while a broker is away the client goes on trying.
    """
    error, offset = message.error(), message.offset()
    if error is None:
        return (offset or 0) + 1
    if error.code() == KafkaError._PARTITION_EOF:
        return offset
    where = f"{message.topic()}[{message.partition()}]"
    if error.code() in REMOVED:
        raise Halt(
            f"{where} no longer holds the offset that was asked for ({error.str()}). Records of the checkpoint topic "
            f"were deleted by other means than exactlyonce's. Restore the topic, or reset the pipeline."
        )
    if error.fatal() or not store_client.is_passing(error):
        raise store_client.explanation(config, f"reading {where}", error) from KafkaException(error)
    return None
