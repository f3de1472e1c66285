"""Tables as sources: each key once, whatever is killed and changed meanwhile; all of one moment if it goes well."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from auditing import audited
from bounded import Silent, load_pipeline
from running import Job, Run, orders, visible, workers_of
from shop import on_mariadb, on_postgres

from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Loaded

ROOT = Path(__file__).parents[2]
REFUSED, BAD_RECORD, HALTED = 2, 3, 6
ROWS, RAISED = 2_400, 1_000
"""The rows of a table, and how much their totals grow while it is read."""


class Table:
    """Table `orders` of the shop, and the job that reads it."""

    def __init__(self, shop: Any, job: Job, opened: Path) -> None:
        self.shop, self.job, self._opened = shop, job, opened
        shop.sql("CREATE TABLE orders (id int PRIMARY KEY, customer varchar(20) NOT NULL, total int)")

    def add(self, count: int) -> None:
        more = orders(count, first=len(self.job.fed))
        rows = [tuple(json.loads(value).values()) for _, value in more]
        self.shop.sql("INSERT INTO orders VALUES " + ", ".join(f"({id}, '{c}', {total})" for id, c, total in rows))
        self.job.fed += more

    def begun(self) -> Run:
        """A run that has read a part of the table, and committed some of that."""
        run = self.job.start()
        run.await_event(lambda event: event["event"] == "checkpoint" and event["records_committed"] > 0)
        return run

    def change(self) -> None:
        """Change all rows, and add some above them; from now on rows are read without delay."""
        self.shop.sql(f"UPDATE orders SET total = total + {RAISED}")
        self.shop.sql(f"INSERT INTO orders SELECT id + {ROWS}, customer, total FROM orders")
        self._opened.touch()

    def changed(self, count: int) -> list[bool]:
        """Whether each row that readers see was read after the change, by key; all keys are there once."""
        found = [
            json.loads(record.value or b"") for record in visible(self.job.kafka, f"{self.job.name}-copies", count)
        ]
        assert len({order["id"] for order in found}) == len(found), "a key was read twice"
        assert {order["id"] for order in found} >= set(range(ROWS)), "a key was not read"
        return [order["total"] > RAISED for order in sorted(found, key=lambda order: int(order["id"]))]


@pytest.fixture
def table_of(shop: Any, job_of: Callable[..., Job], tmp_path: Path) -> Callable[..., Table]:
    def made(target: str = "table", *arguments: str) -> Table:
        parameters = ("--param", f"kind={shop.kind}", "--param", f"folder={tmp_path}") if target == "table" else ()
        return Table(shop, job_of(f"source_pipelines:{target}", *parameters, *arguments), tmp_path / "open")

    return made


@on_mariadb
def test_a_run_that_is_killed(table_of: Any) -> None:
    """The next run reads on as of a later moment, above the keys that were read: each key comes once."""
    table = table_of("table", "--parallelism", "2")
    table.add(ROWS)
    table.begun().kill()
    table.change()
    newest = table.job.history().latest
    assert newest is not None
    table.job.finish_here("--parallelism", "1")
    changed = table.changed(2 * ROWS)
    assert changed.count(False) == sum(position.offset for position in newest.offsets) < ROWS
    table.job.finish_here("--parallelism", "1", until="running")  # a table that was read to its end is not read again
    assert len(table.changed(2 * ROWS)) == len(changed)


@pytest.mark.exhaustive
@on_postgres
def test_a_worker_that_is_killed(table_of: Any) -> None:
    """The leader has kept the snapshot: all rows are as of one moment."""
    table = table_of("table", "--parallelism", "2", "--param", "one=yes")
    table.add(ROWS)
    run = table.begun()
    os.kill(workers_of(run)[0], signal.SIGKILL)
    table.change()
    assert run.wait() == 0, run.said
    table.job.assert_output()


@on_postgres
def test_one_moment_or_none(table_of: Any) -> None:
    """With one_snapshot=True a run does not go on where the snapshot is gone."""
    table = table_of("table", "--param", "one=yes", "--inline")
    table.add(ROWS)
    table.begun().kill()
    table.change()
    said = table.job.finish_here(until="running", code=HALTED)
    assert "cannot go on reading orders as of one moment" in said


@pytest.mark.exhaustive
@on_postgres
def test_a_session_that_an_administrator_ends(table_of: Any) -> None:
    """The rest is read as of a later moment, and the run says so."""
    table = table_of("table")
    table.add(ROWS)
    run = table.begun()
    table.shop.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        " AND application_name = 'exactlyonce' AND state = 'idle in transaction' ORDER BY backend_start LIMIT 1"
    )
    run.await_event(lambda event: "Rows not yet read are read as of a later moment" in event.get("text", ""))
    table.change()
    assert run.wait() == 0, run.said
    table.changed(2 * ROWS)


@pytest.mark.exhaustive
@on_mariadb
def test_a_server_that_is_killed(table_of: Any, database_server: Any) -> None:
    """The job restarts until the server is there again, and reads on."""
    server = database_server("mariadb")
    table = table_of("table")
    table.add(ROWS)
    run = table.begun()
    server.kill()
    server.start()
    table.change()
    assert run.wait() == 0, run.said
    assert True in table.changed(2 * ROWS)


@pytest.mark.exhaustive
@on_postgres
def test_a_table_and_a_topic_that_goes_on(table_of: Any) -> None:
    """The run goes on with the topic once the table has ended."""
    table = table_of("table_and_topic")
    table.add(500)
    run = table.job.start()
    run.await_checkpoint()
    table.job.feed(500)
    table.job.assert_copies()
    run.kill()
    table.job.feed(500)
    table.job.finish()
    table.job.assert_output()


def test_a_row_that_does_not_decode(table_of: Any) -> None:
    """It stops the pipeline, and is read again once it is correct; no option leaves out a row by its number."""
    table = table_of("table")
    table.add(10)
    table.change()
    table.shop.sql("UPDATE orders SET total = NULL WHERE id = 3")
    said = table.job.finish_here(code=BAD_RECORD)
    assert "offset 3: in " in said
    assert "the row is not Order: Expected `int`, got `null`" in said
    assert "--skip" not in said
    place = f"{'postgres' if table.shop.kind == 'postgres' else 'mysql'}:orders:0:3"
    assert "the number may be another row's" in table.job.finish_here("--skip", place, code=REFUSED)
    table.shop.sql("UPDATE orders SET total = 7 WHERE id = 3")
    table.job.finish_here()
    assert len(visible(table.job.kafka, f"{table.job.name}-copies", 20)) == 20


def loaded(table: Table, folder: Path, one: str = "") -> Loaded:
    params = {"name": table.job.name, "kind": table.shop.kind, "folder": str(folder), "one": one}
    return load_pipeline("source_pipelines", "table", **params)


class Changes(Silent):
    """The table changes after the first checkpoint."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        if not self.checkpoints:
            self._table.change()
        super().advanced(advanced, offsets)


@pytest.mark.exhaustive(but=["postgres"])
def test_bounded_work_reads_a_table(table_of: Any, tmp_path: Path) -> None:
    """In several checkpoints, each key once; on PostgreSQL the driver keeps the snapshot, as the leader of a run does.
    MySQL's session ends with a unit, so bounded work refuses to promise one snapshot."""
    table = table_of()
    table.add(ROWS)
    (tmp_path / "open").touch()
    options = RunOptions(table.job.config, parallelism=2)
    is_postgres, staging = table.shop.kind == "postgres", tmp_path / "staging"
    target = loaded(table, tmp_path, "yes")
    if not is_postgres:
        with pytest.raises(ConfigError, match=r"Source 'orders': one_snapshot=True.* share no snapshot on MySQL"):
            CatchUp(target, options, Silent(), from_nothing=True).judge()
        target = loaded(table, tmp_path)
    work = CatchUp(target, options, Changes(table), chunk_records=500, from_nothing=True)
    summary = work.lead(in_process, staging)
    changed = table.changed(summary.records)
    assert (any(changed), len(changed) > ROWS) == (not is_postgres, not is_postgres)
    assert not CatchUp(target, options, Silent()).lead(in_process, staging).records, "it is not read again"


@pytest.mark.exhaustive
@on_postgres
def test_an_audit_says_that_it_cannot_judge(table_of: Any, tmp_path: Path) -> None:
    table = table_of("table")
    table.add(10)
    (tmp_path / "open").touch()
    table.job.finish_here()
    client = table.job.config
    report = audited(loaded(table, tmp_path), client, tmp_path)
    assert report.findings == []
    assert [why for why in report.unjudged if "whose rows may have changed since then" in why]
