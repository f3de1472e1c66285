"""SIGKILL at every step of a streaming write, in every process of it: the output is exact all the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from drivers import Driver
from sink_job import EXIT_CODE
from targets import Target, TopicTarget, rows_of

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.platform != "linux", reason="finds a driver's processes in /proc"),
]
FILES, ROWS = 6, 80
STEPS = dict.fromkeys(("coordinator-opened", "worker-flushed", "coordinator-checked", "coordinator-decided"), 1)
STEPS_OF_KAFKA = STEPS | {"coordinator-swept": 1, "coordinator-committed": 2, "coordinator-finalized": 1}
STEPS_OF_STORES = STEPS | {
    "coordinator-swept": 2, "store-committing": 2, "store-committed": 3, "coordinator-finalized": 2
}  # fmt: skip
DRIVER_STEPS_OF_KAFKA = ("worker-flushed=stop", "coordinator-decided=stop", "coordinator-finalized=stop")
DRIVER_STEPS_OF_STORES = ("worker-flushed=stop@2", "store-committing=stop@2", "coordinator-finalized=stop@2")


class Query:
    def __init__(self, target: Target | TopicTarget, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.options = {
            "sinkId": target.name, "kafka.bootstrap.servers": target.kafka.bootstrap_servers, **target.options
        }  # fmt: skip
        (folder / "in").mkdir()
        for number in range(FILES):
            path = folder / "in" / f"{number}.json"
            path.write_text("\n".join(json.dumps(row._asdict()) for row in rows_of(number, 0, ROWS)))
            os.utime(path, (number + 1, number + 1))

    def driver(self, armed: str = "", kind: str = "classic") -> Driver:
        return Driver(self.folder, armed, "sink_job.py", str(self.folder), json.dumps(self.options), kind)

    def assert_exact(self) -> None:
        assert self.target.found() == [row for number in range(FILES) for row in rows_of(number, 0, ROWS)]
        self.target.assert_settled()


@pytest.fixture
def query(target: Target | TopicTarget, tmp_path: Path) -> Query:
    return Query(target, tmp_path)


@pytest.mark.parametrize("target", ["kafka", "postgres", "files"], indirect=True)
def test_python_processes_are_killed(query: Query) -> None:
    """Planner, writer and committer die one after the other, and the same driver starts the query again."""
    steps = STEPS_OF_KAFKA if query.target.store == "kafka" else STEPS_OF_STORES
    with query.driver(",".join(f"{name}=kill@{nth}" for name, nth in steps.items())) as driver:
        driver.end()
    assert {each.name for each in driver.fired.iterdir()} == set(steps), driver.said()
    query.assert_exact()


@pytest.mark.parametrize("target", ["kafka", "iceberg"], indirect=True)
def test_the_driver_is_killed(query: Query) -> None:
    """JVM and all die during flush, decision, commit and Spark's log; the next driver continues from its location."""
    is_kafka = query.target.store == "kafka"
    for step in DRIVER_STEPS_OF_KAFKA if is_kafka else DRIVER_STEPS_OF_STORES:
        with query.driver(step) as driver:
            driver.await_fired(step.split("=")[0])
    with query.driver(kind="connect" if is_kafka else "classic") as driver:
        driver.end()
    query.assert_exact()


@pytest.mark.parametrize("target", ["kafka"], indirect=True)
def test_a_driver_dies_after_a_write_of_foreach_batch(query: Query) -> None:
    for falls, code in (("0.0=exit", EXIT_CODE), ("0.1=exit", EXIT_CODE), ("1.0=raise,2.1=raise", 0)):
        with query.driver(kind=falls) as driver:
            driver.end(code)
    assert len(list(query.folder.glob("fell-*"))) == 4, driver.said()
    query.assert_exact()
