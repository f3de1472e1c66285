"""Cyclic garbage of a user's functions: a run holds about as much of it as a plain loop does."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from running import QUICK, orders

from exactlyonce.engines.collector import THRESHOLDS
from exactlyonce.testing.cluster import KafkaCluster

PLAIN_THRESHOLDS = (700, 10, 10)
"""Python's own."""
KEPT = 20_000
ROUNDS = 10


def until_full(thresholds: tuple[int, int, int]) -> int:
    """How many objects may be made between two collections of everything."""
    first, second, third = thresholds
    return first * (second + 1) * (third + 1)


def test_everything_is_collected_as_often_as_in_a_plain_loop() -> None:
    """Garbage that has become old piles up no longer than with Python's own thresholds."""
    assert until_full(THRESHOLDS) <= until_full(PLAIN_THRESHOLDS)


@pytest.mark.exhaustive
@pytest.mark.broker
def test_objects_that_refer_to_themselves(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Of objects that refer to themselves, of which a function keeps the last few, the others are freed, however many
    checkpoints have come while they were in use."""
    kafka.create_topic(f"{topic_name}-in")
    job = run("pipelines:cyclic", "--param", f"name={topic_name}", "--param", f"keep={KEPT}", *QUICK)
    for number in range(ROUNDS):
        kafka.produce(f"{topic_name}-in", orders(KEPT, first=number * KEPT))
        committed = 0
        while committed < KEPT:
            committed += job.await_checkpoint()["records_committed"]
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    alive = [json.loads(record.value or b"") for record in kafka.read_committed(f"{topic_name}-out")]
    assert len(alive) == ROUNDS * KEPT
    assert max(alive) < KEPT + until_full(PLAIN_THRESHOLDS)
