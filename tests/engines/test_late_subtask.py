"""A checkpoint aborted by a late subtask while the job goes on: its records are in the next one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from running import LIMIT_S, assert_totals, orders

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker


def test_the_next_checkpoint_carries_what_an_aborted_one_flushed(
    kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path
) -> None:
    """While one of two workers sleeps past the timeout, checkpoints are aborted, nothing restarts, nothing is lost."""
    kafka.create_topic(f"{topic_name}-in", 4)
    fed = orders(3000)
    kafka.produce(f"{topic_name}-in", fed)
    job = run(
        "pipelines:stopping", "--param", f"name={topic_name}", "--param", f"folder={tmp_path}", "--parallelism", "2",
        "--checkpoint-interval", "100ms", "--checkpoint-timeout", "700ms", "--tolerable-failed", "50",
    )  # fmt: skip
    job.await_checkpoint()
    more = orders(2000, first=3000)
    kafka.produce(f"{topic_name}-in", more)
    marker = tmp_path / "stopped"
    deadline = time.monotonic() + LIMIT_S
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.await_event(lambda event: "aborted, its output is carried" in event.get("text", ""))
    os.kill(int(marker.read_text()), signal.SIGCONT)
    job.await_checkpoint()
    assert "restarting" not in job.said
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert run("pipelines:stopping", "--param", f"name={topic_name}", "--param", f"folder={tmp_path}",
               "--parallelism", "2", "--until", "latest").wait() == 0  # fmt: skip
    assert_totals(kafka, f"{topic_name}-out", fed + more)
