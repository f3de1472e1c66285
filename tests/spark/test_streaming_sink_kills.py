"""SIGKILL at every step of a streaming write, in every process of it: the output is exact all the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from drivers import Driver

from exactlyonce.checkpoint.records.committable import transaction_prefix
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds a driver's processes in /proc"),
]
EXIT_CODE = 9
"""Of `foreach_batch_job.py`, when it is told to die."""
FILES, ROWS = 5, 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files of all batches in it."""
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        path = tmp_path / "in" / f"{number}.txt"
        path.write_text("\n".join(f"{number}-{each}" for each in range(ROWS)))
        os.utime(path, (number + 1, number + 1))
    return tmp_path


def started(
    kafka: KafkaCluster,
    name: str,
    folder: Path,
    armed: str,
    kind: str = "classic",
    script: str = "streaming_sink_job.py",
) -> Driver:
    """A driver that writes to the topic of the test."""
    return Driver(folder, armed, script, kafka.bootstrap_servers, name, f"{name}-out", str(folder), kind)


def assert_exact(kafka: KafkaCluster, name: str) -> None:
    """Every row is visible once, no transaction is open, and readers get to the end."""
    seen = sorted((record.value or b"").decode() for record in kafka.read_committed(f"{name}-out"))
    assert seen == sorted(f"{number}-{each}" for number in range(FILES) for each in range(ROWS))
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    transactions, topics = Transactions(config), Topics(config)
    states = {each.state for each in transactions.list(transaction_prefix(name)) if ":spark:" in each.transactional_id}
    assert states <= {"CompleteCommit", "CompleteAbort"}
    for topic in (f"{name}-out", f"{name}.checkpoints"):
        assert topics.end_offsets(topic, committed=True) == topics.end_offsets(topic, committed=False)
    transactions.close()
    topics.close()


@pytest.mark.exhaustive
def test_python_processes_are_killed(kafka: KafkaCluster, topic_name: str, folder: Path) -> None:
    """The processes that plan, write and commit die one after the other, each at another step, and the query is
    started again by the same driver."""
    kafka.create_topic(f"{topic_name}-out", 2)
    steps = {
        "coordinator-opened": 1,
        "coordinator-swept": 1,
        "worker-flushed": 1,
        "coordinator-checked": 1,
        "coordinator-decided": 1,
        "coordinator-committed": 2,
        "coordinator-finalized": 1,
    }
    armed = ",".join(f"{name}=kill@{nth}" for name, nth in steps.items())
    driver = started(kafka, topic_name, folder, armed)
    try:
        driver.end()
    finally:
        driver.kill()
    assert {each.name for each in driver.fired.iterdir()} == set(steps), driver.said()
    assert_exact(kafka, topic_name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "steps",
    [("coordinator-decided",), ("worker-flushed", "coordinator-decided", "coordinator-finalized")],
    ids=["once", "again and again"],
)
def test_the_driver_is_killed(steps: tuple[str, ...], kafka: KafkaCluster, topic_name: str, folder: Path) -> None:
    """JVM and all die while a task has flushed, a batch is decided, a batch is finalized but not in Spark's own log;
    the next driver goes on from the same checkpoint location, the last one by Spark Connect."""
    kafka.create_topic(f"{topic_name}-out", 2)
    for step in steps:
        driver = started(kafka, topic_name, folder, f"{step}=stop")
        try:
            driver.kill_at(step)
        finally:
            driver.kill()
    last = started(kafka, topic_name, folder, "", "connect")
    try:
        last.end()
    finally:
        last.kill()
    assert_exact(kafka, topic_name)


@pytest.mark.exhaustive
def test_a_driver_dies_behind_a_write_of_foreach_batch(kafka: KafkaCluster, topic_name: str, folder: Path) -> None:
    """A function of foreachBatch writes each batch in two parts, without a writeId; it raises, and its driver dies,
    behind the first of them and behind the second: every row is there once. Two drivers die in their first batch."""
    kafka.create_topic(f"{topic_name}-out", 2)
    for falls, code in (("0.0=exit", EXIT_CODE), ("0.1=exit", EXIT_CODE), ("1.0=raise,2.1=raise", 0)):
        driver = started(kafka, topic_name, folder, "", falls, "foreach_batch_job.py")
        try:
            driver.end(code)
        finally:
            driver.kill()
    assert len(list(folder.glob("fell-*"))) == 4, driver.said()
    assert_exact(kafka, topic_name)
