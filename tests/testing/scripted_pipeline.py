"""A pipeline over a script, imported by the workers of `test_scripted`."""

from __future__ import annotations

import os

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.scripted import crash_once


def add(total: int | None, number: int) -> tuple[int, list[int]]:
    total = (total or 0) + number
    return total, [number, total]


def sums(name: str) -> Pipeline:
    """NAME-in through sums of the even and of the odd numbers to NAME-out."""
    pipeline = Pipeline(name)
    (
        pipeline.source("numbers", KafkaSource(f"{name}-in", value=bytes))
        .flat_map(crash_once(os.environ["SCRIPT_FIRED"], int))
        .key_by(lambda number: number % 2)
        .stateful_map("sums", add)
        .sink("out", KafkaSink(f"{name}-out"))
    )
    return pipeline
