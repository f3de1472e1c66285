"""A pipeline that writes to every store, what was fed to it, and its incarnations, which are processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from counting import Count, assert_agreement
from running import QUICK, Run, orders
from servers import PASSWORD, Servers
from unreferenced import unreferenced_blocks

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

CUSTOMERS = 43


class Job:
    def __init__(self, servers: Servers, kafka: KafkaCluster, name: str, run: Callable[..., Run], folder: Path) -> None:
        self.servers, self.kafka, self.name, self.folder = servers, kafka, name, folder
        self.target: tuple[str, ...] = ("together:together",)
        self.fed: list[tuple[str, str]] = []
        self.incarnations: list[Run] = []
        self._run = run

    def make(self) -> None:
        self.kafka.create_topic(f"{self.name}-in", 3)
        self.servers.make_tables(self.name)

    def feed(self, number: int = 2000) -> None:
        more = orders(number, customers=CUSTOMERS, first=len(self.fed))
        self.kafka.produce(f"{self.name}-in", more)
        self.fed += more

    def run(self, *arguments: str, interval: tuple[str, ...] = QUICK, **options: Any) -> Run:
        self.incarnations.append(
            self._run(*self.target, "--param", f"name={self.name}", *interval, *arguments, **options)
        )
        return self.incarnations[-1]

    def armed(self, failpoint: str, *arguments: str, action: str = "kill", nth: int = 1) -> Run:
        """Begin an incarnation in which a process meets *failpoint*, whatever was armed before."""
        fired = self.folder / f"fired-{len(self.incarnations)}"
        fired.mkdir()
        armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}={action}@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
        incarnation = self.run(*arguments, env=armed)
        deadline = time.monotonic() + LIMIT_S
        while not (fired / failpoint).exists():
            assert time.monotonic() < deadline, f"{failpoint} is met: {incarnation.said}"
            assert incarnation.process.poll() in (None, -9), incarnation.said
            self.feed(100)
            time.sleep(0.1)
        return incarnation

    def finish(self, *arguments: str) -> Run:
        incarnation = self.run("--until", "latest", *arguments)
        assert incarnation.wait() == 0, incarnation.said
        return incarnation

    def assert_agreement(self) -> dict[str, Count]:
        counts = assert_agreement(self.servers, self.kafka, self.name, self.fed)
        left = unreferenced_blocks(self.kafka, self.name)
        assert left == set(), left
        assert_no_secret(self.kafka, self.name, self.incarnations)
        return counts


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
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers, "group.id": "secrets", "enable.auto.commit": False,
            "isolation.level": "read_uncommitted", "enable.partition.eof": True,
        }
    )  # fmt: skip
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
