"""Reading one partition of the checkpoint topic from one offset to another.

Transaction markers and what compaction removed take offsets but are never seen: a range is read to its end when the
client reports the end of the partition at or past it, or hands out a record at or past it; never when a certain record
was seen. A damaged batch is skipped, and whoever reads is told. Behind one the client library takes other bytes for
batches and goes on at made-up offsets, and a seek does not take back what it has to say of them: so after the first
word of damage a consumer is not listened to any more, and another one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from exactlyonce.connectors.kafka import client as store_client
from exactlyonce.connectors.kafka.errors import Meaning, explanation, meaning_of
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt

IDLE_TIMEOUT_S = 30.0


def read_range(
    config: Mapping[str, Any],
    topic: str,
    partition: int,
    start: int,
    end: int,
    isolation: str,
    skipped: Callable[[int, int], None],
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> Iterator[Message]:
    """The records at offsets from *start* up to, not including, *end* that a reader of *isolation* may see.

    *skipped* is told of each damaged batch: its first offset, as far as it was asked for, and the one behind it.
    """
    position = start
    while position < end:
        position = yield from _read_on(config, topic, partition, position, end, isolation, skipped, idle_timeout_s)


def _read_on(
    config: Mapping[str, Any],
    topic: str,
    partition: int,
    position: int,
    end: int,
    isolation: str,
    skipped: Callable[[int, int], None],
    idle_timeout_s: float,
) -> Generator[Message, None, int]:
    """Read until the end or behind the first damaged batch; how far that is."""
    consumer = store_client.consumer(config, topic, isolation)
    try:
        consumer.assign([TopicPartition(topic, partition, position)])
        deadline = time.monotonic() + idle_timeout_s
        while position < end:
            message, reached = consumer.poll(0.1), None
            if message is not None and is_damaged(message):
                first = max(position, message.offset() or 0)
                behind = _behind(config, message, first, isolation, time.monotonic() + idle_timeout_s)
                skipped(first, behind)
                return behind
            if message is not None:
                reached = next_offset(config, message)
            if reached is not None and reached > position:
                position, deadline = reached, time.monotonic() + idle_timeout_s
            if message is not None and message.error() is None and position <= end:
                yield message
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"{topic}[{partition}] could not be read from offset {position} on, up to {end}, for "
                    f"{idle_timeout_s:.0f} s. Check the broker, and that no other program has a transaction open there."
                )
        return position
    finally:
        consumer.close()


def is_damaged(message: Message) -> bool:
    """Whether *message* says that a batch cannot be read, and never will be."""
    error = message.error()
    return error is not None and meaning_of(error) is Meaning.DAMAGED


def _behind(config: Mapping[str, Any], damage: Message, within: int, isolation: str, deadline: float) -> int:
    """The first offset behind the damaged batch, in which offset *within* lies.

    A read at any offset within a batch meets all of it, and nobody says where it ends: that is found by halving.
    """
    topic, partition = damage.topic() or "", damage.partition() or 0

    def is_within(offset: int) -> bool:
        consumer = store_client.consumer(config, topic, isolation)
        try:
            consumer.assign([TopicPartition(topic, partition, offset)])
            while time.monotonic() < deadline:
                message = consumer.poll(0.1)
                if message is not None and is_damaged(message):
                    return message.offset() == damage.offset()
                error = message.error() if message is not None else None
                if error is not None and meaning_of(error) is Meaning.REMOVED:
                    return False  # behind the end of the partition
                if message is not None and next_offset(config, message) is not None:
                    return False
        finally:
            consumer.close()
        raise BrokerUnavailable(
            f"{topic}[{partition}] is damaged at offset {damage.offset()}, and what lies behind it could not be read "
            f"in time. Check the broker."
        )

    step = 1
    while is_within(within + step):
        within, step = within + step, step * 2
    behind = within + step
    while behind - within > 1:
        middle = (within + behind) // 2
        within, behind = (middle, behind) if is_within(middle) else (within, middle)
    return behind


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
    if meaning_of(error) is Meaning.REMOVED:
        raise Halt(
            f"{where} no longer holds the offset that was asked for ({error.str()}). Records of the checkpoint topic "
            f"were deleted by other means than exactlyonce's. Restore the topic, or reset the pipeline."
        )
    if meaning_of(error) is not Meaning.PASSING:
        raise explanation(config, f"reading {where}", error) from KafkaException(error)
    return None
