"""Workers that hang while they start are replaced in time and named; a second stop ends anything at once."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, assert_totals, orders

from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.testing.cluster import KafkaCluster, OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]
AT_ONCE_S = APPEND_TIMEOUT_MS / 2000
"""Far less than a broker that is away is waited for, far more than ending at once takes on any machine."""


def started(job: Any) -> list[int]:
    """The pids of the workers, once there are any."""
    return list(job.await_step("deployed")["workers"])


def ended_at_once(job: Any) -> None:
    """Asked for a second time, the run ends with 130 and no worker is left."""
    workers = [pid for event in job.events if event.get("step") == "deployed" for pid in event["workers"]]
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 130, job.said
    assert time.monotonic() - began < AT_ONCE_S
    assert "Nothing is lost: run it again, it takes up from the last completed checkpoint" in job.said
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def fed(kafka: KafkaCluster, topic_name: str) -> list[tuple[str, str]]:
    """Orders in NAME-in."""
    kafka.create_topic(f"{topic_name}-in", 2)
    given = orders(500)
    kafka.produce(f"{topic_name}-in", given)
    return given


@pytest.fixture
def parameters(topic_name: str, tmp_path: Path) -> tuple[str, ...]:
    """Of the pipelines that wait for a file."""
    (tmp_path / "wait").touch()
    return ("--param", f"name={topic_name}", "--param", f"folder={tmp_path}", "--parallelism", "2", *QUICK)


@pytest.mark.exhaustive
def test_an_open_that_does_not_return_is_replaced_and_named(
    kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path, fed: Any, parameters: Any
) -> None:
    """After the timeout for deploying the workers are replaced, the reason has the worker and where it is, and the
    strategy counts it."""
    for timeout_s in (8, 60):
        hasty = ("--deploy-timeout", f"{timeout_s}s", "--restart", "fixed_delay:attempts=1,delay=100ms")
        job = run("pipelines:hanging", *parameters, *hasty)
        first = job.await_event(lambda event: "restarting" in event.get("text", ""))
        assert f"not ready within {timeout_s}000 ms" in first["text"]
        assert job.wait() == 1, job.said
        assert "gives up: the workers were not ready" in job.said
        if "worker 0" not in first["text"]:  # else the machine is so busy that the other one was not ready either
            break
    assert "worker 1 has been in open() of operator 'enrich' for" in first["text"]
    assert "worker 0" not in first["text"]
    (tmp_path / "wait").unlink()
    assert run("pipelines:hanging", *parameters, "--until", "latest").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_worker_that_stands_still_while_it_starts_is_replaced(
    kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any, fed: Any
) -> None:
    """A stopped process tells nothing: the reason says that, and the next attempt runs to the end."""
    arguments = ("--param", f"name={topic_name}", "--until", "latest", "--deploy-timeout", "8s", *QUICK)
    job = run("pipelines:linear", *arguments, env=failpoint("worker-restored", "stop"))
    stopped = re.compile("restarting .*not ready within 8000 ms: worker 0 has .*said nothing for")
    job.await_event(lambda event: stopped.search(event.get("text", "")) is not None)
    assert job.wait() == 0, job.said
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_stop_while_a_worker_hangs_in_open_ends_cleanly(
    kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path, fed: Any, parameters: Any
) -> None:
    """SIGTERM ends it with 0 though a worker never becomes ready, and what the other one wrote is aborted."""
    job = run("pipelines:hanging", *parameters)
    started(job)
    job.await_step("restored")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    (tmp_path / "wait").unlink()
    assert run("pipelines:hanging", *parameters, "--until", "latest").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inline", [False, True])
def test_asked_twice_a_run_with_a_slow_operator_ends_at_once(
    inline: bool, kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path, fed: Any, parameters: Any
) -> None:
    """The first request waits for a checkpoint that cannot come, the second for nothing; the next run is exact."""
    arguments = (*parameters[:4], "--inline") if inline else parameters
    job = run("pipelines:stuck", *arguments)
    started(job)
    job.await_step("restored")
    job.await_event(lambda event: event["event"] == "note" and "wait for it" in event["text"])
    job.process.send_signal(signal.SIGTERM)
    job.await_event(lambda event: "stopping" in event.get("text", ""))
    ended_at_once(job)
    (tmp_path / "wait").unlink()
    assert run("pipelines:stuck", *arguments, "--until", "latest").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inline", [False, True])
def test_asked_twice_a_run_that_hangs_in_open_ends_at_once(
    inline: bool, kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path, fed: Any, parameters: Any
) -> None:
    """So does one whose worker has not started, also where the worker is a thread that nobody can kill."""
    arguments = (*parameters[:4], "--inline") if inline else parameters
    job = run("pipelines:hanging", *arguments)
    started(job)
    job.await_event(lambda event: event["event"] == "note" and "open() of operator 'enrich'" in event["text"])
    job.process.send_signal(signal.SIGTERM)
    if inline:
        job.await_event(lambda event: "stopping" in event.get("text", ""))
        ended_at_once(job)
    else:
        assert job.wait() == 0, job.said
    (tmp_path / "wait").unlink()
    assert run("pipelines:hanging", *arguments, "--until", "latest").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_asked_twice_a_run_whose_broker_stands_still_ends_at_once(
    stoppable: OwnCluster, topic_name: str, run: Any
) -> None:
    """A broker that does not answer is not waited for; when it is back, the next run is exact."""
    cluster = stoppable
    cluster.create_topic(f"{topic_name}-in", 2)
    fed = orders(3000)
    cluster.produce(f"{topic_name}-in", fed)
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", "--parallelism", "2", *QUICK)
    job = run(*arguments, servers=cluster.bootstrap_servers)
    job.await_checkpoint()
    pid = cluster.broker.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        job.process.send_signal(signal.SIGTERM)
        job.await_event(lambda event: "stopping" in event.get("text", ""))
        ended_at_once(job)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert run(*arguments, "--until", "latest", servers=cluster.bootstrap_servers).wait() == 0
    assert_totals(cluster, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_stopped_worker_does_not_hold_up_the_coordinator(
    kafka: KafkaCluster, topic_name: str, run: Any, fed: Any
) -> None:
    """However much there is to tell it: the checkpoint's timeout comes, and another worker takes its place."""
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", "--checkpoint-timeout", "15s", *QUICK)
    job = run(*arguments)
    job.await_checkpoint()
    (worker,) = next(event["workers"] for event in reversed(job.events) if event.get("step") == "deployed")
    os.kill(worker, signal.SIGSTOP)
    kafka.produce(f"{topic_name}-in", more := orders(500, first=500))
    silent = job.await_event(lambda event: "restarting" in event.get("text", ""))
    assert "worker 0 has said nothing for" in silent["text"]
    job.await_checkpoint()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert run(*arguments, "--until", "latest").wait() == 0  # what it had not read when it was stopped
    values = [json.loads(record.value or b"")["id"] for record in kafka.read_committed(f"{topic_name}-out")]
    assert sorted(values) == list(range(len(fed) + len(more)))
