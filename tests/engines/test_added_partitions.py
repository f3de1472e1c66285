"""Partitions that an input topic gets while a job runs are read from their first record, once, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from running import HERE, QUICK, Run, assert_copies, assert_totals, orders

from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker

RETAINED = ("--num-retained", "100")


def read_of(job: Run, records: int) -> None:
    """Waits for a checkpoint after so many records of the present attempt."""
    job.await_event(lambda event: event["event"] == "checkpoint" and event["records_in"] >= records)


def taken(job: Run, step: str, times: int, since_ms: int) -> None:
    """Waits until the protocol has taken *step* so often since a time."""
    for _ in range(times):
        job.await_event(lambda event: event.get("step") == step and event["at_ms"] >= since_ms)


def audited(kafka: KafkaCluster, target: str, name: str) -> dict[str, Any]:
    """The report of an audit of everything that is retained."""
    arguments = ("--param", f"name={name}", "--bootstrap-servers", kafka.bootstrap_servers, "--in-process", "--json")
    command = [sys.executable, "-m", "exactlyonce.cli.main", "audit", target, *arguments]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["findings"] == []
    return report


def offsets_noted(kafka: KafkaCluster, name: str) -> list[dict[int, int]]:
    """Sn by partition of every retained manifest, in order."""
    manifests = read_history({"bootstrap.servers": kafka.bootstrap_servers}, name).manifests
    return [{each.partition: each.offset for each in manifests[n].offsets} for n in sorted(manifests)]


def halted(job: Run) -> None:
    """It has ended with a halt that says why."""
    assert job.wait() == 6, job.said
    assert "keys go elsewhere, away from their state" in job.said


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallelism", [1, 2])
def test_partitions_are_taken_up_by_a_running_job(
    parallelism: int, kafka: KafkaCluster, topic_name: str, run: Callable[..., Run]
) -> None:
    """A job with one partition goes on with three: the first manifest that has the new ones has them at offset 0, every
    record counts once, and an audit of every interval finds nothing, although the first intervals knew one partition
    and, at parallelism 2, one subtask had none."""
    topic = kafka.create_topic(f"{topic_name}-in")
    fed = orders(300)
    kafka.produce(topic, fed)
    arguments = ("--param", f"name={topic_name}", "--parallelism", str(parallelism), *RETAINED, *QUICK)
    job = run("pipelines:linear", *arguments)
    read_of(job, 300)
    kafka.add_partitions(topic, 3)
    for first in range(300, 900, 100):
        more = orders(100, first=first)
        kafka.produce(topic, more)
        fed += more
        read_of(job, len(fed))
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    assert_totals(kafka, f"{topic_name}-out", fed)
    noted = offsets_noted(kafka, topic_name)
    assert noted[0].keys() == {0}
    with_new = [each for each in noted if len(each) > 1]
    assert with_new[0].items() >= {1: 0, 2: 0}.items()
    assert with_new[-1][1] > 0
    report = audited(kafka, "pipelines:linear", topic_name)
    assert (report["records_in"], report["unjudged"]) == (900, [])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("role", ["worker", "coordinator"])
def test_kills_around_the_taking_up(role: str, kafka: KafkaCluster, topic_name: str, run: Callable[..., Run]) -> None:
    """Each order counts once in both outputs though a process died at the trigger, at an acknowledgement and at a
    decision that followed when a partition was added, and an audit finds nothing."""
    topic, other = kafka.create_topic(f"{topic_name}-in"), kafka.create_topic(f"{topic_name}-more", 2)
    fed = orders(200)
    kafka.produce(topic, fed)
    right = orders(50, first=100_000)
    kafka.produce(other, right)
    arguments = ("--param", f"name={topic_name}", "--parallelism", "2", *RETAINED, *QUICK)
    job = run("pipelines:diamond", *arguments)
    read_of(job, 250)
    for nth, step in enumerate(("triggered", "acknowledged", "decided"), 1):
        kafka.add_partitions(topic, 1 + nth)
        more = orders(200, first=200 * nth)
        kafka.produce(topic, more)
        fed += more
        produced_ms = SystemClock().now_ms()
        taken(job, step, nth, produced_ms)
        if role == "coordinator":
            job.kill()
            job = run("pipelines:diamond", *arguments)
        else:
            deployed = next(event for event in reversed(job.events) if event.get("step") == "deployed")
            os.kill(deployed["workers"][nth % 2], signal.SIGKILL)
        job.await_step("deployed")
        job.await_event(lambda event: event["event"] == "checkpoint")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert run("pipelines:diamond", *arguments, "--until", "latest").wait() == 0
    assert_copies(kafka, f"{topic_name}-copies", fed + right)
    assert_totals(kafka, f"{topic_name}-out", fed + right)
    assert audited(kafka, "pipelines:diamond", topic_name)["records_in"] == len(fed + right)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_take_up_whose_checkpoint_is_aborted(kafka: KafkaCluster, topic_name: str, run: Callable[..., Run]) -> None:
    """A worker that sleeps makes the checkpoint that takes a partition up fail, and the job goes on: the next one has
    what was read of it meanwhile, every record counts once, and an audit finds nothing."""
    topic = kafka.create_topic(f"{topic_name}-in")
    fed = orders(200)
    kafka.produce(topic, fed)
    arguments = ("--param", f"name={topic_name}", "--parallelism", "2", *RETAINED)
    tolerant = ("--checkpoint-interval", "2s", "--checkpoint-timeout", "3s", "--tolerable-failed", "50")
    job = run("pipelines:linear", *arguments, *tolerant)
    read_of(job, 200)
    kafka.add_partitions(topic, 2)
    job.await_event(lambda event: f"topic {topic} has 2 partitions now" in event.get("text", ""))
    deployed = next(event for event in reversed(job.events) if event.get("step") == "deployed")
    os.kill(deployed["workers"][0], signal.SIGSTOP)
    more = orders(300, first=200)
    kafka.produce(topic, more, partition=1)
    job.await_event(lambda event: "aborted, its output is carried" in event.get("text", ""))
    os.kill(deployed["workers"][0], signal.SIGCONT)
    read_of(job, 500)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    assert_totals(kafka, f"{topic_name}-out", fed + more)
    report = audited(kafka, "pipelines:linear", topic_name)
    assert (report["records_in"], report["unjudged"]) == (500, [])


def test_partitions_that_an_output_gets(kafka: KafkaCluster, topic_name: str, run: Callable[..., Run]) -> None:
    """An output topic that grows again and again while a job decides costs no restart: every order counts once, and
    manifests name as many partitions as were written to."""
    kafka.create_topic(f"{topic_name}-in", 2)
    out = kafka.create_topic(f"{topic_name}-out", 1)
    job = run("pipelines:linear", "--param", f"name={topic_name}", *RETAINED, *QUICK)
    fed = []
    for nth in range(6):
        fed += orders(100, first=100 * nth)
        kafka.produce(f"{topic_name}-in", fed[-100:])
        read_of(job, 100 * nth + 1)
        kafka.add_partitions(out, nth + 2)
    read_of(job, 600)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    ids = sorted(json.loads(record.value or b"")["id"] for record in kafka.read_committed(out))
    assert ids == list(range(600))
    manifests = read_history({"bootstrap.servers": kafka.bootstrap_servers}, topic_name).manifests
    counts = [manifests[n].sinks[0][2] for n in sorted(manifests)]
    assert counts == sorted(counts)
    for each in manifests.values():
        assert all(w.partition < each.sinks[0][2] for c in each.committables for w in c.written)
    assert counts[-1] == 7


@pytest.mark.exhaustive
def test_partitions_that_place_the_state(kafka: KafkaCluster, topic_name: str, run: Callable[..., Run]) -> None:
    """Where the partitions of the topic say which of several subtasks has the state of a key, added ones halt the job,
    and the next run as well."""
    topic = kafka.create_topic(f"{topic_name}-in", 2)
    fed = orders(200)
    kafka.produce(topic, fed)
    arguments = ("pipelines:partitioned", "--param", f"name={topic_name}", *QUICK)
    job = run(*arguments, "--parallelism", "2")
    read_of(job, 200)
    kafka.add_partitions(topic, 4)
    halted(job)
    halted(run(*arguments, "--parallelism", "2"))
