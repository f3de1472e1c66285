"""The pipeline that sends dead letters back to the topics that their records came from, each once."""

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


def replay(name: str, letters: str, topics: str) -> Pipeline:
    """Pipeline *name*, from topic *letters* into *topics*, separated by commas; a letter from elsewhere stops it."""
    known = topics.split(",")

    def inputs(letter: DeadLetter) -> list[DeadLetter]:
        reason = Reason.of(letter.headers)
        if reason is None or not reason.has_input:
            return []
        if reason.topic not in known:
            raise ValueError(f"it came while the replay began, from topic {reason.topic}: run the command again")
        return [msgspec.structs.replace(as_input(letter), topic=reason.topic)]

    pipeline = Pipeline(name)
    read = pipeline.source("letters", KafkaSource(letters, value=bytes | None, metadata=True))
    records = read.flat_map(inputs, id="inputs", output=DeadLetter)
    for topic in known:
        own = records.filter(partial(_is_from, topic), id=as_name(f"from-{topic}"))
        own.sink(as_name(f"to-{topic}"), KafkaSink(topic, create_partitions=None))
    return pipeline
