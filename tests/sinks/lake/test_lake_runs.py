"""Runs from Kafka into tables of lakes, killed at every step; DuckDB counts, which shares no code with the sinks."""

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

for library in ("pyiceberg", "deltalake"):
    pytest.importorskip(library, reason="LAKES NOT TESTED: they need the extras `iceberg` and `delta`")
duckdb_ext = pytest.importorskip("duckdb_ext", reason="LAKES NOT TESTED: DuckDB and its extensions are missing")
duckdb = pytest.importorskip("duckdb")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROWS = int(os.environ.get("EXACTLYONCE_ROWS", "300000"))
KILLS = 8
STEPS = [
    "worker-barrier", "worker-flushed", "worker-acknowledged", "coordinator-checked", "coordinator-decided",
    "store-committing", "store-committed", "coordinator-finalized",
]  # fmt: skip


class LakeJob(Job):
    """The pipeline into *lake*, and its table as DuckDB reads it."""

    folder: Path
    lake: str

    def ids(self) -> list[int]:
        scan, place = "delta_scan", str(self.folder / "totals")
        if self.lake == "iceberg":
            with sqlite3.connect(self.folder / "catalog.db") as catalog:
                ((place,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables")
            scan = "iceberg_scan"
        with duckdb.connect() as reader:
            duckdb_ext.init(reader)
            return [id for (id,) in reader.execute(f"SELECT id FROM {scan}(?)", [place]).fetchall()]

    def assert_exact(self) -> None:
        """Each order is in the table once."""
        assert_once(self.ids(), self.fed, self.lake)


@pytest.fixture(params=["iceberg", "delta"])
def lake(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(
    kafka: KafkaCluster, topic_name: str, run: Any, lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LakeJob:
    folder = tmp_path / "lake"
    folder.mkdir()
    monkeypatch.setenv(LAKE, str(folder))
    path = [str(HERE.parent / "rig"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    job = LakeJob(run, kafka, topic_name, "lake_pipelines:into", "--param", f"lake={lake}")
    job.folder, job.lake = folder, lake
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
def test_the_folder_is_away_for_a_minute(job: LakeJob) -> None:
    """The checkpoint waits for it, the run does not end, and all comes once."""
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
    quick = QUICK[:1]
    for number in range(KILLS):
        job.feed(ROWS // KILLS)
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
