"""A checkpoint aborted by a late subtask while the job goes on: its records are in the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from running import Job, abort_while_a_worker_sleeps, stop

pytestmark = pytest.mark.broker


@pytest.mark.exhaustive
def test_the_next_checkpoint_carries_what_an_aborted_one_flushed(job_of: Callable[..., Job], tmp_path: Path) -> None:
    """While one of two workers sleeps past the timeout, checkpoints are aborted, nothing restarts, nothing is lost."""
    job = job_of("stopping", "--param", f"folder={tmp_path}", "--parallelism", "2", partitions=4)
    job.feed(3000)
    run = job.start("--checkpoint-interval", "100ms", "--checkpoint-timeout", "2s", "--tolerable-failed", "50")
    run.await_checkpoint()
    job.fed += abort_while_a_worker_sleeps(run, job.kafka, job.topic, tmp_path, len(job.fed))
    run.await_checkpoint()
    restarts = [line for line in run.said.splitlines() if "restarting" in line]
    starved = ("no producer was ready", "no checkpoint could be triggered")
    assert all(any(each in line for each in starved) for line in restarts), "nothing but what the feeding went on after"
    stop(run)
    job.finish()
    job.assert_totals()
