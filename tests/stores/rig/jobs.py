"""A pipeline that writes to every store, what was fed to it, and its incarnations, which are processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import running
from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from plain_consumer import plain_consumer
from running import Fed, Run, assert_copies, assert_once, assert_updates, visible
from servers import FORMATS, PASSWORD, STORES, Row, Servers
from together import table
from unreferenced import unreferenced_blocks
from waiting import until

from exactlyonce.testing.cluster import BY_KEY, LIMIT_S, KafkaCluster

CUSTOMERS = 43


class Job(running.Job):
    def __init__(self, servers: Servers, kafka: KafkaCluster, name: str, run: Callable[..., Run], folder: Path) -> None:
        super().__init__(run, kafka, name, "together:together")
        self.servers, self.folder = servers, folder
        servers.make_tables(name)

    def feed(
        self, count: int = 2000, to: str = "in", customers: int = CUSTOMERS, partition: int = BY_KEY, *,
        by_customer: bool = False,
    ) -> Fed:  # fmt: skip
        return super().feed(count, to, customers, partition, by_customer=by_customer)

    def armed(self, failpoint: str, *arguments: str, action: str = "kill", nth: int = 1) -> Run:
        """Begin an incarnation in which a process meets *failpoint*, whatever was armed before."""
        fired = self.folder / f"fired-{len(self.incarnations)}"
        fired.mkdir()
        armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}={action}@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
        incarnation = self.start(*arguments, env=armed)

        def go_on() -> None:
            assert incarnation.process.poll() in (None, -9), incarnation.said
            self.feed(100)

        until((fired / failpoint).exists, meanwhile=go_on, told=lambda: incarnation.said, pause_s=0.1)
        return incarnation

    def assert_agreement(self) -> None:
        assert_agreement(self.servers, self.kafka, self.name, self.fed)
        assert unreferenced_blocks(self.kafka, self.name) == set()
        assert_no_secret(self.kafka, self.name, self.incarnations)


def assert_no_secret(kafka: KafkaCluster, pipeline: str, incarnations: Iterable[Run], *secrets: str) -> None:
    """No password is in what processes have said, nor in any byte of the checkpoint topic."""
    passwords = [form.encode() for each in secrets or (PASSWORD,) for form in (each, quote(each, safe=""), repr(each))]
    written = list(records_of(kafka, f"{pipeline}.checkpoints"))
    assert any(pipeline.encode() in each for each in written), "what is looked through is the right topic, in plain"
    for incarnation in incarnations:
        assert incarnation.process.stdout is not None
        if incarnation.process.poll() is not None:  # of one that lives it has no end
            written.append(incarnation.process.stdout.read().encode())
        written.append("\n".join(incarnation.text).encode())
        written += [json.dumps(event, ensure_ascii=False).encode() for event in incarnation.events]
    for each in written:
        assert not any(password in each for password in passwords)


def records_of(kafka: KafkaCluster, topic: str) -> Iterator[bytes]:
    """Keys and values of all records, whatever became of their transactions."""
    settings = {"isolation.level": "read_uncommitted", "enable.partition.eof": True}
    consumer = plain_consumer(kafka.bootstrap_servers, settings)
    unread = set(kafka.admin().list_topics(topic).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for each in unread])
    while unread:
        message = consumer.poll(LIMIT_S)
        assert message is not None
        if message.error() is not None:
            unread.discard(message.partition())
            continue
        yield bytes(message.key() or b"") + b"\0" + bytes(message.value() or b"")
    consumer.close()


def stop(incarnation: Run) -> None:
    incarnation.process.terminate()
    assert incarnation.wait() == 0, incarnation.said
    assert "restarting" not in incarnation.said


class Feed(threading.Thread):
    def __init__(self, job: Job, number: int = 100, pause_s: float = 0.1) -> None:
        super().__init__(daemon=True)
        self._job, self._number, self._pause_s = job, number, pause_s
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._pause_s):
            self._job.feed(self._number)

    def end(self) -> None:
        self._ended.set()
        self.join()


def assert_agreement(servers: Servers, kafka: KafkaCluster, name: str, fed: Fed) -> None:
    """Every store has each row once, in order where there is one, and all have the same."""
    assert_copies(kafka, f"{name}-copies", fed)
    updates = [json.loads(record.value or b"") for record in visible(kafka, f"{name}-out", len(fed))]
    totals = [Row(each["id"], each["customer"], each["sum"]) for each in updates]
    appended = {"kafka": totals}
    for store in STORES:
        appended[store] = servers.appended(store, f"{name}:totals" if store == "redis" else table(name, "append"))
    appended["duckdb"] = servers.in_duckdb(name, "appended")
    for where, rows in appended.items():
        assert_updates([row._asdict() for row in rows], fed, where)
        assert sorted(rows) == sorted(totals), f"{where} and Kafka have the same totals"
    for format in FORMATS:
        rows = servers.filed(name, format)
        assert_once([row.id for row in rows], fed, format)
        assert sorted(rows) == sorted(totals), f"{format} files and Kafka have the same totals"
    newest = {row.customer: row for row in totals}
    for store in STORES:
        assert sorted(servers.upserted(store, name)) == sorted(newest.values()), f"{store}, by key"
    assert sorted(servers.in_duckdb(name, "upserted")) == sorted(newest.values()), "DuckDB, by key"
