"""A canary in every setting that takes a secret: whatever a run and the commands show or write has none of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
from confluent_kafka import Consumer, TopicPartition
from secured_kafka import SCRAM_LOGIN, add_user, make_certificate, tls_settings

from exactlyonce.connectors.embedded.broker import HOST, EmbeddedBroker, free_port
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.exhaustive]

CANARY = "c4nary-Zr9"
MODULE = """\
import msgspec
from exactlyonce import AvroCodec, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import DeltaSink, FileSink, IcebergSink, KafkaSink, MySQLSink, PostgresSink, RedisSink


class Total(msgspec.Struct):
    customer: str
    sum: int


def add(sum: int | None, total: Total) -> tuple[int, Total]:
    sum = (sum or 0) + total.sum
    return sum, Total(total.customer, sum)


KEYS = {"AWS_ACCESS_KEY_ID": "env:S3_KEY", "AWS_SECRET_ACCESS_KEY": "env:S3_SECRET", "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": "env:AWS_ENDPOINT_URL", "AWS_REGION": "us-east-1"}
CATALOG = {"type": "sql", "uri": "env:CATALOG_URI", "warehouse": "env:WAREHOUSE", "token": "env:S3_SECRET"}
REGISTRY = {"url": "env:REGISTRY_URL", "basic.auth.user.info": "env:REGISTRY_LOGIN"}
pipeline = Pipeline("secrets")
totals = (
    pipeline.source("orders", KafkaSource("orders", value=Total))
    .key_by(lambda total: total.customer)
    .stateful_map("totals", add)
)
totals.sink("avro", KafkaSink("totals", value=AvroCodec(Total, registry=REGISTRY, register=True), create_partitions=2))
totals.sink("postgres", PostgresSink("totals", dsn="env:POSTGRES_DSN", create=True))
totals.sink("mysql", MySQLSink("totals", dsn="env:MYSQL_DSN", create=True))
totals.sink("redis", RedisSink("env:REDIS_URL", key=lambda total: total.customer))
totals.sink("files", FileSink("s3://checkpoints/totals"))
totals.sink("delta", DeltaSink("s3://checkpoints/delta", storage_options=KEYS, create=True))
totals.sink("iceberg", IcebergSink("shop.totals", catalog=CATALOG, create=True))
"""


class Place(NamedTuple):
    """A folder with the pipeline, and the environment in which all of its servers are known."""

    folder: Path
    environment: dict[str, str]
    cluster: KafkaCluster

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        settings = () if arguments[0] in ("explain", "acls") else ("--config", "settings.toml")
        return subprocess.Popen(
            [sys.executable, "-m", "exactlyonce.cli.main", *arguments, *settings], cwd=self.folder,
            env={**os.environ, **self.environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def said(self, *arguments: str, codes: Collection[int] = (0,)) -> str:
        process = self.command(*arguments)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode in codes, out + err
        return f"{out}{err}"


@pytest.fixture
def place(tmp_path: Path, database_server: Callable[[str], Any], s3: Any, registry: Any) -> Iterator[Place]:
    make_certificate(tmp_path, "server")
    make_certificate(tmp_path, "client", CANARY)
    ports = {name: free_port() for name in ("PLAINTEXT", "CONTROLLER", "LOGIN")}
    settings = {
        "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in ports.items()),
        "advertised.listeners": f"PLAINTEXT://{HOST}:{ports['PLAINTEXT']},LOGIN://{HOST}:{ports['LOGIN']}",
        "controller.quorum.voters": f"1@{HOST}:{ports['CONTROLLER']}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LOGIN:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.name.login.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.login.scram-sha-512.sasl.jaas.config": SCRAM_LOGIN,
        **tls_settings(tmp_path),
    }  # fmt: skip
    broker = EmbeddedBroker(tmp_path / "broker", ports["PLAINTEXT"], settings, lifetime="process")
    broker.start()
    cluster = KafkaCluster(broker.bootstrap_servers)
    add_user(cluster.bootstrap_servers, "alice", CANARY)
    postgres, mariadb, redis = map(database_server, ("postgres", "mariadb", "redis"))
    postgres.execute(f"CREATE ROLE alice SUPERUSER LOGIN PASSWORD '{CANARY}'")
    postgres.execute("CREATE DATABASE secrets OWNER alice")
    mariadb.sql(f"CREATE USER alice IDENTIFIED BY '{CANARY}'")
    mariadb.sql("GRANT ALL ON *.* TO alice")
    (tmp_path / "ordering.py").write_text(MODULE)
    (tmp_path / CANARY).mkdir()
    settings = {
        "bootstrap.servers": f"{HOST}:{ports['LOGIN']}", "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "alice", "sasl.password": "env:KAFKA_PASSWORD",
        "ssl.ca.location": str(tmp_path / "server.pem"), "ssl.certificate.location": str(tmp_path / "client.pem"),
        "ssl.key.location": str(tmp_path / "client.key"), "ssl.key.password": "env:KAFKA_PASSWORD",
    }  # fmt: skip
    (tmp_path / "settings.toml").write_text(
        "\n".join(["[kafka]", *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in settings.items())])
    )
    mysql_dsn = mariadb.dsn.replace("root@", f"alice:{CANARY}@")
    environment = {
        **s3.env, "AWS_SECRET_ACCESS_KEY": CANARY, "S3_KEY": "key", "S3_SECRET": CANARY, "KAFKA_PASSWORD": CANARY,
        "POSTGRES_DSN": postgres.dsn("secrets", "alice", CANARY), "MYSQL_DSN": mysql_dsn,
        "REDIS_URL": f"redis://default:{CANARY}@{HOST}:{redis.port}/0", "REGISTRY_URL": registry.url,
        "REGISTRY_LOGIN": f"alice:{CANARY}", "CATALOG_URI": f"sqlite:///{tmp_path}/{CANARY}/catalog.db",
        "WAREHOUSE": f"file://{tmp_path}", "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={CANARY}",
    }  # fmt: skip
    yield Place(tmp_path, environment, cluster)
    broker.kill()
    postgres.execute("DROP DATABASE secrets WITH (FORCE)")
    postgres.execute("DROP ROLE alice")
    mariadb.sql("DROP USER alice")


def titles(place: Place) -> Iterator[str]:
    """The command lines of the processes in the folder of *place*: the run and its workers."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (process / "cwd").readlink() == place.folder:
                yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def records(cluster: KafkaCluster) -> Iterator[bytes]:
    """Keys and values of all topics of the pipeline and of Kafka's own, in all partitions."""
    topics = cluster.admin().list_topics(timeout=LIMIT_S).topics
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    consumer = Consumer({**servers, "group.id": "reader", "enable.partition.eof": True})
    for name, topic in topics.items():
        places = [TopicPartition(name, partition, 0) for partition in topic.partitions]
        consumer.assign(places)
        left = len(places)
        while left:
            message = consumer.poll(LIMIT_S)
            assert message is not None
            if message.error():
                left -= 1
            else:
                yield b" ".join([name.encode(), message.key() or b"", message.value() or b""])
    consumer.close()


def test_no_secret_is_shown(place: Place) -> None:
    place.cluster.create_topic("orders", partitions=2)
    write = [(name, json.dumps({"customer": name, "sum": 1})) for name in ("ann", "bob", "cho")] * 10
    place.cluster.produce("orders", write)
    address = f"{HOST}:{free_port()}"
    run = place.command(
        "run", "ordering:pipeline", "--ui", address, "--metrics", address, "--traces", f"http://{HOST}:{free_port()}",
        "--parallelism", "2", "--checkpoint-interval", "200ms", "--checkpoint-storage", "s3://checkpoints/state",
        "--verbose", "--num-retained", "1000",
    )  # fmt: skip

    def asked(path: str) -> str:
        with urlopen(f"http://{address}/{path}", timeout=LIMIT_S) as answer:
            return str(answer.read().decode())

    shown: dict[str, str] = {}
    try:
        assert run.stderr is not None
        log: list[str] = []
        for line in run.stderr:
            log.append(line)
            if line.startswith("{") and json.loads(line).get("records_committed"):
                break
        else:
            raise AssertionError("".join(log[-20:]))
        shown["log"] = "".join(log)
        shown |= {path: asked(path) for path in ("state.json", "metrics", "checkpoint.json?id=1", "")}
        assert CANARY in Path(f"/proc/{run.pid}/environ").read_text(), "it has the secrets"
        shown["titles"] = "\n".join(titles(place))
        assert len(shown["titles"].splitlines()) >= 3, "the run and its workers"
    finally:
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=LIMIT_S)
    shown["output"] = out + err
    assert run.returncode == 0, shown
    for words in (
        ["explain", "ordering:pipeline"], ["checkpoints", "secrets", "--json"], ["checkpoints", "secrets"],
        ["state", "show", "secrets", "--json"], ["transactions", "list", "ordering:pipeline", "--json"],
        ["top", "secrets", "--json"], ["doctor", "ordering:pipeline", "--json"],
        ["savepoints", "list", "secrets", "--json"],
        ["acls", "ordering:pipeline", "--principal", "User:alice"], ["audit", "ordering:pipeline", "--json"],
    ):  # fmt: skip
        shown[" ".join(words)] = place.said(*words, codes=(0, 1) if words[0] in ("doctor", "audit") else (0,))
    # None of the servers knows this password any more.
    place.environment.update({name: re.sub(CANARY, f"{CANARY}-wrong", of) for name, of in place.environment.items()})
    for words in (["run", "ordering:pipeline", "--until", "latest"], ["doctor", "ordering:pipeline"]):
        shown[f"wrong: {' '.join(words)}"] = place.said(*words, codes=(1, 2))
    shown["topics"] = "\n".join(record.decode(errors="replace") for record in records(place.cluster))
    assert "manifest/" in shown["topics"]
    found = {name: text for name, text in shown.items() if CANARY in text and name != "topics"}
    leaked = [line for line in shown["topics"].splitlines() if CANARY in line]
    assert (found, leaked) == ({}, [])
