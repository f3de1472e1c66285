"""Event time in whole runs: idle, new and drained partitions, records without a time, what is not there yet."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from running import Job, stop, visible, workers_of

from exactlyonce.pipeline.dead_letters import Reason

pytestmark = pytest.mark.broker
JobOf = Callable[..., Job]


def feed(job: Job, partition: int, *times: int | None, topic: str = "") -> None:
    job.kafka.produce(topic or job.topic, [(None, json.dumps({"at": at})) for at in times], partition)


def counts(job: Job, windows: int) -> dict[int, int]:
    """The count of each window by its first ms; each window is there once."""
    found = [json.loads(record.value or b"") for record in visible(job.kafka, f"{job.name}-out", windows)]
    assert len({each["first"] for each in found}) == len(found)
    return {each["first"]: each["count"] for each in found}


def late(job: Job, records: int) -> list[Any]:
    return sorted(json.loads(record.value or b"")["at"] for record in visible(job.kafka, f"{job.name}-late", records))


@pytest.mark.exhaustive
def test_silent_partitions_hold_back_nothing_and_the_last_window_closes(job_of: JobOf) -> None:
    """One of three partitions never speaks, and a subtask has no other."""
    job = job_of("event_time_pipelines:counts", "--parallelism", "3")
    feed(job, 0, 100, 1_100, 2_100, 2_300)
    feed(job, 1, 900, 1_900, 2_200, 1_500)
    run = job.start()
    assert counts(job, 3) == {0: 2, 1_000: 2, 2_000: 3}
    assert late(job, 1) == [1_500]
    feed(job, 2, 1_200, 100_000)
    assert late(job, 2) == [1_200, 1_500]
    run.kill()
    run = job.start()
    feed(job, 2, 2_400)
    assert late(job, 3) == [1_200, 1_500, 2_400]
    assert counts(job, 4) == {0: 2, 1_000: 2, 2_000: 3, 100_000: 1}
    stop(run)


@pytest.mark.exhaustive
def test_output_that_waits_for_a_silent_partition_says_so(job_of: JobOf) -> None:
    """Once in the log, and to those who look: which operator, source and partition, and what helps."""
    job = job_of("event_time_pipelines:counts", "--param", "idle=10m", partitions=2)
    feed(job, 0, 100, 50_000)
    run = job.start()
    note = run.await_event(lambda event: event["event"] == "note" and "waits for source" in event["text"])
    assert f"operator 'counts' waits for source 'clicks': {job.topic}[1] has had no record for" in note["text"]
    assert "while another has come to 1970-01-01T00:00:49.899Z. Results wait until one comes, or it is" in note["text"]
    assert "it is idle: idle='10m'. A shorter EventTime(..., idle=) of the source" in note["text"]
    named = f"Source 'clicks': {job.topic}[1] has had no record for"
    assert named in json.loads(job.command("top", job.name, "--json"))["cause"]
    assert named in " ".join(job.command("doctor", job.name).split())
    feed(job, 1, 50_000)
    assert counts(job, 1) == {0: 1}
    stop(run)
    assert run.said.count("waits for source") == 1


@pytest.mark.exhaustive
def test_a_pause_of_the_workers_makes_no_partition_idle(job_of: JobOf) -> None:
    """What comes while they are stopped, for longer than `idle`, is in time."""
    job = job_of("event_time_pipelines:counts", "--param", "idle=10s", partitions=2)
    feed(job, 0, 100_000)
    feed(job, 1, 5_000, 100)
    run = job.start()
    assert late(job, 1) == [100]
    workers = workers_of(run)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    feed(job, 1, 5_100)
    time.sleep(11)
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    for partition in (0, 1):
        feed(job, partition, 200_000)
    assert counts(job, 2) == {5_000: 2, 100_000: 1}
    assert late(job, 1) == [100]
    stop(run)


@pytest.mark.exhaustive
def test_a_topic_found_later_begins_at_the_watermark_and_keeps_its_floor(job_of: JobOf) -> None:
    """The floors are found again by split after a kill, in another number of subtasks."""
    job = job_of("event_time_pipelines:counts", "--param", "idle=10m", "--param", "pattern=yes", partitions=1)
    feed(job, 0, 100, 5_000, 5_200)
    run = job.start()
    assert counts(job, 1) == {0: 1}
    later = job.kafka.create_topic(f"{job.name}-in-later", 1)
    feed(job, 0, 700, 4_999, 5_101, 6_900, topic=later)
    assert late(job, 2) == [700, 4_999]
    run.kill()
    feed(job, 0, 5_900, 6_801, topic=later)
    feed(job, 0, 5_300)
    run = job.start("--parallelism", "2")
    assert late(job, 3) == [700, 4_999, 5_900]
    feed(job, 0, 9_000, topic=later)
    feed(job, 0, 9_000)
    assert counts(job, 3) == {0: 1, 5_000: 4, 6_000: 2}
    stop(run)


def test_windows_stay_open_until_a_run_drains_them_and_their_later_records_are_late(job_of: JobOf) -> None:
    job = job_of("event_time_pipelines:counts", "--param", "idle=10m", partitions=1)
    feed(job, 0, 100, 1_100, None, 1_200)
    job.finish_here()
    assert counts(job, 1) == {0: 1}
    (dead,) = visible(job.kafka, f"{job.name}-dead", 1)
    reason = Reason.of(dead.headers)
    assert reason is not None
    assert reason.message.startswith("time= gave None")
    job.finish_here("--drain")
    assert counts(job, 2) == {0: 1, 1_000: 2}
    feed(job, 0, 1_300, 2_300)
    job.finish_here("--drain")
    assert late(job, 1) == [1_300]
    assert counts(job, 3) == {0: 1, 1_000: 2, 2_000: 1}
    shown = job.command("state", "show", job.name, "counts")
    assert "tumbling=1000 of=Count No key has a state." in " ".join(shown.split())


def test_a_run_that_leaves_windows_open_names_the_partition_without_a_record(job_of: JobOf) -> None:
    job = job_of("event_time_pipelines:counts", "--param", "idle=10m", partitions=2)
    feed(job, 0, 1_500_000_000, 1_700_000_000)
    said = " ".join(job.finish_here().split())
    assert f"no record has come from {job.topic}[1], so its watermark has not begun" in said
    assert (
        f"time= gave 1500000000 ms since 1970 for {job.topic}[0] offset 0, which is 1970-01-18T08:40:00.000Z:" in said
    )


def test_another_window_does_not_go_on_with_the_state_of_the_old_one(job_of: JobOf) -> None:
    job = job_of("event_time_pipelines:counts", "--param", "idle=10m", partitions=1)
    feed(job, 0, 100, 1_100)
    job.finish_here()
    said = job.finish_here("--param", "size=2s", code=2)
    assert "is of tumbling=1000 of=Count, and the pipeline now has tumbling=2000" in said


@pytest.mark.parametrize(("target", "arguments", "sentence"), [("rejected", [], "does not go with loops yet")])
def test_what_event_time_does_not_go_with_yet_is_refused(
    target: str, arguments: list[str], sentence: str, job_of: JobOf
) -> None:
    said = job_of(f"event_time_pipelines:{target}").finish_here(*arguments, code=2)
    assert sentence in said
