"""SIGKILL at every step of a streaming write to a store, in every process of it: each row is there once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from drivers import Driver
from targets import TARGETS, Target, rows_of
from unreferenced import unreferenced_blocks

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds a driver's processes in /proc"),
]
FILES, ROWS = 6, 80
PYTHON_STEPS = {
    "coordinator-opened": 1,
    "coordinator-swept": 2,
    "worker-flushed": 1,
    "coordinator-checked": 1,
    "coordinator-decided": 1,
    "store-committing": 2,
    "store-committed": 3,
    "coordinator-finalized": 2,
}
DRIVER_STEPS = ("worker-flushed", "store-committing", "coordinator-finalized")


class Job:
    """A query that copies files to a target, by drivers that are killed."""

    def __init__(self, kafka: KafkaCluster, name: str, target: Target, folder: Path) -> None:
        self.kafka, self.name, self.target, self.folder = kafka, name, target, folder
        self.options = {"sinkId": name, "kafka.bootstrap.servers": kafka.bootstrap_servers, **target.options}
        (folder / "in").mkdir()
        for number in range(FILES):
            lines = [json.dumps(row._asdict()) for row in rows_of(number, 0, ROWS)]
            (folder / "in" / f"{number}.json").write_text("\n".join(lines))

    def driver(self, armed: str = "") -> Driver:
        """One more."""
        return Driver(self.folder, armed, "store_targets_job.py", str(self.folder), json.dumps(self.options))

    def assert_exact(self) -> None:
        """Every row is there once, and nothing is left that no decision names."""
        assert self.target.found() == [row for number in range(FILES) for row in rows_of(number, 0, ROWS)]
        assert unreferenced_blocks(self.kafka, self.name) == set()
        assert self.target.hidden() == []


@pytest.fixture
def job(kafka: KafkaCluster, topic_name: str, servers: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    """To the store that the test is given."""
    return Job(kafka, topic_name, Target(request.param, servers, topic_name, tmp_path), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", TARGETS, indirect=True)
def test_python_processes_are_killed(job: Job) -> None:
    """The processes that plan, write and commit die one after the other, each at another step, and the query is
    started again by the same driver."""
    driver = job.driver(",".join(f"{name}=kill@{nth}" for name, nth in PYTHON_STEPS.items()))
    try:
        driver.end()
    finally:
        driver.kill()
    assert {each.name for each in driver.fired.iterdir()} == set(PYTHON_STEPS), driver.said()
    job.assert_exact()


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", TARGETS, indirect=True)
def test_the_driver_is_killed(job: Job) -> None:
    """JVM and all die while a task has set rows aside, while some of a batch are in the store, and once a batch is
    finalized but not in Spark's own log; the next driver goes on from the same checkpoint location."""
    for step in DRIVER_STEPS:
        driver = job.driver(f"{step}=stop@2")
        try:
            driver.kill_at(step)
        finally:
            driver.kill()
    last = job.driver()
    try:
        last.end()
    finally:
        last.kill()
    job.assert_exact()
