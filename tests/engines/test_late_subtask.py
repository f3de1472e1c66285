"""A checkpoint aborted by a late subtask while the job goes on: its records are in the next one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from running import abort_while_a_worker_sleeps, assert_totals, orders

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker


@pytest.mark.exhaustive
def test_the_next_checkpoint_carries_what_an_aborted_one_flushed(
    kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path
) -> None:
    """While one of two workers sleeps past the timeout, checkpoints are aborted, nothing restarts, nothing is lost."""
    kafka.create_topic(f"{topic_name}-in", 4)
    fed = orders(3000)
    kafka.produce(f"{topic_name}-in", fed)
    job = run(
        "pipelines:stopping", "--param", f"name={topic_name}", "--param", f"folder={tmp_path}", "--parallelism", "2",
        "--checkpoint-interval", "100ms", "--checkpoint-timeout", "2s", "--tolerable-failed", "50",
    )  # fmt: skip
    job.await_checkpoint()
    fed += abort_while_a_worker_sleeps(job, kafka, f"{topic_name}-in", tmp_path, len(fed))
    told = len(job.events)
    job.await_checkpoint()
    assert not any("restarting" in event.get("text", "") for event in job.events[told:])
    restarts = [line for line in job.said.splitlines() if "restarting" in line]
    starved = ("no producer was ready", "no checkpoint could be triggered")
    assert all(any(each in line for each in starved) for line in restarts), "nothing but what the feeding went on after"
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert run("pipelines:stopping", "--param", f"name={topic_name}", "--param", f"folder={tmp_path}",
               "--parallelism", "2", "--until", "latest").wait() == 0  # fmt: skip
    assert_totals(kafka, f"{topic_name}-out", fed)
