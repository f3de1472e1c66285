"""Workers that hang while they start are replaced in time and named; a second stop ends anything at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Job, Run, stop

from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.testing.cluster import OwnCluster

pytestmark = pytest.mark.slow
AT_ONCE_S = APPEND_TIMEOUT_MS / 2000
"""Far less than a broker that is away is waited for, far more than ending at once takes on any machine."""


def asked_to_stop(run: Run) -> None:
    """It has heard the first request, which it does not follow at once."""
    run.process.send_signal(signal.SIGTERM)
    run.await_event(lambda event: "stopping" in event.get("text", ""))


def ended_at_once(run: Run) -> None:
    workers = [pid for event in run.events if event.get("step") == "deployed" for pid in event["workers"]]
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.said
    assert time.monotonic() - began < AT_ONCE_S
    assert "Nothing is lost: run it again, it takes up from the last completed checkpoint" in run.said
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def waiting(job_of: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """`waiting("stuck")`: a pipeline that waits for a file to go, with 500 orders."""

    def made(target: str) -> Job:
        (tmp_path / "wait").touch()
        job = job_of(target, "--param", f"folder={tmp_path}")
        job.feed(500)
        return job

    return made


def finished(job: Job, tmp_path: Path) -> None:
    (tmp_path / "wait").unlink()
    job.finish_here()
    job.assert_totals()


@pytest.mark.exhaustive
def test_an_open_that_does_not_return_is_replaced_and_named(waiting: Callable[..., Job], tmp_path: Path) -> None:
    job = waiting("hanging")
    for timeout_s in (8, 60):
        hasty = ("--deploy-timeout", f"{timeout_s}s", "--restart", "fixed_delay:attempts=1,delay=100ms")
        run = job.start("--parallelism", "2", *hasty)
        first = run.await_event(lambda event: "restarting" in event.get("text", ""))
        assert f"not ready within {timeout_s}000 ms" in first["text"]
        assert run.wait() == 1, run.said
        assert "gives up: the workers were not ready" in run.said
        if "worker 0" not in first["text"]:  # else the machine is so busy that the other one was not ready either
            break
    assert "worker 1 has been in open() of operator 'enrich' for" in first["text"]
    assert "worker 0" not in first["text"]
    finished(job, tmp_path)


@pytest.mark.exhaustive
def test_a_stop_while_a_worker_hangs_in_open_ends_cleanly(waiting: Callable[..., Job], tmp_path: Path) -> None:
    job = waiting("hanging")
    run = job.start("--parallelism", "2")
    run.await_step("deployed")
    run.await_step("restored")
    stop(run)
    assert "restarting" not in run.said
    finished(job, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "mode", "note"),
    [("stuck", ("--parallelism", "2"), "wait for it"), ("hanging", ("--inline",), "open() of operator 'enrich'")],
    ids=["processes", "inline"],
)
def test_asked_twice_a_run_ends_at_once(
    target: str, mode: tuple[str, ...], note: str, waiting: Callable[..., Job], tmp_path: Path
) -> None:
    """A thread that hangs in open() needs the second request; where the worker is a process, the first is enough."""
    job = waiting(target)
    run = job.start(*mode)
    run.await_event(lambda event: event["event"] == "note" and note in event["text"])
    asked_to_stop(run)
    ended_at_once(run)
    finished(job, tmp_path)


@pytest.mark.exhaustive
def test_asked_twice_a_run_whose_broker_stands_still_ends_at_once(
    stoppable: OwnCluster, job_of: Callable[..., Job]
) -> None:
    job = job_of("linear", "--parallelism", "2", cluster=stoppable)
    job.feed(3000)
    run = job.start()
    run.await_checkpoint()
    pid = stoppable.broker.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        asked_to_stop(run)
        ended_at_once(run)
    finally:
        os.kill(pid, signal.SIGCONT)
    job.finish()
    job.assert_totals()
