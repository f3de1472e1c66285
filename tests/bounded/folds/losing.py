"""The permanent loss of one decided transaction: timed out while all was down, its records gone from the log."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from running import Run, assert_copies, assert_totals, orders
from settled import await_readable, ended_transactions
from waiting import until

from exactlyonce.checkpoint.records.manifest import Committable
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, Committed, KafkaCluster

TIMEOUTS = ("--checkpoint-timeout", "15s", "--restart-budget", "3s", "--transaction-timeout", "30s")
"""Options of a run whose transactions the broker aborts soon, with an interval of 10 s at most."""
INTERVAL = ("--checkpoint-interval", "10s")
"""The checkpoint that is decided first is the last, before which both subtasks have written to both sinks."""
QUICK_ABORTS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
"""Settings of a broker that looks at transactions' timeouts every half second."""


def lose_one(kafka: KafkaCluster, name: str, writer: tuple[str, int]) -> Committable:
    """Commit all committables of the undelivered checkpoint but that of *writer*, which the broker has aborted then."""
    servers = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    manifest = read_history(servers, name).unfinalized
    assert manifest is not None
    (lost,) = [each for each in manifest.committables if each.writer == writer]
    with closing(Transactions(servers)) as transactions:
        for each in manifest.committables:
            if each is not lost:
                transactions.end_until_answered(each.transactional_id, each.producer_id, each.epoch, commit=True)
    until(
        lambda: ended_transactions(kafka, lost.transactional_id)[lost.transactional_id] == "CompleteAbort", pause_s=0.1
    )  # the broker's own timeout must pass
    return lost


def expire(kafka: KafkaCluster, topic: str) -> list[Committed]:
    """Delete all records of *topic*, as retention would; what readers had seen of it until then."""
    await_readable(kafka, topic)
    seen = kafka.read_committed(topic)
    kafka.delete_records(topic, dict.fromkeys(kafka.admin().list_topics(topic).topics[topic].partitions, -1))
    return seen


class Together(KafkaCluster):
    """A cluster where readers have read on: before records expired, and after."""

    def __init__(self, kafka: KafkaCluster, seen_before: dict[str, list[Committed]]) -> None:
        super().__init__(kafka.bootstrap_servers)
        self._seen_before = seen_before

    def read_committed(self, topic: str, timeout_s: float = LIMIT_S) -> list[Committed]:
        return [*self._seen_before.get(topic, []), *super().read_committed(topic, timeout_s)]


def arguments(name: str, *more: Any) -> Iterable[Any]:
    target = ("pipelines:diamond", f"--param=name={name}", "--parallelism", "2", "--until", "latest")
    return (*target, *INTERVAL, *TIMEOUTS, *more)


class Lossy:
    """`diamond` at parallelism 2, with a decided checkpoint of which one transaction of four is lost for good."""

    def __init__(self, kafka: KafkaCluster, name: str, fired: Path) -> None:
        self.kafka, self.name, self.fired = kafka, name, fired
        self.client = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
        self.fed: list[tuple[str, str]] = []
        self.runs: list[Run] = []
        self.seen_before: Any = {}
        fired.mkdir(exist_ok=True)
        for topic in ("in", "more"):
            kafka.create_topic(f"{name}-{topic}", 3)

    def feed(self, count: int) -> None:
        for topic, first in (("in", 0), ("more", 100_000)):
            records = orders(count, first=first + len(self.fed))
            self.kafka.produce(f"{self.name}-{topic}", records)
            self.fed += records

    def incarnation(self, killed_at: str = "", *more: str) -> Run:
        armed = {"EXACTLYONCE_FAILPOINTS": f"{killed_at}=kill@1"} if killed_at else {}
        env = {**armed, "EXACTLYONCE_FAILPOINTS_FIRED": str(self.fired)}
        self.runs.append(Run(self.kafka.bootstrap_servers, *arguments(self.name, *more), env=env))
        return self.runs[-1]

    def lose(self, sink: str, topic: str) -> Committable:
        """The next checkpoint is decided; subtask 1 of *sink* loses its transaction, *topic* all its records."""
        self.feed(2000)
        first = self.incarnation()
        assert first.wait() == 0, first.said
        self.feed(1500)
        assert self.incarnation("coordinator-decided").wait() == -9
        manifest = read_history(self.client, self.name).unfinalized
        assert manifest is not None
        assert len(manifest.committables) == 4, "two sinks at parallelism 2"
        assert manifest.previous > 0, "the interval begins with state"
        lost = lose_one(self.kafka, self.name, (sink, 1))
        self.seen_before = {topic: expire(self.kafka, topic)}
        return lost

    def end(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.kill()

    def assert_exact(self) -> None:
        seen = Together(self.kafka, self.seen_before)
        assert_totals(seen, f"{self.name}-out", self.fed)
        assert_copies(seen, f"{self.name}-copies", self.fed)
        assert read_history(self.client, self.name).unfinalized is None
