"""A store with a ledger in a pipeline: killed, away, refusing, restored, beside Kafka; and that of the docs."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, Job, Run, abort_while_a_worker_sleeps, orders, stop
from stored import assert_rows, rows_of
from test_kill_matrix import ELSEWHERE
from unreferenced import unreferenced_blocks
from waiting import until

from exactlyonce.cli.main import main
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import StoppedShort
from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.testing.cluster import KafkaCluster


class Stored:
    def __init__(self, job: Job, database: Path) -> None:
        self.job, self.database = job, database
        job.feed(2000)

    def flag(self, name: str) -> Path:
        return self.database.with_suffix(f".{name}")

    def ends(self, code: int, *arguments: str) -> str:
        return self.job.finish_here(*arguments, code=code)

    def assert_exact(self) -> None:
        assert_rows(self.database, self.job.fed)
        self.job.assert_totals()
        self.job.assert_copies()
        assert unreferenced_blocks(self.job.kafka, self.job.name) == set()


@pytest.fixture
def stored(job_of: Callable[..., Job], tmp_path: Path) -> Stored:
    database = tmp_path / "rows.db"
    return Stored(job_of("stored:totals", "--param", f"database={database}"), database)


PLACES = sorted(set(NAMES) - ELSEWHERE | {"store-committing", "store-committed"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLACES)
def test_kills(name: str, stored: Stored, failpoint: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    once = name in ("coordinator-opened", "coordinator-swept", "worker-restored")
    run = stored.job.start("--parallelism", "2", env=failpoint(name, nth=1 if once else 2))
    fired = tmp_path / "fired" / name
    until(fired.exists, meanwhile=lambda: stored.job.feed(100), told=lambda: run.said, pause_s=0.1)
    if name.startswith("worker"):
        run.await_checkpoint()
        run.kill()
        stored.job.finish("--parallelism", "3")
    else:
        assert run.wait() == -9, run.said
        stored.ends(0)
    stored.assert_exact()


def gone_on(stored: Stored, run: Run) -> None:
    stored.job.feed(2000)
    stored.flag("away").unlink()
    run.await_checkpoint()
    stop(run)
    assert "restarting" not in run.said
    stored.ends(0)
    stored.assert_exact()


@pytest.mark.exhaustive
@pytest.mark.parametrize("away_s", [0, 60])
def test_a_store_that_is_away(away_s: int, stored: Stored) -> None:
    run = stored.job.start("--parallelism", "2")
    run.await_checkpoint()
    stored.flag("away").touch()
    stored.job.feed(2000)
    waiting = run.await_event(lambda event: "waiting for the store of sink 'rows'" in event.get("text", ""))
    assert "rows.db is away" in waiting["text"]
    time.sleep(away_s)  # longer than anything but `--store-timeout` waits
    assert stored.job.history().living(SystemClock().now_ms()) is not None, "it shows that it goes on"
    gone_on(stored, run)


@pytest.mark.exhaustive
def test_a_store_that_stays_away(stored: Stored) -> None:
    run = stored.job.start("--store-timeout", "1s")
    run.await_checkpoint()
    stored.flag("away").touch()
    stored.job.feed(2000)
    assert run.wait() == 4, run.said
    assert "(store_timeout, --store-timeout;" in run.said
    assert "Nothing is lost: run it again once the store is there" in run.said
    assert "(store_timeout, --store-timeout;" in stored.ends(4, "--store-timeout", "1s"), "at the start, too"
    stored.flag("away").unlink()
    stored.ends(0)
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_stop_while_the_store_is_away(stored: Stored) -> None:
    """The run ends by `--stop-timeout`, or at once before anything runs, and says what the next run has to do."""
    run = stored.job.start("--stop-timeout", "1s")
    run.await_checkpoint()
    stored.flag("away").touch()
    stored.job.feed(2000)
    run.await_event(lambda event: "waiting for the store of sink 'rows'" in event.get("text", ""))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == StoppedShort.exit_code, run.said
    assert "none was complete within stop_timeout (--stop-timeout), 1000 ms" in run.said
    assert "whose commit it takes up" in run.said
    again = stored.job.start()
    again.await_event(lambda event: "waiting for the store of sink 'rows'" in event.get("text", ""))
    again.process.send_signal(signal.SIGTERM)
    assert again.wait() == StoppedShort.exit_code, again.said
    assert "before anything ran" in again.said
    stored.flag("away").unlink()
    stored.ends(0)
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_store_that_refuses(stored: Stored) -> None:
    stored.ends(0)
    stored.flag("refuse").touch()
    stored.job.feed(2000)
    assert "has no column 'sum'" in stored.ends(6)
    stored.flag("refuse").unlink()
    stored.ends(0)
    stored.assert_exact()
    stored.flag("refuse").touch()
    stored.job.feed(100)
    run = stored.job.start("--until", "latest")
    while run.wait() == 6:  # once for each checkpoint that has some of them
        number = run.said.split("--accept-loss ")[1].split("`")[0]
        run = stored.job.start("--until", "latest", "--accept-loss", number)
    assert run.wait() == 0, run.said
    stored.flag("refuse").unlink()
    before = len(stored.job.fed)
    stored.job.feed(100)
    stored.ends(0)
    seen = {row.id for row in rows_of(stored.database)}
    assert seen == set(range(before - 100)) | set(range(before, before + 100))


@pytest.mark.exhaustive
def test_a_store_that_was_restored_from_a_backup(stored: Stored, tmp_path: Path) -> None:
    stored.ends(0)
    shutil.copy(stored.database, tmp_path / "backup")
    stored.job.feed(2000)
    stored.ends(0)
    shutil.copy(stored.database, tmp_path / "newest")
    shutil.copy(tmp_path / "backup", stored.database)
    stored.job.feed(2000)
    assert "the store was restored from a backup" in stored.ends(6)
    shutil.copy(tmp_path / "newest", stored.database)
    stored.ends(0)
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_sink_of_another_description(stored: Stored, failpoint: Callable[..., dict[str, str]]) -> None:
    stored.job.finish(env=failpoint("store-committing"), code=-9)
    assert "set aside for another description of the sink" in stored.ends(6, "--param", "label=changed")
    stored.ends(0)
    stored.job.feed(2000)
    stored.ends(0, "--param", "label=changed")
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_pipeline_that_was_reset(stored: Stored) -> None:
    """The old ledger would hide its first checkpoints: a halt says what to empty."""
    stored.ends(0)
    servers = ("--bootstrap-servers", stored.job.kafka.bootstrap_servers)
    assert main(["reset", stored.job.name, "--yes", "--force", *servers]) == 0
    assert "begun for another checkpoint topic" in stored.ends(6)
    stored.database.unlink()
    stored.ends(0)
    assert_rows(stored.database, stored.job.fed)


@pytest.mark.exhaustive
def test_an_aborted_checkpoint(stored: Stored, tmp_path: Path) -> None:
    job = stored.job
    job.feed(1000)
    slow = ("--parallelism", "2", "--checkpoint-timeout", "2s", "--tolerable-failed", "50")
    run = job.start("--param", f"folder={tmp_path}", *slow)
    run.await_checkpoint()
    job.fed += abort_while_a_worker_sleeps(run, job.kafka, job.topic, tmp_path, len(job.fed))
    run.await_checkpoint()
    restarts = [line for line in run.said.splitlines() if "restarting" in line]
    starved = ("no producer was ready", "no checkpoint could be triggered")
    assert all(any(each in line for each in starved) for line in restarts), "nothing but what the feeding went on after"
    stop(run)
    stored.job.finish("--param", f"folder={tmp_path}")
    stored.assert_exact()


PAGE = Path(__file__).parents[2] / "docs" / "writing-a-sink.md"


def test_each_order_is_in_the_table_once(
    kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], tmp_path: Path,
    failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "shop.py").write_text("\n\n".join(blocks[:2]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    database = tmp_path / "orders.db"
    topic = kafka.create_topic(f"{topic_name}-orders", partitions=3)
    arguments = ("shop:pipeline", "--param", f"name={topic_name}", "--param", f"path={database}", *QUICK)
    kafka.produce(topic, orders(1_000))
    killed = run(*arguments, env=failpoint("store-committing"))
    assert killed.wait() == -9, killed.said
    kafka.produce(topic, orders(1_000, first=1_000))
    last = run(*arguments, "--inline", "--until", "latest")
    assert last.wait() == 0, last.said
    with closing(sqlite3.connect(database)) as db:
        ids = [id_ for (id_,) in db.execute("SELECT id FROM orders ORDER BY id")]
    assert ids == list(range(2_000))
