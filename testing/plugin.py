"""The pytest plugin of exactlyonce, loaded with the package: a real Kafka, and real stores, for tests.

| fixture | scope | gives |
| --- | --- | --- |
| `kafka` | session | a `KafkaCluster`: a given cluster, else an embedded broker or a container |
| `topic_name` | function | a prefix no other test has, safe in the name of a topic or pipeline |
| `own_broker` | function | a function that starts a broker of the test's own, which it may kill |
| `container_kafka` | session | a `KafkaCluster` that runs in a container |
| `postgres_server` | session | a PostgreSQL server, of `servers/` as all below |
| `mariadb_server` | session | a MariaDB server |
| `redis_server` | session | a Redis server |
| `s3_server` | session | a server with S3's protocol |
| `registry_server` | session | a schema registry |

The marker `exactlyonce_broker` has `assert_exactly_once` run pipelines on the cluster of `kafka`.

EXACTLYONCE_BOOTSTRAP_SERVERS names a given cluster. Everything started here ends with the tests, an embedded broker
also when they are killed. The plugin is loaded in every pytest run of every user, so it imports nothing but pytest
until a fixture is requested.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from exactlyonce.testing.cluster import KafkaCluster, OwnCluster
    from exactlyonce.testing.servers.mariadb import MariaDB
    from exactlyonce.testing.servers.postgres import PostgresServer
    from exactlyonce.testing.servers.redis import RedisServer
    from exactlyonce.testing.servers.registry import RegistryServer
    from exactlyonce.testing.servers.s3 import S3Server

ON_BROKER = "exactlyonce_broker"
SCHEMA_WARNINGS = (
    "read_text is deprecated:DeprecationWarning:kafka.protocol.schemas.load_json",
    "open_text is deprecated:DeprecationWarning:importlib.resources._legacy",
)
"""The warnings of Python 3.11 and 3.12 about how kafka-python reads its schemas. The second one is about read_text
itself, so another caller of that still has the first."""
IMAGE_DEFAULT = "exactlyonce-kafka:4.3.1"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Before a conftest.py imports our clients."""
    for warning in SCHEMA_WARNINGS:
        early_config.addinivalue_line("filterwarnings", f"ignore:{warning}")
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{ON_BROKER}: assert_exactly_once runs pipelines on the cluster of the fixture kafka"
    )


@pytest.fixture(autouse=True)
def _pipelines_on_a_broker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only in tests with the marker is anything done."""
    if request.node.get_closest_marker(ON_BROKER) is None:
        yield
        return
    from exactlyonce.testing.exactly_once import on_cluster

    with on_cluster(request.getfixturevalue("kafka")):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("exactlyonce")
    group.addoption(
        "--kafka",
        choices=["embedded", "container"],
        default="embedded",
        help="what the fixture kafka starts when EXACTLYONCE_BOOTSTRAP_SERVERS is not set",
    )
    group.addoption("--kafka-image", default=IMAGE_DEFAULT, help="the image of the container (docker/kafka makes it)")


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A Kafka cluster, the same for all tests: use names that begin with `topic_name`."""
    from exactlyonce.testing.cluster import KafkaCluster

    given = os.environ.get("EXACTLYONCE_BOOTSTRAP_SERVERS")
    if given:
        yield KafkaCluster(given)
    elif request.config.getoption("--kafka") == "container":
        yield request.getfixturevalue("container_kafka")
    else:
        yield from _embedded(tmp_path_factory, {}, _progress(request.config))


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A unique prefix of letters, digits and dashes with the name of the test."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:60]
    return f"{test}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OwnCluster]]:
    """Starts brokers for this test alone: `own_broker({"log.retention.ms": "1000"})`."""
    running = []

    def start(settings: Mapping[str, str] | None = None) -> OwnCluster:
        life = _embedded(tmp_path_factory, settings or {}, lambda line: None)
        running.append(life)
        return next(life)

    yield start
    for life in running:
        next(life, None)


@pytest.fixture(scope="session")
def kafka_image(request: pytest.FixtureRequest) -> str:
    """The name of the image that `container_kafka` runs."""
    return str(request.config.getoption("--kafka-image"))


@pytest.fixture(scope="session")
def container_kafka(kafka_image: str) -> Iterator[KafkaCluster]:
    """A Kafka cluster in a container, by testcontainers."""
    from exactlyonce.testing.cluster import kafka_container

    with kafka_container(kafka_image) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server, the same for all tests; a test that kills it starts it again."""
    from exactlyonce.testing.servers.programs import require

    require("psycopg", "exactlyonce[postgres]")
    from exactlyonce.testing.servers.postgres import PostgresServer

    server = PostgresServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDB]:
    """A MariaDB server, which speaks MySQL's protocol, the same for all tests; one that kills it starts it again."""
    from exactlyonce.testing.servers.programs import require

    require("pymysql", "exactlyonce[mysql]")
    from exactlyonce.testing.servers.mariadb import MariaDB

    server = MariaDB()
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server, the same for all tests; a test that kills it starts it again."""
    from exactlyonce.testing.servers.programs import require

    require("redis", "exactlyonce[redis]")
    from exactlyonce.testing.servers.redis import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server with S3's protocol, the same for all tests; its `env` leads clients to it."""
    from exactlyonce.testing.servers.programs import require

    require("moto", "moto[server]")
    from exactlyonce.testing.servers.s3 import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def registry_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A schema registry with Confluent's protocol, the same for all tests. Maven downloads it once."""
    from exactlyonce.testing.servers.registry import RegistryServer

    server = RegistryServer(tmp_path_factory.mktemp("registry"))
    yield server
    server.close()


def _embedded(
    tmp_path_factory: pytest.TempPathFactory, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Iterator[OwnCluster]:
    from exactlyonce.connectors.embedded.broker import EmbeddedBroker
    from exactlyonce.testing.cluster import OwnCluster

    folder = tmp_path_factory.mktemp("kafka")
    broker = EmbeddedBroker(folder, port=0, settings=settings, lifetime="process")
    broker.start(progress)
    try:
        yield OwnCluster(broker)
    finally:
        broker.kill()
        shutil.rmtree(folder)


def _progress(config: pytest.Config) -> Callable[[str], None]:
    """Prints lines about a long download past pytest's capture."""
    from exactlyonce.connectors.embedded.progress import seldom

    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return seldom(reporter.write_line) if reporter else lambda line: None
