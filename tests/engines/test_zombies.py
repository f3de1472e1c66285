"""A coordinator or worker that is stopped, replaced, and wakes up is fenced, and changes neither state nor output."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from running import Job, await_stopped

FENCED = 5


@pytest.mark.exhaustive(but=["coordinator-decided"])
@pytest.mark.parametrize("name", ["coordinator-checked", "coordinator-decided"])
def test_a_zombie_coordinator(name: str, job_of: Callable[..., Job], failpoint: Any) -> None:
    job = job_of("linear")
    job.feed(3000)
    zombie = job.start(env=failpoint(name, "stop"))
    await_stopped(zombie.process.pid)
    newer = job.finish("--inline")
    job.assert_totals()
    os.kill(zombie.process.pid, signal.SIGCONT)
    assert zombie.wait() == FENCED, zombie.said
    assert "has taken over" in zombie.said
    assert f"process {newer.process.pid}" in zombie.said
    job.feed(500)
    job.finish_here()
    job.assert_totals()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["worker-flushed", "worker-acknowledged", "worker-finalized"])
def test_a_zombie_worker(name: str, job_of: Callable[..., Job], failpoint: Any) -> None:
    job = job_of("linear")
    job.feed(3000)
    zombie = job.start(env=failpoint(name, "stop"))
    (worker,) = zombie.await_step("deployed")["workers"]
    await_stopped(worker)
    os.kill(zombie.process.pid, signal.SIGSTOP)
    job.finish_here()
    os.kill(worker, signal.SIGCONT)
    job.feed(500)
    job.finish_here()
    job.assert_totals()
    os.kill(zombie.process.pid, signal.SIGCONT)
    assert zombie.wait() == FENCED, zombie.said
    job.assert_totals()
