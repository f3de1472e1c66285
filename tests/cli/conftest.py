"""The command, and a pipeline with its input.

`Command` calls `main` in this process, which saves a second of imports. Runs that are killed, stopped or signalled, or
that need a terminal, are processes (`Command.process`, `Command.start`).
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

import pytest
from blank_manifest import blank_manifest

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records import history
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest
from exactlyonce.checkpoint.requests import Outcome, drive
from exactlyonce.cli.commands import run
from exactlyonce.cli.main import main, parser
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.configuration import options_from
from exactlyonce.engines.local.reporting import JsonReporter
from exactlyonce.engines.local.run import Stopper, run_loaded
from exactlyonce.engines.run_requests import living_run
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ExactlyOnceError, TopicError
from exactlyonce.pipeline.loading import load
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


manifest = partial(blank_manifest, checkpoint=1, base=0, previous=0, fingerprint="f" * 64, block_end_offsets=())


def children_of(process: int) -> list[int]:
    """The processes that its threads have started; threads end meanwhile."""
    children = list[int]()
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, (thread / "children").read_text().split())
    return children


def wait_until(condition: Callable[[], object], still: Callable[[], object] = lambda: True) -> None:
    """Wait for a state of another thread or process, as long as *still* holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert still()
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.02)  # what another process does has no event to wait for


def armed(folder: Path, failpoint: str, action: str = "kill") -> dict[str, str]:
    """The environment of a process that meets *failpoint* once; its file in the folder `fired` says that it did."""
    (folder / "fired").mkdir(exist_ok=True)
    return {"EXACTLYONCE_FAILPOINTS": f"{failpoint}={action}", "EXACTLYONCE_FAILPOINTS_FIRED": str(folder / "fired")}


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def said(self) -> str:
        """All of it on one line, whatever was wrapped."""
        return " ".join((self.out + self.err).split())


def forget_modules(folder: Path) -> None:
    """Reload modules of this folder at their next import: they may have changed."""
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]


class Command:
    """`exactlyonce`, called in *folder*."""

    line = (sys.executable, "-m", "exactlyonce.cli.main")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, stdin: TextIO | None = None, **environment: str) -> Ended:
        forget_modules(self.folder)
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, environment), mock.patch("sys.stdin", stdin or io.StringIO()),
            redirect_stdout(out), redirect_stderr(err),
        ):  # fmt: skip
            try:
                code = main(arguments)
            except SystemExit as ended:  # argparse raises it
                code = int(ended.code or 0)
        return Ended(code, out.getvalue(), err.getvalue())

    def done(self, *arguments: str) -> Ended:
        ended = self(*arguments)
        assert ended.code == 0, ended
        return ended

    def refused(self, text: str, *arguments: str, code: int = 2) -> Ended:
        ended = self(*arguments)
        assert (ended.code, text in ended.said) == (code, True), ended
        return ended

    def process(self, *arguments: str, **environment: str) -> Ended:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=LIMIT_S)
        return Ended(process.returncode, out, err)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.line, *arguments], cwd=self.folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The command in an empty folder, without settings from outside, for a terminal of 80 columns."""
    for name in [*os.environ]:
        if name.startswith("EXACTLYONCE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is told from what it was made of by size and second
    yield Command(tmp_path)
    forget_modules(tmp_path)


class Running:
    """A run of `orders:pipeline` on a thread of this process, which takes ten checkpoints a second."""

    def __init__(self, folder: Path, *options: str) -> None:
        forget_modules(folder)
        line = ["run", "orders:pipeline", "--checkpoint-interval", "100ms", *inline(options)]
        self._options = options_from(run.settings_given(parser().parse_args(line)))
        self._loaded, self._stopper, self._told = load("orders:pipeline"), Stopper(), io.StringIO()
        self._code: int | None = None
        self._thread = threading.Thread(target=self._run, name="running", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_loaded(self._loaded, self._options, JsonReporter(self._told), self._stopper)
            self._code = 0
        except ExactlyOnceError as error:
            self._told.write(f"{error}\n")
            self._code = error.exit_code

    @property
    def said(self) -> str:
        return self._told.getvalue()

    def await_said(self, text: str) -> None:
        wait_until(lambda: text in self.said, self._thread.is_alive)

    def stop(self) -> int:
        self._stopper.stop()
        return self.wait()

    def kill(self) -> None:
        """End it at once, if it goes on."""
        for _ in range(2):
            self._stopper.stop()
        self._thread.join(LIMIT_S)

    def wait(self) -> int:
        """The code that its process would exit with."""
        self._thread.join(LIMIT_S)
        assert self._code is not None, self.said
        return self._code


def inline(options: tuple[str, ...]) -> tuple[str, ...]:
    """The options of a run, which starts no process unless it is to have several workers."""
    return options if "--parallelism" in options else (*options, "--inline")


@dataclass(frozen=True)
class Orders:
    """A pipeline `orders:pipeline`, its topics, and the command, which finds both."""

    name: str
    kafka: KafkaCluster
    command: Command

    @property
    def config(self) -> ClientConfig:
        return ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers})

    def write(self, count: int) -> None:
        orders = [(f"c{number % 7}", f'{{"customer":"c{number % 7}","total":1}}') for number in range(count)]
        self.kafka.produce(f"{self.name}-orders", orders)

    def change(self, *edits: tuple[str, str]) -> None:
        module = self.command.folder / "orders.py"
        text = module.read_text()
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        module.write_text(text)

    def run(self, *options: str) -> Ended:
        return self.command("run", "orders:pipeline", "--until", "latest", *inline(options))

    def ran(self, *options: str) -> Ended:
        ended = self.run(*options)
        assert ended.code == 0, ended
        return ended

    def run_refused(self, text: str, *options: str, code: int = 2) -> None:
        self.command.refused(text, "run", "orders:pipeline", "--until", "latest", *inline(options), code=code)

    def killed_at(self, failpoint: str, *options: str) -> None:
        """Have a run die once its coordinator stands at *failpoint*, in its last checkpoint."""
        line = ("run", "orders:pipeline", "--until", "latest", "--checkpoint-interval", "10m", *inline(options))
        ended = self.command.process(*line, **armed(self.command.folder, failpoint))
        assert ended.code == -signal.SIGKILL, ended

    @contextmanager
    def running(self, *options: str, until: str = '"event": "checkpoint"') -> Iterator[Running]:
        """A run that has taken a checkpoint, or told *until*; killed at the end, if it has not ended by then."""
        running = Running(self.command.folder, *options)
        try:
            running.await_said(until)
            yield running
        finally:
            running.kill()

    def taken(self, *options: str) -> int:
        return int(self.command.done("savepoint", self.name, "--json", *options).json["checkpoint"])

    def ended_by_savepoint(self, *options: str) -> int:
        with self.running("--num-retained", "1", *options) as run:
            number = self.taken("--stop")
            assert run.wait() == 0
        return number

    def exported(self, folder: Path) -> str:
        """The URL of an export of the newest checkpoint; the pipeline does not run."""
        folder.mkdir(exist_ok=True)
        return str(self.command.done("savepoint", self.name, "--to", f"file://{folder}", "--json").json["url"])

    def reset(self) -> None:
        self.command.done("reset", self.name, "--yes", "--force")

    def begun_elsewhere(self) -> Callable[..., Outcome]:
        """A run has begun on `other-host`. The result writes its heartbeat, and raises `Fenced` if it was fenced."""
        topic = find_topic(self.config, self.name)
        log, requests = DecisionLog(self.name, topic, SystemClock()), LogRequests(self.config, topic)
        drive(log.open(), requests)
        drive(log.begin("other-host", 1), requests)
        return lambda **more: drive(log.heartbeat(**more), requests)

    def history(self) -> History:
        return read_history(self.config, self.name)

    def lives(self) -> bool:
        """Whether there is a run that may be asked for something."""
        with suppress(TopicError):
            return living_run(self.history()) is not None
        return False

    def incarnation(self) -> Incarnation:
        found = self.history().newest_incarnation
        assert found is not None
        return found

    def newest(self) -> Manifest:
        found = self.history().latest
        assert found is not None
        return found

    def states(self, operator: str = "totals") -> dict[str, Any]:
        shown = self.command.done("state", "show", self.name, operator, "--json").out
        return {each["key"]: each["state"] for each in map(json.loads, shown.splitlines())}

    def holds_readers(self) -> bool:
        """Whether the output has an open transaction: one that was ended until its markers are in all partitions."""
        with closing(Topics(self.config)) as topics:
            ends = [topics.end_offsets(f"{self.name}-totals", committed=each) for each in (True, False)]
        return ends[0] != ends[1]

    def totals(self) -> list[bytes | None]:
        """Records visible in the output, in no certain order, once no transaction is open there."""
        wait_until(lambda: not self.holds_readers())
        return self.totals_now()

    def totals_now(self) -> list[bytes | None]:
        """Records visible while a transaction is open."""
        return [record.value for record in self.kafka.read_committed(f"{self.name}-totals")]


@pytest.fixture
def orders(command: Command, kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> Orders:
    """A pipeline with 700 orders of 7 customers in two partitions; never run yet. Killed runs count as alive."""
    monkeypatch.setattr(history, "SILENCE_MS", LIMIT_S * 1000)
    kafka.create_topic(f"{topic_name}-orders", partitions=2)
    (command.folder / "orders.py").write_text(MODULE.format(name=topic_name))
    monkeypatch.setenv("EXACTLYONCE_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    found = Orders(topic_name, kafka, command)
    found.write(700)
    return found


def files(folder: Path) -> list[Path]:
    """All that lie there, at any depth."""
    return sorted(each for each in folder.rglob("*") if each.is_file())


def by_customer(state: object) -> dict[str, object]:
    return {f"c{number}": state for number in range(7)}
