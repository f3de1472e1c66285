"""The protocol of a sink of Spark, for Kafka and for every store: its driver and tasks without Spark."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from targets import STORES, TARGETS, Row, rows_of
from worlds import QUERY, World, expected

from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.spark.sink.position import SparkJob
from exactlyonce.pipeline.errors import Fenced, Halt
from exactlyonce.pipeline.failpoints import FailpointRaised

OF_KAFKA = ("coordinator-checked", "coordinator-decided", "coordinator-committed", "coordinator-finalized")
OF_POSTGRES = ("coordinator-checked", "coordinator-decided", "store-committing", "coordinator-finalized")
DEATHS = [
    *(("kafka", step, False) for step in OF_KAFKA),
    ("kafka", "coordinator-decided", True),
    *(("postgres", step, True) for step in OF_POSTGRES),
    *((store, "store-committed", False) for store in STORES),
]


@pytest.mark.exhaustive(but=["kafka"])
@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_batches(world: World) -> None:
    planner, committer = world.pair("a")
    decided: list[Row] = []
    for batch, partitions in enumerate((3, 0, 1, 2)):
        flushed = world.tasks(planner, batch, partitions)
        assert world.found() == decided
        decided += expected(batch, partitions=partitions)
        for _ in range(2):
            committer.commit(SparkJob(QUERY, batch), flushed)
            assert world.found() == decided
            flushed = world.tasks(planner, batch, partitions)
            assert not any(task.wrote for task in flushed)
    world.target.assert_settled()
    if world.target.store == "kafka":
        assert len(world.target.states()) == 3, "one transactional id for each task, and not for each batch"
    history = read_history(ClientConfig({"bootstrap.servers": world.kafka.bootstrap_servers}), world.name)
    assert history.unfinalized is None
    assert len(history.manifests) == 3


@pytest.mark.exhaustive(but=["kafka-coordinator-decided-True", "kafka-coordinator-decided-False"])
@pytest.mark.parametrize(("target", "step", "aborted"), DEATHS, indirect=["target"])
def test_a_commit_that_dies_at_any_step(step: str, aborted: bool, world: World, failing: Callable[[str], None]) -> None:
    """A decided batch becomes visible, even if Spark aborts it. An undecided one is written once, later."""
    planner, committer = world.pair("a")
    flushed = world.tasks(planner, 0)
    failing(step)
    with pytest.raises(FailpointRaised):
        committer.commit(SparkJob(QUERY, 0), flushed)
    decided = [] if step == "coordinator-checked" else expected(0)
    if aborted:
        world.driver("a").abort()
        assert world.found() == decided
    successor, committer = world.pair("b")
    again = world.tasks(successor, 0)
    assert [each.wrote for each in again] == [not decided] * 2
    assert world.found() == decided
    committer.commit(SparkJob(QUERY, 0), again)
    committer.commit(SparkJob(QUERY, 1), world.tasks(successor, 1))
    world.assert_exact(0, 1)


@pytest.mark.exhaustive(but=["kafka"])
@pytest.mark.parametrize("target", ["kafka", "postgres", "files"], indirect=True)
def test_a_task_that_is_tried_again(world: World) -> None:
    """The attempt that Spark reports is there. Output of other attempts and of failed jobs is dropped."""
    planner, committer = world.pair("a")
    for batch, reported in enumerate((2, 0)):
        attempts = world.attempts(planner, SparkJob(QUERY, batch), rows_of(batch, 0), 3)
        committer.commit(SparkJob(QUERY, batch), [attempts[reported]])
        world.assert_exact(*range(batch + 1), partitions=1)
    for batch, is_told in ((2, True), (3, False)):
        world.tasks(planner, batch)
        if is_told:
            committer.abort()
        committer.commit(SparkJob(QUERY, batch), world.tasks(planner, batch, partitions=1))
        world.assert_exact(*range(batch + 1), partitions=1)


@pytest.mark.exhaustive(but=["kafka"])
@pytest.mark.parametrize("target", ["kafka", "postgres"], indirect=True)
def test_a_fenced_driver_decides_nothing_more(world: World) -> None:
    planner, committer = world.pair("a")
    committer.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    stale = world.tasks(planner, 1)
    successor, last = world.pair("b")
    fresh = world.tasks(successor, 1)
    for zombie in (committer, world.driver("a")):
        with pytest.raises(Fenced, match="on b"):
            zombie.commit(SparkJob(QUERY, 1), stale)
    last.commit(SparkJob(QUERY, 1), fresh)
    fresh = world.tasks(successor, 2)
    world.driver("a").abort()
    with pytest.raises(Fenced, match="on b"):
        planner.assign()
    last.commit(SparkJob(QUERY, 2), fresh)
    world.assert_exact(0, 1, 2)


@pytest.mark.exhaustive(but=["kafka"])
@pytest.mark.parametrize("target", ["kafka", "postgres"], indirect=True)
def test_other_rows_under_a_decided_number_are_a_halt(world: World) -> None:
    planner = world.driver("a")
    planner.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    job = SparkJob(QUERY, 1)
    planner.commit(job, world.tasks(planner, 1))
    planner.commit(job, world.job(planner, job, [[*rows_of(1, 1), *rows_of(1, 0)]]))
    first, second = rows_of(1, 0), rows_of(1, 1)
    for others in ([first, rows_of(2, 1)], [first], [first, second, second], []):
        driver = world.driver("b")
        with pytest.raises(Halt, match=r"(?s)batch 1 .*with 6 rows.*older copy.*rand\(\).*sinkId.*acceptLoss.* \"2\""):
            driver.commit(job, world.job(driver, job, others))
        driver.abort()
        world.assert_exact(0, 1)
    accepting = world.driver("b", acceptLoss="2")
    accepting.commit(job, world.job(accepting, job, [rows_of(9, 9)]))
    accepting.commit(SparkJob(QUERY, 2), world.tasks(accepting, 2))
    world.assert_exact(0, 1, 2)
