"""Sums of even and of odd numbers, imported by the workers of `test_scripted` and `test_exactly_once_on_a_broker`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.scripted import crash_once


def add(total: int | None, number: int) -> tuple[int, list[int]]:
    total = (total or 0) + number
    return total, [number, total]


def noted(number: int) -> Iterator[int]:
    """Note each number in a file, which no checkpoint takes back."""
    with open(os.environ["NOTED_NUMBERS"], "a") as file:
        file.write(f"{number}\n")
    yield number


def _sums(name: str, value: Any, function: Callable[[Any], Iterable[int]]) -> Pipeline:
    """NAME-in through *function* and the sums to NAME-out."""
    pipeline = Pipeline(name)
    numbers = pipeline.source("numbers", KafkaSource(f"{name}-in", value=value)).flat_map(function)
    numbers.key_by(lambda number: number % 2).stateful_map("sums", add).sink("out", KafkaSink(f"{name}-out"))
    return pipeline


def scripted(name: str) -> Pipeline:
    return _sums(name, bytes, crash_once(os.environ["SCRIPT_FIRED"], int))


def sums(name: str) -> Pipeline:
    return _sums(name, int, noted)
