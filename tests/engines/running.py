"""Runs of pipelines as their users have them, as processes, and a count of their output without the engine's code."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

HERE = Path(__file__).parent
QUICK = ("--checkpoint-interval", "200ms")


class Run:
    """`exactlyonce run` as a process."""

    def __init__(self, servers: str, target: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "exactlyonce.cli.main", "run", target, "--bootstrap-servers", servers]
        self.process = subprocess.Popen(
            [*command, "--json", "--verbose", *arguments],
            cwd=HERE,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self.text: list[str] = []
        """What it wrote to stderr that is no event."""
        self._fresh: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                self.text.append(line.rstrip())
                continue
            self.events.append(event)
            self._fresh.put(event)

    def await_event(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next event that is wanted."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                event = self._fresh.get(timeout=0.2)
            except queue.Empty:
                if self.process.poll() is not None and self._fresh.empty():
                    raise AssertionError(f"the run ended with {self.process.returncode}: {self.text[-5:]}") from None
                continue
            if wanted(event):
                return event
        raise AssertionError(f"no such event came; the last were {self.events[-3:]}")

    def await_step(self, step: str) -> dict[str, Any]:
        """The next time the protocol takes *step*."""
        return self.await_event(lambda event: event.get("step") == step)

    def await_checkpoint(self) -> dict[str, Any]:
        """The next finalized checkpoint that committed records."""
        return self.await_event(lambda event: event["event"] == "checkpoint" and event["records_committed"] > 0)

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """SIGKILL to the coordinator; its workers die with it."""
        self.process.kill()
        self.wait()

    @property
    def said(self) -> str:
        """Everything that was for people."""
        return "\n".join([*self.text, *(event["text"] for event in self.events if event["event"] == "note")])


def orders(count: int, customers: int = 17, first: int = 0) -> list[tuple[str, str]]:
    """(key, value): unique ids, keys that are not the customer."""
    return [
        (str(i % 5), json.dumps({"id": i, "customer": f"c{i * 7 % customers}", "total": i % 90 + 1}))
        for i in range(first, first + count)
    ]


def abort_while_a_worker_sleeps(
    job: Run, kafka: KafkaCluster, topic: str, folder: Path, first: int
) -> list[tuple[str, str]]:
    """Feeds *topic*, which `pipelines.stopping` reads, a thousand orders from number *first* on, again and again until
    a checkpoint was aborted while a worker slept, and wakes it. What was fed.

    A worker that falls asleep before its sink's next producers are ready is replaced, and no checkpoint is aborted:
    rare in a job that was idle."""
    fed: list[tuple[str, str]] = []
    deadline = time.monotonic() + LIMIT_S
    while True:
        job.await_event(lambda event: event["event"] == "checkpoint" and event["records_committed"] == 0)  # it is idle
        marker = folder / str(first + len(fed) + 500)
        more = orders(1000, first=first + len(fed))
        kafka.produce(topic, more)
        fed += more
        while not marker.exists():
            assert time.monotonic() < deadline, job.said
            time.sleep(0.01)
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


def assert_totals(kafka: KafkaCluster, topic: str, fed: list[tuple[str, str]]) -> None:
    """Each order gave one update, each customer's sums are those of its orders in the order of the updates."""
    given = {order["id"]: order for order in (json.loads(value) for _, value in fed)}
    updates = [json.loads(record.value or b"") for record in kafka.read_committed(topic)]
    seen = [update["id"] for update in updates]
    missing, doubled = sorted(given.keys() - set(seen)), sorted(each for each in set(seen) if seen.count(each) > 1)
    assert sorted(seen) == sorted(given), f"every order counts once: {missing} do not, {doubled} more than once"
    sums: dict[str, int] = defaultdict(int)
    for update in updates:
        sums[update["customer"]] += given[update["id"]]["total"]
        assert update["sum"] == sums[update["customer"]], f"the total of {update['customer']} at order {update['id']}"


def assert_copies(kafka: KafkaCluster, topic: str, fed: list[tuple[str, str]]) -> None:
    """Each order came through once."""
    ids = sorted(json.loads(record.value or b"")["id"] for record in kafka.read_committed(topic))
    assert ids == sorted(json.loads(value)["id"] for _, value in fed)
