"""A sink of Spark that writes to a store: its driver and tasks without Spark, one step at a time, on real servers."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from targets import COLUMNS, Row, rows_of
from unreferenced import unreferenced_blocks
from worlds import QUERY, World, expected

from exactlyonce.checkpoint import requests as ask
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.connections import Performer
from exactlyonce.engines.spark.sink.driver import SinkDriver
from exactlyonce.engines.spark.sink.position import SparkJob
from exactlyonce.engines.spark.sink.task import Flushed
from exactlyonce.pipeline import failpoints
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, RecordError, StoreError, StoreUnavailable
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.cluster import LIMIT_S


def test_what_an_attempt_writes_that_spark_has_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost executor or a repeated stage leaves nothing. Only a job that shows another writer is looked after."""
    looks: list[ask.Request] = []
    perform = Performer.__call__

    def looking(self: Performer, request: ask.Request) -> Any:
        looks.extend([request] * isinstance(request, ask.ScanBlocks))
        return perform(self, request)

    monkeypatch.setattr(Performer, "__call__", looking)
    planner, committer = world.pair("a")
    for batch, expected_looks in enumerate((2, 0, 0)):
        flushed = world.tasks(planner, batch, 5)
        looks.clear()
        committer.commit(SparkJob(QUERY, batch), flushed)
        assert len(looks) == expected_looks
    assignment, job = planner.assign(), SparkJob(QUERY, 3)
    attempts = [world.task(planner, assignment, job, rows_of(3, 0)) for _ in range(2)]
    committer.commit(job, attempts[-1:])
    committer.commit(SparkJob(QUERY, 4), world.tasks(planner, 4))
    assert len(looks) == 1
    assert unreferenced_blocks(world.kafka, world.name) == set()
    committer.commit(SparkJob(QUERY, 5), world.tasks(planner, 5))
    assert len(looks) == 1


def test_a_zombie_between_decision_and_commit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that sleeps after its decision finds the ledger fenced, and its rows there, once."""
    planner, committer = world.pair("a")
    flushed, hit = world.tasks(planner, 0), failpoints.hit

    def overtaken(name: str) -> None:
        hit(name)
        if name == "coordinator-decided":
            monkeypatch.undo()
            successor, last = world.pair("b")
            last.commit(SparkJob(QUERY, 1), world.tasks(successor, 1))

    monkeypatch.setattr("exactlyonce.engines.connections.hit", overtaken)
    with pytest.raises(Fenced, match="incarnation 2"):
        committer.commit(SparkJob(QUERY, 0), flushed)
    world.assert_exact(0, 1)


@pytest.mark.exhaustive
def test_a_store_that_is_away(world: World) -> None:
    """Tasks and commits wait for it; a commit that has waited for storeTimeout says so, an abort does not wait again,
    and the next start brings the store what it lacks."""
    servers, store = world.target.servers, world.target.store
    planner, committer = world.pair("a")
    committer.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    flushed: list[Flushed] = []
    for step in (
        lambda: flushed.extend(world.tasks(planner, 1)),
        lambda: committer.commit(SparkJob(QUERY, 1), flushed),
    ):
        servers.kill(store)
        waiting = threading.Thread(target=step)
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive()
        servers.start(store)
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()
    world.assert_exact(0, 1)
    flushed = world.tasks(planner, 2)
    committer = world.driver("a", storeTimeout="1s")
    servers.kill(store)
    with pytest.raises(StoreUnavailable, match=r"has not answered for 1 s .*Nothing is lost"):
        committer.commit(SparkJob(QUERY, 2), flushed)
    world.driver("a").abort()
    with pytest.raises(StoreUnavailable, match=r"has not answered for 1 s"):
        world.driver("b", storeTimeout="1s").assign()
    servers.start(store)
    successor, last = world.pair("b")
    last.commit(SparkJob(QUERY, 2), world.tasks(successor, 2))
    world.assert_exact(0, 1, 2)


def test_a_row_that_does_not_fit(world: World) -> None:
    planner, committer = world.pair("a")
    job = SparkJob(QUERY, 0)
    with pytest.raises(RecordError, match=r"row 2 of task 0 of batch 0 .*customer.*21.*Filter such rows"):
        world.job(planner, job, [[Row(1, "customer", 1), Row(2, "x" * 21, 2)]])
    flushed = world.job(planner, job, [[Row(1, "customer", -1)]])
    with pytest.raises(Halt, match=r"(?s)refuses its 1 records.*total_check.*option\(\"acceptLoss\", \"1\"\)"):
        committer.commit(job, flushed)
    with pytest.raises(Halt, match="refuses its 1 records"):
        world.driver("b").assign()
    successor, committer = world.pair("b", acceptLoss="1")
    committer.commit(SparkJob(QUERY, 1), world.tasks(successor, 1))
    world.assert_exact(1)


def test_what_would_count_as_written(world: World) -> None:
    """The second of two jobs with the same arguments to end is refused, and written when it is run again; so is the
    second target of a function of foreachBatch that has one sinkId for two."""
    planner, committer = world.pair("a")
    jobs = [SparkJob(write_id=each) for each in ("monday", "tuesday")]
    assignment = planner.assign()
    first, second = ([world.task(planner, assignment, job, rows_of(n, 0))] for n, job in enumerate(jobs))
    committer.commit(jobs[0], first)
    with pytest.raises(SinkFailed, match="another job was decided"):
        world.driver("a").commit(jobs[1], second)
    committer = world.driver("a")
    committer.commit(jobs[1], world.job(planner, jobs[1], [rows_of(1, 0)]))
    world.assert_exact(0, 1, partitions=1)
    job = SparkJob(QUERY, 0, run="app/1")
    committer.commit(job, world.job(planner, job, [rows_of(2, 0)]))
    planner, committer = world.pair("a", mode="upsert", key="id")
    world.target.sql(f"CREATE UNIQUE INDEX ON {world.target.table} (id)")
    with pytest.raises(ConfigError, match="two targets under one sinkId"):
        committer.commit(job, world.job(planner, job, [rows_of(3, 0)]))
    assert world.found() == expected(0, 1, 2, partitions=1)


@pytest.mark.parametrize("target", ["files"], indirect=True)
def test_two_jobs_at_a_time(world: World) -> None:
    """The job that began first is refused before its decision, for its rows are dropped. Run again, it is written."""
    planner = world.driver("a")
    jobs = [SparkJob(write_id=each) for each in ("monday", "tuesday")]
    first, second = (world.job(planner, job, [rows_of(place, 0)]) for place, job in enumerate(jobs))
    with pytest.raises(Fenced, match=r"Incarnation 2 .*nothing is lost"):
        world.driver("a").commit(jobs[0], first)
    world.driver("a").commit(jobs[1], second)
    world.driver("a").commit(jobs[0], world.job(planner, jobs[0], [rows_of(0, 0)]))
    assert world.found() == expected(0, 1, partitions=1)


@pytest.mark.exhaustive(but=["undecided-files", "coordinator-decided-postgres"])
@pytest.mark.parametrize(
    ("step", "target"),
    [("undecided", "files"), ("coordinator-decided", "postgres"), ("coordinator-finalized", "files")],
    indirect=["target"],
)
def test_a_stopped_query(step: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted query and the former one's commit: neither decides dropped rows, nor drops those staged meanwhile."""
    planner, committer = world.pair("a")
    committer.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    job = SparkJob(QUERY, 1)
    attempts = world.attempts(planner, job, rows_of(1, 0), 2)
    again: list[Flushed] = []
    batch, decide, hit = 1 + (step != "undecided"), SinkDriver._decide, failpoints.hit

    def overtaken() -> None:
        monkeypatch.undo()
        again.extend(world.tasks(planner, batch, 1))

    def deciding(*arguments: Any) -> None:
        overtaken()
        decide(*arguments)

    if step == "undecided":
        monkeypatch.setattr(SinkDriver, "_decide", deciding)
    else:
        monkeypatch.setattr(
            "exactlyonce.engines.connections.hit", lambda name: overtaken() if name == step else hit(name)
        )
    with nullcontext() if step == "coordinator-finalized" else pytest.raises(Fenced):
        committer.commit(job, attempts[:1])
    assert [each.wrote for each in again] == [True]
    world.driver("a").commit(SparkJob(QUERY, batch), again)
    assert world.found() == sorted([*expected(0), *expected(*range(1, 1 + batch), partitions=1)])


def test_upserts(world: World) -> None:
    world.target.make(COLUMNS.replace("customer varchar(20) NOT NULL", "customer varchar(20) NOT NULL UNIQUE"))
    planner, committer = world.pair("a", mode="upsert", key="customer")
    for batch in range(2):
        rows = [Row(batch, "ann", batch), Row(10 + batch, "bob", batch), Row(20 + batch, "ann", 7 * batch)]
        committer.commit(SparkJob(QUERY, batch), world.job(planner, SparkJob(QUERY, batch), [rows]))
        assert world.found() == [Row(10 + batch, "bob", batch), Row(20 + batch, "ann", 7 * batch)]


@pytest.mark.exhaustive(but=["files"])
@pytest.mark.parametrize("target", ["files", "postgres"], indirect=True)
def test_at_least_once(world: World) -> None:
    planner, committer = world.pair("a", delivery="at_least_once")
    for batch in range(2):
        attempts = world.attempts(planner, SparkJob(QUERY, batch), rows_of(batch, 0), 2)
        committer.commit(SparkJob(QUERY, batch), attempts[1:])
    assert world.found() == sorted(2 * expected(0, 1, partitions=1))
    assert world.target.hidden() == []


def test_what_is_refused_at_start(world: World) -> None:
    world.target.make(COLUMNS.replace("total", "sum"))
    with pytest.raises(StoreError, match=rf"Sink '{world.name}': .*no column 'total'"):
        world.driver("a").assign()
    with pytest.raises(StoreError, match=r"nowhere"):
        world.driver("a", table="nowhere").assign()
    client = ClientConfig({"bootstrap.servers": world.kafka.bootstrap_servers})
    assert read_history(client, world.name).newest_incarnation is None
