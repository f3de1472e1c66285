"""Runs from Kafka into tables of lakes, killed at every step; DuckDB counts, which shares no code with the sinks."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from gateway import DELTA_COMMIT, ICEBERG_COMMIT, Fate, Gateway
from lake_pipelines import BUCKET, CATALOG, LAKE
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
    rest: Any = None
    """The server of the catalog, if it is not in the folder."""

    def ids(self) -> list[int]:
        scan = f"delta_scan('{self.tables}/totals')"
        if self.lake == "iceberg":
            place = Path(self.newest_metadata().removeprefix("file://"))
            version, table = place.name.removesuffix(".metadata.json"), place.parent.parent
            table = table if self.s3 is None else self.tables / "shop" / "totals"
            scan = f"iceberg_scan('{table}', version = '{version}', allow_moved_paths = true)"
        with duckdb.connect() as reader:
            duckdb_ext.init(reader)
            return [id for (id,) in reader.execute(f"SELECT id FROM {scan}").fetchall()]

    def newest_metadata(self) -> str:
        """The address of the newest metadata of the table of Iceberg, as the catalog has it."""
        if self.rest is not None:
            with urlopen(f"{self.rest.uri}/v1/namespaces/shop/tables/totals") as answer:
                return str(json.load(answer)["metadata-location"])
        with sqlite3.connect(self.folder / "catalog.db") as catalog:
            ((place,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables")
        return str(place)

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
def test_kills_behind_a_gateway(job: LakeJob, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of each incarnation meets a fault on its way, then its coordinator is killed: 0 missing, 0 doubled."""
    if job.lake == "delta":
        job.s3 = request.getfixturevalue("s3")
        gateway = Gateway(job.s3.door.port, DELTA_COMMIT)
        monkeypatch.setenv(BUCKET, f"{job.s3.url}/{job.name}")
        monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.url)
    else:
        job.rest = request.getfixturevalue("rest")
        gateway = Gateway(job.rest.port, ICEBERG_COMMIT)
        monkeypatch.setenv(CATALOG, gateway.url)
    dice = random.Random(17)
    fates = [Fate.TWICE, Fate.TWIN, Fate.LATE, Fate.LOST, Fate.FAILED_500]
    dice.shuffle(fates)
    with closing(gateway):
        for fate in fates:
            job.feed(500)
            incarnation = job.start("--parallelism", "2")
            incarnation.await_step("finalized")
            gateway.meet(fate)
            until(lambda: gateway.has_met, meanwhile=lambda: job.feed(50), pause_s=0.1)
            if dice.random() < 0.5:
                incarnation.await_step("finalized")
            incarnation.kill()
            if dice.random() < 0.5:
                gateway.release()
        job.finish("--parallelism", "2")
        gateway.release()
        job.feed(100)
        job.finish()
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
