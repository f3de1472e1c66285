"""SIGKILL at every step of a streaming write, in every process of it: the output is exact all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exactlyonce.checkpoint.records.committable import transaction_prefix
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds a driver's processes in /proc"),
]
HERE = Path(__file__).parent
EXIT_CODE = 9
"""Of `foreach_batch_job.py`, when it is told to die."""
FILES, ROWS = 5, 200


class Driver:
    """A job of this folder with all its processes: Python, JVM, and the JVM's Python workers."""

    def __init__(
        self, kafka: KafkaCluster, name: str, folder: Path, armed: str, kind: str = "classic",
        script: str = "streaming_sink_job.py",
    ) -> None:  # fmt: skip
        self.fired = folder / "fired"
        self.fired.mkdir(exist_ok=True)
        self.mark = f"EXACTLYONCE_FAILPOINTS_FIRED={self.fired}"
        job = [sys.executable, script]
        command = [*job, kafka.bootstrap_servers, name, f"{name}-out", str(folder), kind]
        environment = {**os.environ, "EXACTLYONCE_FAILPOINTS": armed, **dict([self.mark.split("=", 1)])}
        self.output = (folder / "said").open("a+")
        self.process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=self.output, stderr=self.output)

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def end(self, code: int = 0) -> None:
        """It ends by itself."""
        assert self.process.wait(LIMIT_S) == code, self.said()

    def kill_at(self, name: str) -> None:
        """SIGKILL for all its processes once one of them stands at the failpoint."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.fired / name).exists():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        for process in self._processes():
            os.kill(process, signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def _processes(self) -> Iterator[int]:
        """All that have our environment."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if self.mark.encode() in environment.split(b"\0"):
                yield int(folder.name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files of all batches in it."""
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        path = tmp_path / "in" / f"{number}.txt"
        path.write_text("\n".join(f"{number}-{each}" for each in range(ROWS)))
        os.utime(path, (number + 1, number + 1))
    return tmp_path


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
    driver = Driver(kafka, topic_name, folder, ",".join(f"{name}=kill@{nth}" for name, nth in steps.items()))
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
        driver = Driver(kafka, topic_name, folder, f"{step}=stop")
        try:
            driver.kill_at(step)
        finally:
            driver.kill()
    last = Driver(kafka, topic_name, folder, "", "connect")
    try:
        last.end()
    finally:
        last.kill()
    assert_exact(kafka, topic_name)


@pytest.mark.exhaustive
def test_a_driver_dies_behind_a_write_of_foreach_batch(kafka: KafkaCluster, topic_name: str, folder: Path) -> None:
    """A function of foreachBatch writes each batch in two parts, without a writeId; it raises, and its driver dies,
    behind the first of them and behind the second: every row is there once."""
    kafka.create_topic(f"{topic_name}-out", 2)
    for falls, code in (("0.0=raise,0.1=raise,1.0=exit", EXIT_CODE), ("2.1=exit", EXIT_CODE), ("", 0)):
        driver = Driver(kafka, topic_name, folder, "", falls, "foreach_batch_job.py")
        try:
            driver.end(code)
        finally:
            driver.kill()
    assert len(list(folder.glob("fell-*"))) == 4, driver.said()
    assert_exact(kafka, topic_name)
