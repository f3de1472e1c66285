"""Orphaned blocks are gone after the next completed checkpoint; the crash matrix checks it after each cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Job, stop
from unreferenced import unreferenced_blocks

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_checkpoints_in_flight_behind_a_completed_one(
    job_of: Callable[..., Job], failpoint: Any, tmp_path: Path
) -> None:
    overlapping = ("--max-concurrent", "3", "--checkpoint-interval", "50ms")
    job = job_of("slow", "--param", "pause_ms=1", "--parallelism", "2", *overlapping)
    job.feed(4000)
    first = job.start(env=failpoint("worker-flushed", nth=4))
    first.await_event(lambda event: event["event"] == "note" and "restarting" in event["text"])
    first.await_event(lambda event: event["event"] == "checkpoint")
    stop(first)
    assert (tmp_path / "fired" / "worker-flushed").exists()
    job.finish()
    assert unreferenced_blocks(job.kafka, job.name) == set()
    job.assert_totals()
