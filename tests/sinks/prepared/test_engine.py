"""Prepared transactions under `exactlyonce run`: killed at every step, the store killed, checkpoints aborted."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from prepared_job import PreparedJob
from running import abort_while_a_worker_sleeps
from waiting import until

from exactlyonce.pipeline.failpoints import NAMES

IN_THE_STORE = ("store-preparing", "store-prepared", "store-committing", "store-entering", "store-committed")
PLACES = sorted(name for name in NAMES if name.startswith(("worker-", "coordinator-")) or name in IN_THE_STORE)
IN_WORKERS = ("worker", "store-prepar")
ONCE = ("coordinator-opened", "coordinator-swept", "worker-restored")
"""Steps that a run takes once."""


def armed(folder: Path, name: str = "store-committing", nth: int = 1) -> dict[str, str]:
    """The environment of a run that is killed there: once a checkpoint with rows is decided, and nothing committed."""
    fired = folder / "fired"
    fired.mkdir()
    return {"EXACTLYONCE_FAILPOINTS": f"{name}=kill@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}


@pytest.mark.exhaustive(matrix=True, in_all=["postgres-store-entering"])
@pytest.mark.parametrize("name", PLACES)
def test_kills(name: str, job: PreparedJob, tmp_path: Path) -> None:
    running = job.start("--parallelism", "2", env=armed(tmp_path, name, 1 if name in ONCE else 2))
    killed = tmp_path / "fired" / name
    until(killed.exists, meanwhile=lambda: job.feed(100), told=lambda: running.said, pause_s=0.1)
    if name.startswith(IN_WORKERS):
        running.await_checkpoint()
        running.kill()
    else:
        assert running.wait() == -9, running.said
    job.finish("--parallelism", "3")
    job.assert_exact()


@pytest.mark.exhaustive(matrix=True)
def test_the_store_is_killed(job: PreparedJob) -> None:
    """Prepared transactions survive; the interval that was open is computed again."""
    running = job.start("--parallelism", "2")
    running.await_checkpoint()
    for _ in range(3):
        job.feed(3000)
        job.preparing.kill()
        job.feed(100)
        running.await_checkpoint()
    running.process.terminate()
    assert running.wait() == 0, running.said
    job.finish()
    job.assert_exact()


@pytest.mark.exhaustive(matrix=True)
def test_an_aborted_checkpoint(job: PreparedJob, tmp_path: Path) -> None:
    """Transactions prepared for it are carried by the next one, at whose decision they are committed."""
    job.feed(1000)
    slow = ("--parallelism", "2", "--checkpoint-timeout", "2s", "--tolerable-failed", "50")
    running = job.start("--param", f"folder={tmp_path}", *slow)
    running.await_checkpoint()
    job.fed += abort_while_a_worker_sleeps(running, job.kafka, f"{job.name}-in", tmp_path, len(job.fed))
    running.await_checkpoint()
    running.process.terminate()
    assert running.wait() == 0, running.said
    job.finish("--param", f"folder={tmp_path}")
    job.assert_exact()


@pytest.mark.exhaustive(matrix=True)
def test_somebody_rolls_back_what_was_decided(job: PreparedJob, tmp_path: Path) -> None:
    assert job.start(env=armed(tmp_path)).wait() == -9
    name, *_ = job.preparing.listed()
    job.preparing.by_hand(name, commit=False)
    halted = job.start("--until", "latest")
    assert halted.wait() == 6, halted.said
    assert "is gone, and was not committed" in halted.said
    number = halted.said.split("--accept-loss ")[-1].split("`")[0]
    job.finish("--accept-loss", number)
    before = len(job.fed)
    job.feed(100)
    job.finish()
    ids = [number for (number,) in job.preparing.sql("SELECT id FROM totals")]
    assert len(ids) == len(set(ids))
    assert set(range(before, before + 100)) <= set(ids)
    assert job.preparing.listed() == []


@pytest.mark.exhaustive(matrix=True)
def test_from_one_way_to_commit_to_the_other(job: PreparedJob) -> None:
    for commit in ("write_ahead", "", "write_ahead", ""):
        job.finish("--param", f"commit={commit}")
        job.feed(500)
    job.finish()
    job.assert_exact()


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("seed", range(2))
def test_incarnations_that_crash_at_random(job: PreparedJob, seed: int) -> None:
    chance = random.Random(seed)
    for incarnation in range(15):
        running: Any = job.start("--parallelism", str(chance.choice((1, 2, 3))))
        job.feed(300)
        time.sleep(chance.uniform(0.3, 3))
        running.kill()
        if incarnation % 5 == 4:
            job.preparing.kill()
    job.finish()
    job.assert_exact()
