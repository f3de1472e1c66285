"""The pipeline whose histories are recorded, as `exactlyonce run history_pipelines:make` has it."""

from __future__ import annotations

from typing import Any

import msgspec

from exactlyonce import KafkaSink, KafkaSource, Pipeline


class Entry(msgspec.Struct):
    id: int
    user: int


class Counted(msgspec.Struct):
    id: int
    user: int
    number: int


def count(number: int | None, entry: Entry) -> tuple[int, Counted]:
    number = (number or 0) + 1
    return number, Counted(entry.id, entry.user, number)


def make(name: str, delivery: Any = "exactly_once") -> Pipeline:
    """The entries of NAME-in, as they are, to NAME-copies; with their number among their user's, to NAME-counts."""
    pipeline = Pipeline(name)
    entries = pipeline.source("entries", KafkaSource(f"{name}-in", value=Entry))
    entries.sink("copies", KafkaSink(f"{name}-copies", key=lambda entry: str(entry.id), delivery=delivery))
    counted = entries.key_by(lambda entry: entry.user).stateful_map("count", count)
    counted.sink("counts", KafkaSink(f"{name}-counts", key=lambda counted: str(counted.user), delivery=delivery))
    return pipeline
