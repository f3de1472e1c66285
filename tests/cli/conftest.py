"""The real command as a process of its own, and a pipeline with its input for it to run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.requests import drive
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.cli.main import main
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log_requests import LogRequests
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

MODULE = """\
import msgspec
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    customer: str
    total: int


def add(total: int | None, order: Order) -> tuple[int, int]:
    total = (total or 0) + order.total
    return total, total


def make(name: str = "{name}") -> Pipeline:
    pipeline = Pipeline(name)
    (pipeline
        .source("orders", KafkaSource("{name}-orders", value=Order))
        .key_by(lambda order: order.customer)
        .stateful_map("totals", add)
        .sink("out", KafkaSink("{name}-totals")))
    return pipeline


pipeline = make()
"""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, object]]:
        """The lines of JSON on stderr."""
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]


@dataclass(frozen=True)
class Command:
    """`exactlyonce`, called in *folder*."""

    folder: Path
    environment: dict[str, str]

    def __call__(self, *arguments: str, **environment: str) -> Ended:
        """Call it and wait for its end."""
        done = subprocess.run(
            [*self.line, *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Call it and let it run."""
        return subprocess.Popen(
            [*self.line, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def line(self) -> list[str]:
        """What to call."""
        return [sys.executable, "-m", "exactlyonce.cli.main"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The command in an empty folder, without settings from outside, for a terminal of 80 columns."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EXACTLYONCE_")}
    return Command(tmp_path, {**environment, "COLUMNS": "80"})


@dataclass(frozen=True)
class Orders:
    """A pipeline `orders:pipeline`, its topics, and the command, which finds both."""

    name: str
    kafka: KafkaCluster
    command: Command

    def write(self, count: int) -> None:
        """Write *count* orders more."""
        orders = [(f"c{number % 7}", f'{{"customer":"c{number % 7}","total":1}}') for number in range(count)]
        self.kafka.produce(f"{self.name}-orders", orders)

    def killed_at(self, failpoint: str, *options: str) -> None:
        """Have a run die, workers and all, once its coordinator stands at *failpoint*."""
        process = self.stopped_at(failpoint, *options)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)

    def stopped_at(self, failpoint: str, *options: str) -> subprocess.Popen[str]:
        """Have a run whose coordinator stands still at *failpoint*, as if its machine slept."""
        fired = self.command.folder / f"fired-{failpoint}"
        fired.mkdir()
        armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}=stop", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
        command = Command(self.command.folder, {**self.command.environment, **armed})
        process = command.start("run", "orders:pipeline", "--until", "latest", *options)
        deadline = time.monotonic() + LIMIT_S
        while not (fired / failpoint).exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)  # a file of another process has no event to wait for
        return process

    @contextmanager
    def running(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """A run that has taken a checkpoint, of which it takes ten a second; killed at the end, if it has not ended by
        then. It writes `said`, and never waits for a reader."""
        line = [*self.command.line, "run", "orders:pipeline", "--checkpoint-interval", "100ms", *options]
        with self._said.open("wb") as said:
            process = subprocess.Popen(
                line, cwd=self.command.folder, env=self.command.environment, stdin=subprocess.DEVNULL, stderr=said
            )
        try:
            deadline = time.monotonic() + LIMIT_S
            while '"event": "checkpoint"' not in self.said():
                assert process.poll() is None, self.said()
                assert time.monotonic() < deadline
                time.sleep(0.05)  # a file of another process has no event to wait for
            yield process
        finally:
            process.kill()
            process.wait(LIMIT_S)

    def begun_elsewhere(self) -> Callable[[], Outcome]:
        """A run has begun on `other-host`. What is returned has it write a heartbeat, and raises `Fenced` if it was."""
        config = ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers})
        topic = find_topic(config.confluent(), self.name)
        log, requests = DecisionLog(self.name, topic, SystemClock()), LogRequests(config, topic)
        drive(log.open(), requests)
        drive(log.begin("other-host", 1), requests)
        return lambda: drive(log.heartbeat(), requests)

    def said(self) -> str:
        """What the newest of `running` has written on stderr."""
        return self._said.read_text()

    @property
    def _said(self) -> Path:
        return self.command.folder / "run.err"

    def totals(self) -> list[bytes | None]:
        """What is visible in the output, in no certain order."""
        return [record.value for record in self.kafka.read_committed(f"{self.name}-totals")]


@pytest.fixture
def orders(command: Command, kafka: KafkaCluster, topic_name: str) -> Orders:
    """A pipeline with 700 orders of 7 customers in two partitions; never run yet."""
    kafka.create_topic(f"{topic_name}-orders", partitions=2)
    (command.folder / "orders.py").write_text(MODULE.format(name=topic_name))
    environment = {**command.environment, "EXACTLYONCE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
    found = Orders(topic_name, kafka, Command(command.folder, environment))
    found.write(700)
    return found


Here = Callable[..., Ended]


@pytest.fixture
def here(orders: Orders, capsys: pytest.CaptureFixture[str]) -> Here:
    """The command on the cluster of `orders`, in this process, which has imported it: for what names no module."""

    def called(*arguments: str) -> Ended:
        capsys.readouterr()
        code = main([*arguments, "--bootstrap-servers", orders.kafka.bootstrap_servers])
        return Ended(code, *capsys.readouterr())

    return called
