"""Runs of pipelines as their users have them, as processes, and a count of their output without the engine's code."""

from __future__ import annotations

import io
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Producer
from waiting import until

from exactlyonce.checkpoint.records.history import History
from exactlyonce.cli.main import main
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.testing.cluster import BY_KEY, LIMIT_S, Committed, KafkaCluster

HERE = Path(__file__).parent
QUICK = ("--checkpoint-interval", "200ms", "--stop-timeout", "10m")
DESCRIPTORS = 1024
"""A run may open so many, as one from a shell may."""
Fed = list[tuple[str, str]]


def write_program(page: str, file: Path) -> None:
    """Write the program of a *page* below docs/, its first two blocks, into *file*."""
    text = (HERE.parents[1] / "docs" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    file.write_text("\n\n".join(blocks[:2]))


def event_in(line: str | bytes) -> dict[str, Any] | None:
    """The event that a *line* on the stderr of a run with --json is; None: another text."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event


def limit_descriptors(run: int) -> None:
    """To be called before it starts any worker: these inherit it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.prlimit(run, resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))


class Run:
    def __init__(self, servers: str, target: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "exactlyonce.cli.main", "run", target, "--bootstrap-servers", servers]
        self.process = subprocess.Popen(
            [*command, "--json", "--verbose", *arguments], cwd=HERE, env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        limit_descriptors(self.process.pid)
        self.events: list[dict[str, Any]] = []
        self.text: list[str] = []
        """Lines on stderr that are no events."""
        self._fresh: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            event = event_in(line)
            if event is None:
                self.text.append(line.rstrip())
                continue
            self.events.append(event)
            self._fresh.put(event)

    def await_event(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                event = self._fresh.get(timeout=0.2)
            except queue.Empty:
                if self.process.poll() is not None and self._fresh.empty():
                    raise AssertionError(f"the run ended with {self.process.returncode}: {self.said[-500:]}") from None
                continue
            if wanted(event):
                return event
        raise AssertionError(f"no such event came; the last were {self.events[-3:]}")

    def await_step(self, step: str) -> dict[str, Any]:
        return self.await_event(lambda event: event.get("step") == step)

    def await_checkpoint(self) -> dict[str, Any]:
        """The next finalized checkpoint that committed records."""
        return self.await_event(lambda event: event["event"] == "checkpoint" and event["records_committed"] > 0)

    def wait(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """SIGKILL to the coordinator; its workers die with it."""
        self.process.kill()
        self.wait()

    @property
    def said(self) -> str:
        return "\n".join([*self.text, *(event["text"] for event in self.events if "text" in event)])


def orders(count: int, customers: int = 17, first: int = 0, *, by_customer: bool = False) -> list[tuple[str, str]]:
    """(key, value): unique ids, keys that are not the customer, unless *by_customer*."""
    return [
        (customer if by_customer else str(i % 5), json.dumps({"id": i, "customer": customer, "total": i % 90 + 1}))
        for i in range(first, first + count)
        for customer in [f"c{i * 7 % customers}"]
    ]


class Ended(NamedTuple):
    code: int
    said: str


def run_here(servers: str, target: str, *arguments: str) -> Ended:
    """`exactlyonce run` within this process, which takes a fraction of the time of a process of its own."""
    stderr = io.StringIO()
    with chdir(HERE), redirect_stderr(stderr):
        code = main(["run", target, "--bootstrap-servers", servers, "--json", "--verbose", *arguments])
    said = []
    for line in stderr.getvalue().splitlines():
        event = event_in(line)
        if event is None:
            said.append(line)
        elif "text" in event:
            said.append(event["text"])
    assert "Traceback" not in stderr.getvalue()
    return Ended(code, "\n".join(said))


def exactlyonce(kafka: KafkaCluster, *words: str, folder: Path = HERE, code: int = 0) -> str:
    """A command in this process, run in *folder*, with its exit *code*; what it writes to stdout, or else to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        ended = main([*words, "--bootstrap-servers", kafka.bootstrap_servers])
    assert ended == code, err.getvalue()
    return out.getvalue() or err.getvalue()


@contextmanager
def runs_of(kafka: KafkaCluster) -> Iterator[Callable[..., Run]]:
    """`start("pipelines:linear", "--param", ...)` begins a run on the cluster; the end kills those that live."""
    runs: list[Run] = []

    def start(target: str, *arguments: str, **options: Any) -> Run:
        runs.append(Run(options.pop("servers", kafka.bootstrap_servers), target, *arguments, **options))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.kill()


class Job:
    def __init__(
        self, run: Callable[..., Run], kafka: KafkaCluster, name: str, target: str, *arguments: str, partitions: int = 3
    ) -> None:
        self.kafka, self.name, self._run = kafka, name, run
        self._target = (target if ":" in target else f"pipelines:{target}", "--param", f"name={name}")
        self._arguments = (*QUICK, *arguments)
        self.topic = kafka.create_topic(f"{name}-in", partitions)
        self.fed: Fed = []
        self.incarnations: list[Run] = []

    def feed(
        self, count: int, to: str = "in", customers: int = 17, partition: int = BY_KEY, *, by_customer: bool = False
    ) -> Fed:
        more = orders(count, customers, first=len(self.fed), by_customer=by_customer)
        self.kafka.produce(f"{self.name}-{to}", more, partition)
        self.fed += more
        return more

    def start(self, *arguments: str, target: str | None = None, **options: Any) -> Run:
        first, *parameters = self._target
        options.setdefault("servers", self.kafka.bootstrap_servers)
        self.incarnations.append(self._run(target or first, *parameters, *self._arguments, *arguments, **options))
        return self.incarnations[-1]

    def finish(self, *arguments: str, code: int = 0, **options: Any) -> Run:
        incarnation = self.start("--until", "latest", *arguments, **options)
        assert incarnation.wait() == code, incarnation.said
        return incarnation

    def run_killed(self, armed: Mapping[str, str], parallelism: int, *arguments: str) -> None:
        """Run to the end of what was fed, with a process that meets the failpoint of the environment *armed*."""
        met = Path(armed["EXACTLYONCE_FAILPOINTS_FIRED"], armed["EXACTLYONCE_FAILPOINTS"].partition("=")[0])
        met.unlink(missing_ok=True)
        incarnation = self.start("--until", "latest", "--parallelism", str(parallelism), *arguments, env=armed)
        incarnation.wait()
        assert met.exists(), incarnation.said

    def finish_here(self, *arguments: str, code: int = 0, target: str | None = None, until: str = "latest") -> str:
        """Run to the end of what was fed, or to exit code *code*, within this process; what was said."""
        first, *parameters = self._target
        target = f"pipelines:{target}" if target else first
        options = (*self._arguments, "--until", until, "--inline", *arguments)
        ended = run_here(self.kafka.bootstrap_servers, target, *parameters, *options)
        assert ended.code == code, ended.said
        return ended.said

    def command(self, *words: str, code: int = 0) -> str:
        return exactlyonce(self.kafka, *words, code=code)

    def audited(self) -> dict[str, Any]:
        """The report of an audit, which finds nothing."""
        report: dict[str, Any] = json.loads(self.command("audit", *self._target, "--on", "driver", "--json"))
        assert report["findings"] == []
        return report

    @property
    def config(self) -> ClientConfig:
        return ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers})

    def history(self) -> History:
        return read_history(self.config, self.name)

    def assert_totals(self) -> None:
        assert_totals(self.kafka, f"{self.name}-out", self.fed)

    def assert_output(self) -> None:
        self.assert_copies()
        self.assert_totals()

    def assert_copies(self) -> None:
        assert_copies(self.kafka, f"{self.name}-copies", self.fed)


def stop(incarnation: Run) -> None:
    incarnation.process.send_signal(signal.SIGTERM)
    assert incarnation.wait() == 0, incarnation.said


@contextmanager
def no_decision_counts(kafka: KafkaCluster, pipeline: str) -> Iterator[None]:
    """A transaction of somebody else's holds readers back in the decision log; it is aborted in the end."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{pipeline}-elsewhere"})
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    producer.produce(f"{pipeline}.checkpoints", b"", b"", 0)
    producer.flush(LIMIT_S)
    yield
    producer.abort_transaction(LIMIT_S)


def workers_of(incarnation: Run) -> list[int]:
    deployed = next(event for event in reversed(list(incarnation.events)) if event.get("step") == "deployed")
    return list(deployed["workers"])


def await_stopped(process: int) -> None:
    """Wait until a failpoint with the action "stop" has stopped the process."""
    until(lambda: Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")


def abort_while_a_worker_sleeps(
    job: Run, kafka: KafkaCluster, topic: str, folder: Path, first: int
) -> list[tuple[str, str]]:
    """Feed *topic*, which `pipelines.stopping` reads, a thousand orders at a time from number *first* on, until a
    checkpoint was aborted while a worker slept; wake it, and return the orders.

    A worker that falls asleep before its sink's next producers are ready is replaced, and aborts no checkpoint."""
    fed: list[tuple[str, str]] = []
    while True:
        job.await_event(lambda event: event["event"] == "checkpoint" and event["records_committed"] == 0)  # it is idle
        marker = folder / str(first + len(fed) + 500)
        more = orders(1000, first=first + len(fed))
        kafka.produce(topic, more)
        fed += more
        until(marker.exists, told=lambda: job.said)
        if _aborts(job, since_ms=marker.stat().st_mtime_ns // 1_000_000):
            os.kill(int(marker.read_text()), signal.SIGCONT)
            return fed


def _aborts(job: Run, since_ms: int) -> bool:
    """Whether what comes of a worker's sleep since *since_ms* is that a checkpoint is aborted, not a restart."""
    restarts = ("no producer was ready", "no checkpoint could be triggered")  # as soon as its silence is noticed
    outcomes = {"aborted, its output is carried": True, **dict.fromkeys(restarts, False)}
    event = job.await_event(
        lambda event: event["at_ms"] >= since_ms and any(each in event.get("text", "") for each in outcomes)
    )
    return next(aborted for text, aborted in outcomes.items() if text in event["text"])


def visible(kafka: KafkaCluster, topic: str, count: int) -> list[Committed]:
    """The records that readers of *topic* see, once there are *count*; or fewer, if no more become visible in time."""
    deadline = time.monotonic() + LIMIT_S
    while len(found := kafka.read_committed(topic)) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def ids_in(kafka: KafkaCluster, topic: str, count: int) -> list[int]:
    return sorted(json.loads(record.value or b"")["id"] for record in visible(kafka, topic, count))


def assert_totals(kafka: KafkaCluster, topic: str, fed: Fed) -> None:
    assert_updates([json.loads(record.value or b"") for record in visible(kafka, topic, len(fed))], fed)


def assert_updates(updates: list[dict[str, Any]], fed: Fed, where: str = "") -> None:
    """Each order gave one update, each customer's sums are those of its orders in the order of the updates."""
    given = {order["id"]: order for order in (json.loads(value) for _, value in fed)}
    assert_once([update["id"] for update in updates], fed, where)
    sums: dict[str, int] = defaultdict(int)
    for update in updates:
        customer = given[update["id"]]["customer"]
        sums[customer] += given[update["id"]]["total"]
        assert (update["customer"], update["sum"]) == (customer, sums[customer]), f"{where}: the total at {update}"


def assert_once(ids: Iterable[int], fed: Fed, where: str = "") -> None:
    given, seen = {json.loads(value)["id"] for _, value in fed}, Counter(ids)
    wrong = {
        "missing": given - seen.keys(), "doubled": {id for id, times in seen.items() if times > 1},
        "foreign": seen.keys() - given,
    }  # fmt: skip
    assert not any(wrong.values()), f"{where}: {wrong}"


def assert_copies(kafka: KafkaCluster, topic: str, fed: Fed) -> None:
    assert_once(ids_in(kafka, topic, len(fed)), fed, topic)
