"""A store with a ledger in a pipeline: killed, away, refusing, restored, beside Kafka; and that of the docs."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, Job, Run, orders, stop, write_program
from stored import assert_rows, rows_of
from unreferenced import unreferenced_blocks

from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import StoppedShort
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
        self.job.assert_output()
        assert unreferenced_blocks(self.job.kafka, self.job.name) == set()


@pytest.fixture
def stored(job_of: Callable[..., Job], tmp_path: Path) -> Stored:
    database = tmp_path / "rows.db"
    return Stored(job_of("stored:totals", "--param", f"database={database}"), database)


def gone_on(stored: Stored, run: Run) -> None:
    stored.job.feed(2000)
    stored.flag("away").unlink()
    run.await_checkpoint()
    stop(run)
    assert "restarting" not in run.said
    stored.ends(0)
    stored.assert_exact()


@pytest.mark.exhaustive
def test_a_store_that_is_away(stored: Stored) -> None:
    run = stored.job.start("--parallelism", "2")
    run.await_checkpoint()
    stored.flag("away").touch()
    stored.job.feed(2000)
    waiting = run.await_event(lambda event: "waiting for the store of sink 'rows'" in event.get("text", ""))
    assert "rows.db is away" in waiting["text"]
    time.sleep(60)  # longer than anything but `--store-timeout` waits
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


def test_each_order_is_in_the_table_once(
    kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], tmp_path: Path,
    failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_program("writing-a-sink.md", tmp_path / "shop.py")
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
