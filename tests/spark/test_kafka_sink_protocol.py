"""A sink of Spark that writes to Kafka: its driver and tasks without Spark, one step at a time, on a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql.types import ArrayType, BinaryType, IntegerType, StringType, StructType
from targets import TopicTarget, rows_of
from worlds import QUERY, VALUES, World, expected

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import as_topic, find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import DEFAULT, OF_LIBRARY
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.spark.sink.options import TIMEOUT_DEFAULT_MS, parse_sink_options
from exactlyonce.engines.spark.sink.position import Position, SparkJob
from exactlyonce.engines.spark.sink.task import Flushed
from exactlyonce.engines.spark.sink.writer import batch_of
from exactlyonce.pipeline.errors import ConfigError, Halt, RecordError, TopicError
from exactlyonce.pipeline.failpoints import FailpointRaised
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker


@pytest.fixture
def target(make_target: Callable[[str], TopicTarget]) -> TopicTarget:
    return make_target("kafka")


@pytest.fixture
def config(world: World) -> ClientConfig:
    return ClientConfig({"bootstrap.servers": world.kafka.bootstrap_servers})


@pytest.fixture
def transactions(config: ClientConfig) -> Iterator[Transactions]:
    with closing(Transactions(config)) as made:
        yield made


def test_headers_and_partitions_arrive(world: World) -> None:
    header = StructType().add("key", StringType()).add("value", BinaryType())
    world.schema = StructType().add("value", StringType()).add("partition", IntegerType())
    world.schema = world.schema.add("headers", ArrayType(header))
    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])

    def written(batch: int, *headers: Any) -> list[Flushed]:
        columns = [pa.array(map(str, headers)), pa.array([1] * len(headers)), pa.array(headers, pa.list_(pair))]
        rows = pa.record_batch(columns, names=world.schema.names)
        return [world.task_of(planner, planner.assign(), SparkJob(QUERY, batch), rows)]

    planner, committer = world.pair("a")
    pairs = [{"key": "trace", "value": b"abc"}, {"key": "trace", "value": None}, {"key": "b", "value": b""}]
    committer.commit(SparkJob(QUERY, 0), written(0, pairs, [], None))
    servers = {"bootstrap.servers": world.kafka.bootstrap_servers}
    with closing(Consumer({**servers, "group.id": world.name})) as consumer:
        consumer.assign([TopicPartition(world.target.topic, 1, 0)])
        found = consumer.consume(3, LIMIT_S)
    assert [message.headers() for message in found] == [[("trace", b"abc"), ("trace", None), ("b", b"")], None, None]
    for odd in ([None], [{"key": None, "value": b"a"}]):
        with pytest.raises(RecordError, match="a header has a name"):
            written(1, odd)


def test_a_plan_that_dies(world: World, failing: Callable[[str], None]) -> None:
    world.tasks(world.driver("a"), 0, partitions=4)
    failing("coordinator-swept")
    with pytest.raises(FailpointRaised):
        world.driver("b").assign()
    planner, committer = world.pair("b")
    flushed = world.tasks(planner, 0, partitions=1)
    assert sorted(world.target.states().values()) == ["CompleteAbort"] * 4 + ["Ongoing"]
    committer.commit(SparkJob(QUERY, 0), flushed)
    world.assert_exact(0, partitions=1)


def test_the_ids_of_attempts(world: World) -> None:
    """They are told apart also where a stage was run again, and Spark's count of attempts with it."""
    planner, committer = world.pair("a")
    for batch in range(2):
        assignment, job = planner.assign(), SparkJob(QUERY, batch)
        attempts = [world.task(planner, assignment, job, rows_of(batch, 0), attempt=0) for _ in range(2)]
        names = [precommit.transactional_id for each in attempts for precommit in each.ack.precommits]
        assert names == [f"eo:{world.name}:spark:0:1.0-0:{slot}" for slot in range(2)]
        committer.commit(job, attempts[batch : batch + 1])
    world.assert_exact(0, 1, partitions=1)


def test_a_failed_attempt_holds_readers_only_to_the_decision(world: World, failing: Callable[[str], None]) -> None:
    planner, committer = world.pair("a")
    attempts = world.attempts(planner, SparkJob(QUERY, 0), rows_of(0, 0), 3)
    failing("coordinator-decided")
    with pytest.raises(FailpointRaised):
        committer.commit(SparkJob(QUERY, 0), attempts[1:2])
    states = sorted(world.target.states().items())
    assert [state for _, state in states] == ["CompleteAbort", "Ongoing", "CompleteAbort"]


def test_another_query_is_refused_until_it_adopts_the_sink(world: World) -> None:
    planner, committer = world.pair("a")
    committer.commit(SparkJob(QUERY, 4), world.tasks(planner, 4))
    with pytest.raises(ConfigError, match="an older copy"):
        world.tasks(planner, 3)
    with pytest.raises(ConfigError, match="checkpointLocation"):
        world.tasks(planner, 0, query="another")
    for batch in range(2):
        adopting, committer = world.pair("a", adoptQuery=QUERY)
        committer.commit(SparkJob("another", batch), world.tasks(adopting, batch, query="another"))
    with pytest.raises(ConfigError, match="another query, another"):
        world.tasks(planner, 5)
    world.assert_exact(4, 0, 1)


def test_a_lost_transaction(world: World, transactions: Transactions, failing: Callable[[str], None]) -> None:
    """The rows of a decided batch are copied if everything was down for longer than a transaction may last."""
    planner, committer = world.pair("a")
    flushed = world.tasks(planner, 0)
    failing("coordinator-decided")
    with pytest.raises(FailpointRaised):
        committer.commit(SparkJob(QUERY, 0), flushed)
    (lost,) = flushed[0].ack.precommits
    transactions.end_until_answered(lost.transactional_id, lost.producer_id, lost.epoch, commit=False)
    world.tasks(world.driver("b"), 0)
    client = ClientConfig({"bootstrap.servers": world.kafka.bootstrap_servers})
    fates = read_history(client, world.name).finalized[1].fates
    assert sorted(fate for _, fate in fates) == ["committed", "repaired"]
    world.assert_exact(0)


def test_a_transaction_that_changed_meanwhile_is_not_decided(world: World) -> None:
    planner, committer = world.pair("a")
    flushed = world.tasks(planner, 0)
    (precommit,) = flushed[0].ack.precommits
    more = msgspec.structs.replace(flushed[0].ack, precommits=(msgspec.structs.replace(precommit, records=4),))
    with pytest.raises(SinkFailed, match="holds 3 records on the broker, but 4 were produced"):
        committer.commit(SparkJob(QUERY, 0), [msgspec.structs.replace(flushed[0], ack=more), flushed[1]])
    world.driver("a").abort()
    world.assert_exact()
    with pytest.raises(SinkFailed, match="CompleteAbort, not Ongoing"):
        world.driver("a").commit(SparkJob(QUERY, 0), flushed)
    world.assert_exact()


def test_batch_writes_with_an_id_happen_once(world: World) -> None:
    for number in range(2):
        for write_id in ("monday", ""):
            job, planner = SparkJob(write_id=write_id), world.driver("a", writeId=write_id)
            planner.commit(job, world.job(planner, job, [rows_of(7, number)]))
        planner = world.driver("a")
        planner.commit(SparkJob(QUERY, number), world.tasks(planner, number))
    assert world.found() == sorted([*expected(0, 1), *rows_of(7, 0) * 2, *rows_of(7, 1)])
    world.target.assert_settled()


def test_a_batch_that_had_no_rows_has_none_again(world: World) -> None:
    """Two copies of a checkpoint location would number other rows alike, and write them twice."""
    planner = world.driver("a")
    planner.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    for _ in range(2):
        planner.commit(SparkJob(QUERY, 1), world.tasks(planner, 1, 0))
    copy = world.driver("b")
    with pytest.raises(Halt, match=r"decided in checkpoint 2, with 0 rows. Now Spark gives \d+ others"):
        copy.commit(SparkJob(QUERY, 1), world.tasks(copy, 1))
    again = world.driver("c")
    again.commit(SparkJob(QUERY, 2), world.tasks(again, 2))
    world.assert_exact(0, 2)


def test_a_sink_keeps_the_partitioner_that_it_began_with(world: World) -> None:
    """The partitioner of pipelines unless another was chosen; decisions without rows keep it, too."""
    planner = world.driver("b", partitioner=OF_LIBRARY)
    for batch, partitions in enumerate((2, 0, 2)):
        planner.commit(SparkJob(QUERY, batch), world.tasks(planner, batch, partitions))
        planner = world.driver("b")
        assert planner.assign().partitioner == OF_LIBRARY
    for chosen in ({"partitioner": DEFAULT}, {"kafka.partitioner": DEFAULT}):
        with pytest.raises(ConfigError, match=rf"by {OF_LIBRARY}, and is to do so by {DEFAULT}"):
            world.driver("b", **chosen).assign()


def test_a_gap_is_a_halt(world: World) -> None:
    planner = world.driver("a")
    planner.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    with pytest.raises(Halt, match=r"(?s)up to batch 0, but Spark goes on with batch 2.*acceptLoss.* \"1\""):
        world.tasks(planner, 2)
    accepting = world.driver("a", acceptLoss="1")
    accepting.commit(SparkJob(QUERY, 2), world.tasks(accepting, 2))
    planner.commit(SparkJob(QUERY, 3), world.tasks(planner, 3))
    world.assert_exact(0, 2, 3)


def test_batches_that_an_older_version_decided(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows of a decision without a tally is that of its transactions, if it is retained."""
    offsets = Position.offsets

    def older(position: Position) -> tuple[SourceOffset, ...]:
        return tuple(each for each in offsets(position) if each.source in ("query", "write"))

    with monkeypatch.context() as patch:
        patch.setattr(Position, "offsets", older)
        planner, plain = world.driver("a"), SparkJob(write_id="monday")
        planner.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
        planner.commit(plain, world.job(planner, plain, [rows_of(7, 0)]))
    planner = world.driver("b")
    planner.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    with pytest.raises(Halt, match="with 6 rows"):
        planner.commit(SparkJob(QUERY, 0), world.tasks(planner, 0, partitions=1))
    planner = world.driver("b")
    planner.commit(SparkJob(QUERY, 5), world.tasks(planner, 5))
    assert world.found() == sorted([*expected(0, 5), *rows_of(7, 0)])


@pytest.mark.exhaustive
def test_the_writes_of_a_function_of_foreach_batch(world: World) -> None:
    """Each write is done once, however often a batch runs. Equal writes are two; other rows are a halt."""

    def run(name: str, batch: int, *writes: int, **changes: str) -> None:
        """One run of the function, which writes the rows of *writes*, -1 for none, each in a job of its own."""
        for write in writes:
            driver, job = world.driver("a", **changes), SparkJob(QUERY, batch, run=name)
            driver.commit(job, world.job(driver, job, [rows_of(batch, write)] if write >= 0 else []))

    run("app/1", 0, 0)
    run("app/2", 0, 0, -1, 1, 1)
    run("app/3", 0, 0, -1, 1, 1)
    run("app/4", 0, 0, -1, 1, 1, 2)
    assert world.found() == sorted([*expected(0, partitions=3), *rows_of(0, 1)])
    with pytest.raises(Halt, match=r"(?s)write 3 to sink .* in batch 0.*acceptLoss.* \"1\""):
        run("app/5", 0, 0, -1, 3)
    for name in ("app/6", "app/7"):
        run(name, 0, 0, -1, 3, 4, 2, acceptLoss="1")
    run("app/8", 2, 0, 1)
    run("app/9", 2, 0, 1)
    assert world.found() == sorted([*expected(0, partitions=3), *rows_of(0, 1), *expected(2)])
    with pytest.raises(ConfigError, match="an older copy"):
        run("app/10", 0, 0)
    world.target.assert_settled()


def test_runs_of_drivers_of_one_application() -> None:
    """A cluster may restart a driver, whose counters begin again: its runs are not taken for an earlier driver's."""

    def run(started: int, root: int) -> str:
        told = {"sql.streaming.queryId": QUERY, "streaming.sql.batchId": "7", "spark.app.id": "application_1_0001"}
        told |= {"spark.app.startTime": str(started), "spark.sql.execution.root.id": str(root)}
        job = batch_of(SimpleNamespace(getLocalProperty=told.get))  # type: ignore[arg-type]  # what is asked of it
        assert job is not None
        assert (job.query, job.batch) == (QUERY, 7)
        return job.run

    assert run(1, 0) == run(1, 0)
    assert len({run(1, 0), run(1, 1), run(2, 0)}) == 3


def test_what_a_sink_refuses_before_it_writes(world: World, config: ClientConfig) -> None:
    with pytest.raises(TopicError, match="nowhere"):
        world.driver("a", topic="nowhere").assign()
    world.schema = StructType().add("value", StringType()).add("topic", StringType())
    planner = world.driver("a", topic="")
    unnamed = pa.record_batch([pa.array(["a", "b"]), pa.array([world.target.topic, None])], names=["value", "topic"])
    with pytest.raises(RecordError, match="Row 2"):
        world.task_of(planner, planner.assign(), SparkJob(QUERY, 0), unnamed)
    with closing(Topics(config)) as topics:
        topics.delete(as_topic(find_topic(config, world.name)))
    with pytest.raises(Halt, match="topic was deleted"):
        world.driver("b").assign()


def test_a_topic_that_was_created_again_since_the_last_job(world: World, kafka: KafkaCluster) -> None:
    """Every job halts before its first row, until the topic is accepted; later jobs go on in it."""
    planner, committer = world.pair("a")
    committer.commit(SparkJob(QUERY, 0), world.tasks(planner, 0))
    kafka.delete_topics([world.target.topic])
    kafka.create_topic(world.target.topic, 2)
    for driver in (planner, world.driver("b"), world.driver("b", acceptNewOutput="other")):
        accepting = rf'\("acceptNewOutput", "{world.target.topic}"\)'
        with pytest.raises(Halt, match=rf"(?s)created again since checkpoint 1 .*{accepting}"):
            driver.assign()
    planner, committer = world.pair("c", acceptNewOutput=world.target.topic)
    committer.commit(SparkJob(QUERY, 1), world.tasks(planner, 1))
    planner, committer = world.pair("d")
    committer.commit(SparkJob(QUERY, 2), world.tasks(planner, 2))
    world.assert_exact(1, 2)


def test_the_transaction_timeout(world: World, transactions: Transactions) -> None:
    driver = world.driver("a")
    assert driver.assign().transaction_timeout_ms == TIMEOUT_DEFAULT_MS
    assert driver.options.timeout_within(60_000) == 60_000
    driver = world.driver("a", transactionTimeout="20s")
    flushed = world.tasks(driver, 0)
    states = transactions.describe(list(world.target.states())).values()
    assert {state.timeout_ms for state in states if state} == {20_000}
    driver.commit(SparkJob(QUERY, 0), flushed)
    with pytest.raises(ConfigError, match=r"the broker allows 900 s at most"):
        world.driver("a", transactionTimeout="1000s").assign()
    given = {"sinkId": "a", "topic": "b", "kafka.bootstrap.servers": "a:1"}
    refusals = {"transactionTimeout": ("1s", "10 s at least"), "writeId": ("x" * 129, "128 at most")}
    for option, (wrong, said) in {**refusals, "partitioner": ("mine", "'mine' is unknown")}.items():
        with pytest.raises(ConfigError, match=said):
            parse_sink_options({**given, option: wrong}, VALUES, streaming=False)
