"""Prepared transactions under `exactlyonce run` and in bounded work: processes and the store are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bounded import Silent, load_pipeline, twice
from prepared_job import PreparedJob
from preparing import on_mariadb, on_postgres
from running import abort_while_a_worker_sleeps
from waiting import until

from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.options import RunOptions

PLACES = ("store-preparing", "store-prepared", "coordinator-decided", "store-committing", "store-entering")
"""Steps at which something is prepared; the crash matrix has all of them on PostgreSQL."""


@on_mariadb
@pytest.mark.exhaustive(matrix=True, in_all=["store-entering-mariadb"])
@pytest.mark.parametrize("name", PLACES)
def test_kills(name: str, job: PreparedJob, failpoint: Any, tmp_path: Path) -> None:
    running = job.start("--parallelism", "2", env=failpoint(name, nth=2))
    killed = tmp_path / "fired" / name
    until(killed.exists, meanwhile=lambda: job.feed(100), told=lambda: running.said, pause_s=0.1)
    if name.startswith("store-prepar"):
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


@on_postgres
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


@on_mariadb
@pytest.mark.exhaustive(matrix=True)
def test_somebody_rolls_back_what_was_decided(job: PreparedJob, failpoint: Any) -> None:
    assert job.start(env=failpoint("store-committing")).wait() == -9
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


@on_postgres
@pytest.mark.exhaustive(matrix=True)
def test_from_one_way_to_commit_to_the_other(job: PreparedJob) -> None:
    for commit in ("write_ahead", "", "write_ahead", ""):
        job.finish("--param", f"commit={commit}")
        job.feed(500)
    job.finish()
    job.assert_exact()


def catch_up(job: PreparedJob, folder: Path) -> None:
    loaded = load_pipeline("prepared_totals", "totals", job.name, store=job.preparing.name)
    options = RunOptions(job.config, parallelism=2)
    CatchUp(loaded, options, Silent()).lead(twice, folder)


@on_mariadb
@pytest.mark.broker
@pytest.mark.exhaustive(matrix=True)
def test_a_unit_that_is_tried_again(job: PreparedJob, tmp_path: Path) -> None:
    """One of its two transactions is named, and committed; the other is rolled back as soon as the interval is done."""
    for _ in range(2):
        catch_up(job, tmp_path)
        job.assert_exact()
        job.feed(500)
    job.finish()
    job.assert_exact()
