"""Cyclic garbage of a user's functions: a run holds about as much of it as a plain loop does."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from running import Job, stop, visible

from exactlyonce.engines.collector import THRESHOLDS

PLAIN_THRESHOLDS = (700, 10, 10)
"""Python's own."""
KEPT = 20_000
ROUNDS = 10


def until_full(thresholds: tuple[int, int, int]) -> int:
    """How many objects may be made between two collections of everything."""
    first, second, third = thresholds
    return first * (second + 1) * (third + 1)


def test_everything_is_collected_as_often_as_in_a_plain_loop() -> None:
    assert until_full(THRESHOLDS) <= until_full(PLAIN_THRESHOLDS)


@pytest.mark.exhaustive
def test_objects_that_refer_to_themselves(job_of: Callable[..., Job]) -> None:
    job = job_of("cyclic", "--param", f"keep={KEPT}")
    run = job.start()
    for _ in range(ROUNDS):
        job.feed(KEPT)
        committed = 0
        while committed < KEPT:
            committed += run.await_checkpoint()["records_committed"]
    stop(run)
    alive = [json.loads(each.value or b"") for each in visible(job.kafka, f"{job.name}-out", ROUNDS * KEPT)]
    assert len(alive) == ROUNDS * KEPT
    assert max(alive) < KEPT + until_full(PLAIN_THRESHOLDS)
