"""Exactly the records of one partition from one offset up to another: the committed ones, or all.

Invariants: every such record with start <= offset < end is returned, once and in order, and no other; a removed
offset is an error, never a silent gap; every read ends, also if the range ends in aborted records or markers.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import Meaning, RangeGone, meaning_of, raise_unless_passing
from exactlyonce.connectors.kafka.reader import at_place, epoch_of, exact_consumer, offset_of
from exactlyonce.connectors.source import RangeContext
from exactlyonce.pipeline.errors import BrokerUnavailable, TopicError

WAIT_S = 0.02
"""The timeout of one call that fills a batch: a range that ends in a marker waits for it once."""
TIMEOUT_S = 60.0
ASK_AFTER_S = 1.0
"""The silence before a check that the topic exists: a consumer waits permanently for a missing one."""
ANSWER_TIMEOUT_S = 10.0


class RangeReader:
    """Reads [*start*, *end*) of one partition, by one thread at a time. An empty range opens no connection.

    Raises `RangeGone` if retention or truncation removed some of it, `TopicError` without the topic or the right to
    read it, `BrokerUnavailable` if the position has not moved for *timeout_s*.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        config: ClientConfig,
        *,
        leader_epoch: int = -1,
        isolation: str = "read_committed",
        place: str = "",
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*leader_epoch* of the record before *start*, if known, detects a truncated log. *place* names the topic in
        errors, and in messages."""
        self.topic, self.partition, self.end = topic, partition, end
        self._place = place or topic
        self.position = start
        """All visible records before this offset have been returned."""
        self.leader_epoch = leader_epoch
        """The epoch of the record just before `position`; -1: it is unknown, or that record is not visible."""
        self._config, self._isolation, self._timeout_s, self._clock = config, isolation, timeout_s, clock
        self._consumer: Consumer | None = None
        self._ask_at_s = self._give_up_at_s = 0.0
        self._last_seen = ""

    def read(self, records_max: int) -> list[Message]:
        """The next 1 to *records_max* records; none: the range is finished."""
        if self.position < self.end and self._consumer is None:
            self._open()
        self._moved()  # the caller may have taken any time since the last call
        while self.position < self.end:
            messages = self._consume(min(records_max, self.end - self.position))
            if messages:
                return at_place(messages, self.topic, self._place)
        return []

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _open(self) -> None:
        self._consumer = exact_consumer(self._config.confluent({"isolation.level": self._isolation}))
        self._consumer.assign(
            [TopicPartition(self.topic, self.partition, self.position, leader_epoch=self.leader_epoch)]
        )

    def _moved(self) -> None:
        now_s = self._clock()
        self._ask_at_s, self._give_up_at_s = now_s + ASK_AFTER_S, now_s + self._timeout_s

    def _waited(self) -> None:
        now_s = self._clock()
        if now_s >= min(self._ask_at_s, self._give_up_at_s):
            self._ask_at_s = now_s + ANSWER_TIMEOUT_S
            self._require_partition()
        if now_s >= self._give_up_at_s:
            raise self._stuck()

    def _require_partition(self) -> None:
        """Raise `TopicError` if the partition does not exist: a consumer would wait for it."""
        assert self._consumer is not None
        try:
            described = self._consumer.list_topics(self.topic, timeout=min(self._timeout_s, ANSWER_TIMEOUT_S))
        except KafkaException as error:
            self._last_seen = self._config.redact(error.args[0].str())
            return
        topic = described.topics[self.topic]
        if topic.error is not None:
            self._raise(topic.error, self.position)
        elif self.partition not in topic.partitions:
            raise self._no_topic()

    def _consume(self, records_max: int) -> list[Message]:
        """The records that came within `WAIT_S`, cut at the end; moves `position`."""
        assert self._consumer is not None
        before = self.position
        messages = self._consumer.consume(records_max, WAIT_S)
        if any(map(Message.error, messages)):
            messages = self._without_events(messages)
        if messages:
            self.position = max(self.position, offset_of(messages[-1]) + 1)
            if self.position > self.end:
                messages = messages[: bisect_left(messages, self.end, key=offset_of)]
        else:
            self.position = max(self.position, self._passed())
        if self.position > before:
            is_last = bool(messages) and offset_of(messages[-1]) + 1 == min(self.position, self.end)
            self.leader_epoch = epoch_of(messages[-1]) if is_last else -1
            self._moved()
        else:
            self._waited()
        return messages

    def _passed(self) -> int:
        """The client's position, which also passes aborted records and markers."""
        assert self._consumer is not None
        return int(self._consumer.position([TopicPartition(self.topic, self.partition)])[0].offset)

    def _without_events(self, messages: list[Message]) -> list[Message]:
        """*messages* without ends of the partition and transient errors; raises the others."""
        kept, seen = [], self.position
        for message in messages:
            error = message.error()
            if error is None:
                kept.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._last_seen = f"readers of it are held at offset {message.offset()}"
                seen = max(seen, min(offset_of(message), self.end))
            else:
                self._raise(error, offset_of(kept[-1]) + 1 if kept else seen)
        self.position = seen  # only without an error: messages before one are not returned
        return kept

    def _raise(self, error: KafkaError, offset: int) -> None:
        """Raise an error, met before *offset*, that needs a person; librdkafka retries the others."""
        place = f"{self._place}[{self.partition}]"
        reason = self._config.redact(error.str())
        if meaning_of(error) is Meaning.REMOVED:
            raise self._gone(place)
        if meaning_of(error) is Meaning.MISSING:
            raise self._no_topic()
        group = self._config.settings.get("group.id", "exactlyonce")
        raise_unless_passing(error, place, offset, reason, group)
        self._last_seen = reason

    def _no_topic(self) -> TopicError:
        return TopicError(
            f"{self._place}[{self.partition}], of which offsets {self.position} to {self.end - 1} are to be read, does "
            f"not exist (any more). Create it, or read other partitions."
        )

    def _gone(self, place: str) -> RangeGone:
        try:
            assert self._consumer is not None
            first, end = self._consumer.get_watermark_offsets(
                TopicPartition(self.topic, self.partition), timeout=ANSWER_TIMEOUT_S
            )
            holds = f"the topic holds offsets {first} to {end - 1} now"
        except KafkaException:
            holds = "the topic no longer holds that offset"
        return RangeGone(
            f"Input is missing: {place} is to be read from offset {self.position} up to {self.end - 1}, but {holds}. "
            f"Retention removed the rest, or the log was truncated, or the topic was recreated. Restore it from a "
            f"replica or backup, or read a smaller range."
        )

    def _stuck(self) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"{self._place}[{self.partition}] is to be read up to offset {self.end - 1}, but at offset {self.position} "
            f"nothing has come for {self._timeout_s:g} s: {self._last_seen or 'no broker answers'}. Check that "
            f"{self._config.bootstrap_servers} runs, and that no transaction is left open on the topic; then try again."
        )


class SourceRange:
    """The `SplitReader` of a Kafka source."""

    def __init__(self, context: RangeContext, topic: str, client: ClientConfig | None) -> None:
        """*client*: see `ReadsTopic`."""
        self._context, start = context, context.start
        own = {} if client is None else {"group.id": context.client["group.id"], **client.settings}
        config = ClientConfig({"queued.max.messages.kbytes": context.kilobytes, **(own or context.client)})
        self._reader = RangeReader(
            topic, start.partition, start.offset, context.end, config, leader_epoch=start.leader_epoch,
            place=start.topic,
        )  # fmt: skip
        self.read, self.close = self._reader.read, self._reader.close

    def position(self) -> SourceOffset:
        offset = min(self._reader.position, self._context.end)
        return msgspec.structs.replace(self._context.start, offset=offset, leader_epoch=self._reader.leader_epoch)
