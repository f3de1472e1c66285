"""Unaligned checkpoints on a real broker: killed while channels are full, at another parallelism, at every step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from damaging import damage
from running import Job, Run

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import LIMIT_S, OwnCluster

COUNT = 6_000
HALT = 6
Full = Callable[..., Job]


@pytest.fixture
def full(job_of: Callable[..., Job]) -> Full:
    def made(target: str, *arguments: str, **options: Any) -> Job:
        job = job_of(target, "--param", "pause_ms=1", *(arguments or ("--unaligned",)), **options)
        job.feed(COUNT)
        return job

    return made


def start(job: Job, parallelism: int) -> Run:
    return job.start("--parallelism", str(parallelism))


def kill_with_records_on_their_way(job: Job, parallelism: int) -> Manifest:
    run, deadline = start(job, parallelism), time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if (found := next_checkpoint(job, run)) is not None and found.records_in_flight:
            run.kill()
            left = job.history().latest
            if left is not None and left.records_in_flight:
                return left
            job.feed(COUNT)  # what is left may be too little to fill channels
            run = start(job, parallelism)
    raise AssertionError(f"no checkpoint had anything on its way; {run.said}")


def next_checkpoint(job: Job, run: Run) -> Manifest | None:
    run.await_event(lambda event: event["event"] == "checkpoint")
    return job.history().latest


def save(job: Job, *options: str) -> Manifest:
    """A savepoint that its run is asked for behind a checkpoint that was not aligned."""
    job.feed(COUNT)
    while not ((found := next_checkpoint(job, job.incarnations[-1])) and found.records_in_flight):
        job.feed(COUNT)
    taken = json.loads(job.command("savepoint", job.name, "--json", *options))
    return job.history().manifests[taken["checkpoint"]]


def overtook(job: Job, checkpoint: int) -> bool:
    return job.history().manifests[checkpoint].records_in_flight > 0


def finish(job: Job, parallelism: int, *arguments: str) -> None:
    job.finish("--parallelism", str(parallelism), *arguments)
    found = job.history().latest
    assert found is not None
    assert (found.kind, found.records_in_flight) == ("final", 0)
    job.assert_totals()


def test_what_is_on_its_way_is_listed_and_restored(full: Full) -> None:
    job = full("untagged")
    left = kill_with_records_on_their_way(job, 2)
    assert f"{left.records_in_flight:,} record" in job.command("checkpoints", job.name)
    listed = json.loads(job.command("checkpoints", job.name, "--json"))["checkpoints"]
    assert listed[-1]["records_in_flight"] == left.records_in_flight
    job.finish_here("--param", "pause_ms=0")
    job.assert_totals()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["two_shuffles", "parting"])
def test_records_on_their_way_are_dealt_anew_with_the_parallelism(target: str, full: Full) -> None:
    job = full(target)
    job.kafka.create_topic(f"{job.name}-more", 2)
    assert kill_with_records_on_their_way(job, 3).parallelism == 3
    assert kill_with_records_on_their_way(job, 2).parallelism == 2
    single = start(job, 1)
    single.await_checkpoint()
    single.kill()
    assert kill_with_records_on_their_way(job, 3).parallelism == 3
    finish(job, 2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_savepoint_while_channels_are_full(full: Full) -> None:
    job = full("slow_behind_a_shuffle", "--unaligned", "--num-retained", "1000")
    first = start(job, 2)
    while not overtook(job, (taken := save(job)).previous):
        pass  # channels ran empty before it came
    assert (taken.kind, taken.channel_logs) == ("savepoint", ())
    while not overtook(job, (last := save(job, "--stop")).previous):
        assert first.wait() == 0, first.said
        first = start(job, 2)
    assert first.wait() == 0, first.said
    assert (last.kind, last.channel_logs, last.parallelism) == ("savepoint", (), 2)
    left = job.history().latest
    assert left is not None
    assert left.checkpoint == last.checkpoint
    finish(job, 3, "--from-savepoint", str(last.checkpoint))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_damaged_block_of_what_was_on_its_way_is_a_halt(full: Full, stoppable: OwnCluster) -> None:
    job = full("slow_behind_a_shuffle", cluster=stoppable)
    ref = kill_with_records_on_their_way(job, 2).channel_logs[0].blocks[0]
    damage(stoppable, checkpoint_topic(job.name), ref.partition, ref.key.encode(), known_checksum=True)
    said = job.finish("--parallelism", "2", code=HALT).said
    assert ref.key in said
    assert "Choices:" in said
