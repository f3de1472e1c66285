"""A session that ends in the middle of bounded work: the call says so, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ended_session import FOLDER, NAME
from waiting import until

from exactlyonce.connectors.embedded.broker import HOST, free_port
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]

RIG = Path(__file__).parent / "rig"
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
STOPPED = (
    "The Spark session was stopped before {}: checkpoint 2, stage in was done. Nothing of its checkpoint is visible"
)


class Program:
    """`ended_session.py`, whose Spark, or server of Connect, has the program's environment."""

    def __init__(self, kafka: KafkaCluster, name: str, folder: Path) -> None:
        self.kafka, self.name, self.folder, self.held = kafka, name, folder, folder / "held"
        path = os.pathsep.join([str(RIG), str(RIG.parents[1] / "engines")])
        own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": HOST, "PYTHONPATH": path}
        self.environment = {**os.environ, **own, NAME: name, FOLDER: str(folder)}
        for suffix in ("in", "out"):
            kafka.create_topic(f"{name}-{suffix}", 1)
        kafka.produce(f"{name}-in", [str(number) for number in range(12)])

    @contextmanager
    def started(self, *line: str) -> Iterator[subprocess.Popen[str]]:
        """A process that is killed at the end."""
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                line, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def line(self, kind: str, *url: str) -> list[str]:
        return [sys.executable, str(RIG / "ended_session.py"), kind, self.kafka.bootstrap_servers, *url]

    def server(self, port: int) -> list[str]:
        settings = {"binding.address": HOST, "binding.port": port}
        given = [word for name, value in settings.items() for word in ("--conf", f"spark.connect.grpc.{name}={value}")]
        return [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]", "--class", CONNECT, *given]

    def error(self, process: subprocess.Popen[str]) -> str:
        """The error of the first call, once the second one has ended with everything done."""
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, (self.folder / "log").read_text()
        printed = json.loads(said.splitlines()[-1])
        assert printed["checkpoint"] == 3
        outputs = [int(record.value or b"") for record in self.kafka.read_committed(f"{self.name}-out")]
        assert sorted(outputs) == [2 * number for number in range(12)]
        error: str = printed["error"]
        return error


@pytest.fixture
def program(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Program:
    return Program(kafka, topic_name, tmp_path)


@pytest.mark.parametrize("kind", ["backfill", "follow"])
def test_a_session_is_stopped_in_the_second_checkpoint(kind: str, program: Program) -> None:
    """By the program, as a stage begins and while a task computes."""
    with program.started(*program.line(kind)) as process:
        error = program.error(process)
    began = "exit code 1: exactlyonce" if kind == "follow" else "StageFailed"
    assert error.startswith(f"{began}: {STOPPED.format(program.name)}"), error


def test_a_connect_server_dies_in_the_second_checkpoint(program: Program) -> None:
    """Another one answers at its address, and PySpark notices that it is another one."""
    port = free_port()
    with program.started(*program.line("connect", f"sc://{HOST}:{port}")) as process:
        with program.started(*program.server(port)):
            until(lambda: program.held.exists() or process.poll() is not None, pause_s=0.1)
        with program.started(*program.server(port)):
            error = program.error(process)
    assert error.startswith(f"StageFailed: Spark could not finish {program.name}: checkpoint 2"), error
    assert "Nothing of its checkpoint is visible, and nothing is lost" in error
