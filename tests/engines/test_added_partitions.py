"""Partitions that an input topic gets while a job runs are read from their first record, once, whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from running import Job, Run, ids_in, stop, workers_of

from exactlyonce.engines.system_clock import SystemClock

RETAINED = ("--num-retained", "100")
JobOf = Callable[..., Job]


def read_of(run: Run, records: int) -> None:
    run.await_event(lambda event: event["event"] == "checkpoint" and event["records_in"] >= records)


def taken(run: Run, step: str, times: int, since_ms: int) -> None:
    for _ in range(times):
        run.await_event(lambda event: event.get("step") == step and event["at_ms"] >= since_ms)


@pytest.mark.exhaustive
def test_partitions_are_taken_up_by_a_running_job(job_of: JobOf) -> None:
    """The first intervals knew one partition, so one subtask had none."""
    job = job_of("linear", "--parallelism", "2", *RETAINED, partitions=1)
    job.feed(300)
    run = job.start()
    read_of(run, 300)
    job.kafka.add_partitions(job.topic, 3)
    for _ in range(6):
        job.feed(100)
        read_of(run, len(job.fed))
    stop(run)
    assert "restarting" not in run.said
    job.assert_totals()
    manifests = job.history().manifests
    noted = [{each.partition: each.offset for each in manifests[n].offsets} for n in sorted(manifests)]
    assert noted[0].keys() == {0}
    with_new = [each for each in noted if len(each) > 1]
    assert with_new[0].items() >= {1: 0, 2: 0}.items()
    assert with_new[-1][1] > 0
    report = job.audited()
    assert (report["records_in"], report["unjudged"]) == (900, [])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kills_around_the_taking_up(job_of: JobOf) -> None:
    """Of a worker and of the coordinator in turn, before and after the decision."""
    job = job_of("diamond", "--parallelism", "2", *RETAINED, partitions=1)
    job.kafka.create_topic(f"{job.name}-more", 2)
    job.feed(200)
    job.feed(50, "more")
    run = job.start()
    read_of(run, 250)
    for nth, step in enumerate(("triggered", "acknowledged", "decided", "decided"), 1):
        job.kafka.add_partitions(job.topic, 1 + nth)
        job.feed(200)
        taken(run, step, nth, SystemClock().now_ms())
        if nth % 2:
            run.kill()
            run = job.start()
        else:
            os.kill(workers_of(run)[nth % 2], signal.SIGKILL)
        run.await_step("deployed")
        run.await_event(lambda event: event["event"] == "checkpoint")
    stop(run)
    job.finish()
    job.assert_output()
    assert job.audited()["records_in"] == len(job.fed)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_take_up_whose_checkpoint_is_aborted(job_of: JobOf) -> None:
    """A worker sleeps; the next checkpoint has what was read of the new partition meanwhile."""
    job = job_of("linear", "--parallelism", "2", *RETAINED, partitions=1)
    job.feed(200)
    run = job.start("--checkpoint-interval", "2s", "--checkpoint-timeout", "3s", "--tolerable-failed", "50")
    read_of(run, 200)
    job.kafka.add_partitions(job.topic, 2)
    run.await_event(lambda event: f"topic {job.topic} has 2 partitions now" in event.get("text", ""))
    sleeper = workers_of(run)[0]
    os.kill(sleeper, signal.SIGSTOP)
    job.feed(300, partition=1)
    run.await_event(lambda event: "aborted, its output is carried" in event.get("text", ""))
    os.kill(sleeper, signal.SIGCONT)
    read_of(run, 500)
    stop(run)
    assert "restarting" not in run.said
    job.assert_totals()
    report = job.audited()
    assert (report["records_in"], report["unjudged"]) == (500, [])


def test_partitions_that_an_output_gets(job_of: JobOf) -> None:
    job = job_of("linear", *RETAINED)
    out = job.kafka.create_topic(f"{job.name}-out", 1)
    run = job.start("--inline")
    for nth in range(6):
        job.feed(100)
        read_of(run, 100 * nth + 1)
        job.kafka.add_partitions(out, nth + 2)
    read_of(run, 600)
    stop(run)
    assert "restarting" not in run.said
    assert ids_in(job.kafka, out, 600) == list(range(600))
    manifests = job.history().manifests
    counts = [manifests[n].sinks[0].partitions for n in sorted(manifests)]
    assert counts == sorted(counts)
    for each in manifests.values():
        assert all(w.partition < each.sinks[0].partitions for c in each.committables for w in c.written)
    assert counts[-1] == 7


@pytest.mark.exhaustive
def test_partitions_that_place_the_state(job_of: JobOf) -> None:
    """The state of a key would be elsewhere than its records: the job halts."""
    job = job_of("partitioned", "--parallelism", "2", partitions=2)
    job.feed(200, by_customer=True)
    first = job.start()
    read_of(first, 200)
    job.kafka.add_partitions(job.topic, 4)
    for run in (first, job.start()):
        assert run.wait() == 6, run.said
        assert "keys go elsewhere, away from their state" in run.said
