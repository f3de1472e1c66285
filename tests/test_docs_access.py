"""The access rights of docs/settings.md, on a broker that checks them."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs hide some
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from secured_kafka import SCRAM_LOGIN, add_user, make_certificate, tls_settings
from waiting import until

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.embedded.broker import HOST, EmbeddedBroker, free_port
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.group_offsets import GroupOffsets
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import load_reference
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster
from exactlyonce.views.doctor.examination import examine, resources_of

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.exhaustive]

LOGIN = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "totals",
    "sasl.password": "secret",
}
BEFORE = "before"
"""The group that the pipeline takes over from."""
MODULE = """\
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink

def make(name: str) -> Pipeline:
    pipeline = Pipeline(name)
    numbers = pipeline.source("numbers", KafkaSource("numbers", value=int, start_group="before"))
    by_parity = numbers.key_by(lambda number: number % 2)
    by_parity.reduce("sums", lambda left, right: left + right).sink("out", KafkaSink(f"{name}-out"))
    return pipeline
"""

Right = tuple[str, str, str]
"""Resource, name, operation."""
Rights = Callable[[str], list[Right]]
"""The rights of a pipeline."""


class GuardedKafka(NamedTuple):
    """A cluster at which the user `totals` may do what it was granted; whoever does not log in may do everything."""

    cluster: KafkaCluster
    login: dict[str, str]
    """Where and how to log in."""

    def grant(self, rights: list[Right]) -> None:
        """Allow exactly these; the controller answers before the broker knows of it."""
        admin, bindings = self.cluster.admin(), [binding(*right) for right in rights]
        anything: Any = (None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY)
        everything = AclBindingFilter(ResourceType.ANY, *anything)
        for change in (lambda: admin.delete_acls([everything]), lambda: admin.create_acls(bindings)):
            for done in change().values():
                done.result(LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while set(admin.describe_acls(everything).result(LIMIT_S)) != set(bindings):
            assert time.monotonic() < deadline, "the broker does not know the rights"

    def called(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = [word for name, value in self.login.items() for word in ("--kafka", f"{name}={value}")]
        command = [sys.executable, "-m", "exactlyonce.cli.main", *arguments, *options]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)

    def command(self, folder: Path, *arguments: str) -> bool:
        return self.called(folder, *arguments).returncode == 0

    def run(self, folder: Path, pipeline: str) -> subprocess.CompletedProcess[str]:
        to_its_end = ("--until", "latest", "--restart", "none", "--inline")
        return self.called(folder, "run", "guarded:make", "--param", f"name={pipeline}", *to_its_end)

    def runs(self, folder: Path, pipeline: str) -> bool:
        return self.run(folder, pipeline).returncode == 0

    def published(self, group: str) -> list[int]:
        admin = self.cluster.admin()
        answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(LIMIT_S)
        return [each.offset for each in answer.topic_partitions]


def binding(resource: str, name: str, operation: str) -> AclBinding:
    kinds = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP, "cluster": ResourceType.BROKER}
    kind = kinds.get(resource, ResourceType.TRANSACTIONAL_ID)
    pattern = ResourcePatternType.PREFIXED if resource.endswith("prefixed") else ResourcePatternType.LITERAL
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()
    allowed = (AclOperation[words], AclPermissionType.ALLOW)
    return AclBinding(kind, name or "kafka-cluster", pattern, "User:totals", "*", *allowed)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; each is held until all are found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((HOST, free_port()))) for _ in range(count)]
        return [taken.getsockname()[1] for taken in sockets]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    (path / "guarded.py").write_text(MODULE)
    return path


@pytest.fixture(scope="module")
def guarded_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    """Its input topic has ten records, the group `before` is at the first of them; its login is SCRAM over TLS."""
    certificates = tmp_path_factory.mktemp("certificates")
    make_certificate(certificates, "server")
    ports = dict(zip(("PLAINTEXT", "CONTROLLER", "SASL"), free_ports(3), strict=True))
    listeners = {name: f"{name}://{HOST}:{port}" for name, port in ports.items()}
    settings = {
        "listeners": ",".join(listeners.values()),
        "advertised.listeners": f"{listeners['PLAINTEXT']},{listeners['SASL']}",
        "controller.quorum.voters": f"1@{HOST}:{ports['CONTROLLER']}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.name.sasl.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl.scram-sha-512.sasl.jaas.config": SCRAM_LOGIN,
        **tls_settings(certificates),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    broker = EmbeddedBroker(tmp_path_factory.mktemp("guarded"), ports["PLAINTEXT"], settings, lifetime="process")
    broker.start()
    add_user(broker.bootstrap_servers, LOGIN["sasl.username"], LOGIN["sasl.password"])
    cluster = KafkaCluster(broker.bootstrap_servers)
    cluster.create_topic("numbers")
    cluster.produce("numbers", [str(number) for number in range(10)])
    reader: dict[str, Any] = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": BEFORE}
    with closing(Consumer({**reader, "auto.offset.reset": "earliest"})) as consumer:
        consumer.subscribe(["numbers"])
        until(lambda: consumer.poll(0.1))
        consumer.commit(offsets=[TopicPartition("numbers", 0, 0)], asynchronous=False)
    where = {"bootstrap.servers": f"{HOST}:{ports['SASL']}", "ssl.ca.location": str(certificates / "server.pem")}
    yield GuardedKafka(cluster, {**LOGIN, **where})
    broker.kill()


@pytest.fixture
def documented(table: Callable[..., list[dict[str, str]]]) -> Rights:
    def rights(pipeline: str) -> list[Right]:
        output = f"{pipeline}-out"
        names = {
            "each input": "numbers", "each output": output, "each output that is missing": output,
            "each `start_group`": BEFORE,
        }  # fmt: skip
        return [
            (row["resource"], names.get(row["name"], row["name"].strip("`").replace("<pipeline>", pipeline)), operation)
            for row in table("docs/settings.md", "resource", "name", "operations", "for")
            for operation in row["operations"].split(", ")
        ]

    return rights


def works(kafka: GuardedKafka, folder: Path, pipeline: str) -> bool:
    return (
        all(kafka.runs(folder, pipeline) for _ in ("a first one", "another"))
        and kafka.command(folder, "checkpoints", pipeline)
        and kafka.published(pipeline) == [10]
        and kafka.command(folder, "reset", pipeline, "--yes", "--force")
    )


def test_the_documented_rights_are_enough(guarded_kafka: GuardedKafka, documented: Rights, folder: Path) -> None:
    guarded_kafka.grant(documented("all"))
    assert works(guarded_kafka, folder, "all")


def test_none_of_the_documented_rights_is_idle(guarded_kafka: GuardedKafka, documented: Rights, folder: Path) -> None:
    for number, right in enumerate(documented("")):
        pipeline = f"without-{number}"
        rights = documented(pipeline)
        guarded_kafka.grant(rights[:number] + rights[number + 1 :])
        assert not works(guarded_kafka, folder, pipeline), right


def test_a_start_without_one_of_the_rights_names_it(
    guarded_kafka: GuardedKafka, documented: Rights, folder: Path
) -> None:
    """The checkpoint topic's refusal is the broker's; without the group's offsets, which are for tools, it runs."""
    unnamed = []
    for number, (*_, operation) in enumerate(documented("")):
        pipeline = f"unnamed-{number}"
        rights = documented(pipeline)
        missing = rights.pop(number)
        if operation == "Delete":
            continue
        guarded_kafka.grant(rights)
        run = guarded_kafka.run(folder, pipeline)
        if missing == ("group", pipeline, "Read"):
            told = lacks_the_group(guarded_kafka, pipeline)
        elif missing == ("topic", f"{pipeline}.checkpoints", "Write"):
            told = run.returncode == 4 and f"Writing to {missing[1]}" in run.stderr and "lacks the right" in run.stderr
        else:
            told = run.returncode == 2 and missing[1] in run.stderr and operation in run.stderr
        if not told:
            unnamed.append((missing, run.returncode, run.stderr))
    assert not unnamed, unnamed


def lacks_the_group(kafka: GuardedKafka, group: str) -> bool:
    """Whether a note names the right, once the broker has answered."""
    notes: list[str] = []
    offsets = GroupOffsets(ClientConfig(kafka.login), group, notes.append)

    def is_noted() -> bool:
        offsets.publish([SourceOffset("numbers", "numbers", "", 0, 10)])
        return bool(notes)

    with closing(offsets):
        until(is_noted)
    return f"Read on the group {group}" in notes[0]


def test_the_doctor_names_a_right_that_is_missing(
    guarded_kafka: GuardedKafka, documented: Rights, folder: Path
) -> None:
    rights = documented("examined")
    guarded_kafka.grant([each for each in rights if each[1] != BEFORE])
    assert f"We lack Describe on group {BEFORE}" in lacked(guarded_kafka, "examined", graph(folder, "examined"))
    guarded_kafka.grant(rights)
    assert lacked(guarded_kafka, "examined", graph(folder, "examined")) == []
    assert guarded_kafka.runs(folder, "examined")
    rights = [each for each in rights if each[1] != BEFORE]  # the group was read, and is not any more
    guarded_kafka.grant(rights)
    assert lacked(guarded_kafka, "examined") == []
    for missing in rights:
        if missing[2] not in ("Create", "Delete"):
            guarded_kafka.grant([each for each in rights if each != missing])
            resource, name, operation = missing
            kind = "transactional-id" if resource.startswith("transactional") else resource
            assert f"We lack {operation} on {kind} {name}".rstrip() in "; ".join(lacked(guarded_kafka, "examined"))


def graph(folder: Path, pipeline: str) -> LogicalGraph:
    reference = {"module": "guarded", "attribute": "make", "params": {"name": pipeline}, "path": str(folder)}
    return load_reference(reference).build()


def lacked(kafka: GuardedKafka, pipeline: str, graph: LogicalGraph | None = None) -> list[str]:
    config = ClientConfig(kafka.login)
    resources, now_ms = resources_of(config, pipeline, graph), SystemClock().now_ms()
    _, found = examine(config, resources, graph, CheckpointSettings(), now_ms=now_ms, older_than_ms=0, deep=False)
    return [each.what for each in found.diagnoses if each.about == "rights"]


def test_reading_is_enough_to_judge(guarded_kafka: GuardedKafka, documented: Rights, folder: Path) -> None:
    """An audit and a replay need the page's Read rights alone."""
    rights = documented("judged")
    guarded_kafka.grant(rights)
    assert guarded_kafka.runs(folder, "judged")
    guarded_kafka.grant([each for each in rights if each[2] == "Read"])
    pipeline = ("guarded:make", "--param", "name=judged", "--on", "driver")
    assert guarded_kafka.command(folder, "audit", *pipeline)
    assert guarded_kafka.command(folder, "replay", *pipeline, "--checkpoint", "1")
