"""Runs from Kafka into tables of lakes, killed at every step; DuckDB counts, which shares no code with the sinks."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lake_pipelines import BUCKET, LAKE
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
STEPS = ["worker-flushed", "coordinator-decided", "store-committing", "store-committed"]
ON_SPARK = ("--on", "spark", "--master", "local[2]")
BOUNDED = [
    ("unit-computed", ("--on", "driver")),
    ("store-committed", ("--on", "driver")),
    pytest.param("store-committing", ON_SPARK, id="store-committing-on-spark", marks=pytest.mark.spark),
]
ENGINES = HERE.parents[1] / "engines"


class LakeJob(Job):
    """The pipeline into *lake*, and its table as DuckDB reads it."""

    folder: Path
    lake: str
    s3: Any = None
    """The server that has the tables, if they are not in the folder."""

    def ids(self) -> list[int]:
        scan = f"delta_scan('{self.tables}/totals')"
        if self.lake == "iceberg":
            with sqlite3.connect(self.folder / "catalog.db") as catalog:
                ((place,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables")
            version = Path(place).name.removesuffix(".metadata.json")
            scan = f"iceberg_scan('{self.tables}/shop/totals', version = '{version}', allow_moved_paths = true)"
        with duckdb.connect() as reader:
            duckdb_ext.init(reader)
            return [id for (id,) in reader.execute(f"SELECT id FROM {scan}").fetchall()]

    @property
    def tables(self) -> Path:
        """The folder of the tables; of those in S3 a copy, which shares no client with the sinks."""
        if self.s3 is None:
            return self.folder
        for key in self.s3.listed(f"{self.name}/"):
            if not key.endswith("/"):  # a client's mark of a folder
                file = self.folder / key
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(self.s3.get(key))
        return self.folder / self.name

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
    path = [str(HERE.parent / "rig"), str(ENGINES), os.environ.get("PYTHONPATH", "")]
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
def test_a_kill_at_every_step(job: LakeJob, step: str, failpoint: Any, tmp_path: Path) -> None:
    job.feed(2_000)
    incarnation = job.start("--parallelism", "2", env=failpoint(step, nth=2))
    until(
        (tmp_path / "fired" / step).exists, meanwhile=lambda: job.feed(200), told=lambda: incarnation.said, pause_s=0.2
    )
    if step.startswith("worker"):
        incarnation.await_checkpoint()
        incarnation.process.terminate()
    assert incarnation.wait() == (0 if step.startswith("worker") else -9), incarnation.said
    job.finish("--parallelism", "3")
    job.assert_exact()


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_many_rows(job: LakeJob, place: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and coordinators are killed at random instants, with another width each time: 0 missing, 0 doubled."""
    if place == "s3":
        job.s3 = request.getfixturevalue("s3")
        monkeypatch.setenv(BUCKET, f"{job.s3.url}/{job.name}")
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "on"), BOUNDED)
def test_bounded_work_that_is_killed(job: LakeJob, step: str, on: tuple[str, ...], tmp_path: Path) -> None:
    """A backfill in chunks dies in its second checkpoint, and a catch-up; others go on, and a run from there."""
    arguments = ["--param", f"name={job.name}", "--param", f"lake={job.lake}", "--chunk-records", "1000"]
    arguments += ["--bootstrap-servers", job.kafka.bootstrap_servers, "--parallelism", "2", *on]

    def work(command: str, **env: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "exactlyonce.cli.main", command, "lake_pipelines:into", *arguments]
        return subprocess.run(line, env={**os.environ, **env}, cwd=ENGINES, capture_output=True, text=True)

    for command in ("backfill", "catch-up"):
        job.feed(3_000)
        fired = tmp_path / command
        fired.mkdir()
        armed = {"EXACTLYONCE_FAILPOINTS": f"{step}=kill@2", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
        killed = work(command, **armed)
        assert killed.returncode, "it has died"
        assert (fired / step).exists(), killed.stderr
        done = work(command)
        assert done.returncode == 0, done.stderr
        job.assert_exact()
    job.feed(500)
    job.finish()
    job.assert_exact()
