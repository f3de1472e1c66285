"""The sink's driver and tasks without Spark: what Spark does to them, one step at a time, on a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql.types import StringType, StructType

from exactlyonce.checkpoint.records.committable import transaction_prefix
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log_requests import as_topic
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.spark.sink.driver import SinkDriver
from exactlyonce.engines.spark.sink.messages import Flushed
from exactlyonce.engines.spark.sink.options import TIMEOUT_DEFAULT_MS, SinkOptions, parse_sink_options
from exactlyonce.engines.spark.sink.position import Job, Position
from exactlyonce.engines.spark.sink.task import write_task
from exactlyonce.engines.spark.sink.writer import batch_of
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, RecordError, TopicError
from exactlyonce.pipeline.failpoints import FailpointRaised
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker
QUERY = "a-query"


class World:
    """A sink, its cluster, and the drivers that were made for it: a planner and a committer each, as Spark does."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.topic = kafka, f"{name}-out"
        kafka.create_topic(self.topic, 2)
        self.config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
        self.options = SinkOptions(
            sink_id=name, topic=self.topic, columns={"value": 0}, adopt_query="", accept_loss=None, write_id="",
            transaction_timeout_ms=None, client_settings=self.config.settings,
        )  # fmt: skip
        self.transactions = Transactions(self.config)
        self.made: list[SinkDriver] = []

    def driver(self, name: str, **changes: Any) -> SinkDriver:
        """A process of the driver *name*."""
        settings = {field: changes.get(field, value) for field, value in vars(self.options).items()}
        self.made.append(SinkDriver(SinkOptions(**settings), name))
        return self.made[-1]

    def tasks(self, planner: SinkDriver, batch: int, partitions: int = 2, query: str = QUERY) -> list[Flushed]:
        """Plan a batch of two rows for each partition, and run its tasks; of a batch without rows Spark runs one."""
        return self.job(planner, Job(query, batch), [rows(batch, each) for each in range(partitions)])

    def job(self, planner: SinkDriver, job: Job, tasks: Sequence[Any]) -> list[Flushed]:
        """Plan *job*, and run one task for each of *tasks*."""
        assignment = planner.assign()
        return [
            write_task(planner.options, assignment, job, place, 0, [each])
            for place, each in enumerate(tasks or [rows(0, 0)[:0]])
        ]

    def visible(self) -> list[str]:
        """What a plain reader sees."""
        return sorted((record.value or b"").decode() for record in self.kafka.read_committed(self.topic))

    def states(self) -> dict[str, str]:
        """By id of a task's transaction."""
        prefix = transaction_prefix(self.options.sink_id)
        return {t.transactional_id: t.state for t in self.transactions.list(prefix) if ":spark:" in t.transactional_id}

    def assert_settled(self) -> None:
        """No transaction is open, and readers get to the end."""
        assert not [name for name, state in self.states().items() if state not in ("CompleteCommit", "CompleteAbort")]
        topics = Topics(self.config)
        assert topics.end_offsets(self.topic, committed=True) == topics.end_offsets(self.topic, committed=False)
        topics.close()


def rows(batch: int, partition: int) -> Any:
    return pa.record_batch([pa.array([f"{batch}-{partition}-a", f"{batch}-{partition}-b"])], names=["value"])


def expected(*batches: int, partitions: int = 2) -> list[str]:
    return sorted(f"{batch}-{p}-{x}" for batch in batches for p in range(partitions) for x in "ab")


@pytest.fixture
def world(kafka: KafkaCluster, topic_name: str) -> Iterator[World]:
    """A sink that nobody has written to."""
    made = World(kafka, topic_name)
    yield made
    for each in made.made:
        each.close()
    made.transactions.close()


def test_batches_are_visible_once_decided_and_leave_one_id_for_each_task(world: World) -> None:
    """Batches, also empty ones and with fewer tasks, become visible one by one, under the same transactional ids; of
    all decisions only the last few are kept."""
    planner, committer = world.driver("a"), world.driver("a")
    for batch, partitions in enumerate((3, 3, 0, 1, 2, 2)):
        flushed = world.tasks(planner, batch, partitions)
        assert not [row for row in world.visible() if row.startswith(f"{batch}-")]
        committer.commit(Job(QUERY, batch), flushed)
        assert len([row for row in world.visible() if row.startswith(f"{batch}-")]) == 2 * partitions
    assert len(world.states()) == 3
    world.assert_settled()
    history = read_history(world.config.confluent(), world.options.sink_id)
    assert history.unfinalized is None
    assert len(history.manifests) == 3


def with_headers(*headers: Any) -> Any:
    """A row for each list of headers, for partition 1."""
    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.record_batch(
        [pa.array([str(each) for each in headers]), pa.array([1] * len(headers)), pa.array(headers, pa.list_(pair))],
        names=["value", "partition", "headers"],
    )


def test_headers_and_partitions_arrive(world: World) -> None:
    """Of a row each, in their order; a null among them, or a name that is null, is refused."""
    columns = {"value": 0, "partition": 1, "headers": 2}
    planner, committer = world.driver("a", columns=columns), world.driver("a", columns=columns)
    pairs = [{"key": "trace", "value": b"abc"}, {"key": "trace", "value": None}, {"key": "b", "value": b""}]
    committer.commit(Job(QUERY, 0), world.job(planner, Job(QUERY, 0), [with_headers(pairs, [], None)]))
    consumer = Consumer({"bootstrap.servers": world.kafka.bootstrap_servers, "group.id": world.topic})
    consumer.assign([TopicPartition(world.topic, 1, 0)])
    found = consumer.consume(3, LIMIT_S)
    consumer.close()
    assert [message.headers() for message in found] == [[("trace", b"abc"), ("trace", None), ("b", b"")], None, None]
    for odd in ([None], [{"key": None, "value": b"a"}]):
        with pytest.raises(RecordError, match="a header has a name"):
            world.job(planner, Job(QUERY, 1), [with_headers(odd)])


STEPS = ("coordinator-checked", "coordinator-decided", "coordinator-committed", "coordinator-finalized")


@pytest.mark.exhaustive(but=["coordinator-decided-True", "coordinator-decided-False"])
@pytest.mark.parametrize("aborted", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_commit_that_dies_at_any_step(step: str, aborted: bool, world: World, failing: Callable[[str], None]) -> None:
    """A decided batch becomes visible though Spark aborts it, or its driver dies; an undecided one is aborted; written
    again by the next driver, it is there once."""
    planner, committer = world.driver("a"), world.driver("a")
    flushed = world.tasks(planner, 0)
    failing(step)
    with pytest.raises(FailpointRaised):
        committer.commit(Job(QUERY, 0), flushed)
    decided = [] if step == "coordinator-checked" else expected(0)
    if aborted:
        world.driver("a").abort()
        assert world.visible() == decided
        world.assert_settled()
    successor, committer = world.driver("b"), world.driver("b")
    again = world.tasks(successor, 0)
    assert all((each.precommit is None) == bool(decided) for each in again)
    assert world.visible() == decided
    committer.commit(Job(QUERY, 0), again)
    committer.commit(Job(QUERY, 1), world.tasks(successor, 1))
    assert world.visible() == expected(0, 1)
    world.assert_settled()


@pytest.mark.parametrize("step", ["coordinator-opened", "coordinator-swept"])
def test_a_plan_that_dies(step: str, world: World, failing: Callable[[str], None]) -> None:
    """Whoever plans may die before the tasks begin; what was open before is aborted by the next."""
    world.tasks(world.driver("a"), 0, partitions=4)
    failing(step)
    with pytest.raises(FailpointRaised):
        world.driver("b").assign()
    planner = world.driver("b")
    flushed = world.tasks(planner, 0, partitions=1)
    assert sorted(world.states().values()) == ["CompleteAbort"] * 4 + ["Ongoing"]
    world.driver("b").commit(Job(QUERY, 0), flushed)
    assert world.visible() == expected(0, partitions=1)
    world.assert_settled()


@pytest.mark.parametrize(("counted", "slots"), [((0, 1), "00"), ((0, 0), "01")])
def test_a_task_that_is_tried_again_leaves_its_first_attempt_to_be_aborted(
    counted: tuple[int, int], slots: str, world: World
) -> None:
    """Of two attempts of a task, of which Spark reports one, one is visible, whichever it is; the other is aborted.
    Their ids differ by Spark's count of attempts; also where a stage that is run again begins to count anew."""
    planner, committer = world.driver("a"), world.driver("a")
    for batch, reported in enumerate((0, 1)):
        assignment, job = planner.assign(), Job(QUERY, batch)
        attempts = [write_task(world.options, assignment, job, 0, each, [rows(batch, 0)]) for each in counted]
        names = [each.precommit.transactional_id for each in attempts if each.precommit]
        prefix = f"eo:{world.options.sink_id}:spark:0:1.0"
        assert names == [f"{prefix}-{attempt}:{slot}" for attempt, slot in zip(counted, slots, strict=True)]
        committer.commit(job, [attempts[reported]])
    assert world.visible() == expected(0, 1, partitions=1)
    world.assert_settled()
    write_task(world.options, planner.assign(), Job(QUERY, 2), 0, 0, [rows(2, 0)])
    committer.abort()
    assert world.visible() == expected(0, 1, partitions=1)
    world.assert_settled()


def test_a_failed_attempt_holds_readers_only_to_the_decision(world: World, failing: Callable[[str], None]) -> None:
    """Once a batch is decided, only the transactions that it names are open."""
    planner = world.driver("a")
    assignment, job = planner.assign(), Job(QUERY, 0)
    attempts = [write_task(world.options, assignment, job, 0, each, [rows(0, 0)]) for each in range(3)]
    failing("coordinator-decided")
    with pytest.raises(FailpointRaised):
        world.driver("a").commit(job, attempts[1:2])
    assert [state for _, state in sorted(world.states().items())] == ["CompleteAbort", "Ongoing", "CompleteAbort"]


def test_a_fenced_driver_decides_nothing_more(world: World) -> None:
    """A driver that was replaced can neither commit what it had written, nor abort its successor's, nor plan anew; the
    error names the successor."""
    planner, committer = world.driver("a"), world.driver("a")
    committer.commit(Job(QUERY, 0), world.tasks(planner, 0))
    stale = world.tasks(planner, 1)
    successor = world.driver("b")
    fresh = world.tasks(successor, 1)
    for zombie in (committer, world.driver("a")):
        with pytest.raises(Fenced, match="on b"):
            zombie.commit(Job(QUERY, 1), stale)
    committer = world.driver("b")
    committer.commit(Job(QUERY, 1), fresh)
    fresh = world.tasks(successor, 2)
    world.driver("a").abort()
    with pytest.raises(Fenced, match="on b"):
        planner.assign()
    committer.commit(Job(QUERY, 2), fresh)
    assert world.visible() == expected(0, 1, 2)
    world.assert_settled()


def test_another_query_is_refused_until_it_adopts_the_sink(world: World) -> None:
    """A query with a new checkpoint location is refused before it writes, and told the choices, and so is one with an
    older copy of its own; with the old one's id it goes on in its place, and then the old one is refused."""
    planner, committer = world.driver("a"), world.driver("a")
    committer.commit(Job(QUERY, 4), world.tasks(planner, 4))
    with pytest.raises(ConfigError, match="an older copy"):
        world.tasks(planner, 3)
    with pytest.raises(ConfigError, match="checkpointLocation"):
        world.tasks(planner, 0, query="another")
    adopting = {"adopt_query": QUERY}
    world.driver("a", **adopting).commit(
        Job("another", 0), world.tasks(world.driver("a", **adopting), 0, query="another")
    )
    world.driver("a", **adopting).commit(
        Job("another", 1), world.tasks(world.driver("a", **adopting), 1, query="another")
    )
    with pytest.raises(ConfigError, match="another query, another"):
        world.tasks(planner, 5)
    assert world.visible() == expected(4, 0, 1)
    world.assert_settled()


def test_a_decided_transaction_that_the_broker_aborted_is_written_again(
    world: World, failing: Callable[[str], None]
) -> None:
    """With everything down for longer than a transaction may last, the rows of a decided batch are copied."""
    flushed = world.tasks(world.driver("a"), 0)
    failing("coordinator-decided")
    with pytest.raises(FailpointRaised):
        world.driver("a").commit(Job(QUERY, 0), flushed)
    lost = flushed[0].precommit
    assert lost is not None
    world.transactions.end_until_answered(lost.transactional_id, lost.producer_id, lost.epoch, commit=False)
    world.tasks(world.driver("b"), 0)
    assert world.visible() == expected(0)
    fates = read_history(world.config.confluent(), world.options.sink_id).finalized[1].fates
    assert sorted(fate for _, fate in fates) == ["committed", "repaired"]
    world.assert_settled()


def test_a_transaction_that_changed_meanwhile_is_not_decided(world: World) -> None:
    """A transaction that was ended, or holds another number of records than its task produced, refuses the batch."""
    planner, committer = world.driver("a"), world.driver("a")
    flushed = world.tasks(planner, 0)
    assert flushed[0].precommit is not None
    more = msgspec.structs.replace(flushed[0].precommit, records=3)
    with pytest.raises(SinkFailed, match="holds 2 records on the broker, but 3 were produced"):
        committer.commit(Job(QUERY, 0), [msgspec.structs.replace(flushed[0], precommit=more), flushed[1]])
    world.driver("a").abort()
    with pytest.raises(SinkFailed, match="CompleteAbort, not Ongoing"):
        world.driver("a").commit(Job(QUERY, 0), flushed)
    assert world.visible() == []
    world.assert_settled()


def test_batch_writes_with_an_id_happen_once(world: World) -> None:
    """A write with an id is decided once, between batches of a query that keeps its place; one without, every time."""
    for number in range(2):
        for write_id in ("monday", ""):
            job, planner = Job(write_id=write_id), world.driver("a", write_id=write_id)
            written = [write_task(planner.options, planner.assign(), job, 0, 0, [rows(number, 0)])]
            planner.commit(job, written)
        world.driver("a").commit(Job(QUERY, number), world.tasks(world.driver("a"), number, partitions=1))
    assert world.visible() == sorted([*expected(0, partitions=1) * 3, *expected(1, partitions=1) * 2])
    world.assert_settled()


def test_other_rows_under_a_decided_number_are_a_halt(world: World) -> None:
    """The decided rows of a batch, distributed otherwise, are skipped; other ones, more, fewer or as many, are a
    halt that names the choices, and are given up when the user says so; then the next batch is written."""
    world.driver("a").commit(Job(QUERY, 0), world.tasks(world.driver("a"), 0))
    job, planner = Job(QUERY, 1), world.driver("a")
    planner.commit(job, world.tasks(planner, 1))
    one_task = pa.concat_batches([rows(1, 1), rows(1, 0)])
    planner.commit(job, world.job(planner, job, [one_task]))
    for others in ([rows(1, 0), rows(2, 1)], [rows(1, 0)], [rows(1, 0), rows(1, 1), rows(1, 1)], []):
        driver = world.driver("b")
        with pytest.raises(Halt, match=r"(?s)batch 1 .*with 4 rows.*older copy.*rand\(\).*sinkId.*acceptLoss.* \"2\""):
            driver.commit(job, world.job(driver, job, others))
        driver.abort()
        world.assert_settled()
        assert world.visible() == expected(0, 1)
    accepting = world.driver("b", accept_loss=2)
    accepting.commit(job, world.job(accepting, job, [rows(9, 9)]))
    accepting.commit(Job(QUERY, 2), world.tasks(accepting, 2))
    assert world.visible() == expected(0, 1, 2)
    world.assert_settled()


def test_a_batch_that_had_no_rows_may_have_some(world: World) -> None:
    """A decided batch without rows that Spark plans anew is written; one more of it is skipped."""
    planner = world.driver("a")
    planner.commit(Job(QUERY, 0), world.tasks(planner, 0, partitions=0))
    for _ in range(2):
        planner.commit(Job(QUERY, 0), world.tasks(planner, 0))
    assert world.visible() == expected(0)


def test_a_gap_is_a_halt(world: World) -> None:
    """A query that goes on behind batches that the sink has never seen is told so, and goes on if that is accepted."""
    planner = world.driver("a")
    planner.commit(Job(QUERY, 0), world.tasks(planner, 0))
    with pytest.raises(Halt, match=r"(?s)up to batch 0, but Spark goes on with batch 2.*acceptLoss.* \"1\""):
        world.tasks(planner, 2)
    accepting = world.driver("a", accept_loss=1)
    accepting.commit(Job(QUERY, 2), world.tasks(accepting, 2))
    planner.commit(Job(QUERY, 3), world.tasks(planner, 3))
    assert world.visible() == expected(0, 2, 3)


def test_batches_that_an_older_version_decided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a decision has no tally of its rows, their number is that of its transactions, if it is retained."""
    offsets = Position.offsets

    def older(position: Position) -> tuple[SourceOffset, ...]:
        return tuple(each for each in offsets(position) if each.source in ("query", "write"))

    with monkeypatch.context() as patch:
        patch.setattr(Position, "offsets", older)
        planner = world.driver("a")
        planner.commit(Job(QUERY, 0), world.tasks(planner, 0))
        plain = Job(write_id="monday")
        planner.commit(plain, world.job(planner, plain, [rows(7, 0)]))
    planner = world.driver("b")
    planner.commit(Job(QUERY, 0), world.tasks(planner, 0))
    with pytest.raises(Halt, match="with 4 rows"):
        planner.commit(Job(QUERY, 0), world.tasks(planner, 0, partitions=1))
    planner = world.driver("b")
    planner.commit(Job(QUERY, 5), world.tasks(planner, 5))
    assert world.visible() == sorted([*expected(0, 5), *expected(7, partitions=1)])


@pytest.mark.exhaustive
def test_the_writes_of_a_function_of_foreach_batch(world: World) -> None:
    """Each write of a function is done once, however often a batch is run again, and with it what the function writes
    to this sink after it; two writes of the same rows are two; other rows than in the run before are a halt."""

    def run(name: str, batch: int, *writes: int, **changes: Any) -> None:
        """One run of the function, which writes the rows of *writes*, -1 for none, each in a job of its own."""
        for write in writes:
            driver, job = world.driver("a", **changes), Job(QUERY, batch, run=name)
            driver.commit(job, world.job(driver, job, [rows(batch, write)] if write >= 0 else []))

    run("app/1", 0, 0)
    run("app/2", 0, 0, -1, 1, 1)
    run("app/3", 0, 0, -1, 1, 1)
    run("app/4", 0, 0, -1, 1, 1, 2)
    assert world.visible() == sorted([*expected(0, partitions=3), "0-1-a", "0-1-b"])
    with pytest.raises(Halt, match=r"(?s)write 3 to sink .* in batch 0.*acceptLoss.* \"1\""):
        run("app/5", 0, 0, -1, 3)
    for name in ("app/6", "app/7"):
        run(name, 0, 0, -1, 3, 4, 2, accept_loss=1)
    run("app/8", 2, 0, 1)
    run("app/9", 2, 0, 1)
    assert world.visible() == sorted([*expected(0, partitions=3), "0-1-a", "0-1-b", *expected(2)])
    with pytest.raises(ConfigError, match="an older copy"):
        run("app/10", 0, 0)
    world.assert_settled()


def test_runs_of_drivers_of_one_application() -> None:
    """Where a cluster starts an application's driver again, each begins to count what it executes, and nothing of one
    is taken for the same run as of another."""

    def run(started: int, root: int) -> str:
        told = {"sql.streaming.queryId": QUERY, "streaming.sql.batchId": "7", "spark.app.id": "application_1_0001"}
        told |= {"spark.app.startTime": str(started), "spark.sql.execution.root.id": str(root)}
        job = batch_of(SimpleNamespace(getLocalProperty=told.get))  # type: ignore[arg-type]  # what is asked of it
        assert job is not None
        assert (job.query, job.batch) == (QUERY, 7)
        return job.run

    assert run(1, 0) == run(1, 0)
    assert len({run(1, 0), run(1, 1), run(2, 0)}) == 3


def test_what_a_sink_refuses_before_it_writes(world: World) -> None:
    """A missing topic, the name of a pipeline, decisions that were deleted, and a row without topic are told."""
    with pytest.raises(TopicError, match="nowhere"):
        world.driver("a", topic="nowhere").assign()
    planner = world.driver("a", topic="", columns={"value": 0, "topic": 1})
    unnamed = pa.record_batch([pa.array(["a", "b"]), pa.array([world.topic, None])], names=["value", "topic"])
    with pytest.raises(RecordError, match="Row 2"):
        write_task(planner.options, planner.assign(), Job(QUERY, 0), 0, 0, [unnamed])
    Topics(world.config).delete(as_topic(find_topic(world.config.confluent(), world.options.sink_id)))
    with pytest.raises(Halt, match="topic was deleted"):
        world.driver("b").assign()


def test_the_transaction_timeout(world: World) -> None:
    """It is fifteen minutes, where the broker allows as much, or what the option says, which the broker must allow; it
    and a writeId have bounds."""
    assert world.driver("a").assign().transaction_timeout_ms == TIMEOUT_DEFAULT_MS
    assert world.options.timeout_within(60_000) == 60_000
    given = {"sinkId": "a", "topic": "b", "kafka.bootstrap.servers": world.kafka.bootstrap_servers}
    schema = StructType().add("value", StringType())
    parsed = parse_sink_options({**given, "transactionTimeout": "20s"}, schema, streaming=True)
    driver = world.driver("a", transaction_timeout_ms=parsed.transaction_timeout_ms)
    flushed = world.tasks(driver, 0)
    states = world.transactions.describe(list(world.states())).values()
    assert {state.timeout_ms for state in states if state} == {20_000}
    driver.commit(Job(QUERY, 0), flushed)
    with pytest.raises(ConfigError, match=r"the broker allows 900 s at most"):
        world.driver("a", transaction_timeout_ms=1_000_000).assign()
    for wrong, said in (({"transactionTimeout": "1s"}, "10 s at least"), ({"writeId": "x" * 129}, "128 at most")):
        with pytest.raises(ConfigError, match=said):
            parse_sink_options({**given, **wrong}, schema, streaming=False)
