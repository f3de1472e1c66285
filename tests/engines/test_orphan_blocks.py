"""Orphaned blocks are gone after the next completed checkpoint; test_stores.py and the crash matrix check it too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Job, stop
from unreferenced import unreferenced_blocks

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_a_worker_that_died_with_large_blocks(job_of: Callable[..., Job], failpoint: Any, tmp_path: Path) -> None:
    long = "a-name-that-takes-room-in-a-block-" * 2
    records = [(str(i % 5), json.dumps({"id": i, "customer": f"{long}{i}", "total": 1})) for i in range(400_000)]
    job = job_of("linear", "--checkpoint-interval", "1s")
    for half, env in ((records[:200_000], None), (records[200_000:], failpoint("worker-blocks"))):
        job.kafka.produce(job.topic, half)
        job.finish(env=env)
    assert (tmp_path / "fired" / "worker-blocks").exists()
    assert unreferenced_blocks(job.kafka, job.name) == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["worker-flushed", "coordinator-decided"])
def test_checkpoints_in_flight_behind_a_completed_one(
    place: str, job_of: Callable[..., Job], failpoint: Any, tmp_path: Path
) -> None:
    overlapping = ("--max-concurrent", "3", "--checkpoint-interval", "50ms")
    job = job_of("slow", "--param", "pause_ms=1", "--parallelism", "2", *overlapping)
    job.feed(4000)
    first = job.start(env=failpoint(place, nth=4))
    if place == "coordinator-decided":
        assert first.wait() == -9, first.said
    else:
        first.await_event(lambda event: event["event"] == "note" and "restarting" in event["text"])
        first.await_event(lambda event: event["event"] == "checkpoint")
        stop(first)
    assert (tmp_path / "fired" / place).exists()
    job.finish()
    assert unreferenced_blocks(job.kafka, job.name) == set()
    job.assert_totals()
