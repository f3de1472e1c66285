"""Pipelines of `test_exactly_once_on_a_broker`, which worker processes import."""

from __future__ import annotations

import os
from collections.abc import Iterator

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def add(total: int | None, number: int) -> tuple[int, list[int]]:
    total = (total or 0) + number
    return total, [number, total]


def noted(number: int) -> Iterator[int]:
    """Note each number in a file, which no checkpoint takes back."""
    with open(os.environ["NOTED_NUMBERS"], "a") as file:
        file.write(f"{number}\n")
    yield number


def sums(name: str) -> Pipeline:
    """The sums of even and of odd numbers."""
    pipeline = Pipeline(name)
    numbers = pipeline.source("numbers", KafkaSource(f"{name}-in", value=int)).flat_map(noted)
    numbers.key_by(lambda number: number % 2).stateful_map("sums", add).sink("out", KafkaSink(f"{name}-out"))
    return pipeline
