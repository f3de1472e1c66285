"""Servers in containers, by testcontainers: the Kafka image, and the sinks of tables on databases."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from containers import PASSWORD, ContainedMySQL, ContainedPostgres, contained, pulled
from settled import await_readable
from table_contract import DSN, OnMySQL, OnPostgres

from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, kafka_container

pytestmark = pytest.mark.docker

MYSQL = "mysql:8.4"
Image = Callable[[str], str]


@pytest.fixture(scope="module")
def postgres(image: Image) -> Iterator[ContainedPostgres]:
    with contained(image("postgres"), ContainedPostgres) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb(image: Image) -> Iterator[ContainedMySQL]:
    with contained(image("mariadb"), ContainedMySQL) as server:
        yield server


class TestPostgres(OnPostgres):
    secret = PASSWORD

    @pytest.fixture(autouse=True)
    def _database(self, postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = postgres
        postgres.empty()
        monkeypatch.setenv(DSN, postgres.dsn)


class TestMariaDB(OnMySQL):
    mode = "upsert"
    keyed = True
    secret = PASSWORD

    @pytest.fixture(autouse=True)
    def _database(self, mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = mariadb
        mariadb.empty()
        monkeypatch.setenv(DSN, mariadb.dsn)


def test_mysql_itself() -> None:
    """MySQL needs a pulled image, for no package of Debian's has it: skipped if there is none."""
    image = pulled(MYSQL)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(Path(__file__).parent / "mysql_itself.py")], capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "MYSQL_IMAGE": image, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# --- the image of docker/kafka ----------------------------------------------------------------------------------------


def test_the_container_serves_transactions(container_kafka: KafkaCluster, topic_name: str) -> None:
    topic = container_kafka.create_topic(topic_name, partitions=2)
    producer = Producer({"bootstrap.servers": container_kafka.bootstrap_servers, "transactional.id": topic_name})
    producer.init_transactions(LIMIT_S)
    for key, end in [("aborted", producer.abort_transaction), ("committed", producer.commit_transaction)]:
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce(topic, b"value", key, partition)
        assert producer.flush(LIMIT_S) == 0
        end(LIMIT_S)
    await_readable(container_kafka, topic)
    assert [record.key for record in container_kafka.read_committed(topic)] == [b"committed", b"committed"]


def test_a_missing_image_is_an_error_that_says_how_to_make_it() -> None:
    with pytest.raises(BrokerUnavailable, match="make image"), kafka_container("exactlyonce-kafka:absent"):
        pass
