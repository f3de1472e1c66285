"""The pipeline that sends the input records of dead letters back to their topics and partitions, each once."""

from __future__ import annotations

from functools import partial

import msgspec

from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.pipeline.dead_letters import DeadLetter, Reason, as_input
from exactlyonce.pipeline.names import as_name
from exactlyonce.pipeline.stream import Pipeline
from exactlyonce.sinks.kafka.sink import KafkaSink


def _is_from(topic: str, record: DeadLetter) -> bool:
    return record.topic == topic


def _place(record: DeadLetter) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def _once(sent: bool | None, record: DeadLetter) -> tuple[bool, list[DeadLetter]]:
    """Let an input record pass once: several operators and outputs may have made letters of it."""
    return True, [] if sent else [record]


def replay(name: str, letters: str, topics: str) -> Pipeline:
    """Pipeline *name*, from topic *letters* into *topics*, separated by commas; a letter from elsewhere stops it."""
    known = topics.split(",")

    def inputs(letter: DeadLetter) -> list[DeadLetter]:
        reason = Reason.of(letter.headers)
        if reason is None or not reason.can_return:
            return []
        if reason.topic not in known:
            raise ValueError(f"it came while the replay began, from topic {reason.topic}: run the command again")
        place = {"topic": reason.topic, "partition": reason.partition, "offset": reason.offset}
        return [msgspec.structs.replace(as_input(letter), **place)]

    pipeline = Pipeline(name)
    read = pipeline.source("letters", KafkaSource(letters, value=bytes | None, metadata=True))
    records = read.flat_map(inputs, id="inputs", output=DeadLetter).key_by(_place)
    once = records.stateful_flat_map("once", _once)
    for topic in known:
        own = once.filter(partial(_is_from, topic), id=as_name(f"from-{topic}"))
        own.sink(
            as_name(f"to-{topic}"),
            KafkaSink(topic, partition=lambda record: record.partition, create_partitions=None),
        )
    return pipeline
