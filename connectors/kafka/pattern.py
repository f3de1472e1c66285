"""The topics that match a pattern, as one source: each partition of each of them is a split with a number.

Invariants: a partition is a split once every broker knows its topic; its number is above all others then, and for good;
its identity has the topic's id, and the offset from which it is read: the earliest one when its topic was found, 0 of a
partition that was added later. A position is the partition's own: its offset and its leader epoch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from confluent_kafka import Message

from exactlyonce.checkpoint.records.manifest import SourceOffset, TopicSplit
from exactlyonce.connectors.kafka.range_reader import SourceRange
from exactlyonce.connectors.kafka.reader import KafkaReader
from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.connectors.source import RangeContext, ReaderContext, RecordDecoder
from exactlyonce.connectors.splits import SplitBatch, SplitRecord, parts_of
from exactlyonce.pipeline.dead_letters import DeadLetter
from exactlyonce.pipeline.errors import TopicError

LOOK_INTERVAL_S = 5.0
"""The time between two looks for new topics and partitions."""
_INTERNAL = "__"
"""The beginning of the names of Kafka's own topics."""


class PatternFinder:
    """The `SplitFinder` of the topics that *matches* takes."""

    def __init__(self, source: str, place: str, matches: Callable[[str], bool], topics: Topics) -> None:
        self._source, self._place, self._matches, self._topics = source, place, matches, topics
        self._looked_s: float | None = None

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s < LOOK_INTERVAL_S:
            return []
        self._looked_s = now_s
        names = sorted(name for name in self._topics.all() if self._matches(name))
        seen = self._topics.seen_by_each(names) if names else {}
        splits = [TopicSplit.parse(position.topic_id) for position in known]
        number = max((position.partition for position in known), default=-1) + 1
        new = (split for name in names for split in self._new(_known_by_all(seen[name]), splits))
        return [
            SourceOffset(self._source, self._place, str(split), n, split.first) for n, split in enumerate(new, number)
        ]

    def _new(self, topic: Topic | None, known: Iterable[TopicSplit]) -> Iterator[TopicSplit]:
        """The splits of *topic* that are not among *known*; none where its name was another topic's, which stops the
        pipeline."""
        if topic is None:
            return
        before = [split for split in known if split.topic == topic.name]
        first: dict[int, int] = {}
        if not before:
            with suppress(TopicError):  # it may be gone again
                first = self._topics.start_offsets(topic.name, range(topic.partitions))
        elif all(split.topic_id == topic.topic_id for split in before):
            first = dict.fromkeys(range(topic.partitions), 0)
        read = {split.partition for split in before}
        for partition in sorted(first.keys() - read):
            yield TopicSplit(topic.topic_id, partition, first[partition], topic.name)

    def close(self) -> None:
        """The connection is its owner's."""


def _known_by_all(seen: Sequence[Topic | None]) -> Topic | None:
    """The topic, if all brokers know the same one, with the partitions that all of them know."""
    views = [topic for topic in seen if topic is not None]
    if not views or len(views) < len(seen) or len({topic.topic_id for topic in views}) > 1:
        return None
    return min(views, key=lambda topic: topic.partitions)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a topic's whole name matches *pattern*; Kafka's own topics never do.

    >>> [matcher("orders-.*")(name) for name in ("orders-eu", "all-orders-eu")], matcher(".*")("__consumer_offsets")
    ([True, False], False)
    """
    compiled = re.compile(pattern)
    return lambda name: not name.startswith(_INTERNAL) and compiled.fullmatch(name) is not None


class TopicRecords(SplitBatch):
    """A batch of messages, of the splits that *start_of* gives by topic and partition."""

    def __init__(self, messages: list[Message], start_of: Callable[[Message], SourceOffset]) -> None:
        super().__init__(messages)
        self._start_of = start_of

    def _record(self, place: int) -> SplitRecord:
        message = self.parts[place]
        start = self._start_of(message)
        name = f"{message.topic()}[{message.partition()}]"
        return SplitRecord(message, start, message.offset() or 0, name, message.timestamp()[1], start.mark)


class PatternReader(KafkaReader):
    """Reads partitions of several topics, by one consumer, under the numbers of their splits."""

    def __init__(self, context: ReaderContext, place: str) -> None:
        self._starts: dict[int, SourceOffset] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._numbers: dict[tuple[str | None, int | None], int] = {}
        self._is_bounded = context.targets is not None
        config, make = context.clients.consumers(place)
        targets, divide = context.targets or {}, context.divide
        super().__init__(context.source, place, {}, targets, config, topic_id="", make=make, divide=divide)
        for position in context.positions:
            self._note(position)

    def _note(self, position: SourceOffset) -> None:
        number, split = position.partition, TopicSplit.parse(position.topic_id)
        self._starts[number] = position
        self._places[number] = split.topic, split.partition
        self._numbers[split.topic, split.partition] = number
        self.offsets[number], self.epochs[number] = position.offset, position.leader_epoch

    def add(self, start: SourceOffset) -> None:
        if start.partition not in self.offsets:
            self._note(start)
            self._assign([start.partition])

    def place_of(self, split: int) -> tuple[str, int]:
        return self._places[split]

    def name_of(self, topic: str) -> str:
        return topic

    def split_of(self, topic: str | None, partition: int | None) -> int | None:
        return self._numbers.get((topic, partition))

    def splits_of(self, messages: Iterable[Message]) -> list[int]:
        return [self._numbers[message.topic(), message.partition()] for message in messages]

    def poll(self, records_max: int, timeout_s: float) -> Sequence[Any]:
        messages = super().poll(records_max, timeout_s)
        return TopicRecords(list(messages), self._start_of) if messages else []

    def _start_of(self, message: Message) -> SourceOffset:
        return self._starts[self._numbers[message.topic(), message.partition()]]

    def positions(self) -> tuple[SourceOffset, ...]:
        return tuple(
            msgspec.structs.replace(self._starts[number], offset=offset, leader_epoch=self.epochs[number])
            for number, offset in sorted(self.offsets.items())
        )

    @property
    def finished(self) -> bool:
        return self._is_bounded and not self._unfinished


class PatternRange:
    """The `SplitReader` of a range of one partition."""

    def __init__(self, context: RangeContext) -> None:
        self._start = context.start
        at, first = context.start.in_cluster, TopicSplit.parse(context.start.topic_id).first
        assert at is not None
        start = msgspec.structs.replace(at, offset=max(at.offset, first))
        self._range = SourceRange(replace(context, start=start), at.topic, None)
        self.close = self._range.close

    def read(self, records_max: int) -> list[SplitRecord]:
        return list(TopicRecords(self._range.read(records_max), lambda message: self._start))

    def position(self) -> SourceOffset:
        at = self._range.position()
        return msgspec.structs.replace(self._start, offset=at.offset, leader_epoch=at.leader_epoch)


class PatternDecoder:
    """The `RecordDecoder` of such records; *decoder* takes their messages."""

    def __init__(self, decoder: RecordDecoder) -> None:
        self._decoder, self.decode = decoder, decoder.decode

    def parts(self, records: Sequence[Any]) -> Sequence[Any]:
        return self._decoder.parts(parts_of(records))

    def problem(self, record: SplitRecord, error: BaseException) -> str:
        return f"in {record.name}, {self._decoder.problem(record.part, error)}"

    def letter(self, record: SplitRecord) -> DeadLetter:
        return self._decoder.letter(record.part)

    def times_ms(self, records: Sequence[Any]) -> Iterable[int]:
        return self._decoder.times_ms(parts_of(records))
