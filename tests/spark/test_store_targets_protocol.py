"""A sink of Spark that writes to a store: its driver and tasks without Spark, one step at a time, on real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType
from targets import COLUMNS, TARGETS, Row, Target, rows_of
from unreferenced import unreferenced_blocks

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import INCARNATIONS_KEPT
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.engines.performer import Performer
from exactlyonce.engines.spark.sink.driver import SinkDriver
from exactlyonce.engines.spark.sink.messages import Flushed
from exactlyonce.engines.spark.sink.options import parse_sink_options
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.store_task import write_store_task
from exactlyonce.pipeline import failpoints
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, RecordError, StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import FailpointRaised
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker
QUERY = "a-query"
SCHEMA = StructType().add("id", LongType()).add("customer", StringType()).add("total", LongType())


class World:
    """A sink, its target, and the drivers that were made for it: a planner and a committer each, as Spark does."""

    def __init__(self, kafka: KafkaCluster, name: str, target: Target) -> None:
        self.kafka, self.name, self.target = kafka, name, target
        self.made: list[SinkDriver] = []

    def driver(self, name: str, **changes: str) -> SinkDriver:
        """A process of the driver *name*."""
        given = {"sinkId": self.name, "kafka.bootstrap.servers": self.kafka.bootstrap_servers, **self.target.options}
        self.made.append(SinkDriver(parse_sink_options({**given, **changes}, SCHEMA, streaming=False), name))
        return self.made[-1]

    def tasks(self, planner: SinkDriver, batch: int, partitions: int = 2) -> list[Flushed]:
        """Plan a batch, and run its tasks; of a batch without rows Spark runs one."""
        return self.job(planner, Job(QUERY, batch), [rows_of(batch, each) for each in range(partitions)])

    def job(self, planner: SinkDriver, job: Job, tasks: Sequence[Sequence[Row]]) -> list[Flushed]:
        """Plan *job*, and run one task for each of *tasks*."""
        assignment = planner.assign()
        return [
            write_store_task(planner.options, assignment, job, place, False, [frame(each)])
            for place, each in enumerate(tasks or [[]])
        ]

    def assert_exact(self, *batches: int, partitions: int = 2) -> None:
        """Every row of these batches is there once, and no block is left that no decision names."""
        assert self.target.found() == expected(*batches, partitions=partitions)
        assert unreferenced_blocks(self.kafka, self.name) == set()
        assert self.target.hidden() == []


def frame(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    types = (pa.int64(), pa.string(), pa.int64())
    arrays = [pa.array(each, type_) for each, type_ in zip(columns, types, strict=True)]
    return pa.record_batch(arrays, names=["id", "customer", "total"])


def expected(*batches: int, partitions: int = 2) -> list[Row]:
    return sorted(row for batch in batches for each in range(partitions) for row in rows_of(batch, each))


@pytest.fixture
def make_world(kafka: KafkaCluster, topic_name: str, servers: Any, tmp_path: Path) -> Iterator[Callable[[str], World]]:
    """`make_world(store)`: a sink that nobody has written to."""
    worlds: list[World] = []

    def make(store: str) -> World:
        worlds.append(World(kafka, f"{topic_name}-{len(worlds)}", Target(store, servers, topic_name, tmp_path)))
        return worlds[-1]

    yield make
    for driver in (each for world in worlds for each in world.made):
        driver.close()


@pytest.fixture
def world(make_world: Callable[[str], World], request: pytest.FixtureRequest) -> World:
    """One that writes to PostgreSQL, or to the store that the test is given."""
    return make_world(getattr(request, "param", "postgres"))


@pytest.mark.exhaustive(but=["postgres"])
@pytest.mark.parametrize("world", TARGETS, indirect=True)
def test_batches(world: World) -> None:
    """Batches, also empty ones and with fewer tasks, are in the store once they are decided, and not before; what is
    written again is skipped; of rows and decisions only the last few are kept."""
    planner, committer = world.driver("a"), world.driver("a")
    partitions = (3, 3, 0, 1, 2, 2)
    for batch, each in enumerate(partitions):
        flushed = world.tasks(planner, batch, each)
        before = world.target.found()
        assert not [row for row in before if row.id // 10_000 == batch]
        for _ in range(2):
            committer.commit(Job(QUERY, batch), flushed)
            assert len(world.target.found()) == len(before) + 3 * each
            flushed = world.tasks(planner, batch, each)
            assert not any(task.wrote for task in flushed) or not each
    assert world.target.found() == sorted(
        row for batch, each in enumerate(partitions) for row in expected(batch, partitions=each)
    )
    assert unreferenced_blocks(world.kafka, world.name) == set()
    history = read_history({"bootstrap.servers": world.kafka.bootstrap_servers}, world.name)
    assert history.unfinalized is None
    assert len(history.manifests) == 3


STEPS = (
    *("coordinator-checked", "coordinator-decided", "store-committing", "store-committed", "coordinator-finalized"),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", TARGETS, indirect=True)
@pytest.mark.parametrize("aborted", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_commit_that_dies_at_any_step(step: str, aborted: bool, world: World, failing: Callable[[str], None]) -> None:
    """A decided batch comes into the store though Spark aborts it, or its driver dies; an undecided one does not, and
    its rows are dropped; written again by the next driver, it is there once."""
    planner, committer = world.driver("a"), world.driver("a")
    flushed = world.tasks(planner, 0)
    failing(step)
    with pytest.raises(FailpointRaised):
        committer.commit(Job(QUERY, 0), flushed)
    is_decided = step != "coordinator-checked"
    if aborted:
        world.driver("a").abort()
        assert world.target.found() == (expected(0) if is_decided else [])
    successor, committer = world.driver("b"), world.driver("b")
    again = world.tasks(successor, 0)
    assert [each.wrote for each in again] == [not is_decided] * 2
    assert world.target.found() == (expected(0) if is_decided else [])
    committer.commit(Job(QUERY, 0), again)
    committer.commit(Job(QUERY, 1), world.tasks(successor, 1))
    world.assert_exact(0, 1)


@pytest.mark.exhaustive(but=["postgres"])
@pytest.mark.parametrize("world", TARGETS, indirect=True)
def test_a_task_that_is_tried_again(world: World) -> None:
    """Of several attempts of a task, of which Spark reports one, one is in the store, whichever it is; what the others
    have set aside is dropped, and so is that of a job that has failed, or was stopped without a word."""
    planner, committer = world.driver("a"), world.driver("a")
    for batch, reported in enumerate((0, 2, 1)):
        assignment, job = planner.assign(), Job(QUERY, batch)
        attempts = [
            write_store_task(planner.options, assignment, job, 0, True, [frame(rows_of(batch, 0))]) for _ in range(3)
        ]
        committer.commit(job, [attempts[reported]])
        world.assert_exact(*range(batch + 1), partitions=1)
    world.tasks(planner, 3)
    committer.abort()
    committer.commit(Job(QUERY, 3), world.tasks(planner, 3, partitions=1))
    world.assert_exact(0, 1, 2, 3, partitions=1)
    world.tasks(planner, 4)  # of a query that is stopped, Spark says nothing
    committer.commit(Job(QUERY, 4), world.tasks(planner, 4, partitions=1))
    world.assert_exact(0, 1, 2, 3, 4, partitions=1)


@pytest.mark.exhaustive(but=["untold"])
@pytest.mark.parametrize("late", [True, False], ids=["late", "untold"])
def test_what_an_attempt_writes_that_spark_has_given_up(
    late: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an executor that was lost, and goes on behind the decision, or of a stage that was tried again, which Spark
    does not tell tasks of, nothing stays: it is looked for once a job shows that somebody else has written, and only
    then."""
    looks: list[ask.Request] = []
    perform = Performer.__call__

    def looking(self: Performer, request: ask.Request) -> Any:
        looks.extend([request] * isinstance(request, ask.ScanBlocks))
        return perform(self, request)

    monkeypatch.setattr(Performer, "__call__", looking)
    planner, committer = world.driver("a"), world.driver("a")
    for batch in range(6):
        flushed = world.tasks(planner, batch, 5)
        looks.clear()
        committer.commit(Job(QUERY, batch), flushed)
        assert len(looks) == (2 if not batch else 0)
    assignment, job = planner.assign(), Job(QUERY, 6)
    write = partial(write_store_task, planner.options, assignment, job, 0, False, [frame(rows_of(6, 0))])
    attempts = [write() for _ in range(1 if late else 2)]
    committer.commit(job, attempts[-1:])
    if late:
        write()
    committer.commit(Job(QUERY, 7), world.tasks(planner, 7))
    assert len(looks) == 1
    assert unreferenced_blocks(world.kafka, world.name) == set()
    committer.commit(Job(QUERY, 8), world.tasks(planner, 8))
    assert len(looks) == 1


def test_more_rows_than_a_decision_can_name(world: World) -> None:
    """Rows that fill many blocks, which an index lists, are there once; all of the blocks go with the decision, and
    those of a failed attempt at once."""
    planner, committer = world.driver("a"), world.driver("a")
    assignment, job, rows = planner.assign(), Job(QUERY, 0), rows_of(0, 0, 100_000)
    attempts = [write_store_task(planner.options, assignment, job, 0, True, [frame(rows)]) for _ in range(2)]
    assert len(attempts[0].blocks) > 6
    committer.commit(job, attempts[1:])
    assert len(world.target.found()) == 100_000
    for batch in range(1, 5):
        world.target.sql(f"DELETE FROM {world.target.table}")
        committer.commit(Job(QUERY, batch), world.tasks(planner, batch))
    world.assert_exact(4)


@pytest.mark.exhaustive(but=["postgres"])
@pytest.mark.parametrize("world", TARGETS, indirect=True)
def test_a_fenced_driver_commits_nothing_more(world: World, failing: Callable[[str], None]) -> None:
    """A driver that was replaced can neither decide what it had written, nor commit what it had decided; its successor
    has done that already."""
    planner, committer = world.driver("a"), world.driver("a")
    committer.commit(Job(QUERY, 0), world.tasks(planner, 0))
    stale = world.tasks(planner, 1)
    successor = world.driver("b")
    fresh = world.tasks(successor, 1)
    for zombie in (committer, world.driver("a")):
        with pytest.raises(Fenced, match="on b"):
            zombie.commit(Job(QUERY, 1), stale)
    with pytest.raises(Fenced, match="on b"):
        planner.assign()
    world.driver("b").commit(Job(QUERY, 1), fresh)
    world.assert_exact(0, 1)


@pytest.mark.exhaustive
def test_a_fenced_driver_that_wakes_within_a_decision(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves its successor in peace, though that one's decision is not durable yet, and the log has forgotten since
    who it was: it can neither plan nor commit, and aborts nothing."""
    planner, committer, aborter = (world.driver("a") for _ in range(3))
    stale = world.tasks(planner, 0)
    for _ in range(INCARNATIONS_KEPT):
        world.driver("b").assign()
    successor = world.driver("b")
    fresh, hit = world.tasks(successor, 0), failpoints.hit

    def within(name: str) -> None:
        hit(name)
        if name == "coordinator-checked":
            monkeypatch.undo()
            with pytest.raises(Fenced, match="on b"):
                planner.assign()
            with pytest.raises(Fenced, match="on b"):
                committer.commit(Job(QUERY, 0), stale)
            aborter.abort()

    monkeypatch.setattr("exactlyonce.engines.performer.hit", within)
    world.driver("b").commit(Job(QUERY, 0), fresh)
    world.assert_exact(0)


def test_a_zombie_between_decision_and_commit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that sleeps behind its decision finds the ledger fenced, and its rows there, once."""
    planner, committer = world.driver("a"), world.driver("a")
    flushed = world.tasks(planner, 0)
    hit = failpoints.hit

    def overtaken(name: str) -> None:
        hit(name)
        if name == "coordinator-decided":
            monkeypatch.undo()
            successor = world.driver("b")
            world.driver("b").commit(Job(QUERY, 1), world.tasks(successor, 1))

    monkeypatch.setattr("exactlyonce.engines.performer.hit", overtaken)
    with pytest.raises(Fenced, match="incarnation 2"):
        committer.commit(Job(QUERY, 0), flushed)
    world.assert_exact(0, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", TARGETS[:3], indirect=True, ids=TARGETS[:3])
def test_a_store_that_is_away(world: World) -> None:
    """Tasks and commits wait for it; a commit that has waited for storeTimeout says so, an abort does not wait again,
    and the next start brings the store what it lacks."""
    servers, store = world.target.servers, world.target.store
    planner, committer = world.driver("a"), world.driver("a")
    committer.commit(Job(QUERY, 0), world.tasks(planner, 0))
    flushed: list[Flushed] = []
    for committing, step in enumerate(
        (lambda: flushed.extend(world.tasks(planner, 1)), lambda: committer.commit(Job(QUERY, 1), flushed))
    ):
        servers.kill(store)
        waiting = threading.Thread(target=step)
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive() or (store == "redis" and not committing)  # whose encoder need not ask it
        servers.start(store)
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()
    world.assert_exact(0, 1)
    planner, committer = (world.driver("a", storeTimeout="1s") for _ in range(2))
    flushed = world.tasks(planner, 2)
    servers.kill(store)
    with pytest.raises(StoreUnavailable, match=r"has not answered for 1 s .*Nothing is lost"):
        committer.commit(Job(QUERY, 2), flushed)
    world.driver("a").abort()
    with pytest.raises(StoreUnavailable, match=r"has not answered for 1 s"):
        world.driver("b", storeTimeout="1s").assign()
    servers.start(store)
    successor = world.driver("b")
    world.driver("b").commit(Job(QUERY, 2), world.tasks(successor, 2))
    world.assert_exact(0, 1, 2)


def test_a_row_that_does_not_fit(world: World) -> None:
    """A row that the column cannot take fails its task before anything is decided, and is named; one that only the
    server refuses is a halt, whose choices work."""
    planner, committer = world.driver("a"), world.driver("a")
    job, wrong = Job(QUERY, 0), [Row(1, "customer", 1), Row(2, "x" * 21, 2)]
    with pytest.raises(RecordError, match=r"row 2 of task 0 of batch 0 .*customer.*21.*Filter such rows"):
        world.job(planner, job, [wrong])
    flushed = world.job(planner, job, [[Row(1, "customer", -1)]])
    with pytest.raises(Halt, match=r"(?s)refuses its 1 records.*total_check.*option\(\"acceptLoss\", \"1\"\)"):
        committer.commit(job, flushed)
    with pytest.raises(Halt, match="refuses its 1 records"):
        world.driver("b").assign()
    successor, committer = (world.driver("b", acceptLoss="1") for _ in range(2))
    committer.commit(Job(QUERY, 1), world.tasks(successor, 1))
    world.assert_exact(1)


def test_other_rows_under_a_decided_number(world: World) -> None:
    """They are not written, and not skipped in silence."""
    planner, committer = world.driver("a"), world.driver("a")
    committer.commit(Job(QUERY, 0), world.tasks(planner, 0))
    with pytest.raises(Halt, match="as many, but others"):
        committer.commit(Job(QUERY, 0), world.job(planner, Job(QUERY, 0), [rows_of(7, 0), rows_of(0, 1)]))
    world.assert_exact(0)


def test_what_would_count_as_written(world: World) -> None:
    """Of two jobs that were told the same, the second to end is refused, and written when it is run again; so is the
    second target of a function of foreachBatch that has one sinkId for two."""
    planner, committer = world.driver("a"), world.driver("a")
    jobs = [Job(write_id=each) for each in ("monday", "tuesday")]
    assignment = planner.assign()
    first, second = (
        [write_store_task(planner.options, assignment, job, 0, False, [frame(rows_of(place, 0))])]
        for place, job in enumerate(jobs)
    )
    committer.commit(jobs[0], first)
    with pytest.raises(SinkFailed, match="another job was decided"):
        world.driver("a").commit(jobs[1], second)
    committer = world.driver("a")
    committer.commit(jobs[1], world.job(planner, jobs[1], [rows_of(1, 0)]))
    world.assert_exact(0, 1, partitions=1)
    job = Job(QUERY, 0, run="app/1")
    committer.commit(job, world.job(planner, job, [rows_of(2, 0)]))
    planner, committer = (world.driver("a", mode="upsert", key="id") for _ in range(2))
    world.target.sql(f"CREATE UNIQUE INDEX ON {world.target.table} (id)")
    with pytest.raises(ConfigError, match="two targets under one sinkId"):
        committer.commit(job, world.job(planner, job, [rows_of(3, 0)]))
    assert world.target.found() == expected(0, 1, 2, partitions=1)


SETTING_ASIDE = pytest.mark.parametrize(
    ("world", "changes"),
    [("files", {}), ("postgres", {"commit": "prepared"}), ("postgres", {})],
    indirect=["world"], ids=["files", "prepared", "rows"],
)  # fmt: skip


@pytest.mark.exhaustive(but=["prepared"])
@SETTING_ASIDE
def test_two_jobs_at_a_time(world: World, changes: dict[str, str]) -> None:
    """Of two jobs of one driver the one that began first is refused, before it is decided: what its tasks have set
    aside was dropped as the other one began. Run again, it is written."""
    planner = world.driver("a", **changes)
    jobs = [Job(write_id=each) for each in ("monday", "tuesday")]
    first, second = (world.job(planner, job, [rows_of(place, 0)]) for place, job in enumerate(jobs))
    with pytest.raises(Fenced, match=r"Incarnation 2 .*nothing is lost"):
        world.driver("a", **changes).commit(jobs[0], first)
    world.driver("a", **changes).commit(jobs[1], second)
    world.driver("a", **changes).commit(jobs[0], world.job(planner, jobs[0], [rows_of(0, 0)]))
    assert world.target.found() == expected(0, 1, partitions=1)


@pytest.mark.exhaustive(but=["undecided-prepared", "coordinator-decided-rows"])
@SETTING_ASIDE
@pytest.mark.parametrize("step", ["undecided", "coordinator-decided", "coordinator-finalized"])
def test_a_query_that_is_stopped_while_it_commits(
    step: str, world: World, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that commits goes on, while the query is started again by the same driver: it neither decides what
    was dropped meanwhile, nor drops what was set aside meanwhile."""
    planner, committer = (world.driver("a", **changes) for _ in range(2))
    committer.commit(Job(QUERY, 0), world.tasks(planner, 0))
    assignment, job = planner.assign(), Job(QUERY, 1)
    attempts = [write_store_task(planner.options, assignment, job, 0, True, [frame(rows_of(1, 0))]) for _ in range(2)]
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
            "exactlyonce.engines.performer.hit", lambda name: overtaken() if name == step else hit(name)
        )
    with nullcontext() if step == "coordinator-finalized" else pytest.raises(Fenced):
        committer.commit(job, attempts[:1])
    assert [each.wrote for each in again] == [True]
    world.driver("a", **changes).commit(Job(QUERY, batch), again)
    assert world.target.found() == sorted([*expected(0), *expected(*range(1, 1 + batch), partitions=1)])


def test_upserts(world: World) -> None:
    """An upsert changes the row of its key, from one batch to the next and within one."""
    world.target.make(COLUMNS.replace("customer varchar(20) NOT NULL", "customer varchar(20) NOT NULL UNIQUE"))
    keyed = {"mode": "upsert", "key": "customer"}
    planner, committer = (world.driver("a", **keyed) for _ in range(2))
    for batch in range(3):
        rows = [Row(batch, "ann", batch), Row(10 + batch, "bob", batch), Row(20 + batch, "ann", 7 * batch)]
        committer.commit(Job(QUERY, batch), world.job(planner, Job(QUERY, batch), [rows]))
        assert world.target.found() == [Row(10 + batch, "bob", batch), Row(20 + batch, "ann", 7 * batch)]


@pytest.mark.exhaustive(but=["files"])
@pytest.mark.parametrize("world", TARGETS, indirect=True, ids=TARGETS)
def test_at_least_once(world: World) -> None:
    """Every attempt of a task is in the store, from the first batch of a sink on, which begins no ledger."""
    planner, committer = (world.driver("a", delivery="at_least_once") for _ in range(2))
    for batch in range(2):
        assignment, job, rows = planner.assign(), Job(QUERY, batch), frame(rows_of(batch, 0))
        attempts = [write_store_task(planner.options, assignment, job, 0, True, [rows]) for _ in range(2)]
        committer.commit(job, attempts[1:])
    assert world.target.found() == sorted(2 * expected(0, 1, partitions=1))
    assert world.target.hidden() == []


@pytest.mark.parametrize(
    ("world", "commit"), [("postgres", "prepared"), ("mariadb", "xa")], indirect=["world"], ids=["prepared", "xa"]
)
def test_prepared_transactions_of_a_driver_that_begins_anew(world: World, commit: str) -> None:
    """The process that commits goes on with the next incarnation of its driver, though it has cleaned for the one
    before: behind a task that was tried again and a query that was stopped, a batch is committed as any other."""
    planner, committer = (world.driver("a", commit=commit) for _ in range(2))
    assignment, job = planner.assign(), Job(QUERY, 0)
    attempts = [write_store_task(planner.options, assignment, job, 0, True, [frame(rows_of(0, 0))]) for _ in range(2)]
    committer.commit(job, attempts[:1])
    world.tasks(planner, 1)  # of a query that is stopped, Spark says nothing
    committer.commit(Job(QUERY, 1), world.tasks(planner, 1))
    assert world.target.found() == sorted([*rows_of(0, 0), *expected(1)])
    listed = "SELECT gid FROM pg_prepared_xacts" if commit == "prepared" else "XA RECOVER"
    assert len(world.target.sql(listed)) == 0


def test_what_is_refused_at_start(world: World) -> None:
    """A table without a column, or that is not there, ends the query before anything is fenced or decided."""
    world.target.make(COLUMNS.replace("total", "sum"))
    with pytest.raises(StoreError, match=rf"Sink '{world.name}': .*no column 'total'"):
        world.driver("a").assign()
    with pytest.raises(StoreError, match=r"nowhere"):
        world.driver("a", table="nowhere").assign()
    assert read_history({"bootstrap.servers": world.kafka.bootstrap_servers}, world.name).newest_incarnation is None


@pytest.mark.exhaustive
def test_what_was_exact_before_a_weaker_delivery_is_dropped(world: World) -> None:
    """Rows that older, exact decisions name go with these, though later ones set nothing aside."""
    batch = 0
    for delivery in ("exactly_once", "at_least_once", "exactly_once"):
        planner, committer = (world.driver("a", delivery=delivery) for _ in range(2))
        for _ in range(4):
            committer.commit(Job(QUERY, batch), world.tasks(planner, batch))
            batch += 1
    assert unreferenced_blocks(world.kafka, world.name) == set()
