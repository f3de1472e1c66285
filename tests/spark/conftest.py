"""The session that all tests with Spark share, which takes twenty seconds to come up, and how JVMs are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from exactlyonce.pipeline import failpoints
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TESTS = Path(__file__).parents[1]
PIPELINES = [str(TESTS / "bounded" / "folds"), str(TESTS / "engines"), str(TESTS / "spark" / "rig")]
"""Directories of the pipelines and of the code that checks their output."""


@pytest.fixture(scope="session", autouse=True)
def _short_lives() -> None:
    """Spark's own drivers, of which each test has a few for seconds, are compiled for a short life."""
    from spark_classes import options

    os.environ.setdefault("SPARK_SUBMIT_OPTS", options())


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session of two cores, which tries a failed task three times, with our format registered."""
    from pyspark.sql import SparkSession

    from exactlyonce.engines.spark.session import LONG_TIMEOUTS
    from exactlyonce.spark import register

    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = os.pathsep.join([*PIPELINES, os.environ.get("PYTHONPATH", "")])  # of Spark's workers
    os.environ["PYSPARK_PYTHON"] = sys.executable  # what Spark starts its workers with
    settings: dict[str, bool | float | int | str | None] = {
        **LONG_TIMEOUTS, "spark.driver.memory": "1g", "spark.log.level": "ERROR", "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": 2, "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.ui.enabled": False,
    }  # fmt: skip
    session = SparkSession.builder.master("local[2,3]").appName("tests").config(map=settings).getOrCreate()
    register(session)
    yield session
    session.stop()


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    """The installed Spark below a folder of the test, where the workers of a local cluster have theirs."""
    import pyspark

    home = tmp_path / "spark"
    home.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        (home / path.name).symlink_to(path)
    return home


@pytest.fixture
def servers(store_servers: Any) -> Any:
    """The servers of all stores. A test that kills one starts it again."""
    return store_servers


@pytest.fixture
def make_target(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., Any]:
    """`make_target(store)`: a topic, a table, a stream or a folder to which nobody has written."""
    from targets import OF_FOLDERS, Target, TopicTarget

    def make(store: str, suffix: str = "") -> Target | TopicTarget:
        name = topic_name + suffix
        if store == "kafka":
            return TopicTarget(kafka, name)
        servers = None if store in OF_FOLDERS else request.getfixturevalue("servers")
        return Target(store, kafka, servers, name, tmp_path)

    return make


@pytest.fixture
def target(make_target: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return make_target(getattr(request, "param", "postgres"))


@pytest.fixture
def world(target: Any) -> Iterator[Any]:
    from worlds import World

    world = World(target.kafka, target.name, target)
    yield world
    for driver in world.made:
        driver.close()


@pytest.fixture(scope="session")
def mixed(kafka: KafkaCluster) -> str:
    from reads import mixed_topic

    return mixed_topic(kafka)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    monkeypatch.setenv("EXACTLYONCE_FAILPOINTS_FIRED", str(tmp_path))

    def arm(name: str) -> None:
        monkeypatch.setattr(failpoints, "_armed", {name: ("raise", 1)})
        monkeypatch.setattr(failpoints, "_hits", {})

    return arm
