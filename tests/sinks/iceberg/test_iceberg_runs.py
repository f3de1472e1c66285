"""Runs from Kafka into a table of Iceberg, killed at every step; DuckDB counts, which shares no code with the sink."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from lake_pipelines import LAKE
from running import QUICK, Job, assert_once
from waiting import until

from exactlyonce.testing.cluster import KafkaCluster

pytest.importorskip("pyiceberg", reason="ICEBERG NOT TESTED: it needs the extra `iceberg`")
duckdb_ext = pytest.importorskip("duckdb_ext", reason="ICEBERG NOT TESTED: DuckDB and its extensions are missing")
duckdb = pytest.importorskip("duckdb")

pytestmark = [pytest.mark.broker, pytest.mark.slow]

HERE = Path(__file__).parent
ROWS = int(os.environ.get("EXACTLYONCE_ROWS", "300000"))
STEPS = [
    "worker-barrier", "worker-flushed", "worker-acknowledged", "coordinator-checked", "coordinator-decided",
    "store-committing", "store-committed", "coordinator-finalized",
]  # fmt: skip


class LakeJob(Job):
    """The pipeline `iceberg`, and its table as DuckDB reads it."""

    folder: Path

    def rows(self) -> list[tuple[int, str, int]]:
        """The rows of the newest snapshot, which the catalog's own row names."""
        with sqlite3.connect(self.folder / "catalog.db") as catalog:
            ((newest,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables")
        with duckdb.connect() as reader:
            duckdb_ext.init(reader)
            return list(reader.execute("SELECT id, customer, sum FROM iceberg_scan(?)", [newest]).fetchall())

    def assert_exact(self) -> None:
        """Each order is in the table once."""
        assert_once([id for id, _, _ in self.rows()], self.fed, "the table")


@pytest.fixture
def job(kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LakeJob:
    folder = tmp_path / "lake"
    folder.mkdir()
    monkeypatch.setenv(LAKE, str(folder))
    path = [str(HERE.parent / "rig"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    job = LakeJob(run, kafka, topic_name, "lake_pipelines:iceberg")
    job.folder = folder
    return job


def test_a_run_and_the_next(job: LakeJob) -> None:
    job.feed(500)
    job.finish_here()
    job.feed(300)
    job.finish_here()
    job.assert_exact()


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_every_step(job: LakeJob, step: str, tmp_path: Path) -> None:
    job.feed(2_000)
    fired = tmp_path / "fired"
    fired.mkdir()
    armed = {"EXACTLYONCE_FAILPOINTS": f"{step}=kill@2", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
    incarnation = job.start("--parallelism", "2", env=armed)
    until((fired / step).exists, meanwhile=lambda: job.feed(200), told=lambda: incarnation.said, pause_s=0.2)
    if step.startswith("worker"):
        incarnation.await_checkpoint()
        incarnation.process.terminate()
    assert incarnation.wait() == (0 if step.startswith("worker") else -9), incarnation.said
    job.finish("--parallelism", "3")
    job.assert_exact()


@pytest.mark.exhaustive
def test_the_catalog_is_away_for_a_minute(job: LakeJob) -> None:
    """The checkpoint waits for it, nobody restarts, and all comes once."""
    job.feed(2_000)
    incarnation = job.start()
    incarnation.await_checkpoint()
    away = job.folder.rename(job.folder.with_name("away"))
    for _ in range(60):
        job.feed(50)
        time.sleep(1)
    assert incarnation.process.poll() is None, incarnation.said
    away.rename(job.folder)
    incarnation.await_checkpoint()
    incarnation.process.terminate()
    assert incarnation.wait() == 0, incarnation.said
    job.finish()
    job.assert_exact()


@pytest.mark.exhaustive
def test_many_rows_through_kills(job: LakeJob) -> None:
    """Workers and coordinators are killed at random instants, with another width each time: 0 missing, 0 doubled."""
    dice = random.Random(11)
    job.feed(ROWS)
    quick = QUICK[:1]
    for number in range(8):
        incarnation = job.start("--parallelism", str(dice.choice([1, 2, 3])), *quick, "1s")
        workers = incarnation.await_step("deployed")["workers"]
        incarnation.await_step(dice.choice(["triggered", "acknowledged", "decided", "finalized"]))
        time.sleep(dice.uniform(0, 0.3))
        if number % 2:
            os.kill(dice.choice(workers), signal.SIGKILL)
            incarnation.await_step("deployed")
        incarnation.kill()
    job.finish("--parallelism", "2")
    job.assert_exact()
