"""A coordinator or worker that is stopped, replaced, and wakes up is fenced, and changes neither state nor output."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, Run, assert_totals, orders

from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker

FENCED = 5


def await_stopped(pid: int) -> None:
    """Until the process is in state T."""
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline, "the process stops at its failpoint"
        time.sleep(0.01)  # looking at another process


def started(run: Any, name: str, *arguments: str, **options: Any) -> Run:
    """A run of the linear pipeline."""
    zombie: Run = run("pipelines:linear", "--param", f"name={name}", *QUICK, *arguments, **options)
    return zombie


@pytest.mark.exhaustive(but=["coordinator-decided"])
@pytest.mark.parametrize("name", sorted(name for name in NAMES if name.startswith("coordinator-")))
def test_a_zombie_coordinator(name: str, kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any) -> None:
    """A coordinator that sleeps through its replacement ends with the exit code for fenced; the output is exact."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = orders(6000)
    kafka.produce(f"{topic_name}-in", fed)
    zombie = started(run, topic_name, env=failpoint(name, "stop"))
    await_stopped(zombie.process.pid)
    assert started(run, topic_name, "--until", "latest").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)
    os.kill(zombie.process.pid, signal.SIGCONT)
    assert zombie.wait() == FENCED, zombie.said
    assert "has taken over" in zombie.said
    more = orders(500, first=6000)
    kafka.produce(f"{topic_name}-in", more)
    assert started(run, topic_name, "--until", "latest").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed + more)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(name for name in NAMES if name.startswith("worker-")))
def test_a_zombie_worker(name: str, kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any) -> None:
    """A worker that sleeps through its replacement, its coordinator asleep too, writes nothing that can be seen."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = orders(6000)
    kafka.produce(f"{topic_name}-in", fed)
    zombie = started(run, topic_name, env=failpoint(name, "stop"))
    (worker,) = zombie.await_step("deployed")["workers"]
    await_stopped(worker)
    os.kill(zombie.process.pid, signal.SIGSTOP)
    assert started(run, topic_name, "--until", "latest").wait() == 0
    os.kill(worker, signal.SIGCONT)
    more = orders(500, first=6000)
    kafka.produce(f"{topic_name}-in", more)
    assert started(run, topic_name, "--until", "latest").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed + more)
    os.kill(zombie.process.pid, signal.SIGCONT)
    assert zombie.wait() == FENCED, zombie.said
    assert_totals(kafka, f"{topic_name}-out", fed + more)
