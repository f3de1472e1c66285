"""The dead letters in a topic, as a reader with isolation.level=read_committed sees them now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.connectors.kafka.source import record_of
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.dead_letters import DeadLetter, Reason, as_input
from exactlyonce.pipeline.errors import ConfigError

BATCH_RECORDS = 1_000


class Letter(NamedTuple):
    record: DeadLetter
    """Without the reason among its headers; its place is that in the topic of letters."""
    reason: Reason


def letters_in(config: ClientConfig, topic: str) -> Iterator[Letter]:
    """The letters by partition and offset; other records of the topic are left out.

    Raises `TopicError` without the topic, `RangeGone` for letters that go meanwhile, `BrokerUnavailable`.
    """
    with closing(Topics(config)) as topics:
        starts, ends = topics.start_offsets(topic), topics.end_offsets(topic, committed=True)
    for partition, start in sorted(starts.items()):
        yield from _read(config, topic, partition, start, ends[partition])


def letter_at(config: ClientConfig, topic: str, partition: int, offset: int) -> Letter:
    """The letter at this place. Raises `ConfigError` if there is none; else as `letters_in`."""
    with closing(Topics(config)) as topics:
        start, end = topics.start_offsets(topic), topics.end_offsets(topic, committed=True)
    if start.get(partition, 0) <= offset < end.get(partition, 0):
        for letter in _read(config, topic, partition, offset, offset + 1):
            return letter
    raise ConfigError(
        f"There is no dead letter at {topic}[{partition}] offset {offset}. `exactlyonce dead-letters list {topic}` "
        f"shows those that there are."
    )


def _read(config: ClientConfig, topic: str, partition: int, start: int, end: int) -> Iterator[Letter]:
    with closing(RangeReader(topic, partition, start, end, config)) as reader:
        while messages := reader.read(BATCH_RECORDS):
            for message in messages:
                record: DeadLetter = record_of(message, message.value(), message.key())
                if (reason := Reason.of(record.headers)) is not None:
                    yield Letter(as_input(record), reason)
