"""The permanent loss of one decided transaction: timed out while all was down, its records gone from the log."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from running import Run, assert_copies, assert_totals, orders

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, Committed, KafkaCluster

# An interval in which both subtasks have written to both sinks, however slow the machine is.
TIMEOUTS = (
    "--checkpoint-interval", "2500ms", "--checkpoint-timeout", "2s", "--restart-budget", "1s",
    "--transaction-timeout", "6s",
)  # fmt: skip
QUICK_ABORTS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
"""Of a broker that looks at transactions' timeouts every half second."""

Visible = dict[int, list[Committed]]
"""By partition, in order."""


def lose_one(kafka: KafkaCluster, name: str, writer: tuple[str, int]) -> Committable:
    """Commit all committables of the undelivered checkpoint but that of *writer*, which the broker has aborted then."""
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    manifest = read_history(servers, name).unfinalized
    assert manifest is not None
    transactions = Transactions(ClientConfig(servers))
    (lost,) = [each for each in manifest.committables if each.writer == writer]
    for each in manifest.committables:
        if each is not lost:
            transactions.end_until_answered(each.transactional_id, each.producer_id, each.epoch, commit=True)
    deadline = time.monotonic() + LIMIT_S
    while (state := transactions.describe([lost.transactional_id])[lost.transactional_id]) is None or (
        state.state != "CompleteAbort"
    ):
        assert time.monotonic() < deadline, f"the broker aborts it: {state}"
        time.sleep(0.1)  # the broker's own timeout must pass
    transactions.close()
    return lost


def expire(kafka: KafkaCluster, topic: str) -> Visible:
    """Delete all records of *topic*, as retention would; what readers had seen of it until then."""
    seen = visible(kafka, topic)
    kafka.delete_records(topic, dict.fromkeys(kafka.admin().list_topics(topic).topics[topic].partitions, -1))
    return seen


def visible(kafka: KafkaCluster, topic: str) -> Visible:
    """What a plain read_committed consumer sees."""
    found: Visible = defaultdict(list)
    for record in kafka.read_committed(topic):
        found[record.partition].append(record)
    return found


class Together(KafkaCluster):
    """A cluster where readers have read on: before records expired, and after."""

    def __init__(self, kafka: KafkaCluster, seen_before: dict[str, Visible]) -> None:
        super().__init__(kafka.bootstrap_servers)
        self._seen_before = seen_before

    def read_committed(self, topic: str, timeout_s: float = LIMIT_S) -> list[Committed]:
        """All that was ever seen, in order within a partition."""
        later = super().read_committed(topic, timeout_s)
        before = self._seen_before.get(topic, {})
        return [*(record for records in before.values() for record in records), *later]


def arguments(name: str, *more: Any) -> Iterable[Any]:
    """Of a run to the end of `diamond` at parallelism 2."""
    return ("pipelines:diamond", "--param", f"name={name}", "--parallelism", "2", "--until", "latest", *TIMEOUTS, *more)


class Lossy:
    """`diamond` at parallelism 2, with a decided checkpoint of which one transaction of four is lost for good."""

    def __init__(self, kafka: KafkaCluster, name: str, fired: Path) -> None:
        self.kafka, self.name, self.fired = kafka, name, fired
        self.fed: list[tuple[str, str]] = []
        self.runs: list[Run] = []
        self.seen_before: Any = {}
        fired.mkdir(exist_ok=True)
        for topic in ("in", "more"):
            kafka.create_topic(f"{name}-{topic}", 3)

    def feed(self, count: int) -> None:
        """As many to each source."""
        for topic, first in (("in", 0), ("more", 100_000)):
            records = orders(count, first=first + len(self.fed))
            self.kafka.produce(f"{self.name}-{topic}", records)
            self.fed += records

    def incarnation(self, killed_at: str = "", *more: str) -> Run:
        """A run to the end, or until it is killed."""
        armed = {"EXACTLYONCE_FAILPOINTS": f"{killed_at}=kill@1"} if killed_at else {}
        env = {**armed, "EXACTLYONCE_FAILPOINTS_FIRED": str(self.fired)}
        self.runs.append(Run(self.kafka.bootstrap_servers, *arguments(self.name, *more), env=env))
        return self.runs[-1]

    def lose(self, sink: str, topic: str) -> Committable:
        """One checkpoint completes; of the next, which is decided, subtask 1 of *sink* loses its transaction, and the
        output topic all its records."""
        self.feed(2000)
        first = self.incarnation()
        assert first.wait() == 0, first.said
        self.feed(1500)
        assert self.incarnation("coordinator-decided").wait() == -9
        manifest = read_history({"bootstrap.servers": self.kafka.bootstrap_servers}, self.name).unfinalized
        assert manifest is not None
        assert len(manifest.committables) == 4, "two sinks at parallelism 2"
        assert manifest.previous > 0, "the interval begins with state"
        lost = lose_one(self.kafka, self.name, (sink, 1))
        self.seen_before = {topic: expire(self.kafka, topic)}
        return lost

    def assert_exact(self) -> None:
        """Readers that have read on all the time have seen every update once, in order."""
        seen = Together(self.kafka, self.seen_before)
        assert_totals(seen, f"{self.name}-out", self.fed)
        assert_copies(seen, f"{self.name}-copies", self.fed)
        assert read_history({"bootstrap.servers": self.kafka.bootstrap_servers}, self.name).unfinalized is None
