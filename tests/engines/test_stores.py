"""A store with a ledger in a pipeline: killed, away, refusing, restored, and beside Kafka."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, abort_while_a_worker_sleeps, assert_copies, assert_totals, orders
from stored import assert_rows, rows_of
from test_kill_matrix import ELSEWHERE
from unreferenced import unreferenced_blocks

from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker

Fed = list[tuple[str, str]]


class Stored:
    """A pipeline with a database, and what was fed to it."""

    def __init__(self, kafka: KafkaCluster, name: str, folder: Path, run: Any) -> None:
        self.kafka, self.name, self.database = kafka, name, folder / "rows.db"
        self.fed: Fed = []
        self._run = run
        kafka.create_topic(f"{name}-in", 3)
        self.arguments = ("--param", f"name={name}", "--param", f"database={self.database}", *QUICK)

    def feed(self, count: int = 2000) -> None:
        """More orders."""
        more = orders(count, first=len(self.fed))
        self.kafka.produce(f"{self.name}-in", more)
        self.fed += more

    def run(self, *arguments: str, **more: Any) -> Any:
        """Begin an incarnation."""
        return self._run("stored:totals", *self.arguments, *arguments, **more)

    def finish(self, *arguments: str) -> Any:
        """Run to the end of what was fed."""
        job = self.run("--until", "latest", *arguments)
        assert job.wait() == 0, job.said
        return job

    def flag(self, name: str) -> Path:
        """The file beside the database that makes it misbehave."""
        return self.database.with_suffix(f".{name}")

    def assert_exact(self) -> None:
        """The database, and Kafka's topics beside it, are right; no block is left that nobody refers to."""
        assert_rows(self.database, self.fed)
        assert_totals(self.kafka, f"{self.name}-out", self.fed)
        assert_copies(self.kafka, f"{self.name}-copies", self.fed)
        assert unreferenced_blocks(self.kafka, self.name) == set()


@pytest.fixture
def stored(kafka: KafkaCluster, topic_name: str, tmp_path: Path, run: Any) -> Stored:
    """A pipeline that has not run yet, fed with 2,000 orders."""
    made = Stored(kafka, topic_name, tmp_path, run)
    made.feed()
    return made


PLACES = sorted(set(NAMES) - ELSEWHERE | {"store-committing", "store-committed"})


@pytest.mark.exhaustive(but=["store-committed"])
@pytest.mark.parametrize("name", PLACES)
def test_kills(name: str, stored: Stored, failpoint: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    """Kafka and the store agree though a process was killed at the step, for the second time it came there."""
    once = name in ("coordinator-opened", "coordinator-swept", "worker-restored")
    job = stored.run("--parallelism", "2", env=failpoint(name, nth=1 if once else 2))
    fired, deadline = tmp_path / "fired" / name, time.monotonic() + LIMIT_S
    while not fired.exists():
        assert time.monotonic() < deadline, f"the planned kill happened: {job.said}"
        stored.feed(100)
        time.sleep(0.1)
    if name.startswith("worker"):
        job.await_checkpoint()
        job.kill()
    else:
        assert job.wait() == -9, job.said
    stored.finish("--parallelism", "3")
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_store_that_is_away(stored: Stored) -> None:
    """The run waits for it, says so, reads no more meanwhile, and goes on without a restart."""
    job = stored.run("--parallelism", "2")
    job.await_checkpoint()
    stored.flag("away").touch()
    stored.feed()
    waiting = job.await_event(lambda event: "waiting for the store of sink 'rows'" in event.get("text", ""))
    assert "rows.db is away" in waiting["text"]
    stored.feed()
    stored.flag("away").unlink()
    job.await_checkpoint()
    job.process.terminate()
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    stored.finish()
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_store_that_is_away_for_a_minute(stored: Stored) -> None:
    """Heartbeats go on, so that nobody takes the pipeline for dead; no restart, and all rows once."""
    job = stored.run("--parallelism", "2")
    job.await_checkpoint()
    stored.flag("away").touch()
    stored.feed()
    job.await_event(lambda event: "waiting for the store" in event.get("text", ""))
    time.sleep(60)
    history = read_history({"bootstrap.servers": stored.kafka.bootstrap_servers}, stored.name)
    assert history.living(SystemClock().now_ms()) is not None, "it shows that it goes on"
    stored.flag("away").unlink()
    stored.feed()
    job.await_checkpoint()
    job.process.terminate()
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    stored.finish()
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_store_that_stays_away(stored: Stored) -> None:
    """After `--store-timeout` the run ends with what to do; the next one finishes what was decided."""
    job = stored.run("--store-timeout", "1s")
    job.await_checkpoint()
    stored.flag("away").touch()
    stored.feed()
    assert job.wait() == 4, job.said
    assert "(store_timeout, --store-timeout;" in job.said
    assert "Nothing is lost: run it again once the store is there" in job.said
    again = stored.run("--until", "latest", "--store-timeout", "1s")
    assert again.wait() == 4, "at the start it is waited for likewise"
    assert "(store_timeout, --store-timeout;" in again.said
    stored.flag("away").unlink()
    stored.finish()
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_store_that_refuses(stored: Stored) -> None:
    """It halts with the choices; changed, it takes the rows; a loss that is accepted is that of these rows alone."""
    stored.finish()
    stored.flag("refuse").touch()
    stored.feed()
    job = stored.run("--until", "latest")
    assert job.wait() == 6, job.said
    assert "has no column 'sum'" in job.said
    stored.flag("refuse").unlink()
    stored.finish()
    stored.assert_exact()
    stored.flag("refuse").touch()
    stored.feed(100)
    job = stored.run("--until", "latest")
    while job.wait() == 6:  # once for each checkpoint that has some of them
        number = job.said.split("--accept-loss ")[1].split("`")[0]
        job = stored.run("--until", "latest", "--accept-loss", number)
    assert job.wait() == 0, job.said
    stored.flag("refuse").unlink()
    before = len(stored.fed)
    stored.feed(100)
    stored.finish()
    seen = {row.id for row in rows_of(stored.database)}
    assert seen == set(range(before - 100)) | set(range(before, before + 100))


@pytest.mark.exhaustive
def test_a_store_that_was_restored_from_a_backup(stored: Stored, tmp_path: Path) -> None:
    """What it has lost is neither written again nor left out in silence: a halt, until it is as it was."""
    stored.finish()
    shutil.copy(stored.database, tmp_path / "backup")
    stored.feed()
    stored.finish()
    shutil.copy(stored.database, tmp_path / "newest")
    shutil.copy(tmp_path / "backup", stored.database)
    stored.feed()
    job = stored.run("--until", "latest")
    assert job.wait() == 6, job.said
    assert "the store was restored from a backup" in job.said
    shutil.copy(tmp_path / "newest", stored.database)
    stored.finish()
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_sink_of_another_description(stored: Stored, failpoint: Callable[..., dict[str, str]]) -> None:
    """What was set aside for a sink is not committed by one that reads it otherwise: a halt, until it is as it was."""
    assert stored.run("--until", "latest", env=failpoint("store-committing")).wait() == -9
    job = stored.run("--until", "latest", "--param", "label=changed")
    assert job.wait() == 6, job.said
    assert "set aside for another description of the sink" in job.said
    stored.finish()
    stored.feed()
    stored.finish("--param", "label=changed")
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_pipeline_that_was_reset(stored: Stored) -> None:
    """The old ledger would take its first checkpoints for done: a halt says what to empty."""
    stored.finish()
    subprocess.run(
        [sys.executable, "-m", "exactlyonce.cli.main", "reset", stored.name, "--yes", "--force",
         "--bootstrap-servers", stored.kafka.bootstrap_servers],
        check=True, capture_output=True,
    )  # fmt: skip
    job = stored.run("--until", "latest")
    assert job.wait() == 6, job.said
    assert "begun for another checkpoint topic" in job.said
    stored.database.unlink()
    stored.finish()
    assert_rows(stored.database, stored.fed)


@pytest.mark.exhaustive
def test_an_aborted_checkpoint(stored: Stored, tmp_path: Path) -> None:
    """What was set aside for it is carried by the next one, at whose decision it is committed."""
    stored.feed(1000)
    slow = ("--parallelism", "2", "--checkpoint-timeout", "2s", "--tolerable-failed", "50")
    job = stored.run("--param", f"folder={tmp_path}", *slow)
    job.await_checkpoint()
    stored.fed += abort_while_a_worker_sleeps(job, stored.kafka, f"{stored.name}-in", tmp_path, len(stored.fed))
    job.await_checkpoint()
    job.process.terminate()
    assert job.wait() == 0, job.said
    stored.finish("--param", f"folder={tmp_path}")
    stored.assert_exact()
