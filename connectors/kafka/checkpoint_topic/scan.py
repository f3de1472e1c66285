"""Reading one partition of the checkpoint topic from one offset to another.

Transaction markers and compacted records have offsets, and are never seen. A range is read to its end once the client
reports the end of the partition, or a record, at or past it. A damaged batch is skipped, and reported. After one, the
client library parses other bytes as batches, at wrong offsets, and a seek does not drop these: a new consumer goes on.
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
    """The records at [*start*, *end*) that a reader of *isolation* sees.

    *skipped* is called with the first offset of each damaged batch, *start* at least, and the offset after it.
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
    """Read until the end or past the first damaged batch; the next offset."""
    consumer = store_client.consumer(config, topic, isolation)
    try:
        consumer.assign([TopicPartition(topic, partition, position)])
        deadline = time.monotonic() + idle_timeout_s
        while position < end:
            message, reached = consumer.poll(0.1), None
            if message is not None and is_damaged(message):
                first = max(position, message.offset() or 0)
                after = _end_of_batch(config, message, first, isolation, time.monotonic() + idle_timeout_s)
                skipped(first, after)
                return after
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
    """Whether *message* reports a batch that can never be read."""
    error = message.error()
    return error is not None and meaning_of(error) is Meaning.DAMAGED


def _end_of_batch(config: Mapping[str, Any], damage: Message, within: int, isolation: str, deadline: float) -> int:
    """The first offset after the damaged batch that holds offset *within*, found by bisection.

    A read at any offset of a batch meets all of it, and the client does not report its end.
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
                    return False  # after the end of the partition
                if message is not None and next_offset(config, message) is not None:
                    return False
        finally:
            consumer.close()
        raise BrokerUnavailable(
            f"{topic}[{partition}] is damaged at offset {damage.offset()}, and the records after it could not be read "
            f"in time. Check the broker."
        )

    step = 1
    while is_within(within + step):
        within, step = within + step, step * 2
    after = within + step
    while after - within > 1:
        middle = (within + after) // 2
        within, after = (middle, after) if is_within(middle) else (within, middle)
    return after


def next_offset(config: Mapping[str, Any], message: Message) -> int | None:
    """The offset up to which *message*, a record or an event, shows the partition; None: it does not.

    Raises errors that need a person; the client retries the others.
    """
    error, offset = message.error(), message.offset()
    if error is None:
        return (offset or 0) + 1
    if error.code() == KafkaError._PARTITION_EOF:
        return offset
    where = f"{message.topic()}[{message.partition()}]"
    if meaning_of(error) is Meaning.REMOVED:
        raise Halt(
            f"{where} no longer holds an offset of the log ({error.str()}). Something other than exactlyonce has "
            f"deleted records of the checkpoint topic. Restore the topic, or reset the pipeline."
        )
    if meaning_of(error) is not Meaning.PASSING:
        raise explanation(config, f"reading {where}", error) from KafkaException(error)
    return None
