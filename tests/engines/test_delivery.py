"""The deliveries of a sink through crashes, side by side: one doubles, one loses, one does neither."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import QUICK, Run, orders
from test_kill_matrix import ELSEWHERE

from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker

COUNT = 3000
ONE_CHECKPOINT = ("--checkpoint-interval", "5m")
"""The last one, at the end of the input: what a crash there doubles or loses is all of it."""


class Tally(NamedTuple):
    """How many orders a reader finds never, and how many more than once."""

    missing: int
    doubled: int


EXACT = Tally(0, 0)
PLACES = sorted(set(NAMES) - ELSEWHERE - {"worker-blocks"} | {"store-committing", "store-committed"})
"""It keeps no state, so that it writes no block of it."""
ALL_TWICE = Tally(0, COUNT)
NOTHING = Tally(COUNT, 0)


def tally(values: Iterable[str | bytes], count: int = COUNT) -> Tally:
    found = Counter(json.loads(value)["id"] for value in values)
    assert found.keys() <= set(range(count)), "nothing was made up"
    return Tally(count - len(found), sum(times > 1 for times in found.values()))


def rows(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as reader:
        return [row for (row,) in reader.execute("select row from rows")]


class Delivered:
    """A pipeline with two sinks of each delivery, fed with `COUNT` orders."""

    def __init__(self, kafka: KafkaCluster, name: str, folder: Path, run: Callable[..., Run]) -> None:
        self.kafka, self.name, self.folder, self._run = kafka, name, folder, run
        kafka.create_topic(f"{name}-in", 3)
        kafka.produce(f"{name}-in", orders(COUNT))

    def start(self, *arguments: str, **options: Any) -> Run:
        name, folder = f"name={self.name}", f"folder={self.folder}"
        return self._run("stored:deliveries", "--param", name, "--param", folder, *arguments, **options)

    def run_to_the_end(self, *arguments: str, **options: Any) -> list[int]:
        """Again after every kill; the exit codes."""
        codes: list[int] = []
        while 0 not in codes:
            assert len(codes) < 5, f"it does not end: {codes}"
            job = self.start("--until", "latest", *arguments, **options)
            codes.append(job.wait())
            assert codes[-1] in (0, -9), job.said
        return codes

    def of(self, delivery: str) -> list[Tally]:
        """In the topic and in the database."""
        values = [record.value or b"" for record in self.kafka.read_committed(f"{self.name}-{delivery}")]
        return [tally(values), tally(rows(self.folder / f"{delivery}.db"))]


@pytest.fixture
def delivered(kafka: KafkaCluster, topic_name: str, tmp_path: Path, run: Any) -> Delivered:
    """One that has not run yet."""
    return Delivered(kafka, topic_name, tmp_path, run)


@pytest.mark.exhaustive(matrix=True, but=["process"])
@pytest.mark.parametrize("mode", [pytest.param((), id="process"), pytest.param(("--inline",), id="inline")])
def test_without_a_failure(delivered: Delivered, mode: tuple[str, ...]) -> None:
    """All deliveries are exact: at a clean end what waited for the last checkpoint is written too."""
    assert delivered.run_to_the_end(*QUICK, *mode) == [0]
    for delivery in ("exactly_once", "at_least_once", "at_most_once"):
        assert delivered.of(delivery) == [EXACT, EXACT], delivery


def test_the_last_output_is_not_lost_in_silence(kafka: KafkaCluster, topic_name: str, tmp_path: Path, run: Any) -> None:
    """What cannot be written behind the last checkpoint is counted, by sink, and is no clean end."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.create_topic(f"{topic_name}-out", cleanup_policy="compact")
    kafka.produce(f"{topic_name}-in", orders(20))
    parameters = (f"name={topic_name}", f"database={tmp_path / 'rows.db'}", "delivery=at_most_once")
    job = run("stored:changing", *(f"--param={each}" for each in parameters), "--until", "latest", *ONE_CHECKPOINT)
    assert job.wait() != 0, job.said
    assert "Output is lost" in job.said
    assert "20 of sink 'out'" in job.said
    assert kafka.read_committed(f"{topic_name}-out") == []


@pytest.mark.exhaustive(matrix=True, but=["worker-flushed"])
@pytest.mark.parametrize("name", ["worker-flushed", "coordinator-checked"])
def test_killed_before_the_decision(delivered: Delivered, failpoint: Any, tmp_path: Path, name: str) -> None:
    """What is written and not decided comes again at least once, and is there once by the other deliveries."""
    delivered.run_to_the_end(*ONE_CHECKPOINT, env=failpoint(name))
    assert (tmp_path / "fired" / name).exists(), "the planned kill happened"
    assert delivered.of("at_least_once") == [ALL_TWICE, ALL_TWICE]
    assert delivered.of("at_most_once") == [EXACT, EXACT]
    assert delivered.of("exactly_once") == [EXACT, EXACT]


@pytest.mark.exhaustive(matrix=True, but=["coordinator-finalized"])
@pytest.mark.parametrize(
    "name", ["worker-acknowledged", "worker-finalized", "coordinator-decided", "coordinator-finalized"]
)
def test_killed_behind_the_decision(delivered: Delivered, failpoint: Any, tmp_path: Path, name: str) -> None:
    """What is decided and not written is lost at most once, and is there once by the other deliveries."""
    nth = 2 if name == "coordinator-finalized" else 1  # the first is before anything is read
    delivered.run_to_the_end(*ONE_CHECKPOINT, env=failpoint(name, nth=nth))
    assert (tmp_path / "fired" / name).exists(), "the planned kill happened"
    assert delivered.of("at_most_once") == [NOTHING, NOTHING]
    assert delivered.of("at_least_once") == [EXACT, EXACT]
    assert delivered.of("exactly_once") == [EXACT, EXACT]


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("parallelism", ["1", "2"])
@pytest.mark.parametrize("name", PLACES)
def test_killed_anywhere(delivered: Delivered, failpoint: Any, tmp_path: Path, name: str, parallelism: str) -> None:
    """With many checkpoints and a kill at any step: at least once misses nothing, at most once doubles nothing."""
    delivered.run_to_the_end(*QUICK, "--parallelism", parallelism, env=failpoint(name))
    assert (tmp_path / "fired" / name).exists(), "the planned kill happened"
    assert [each.missing for each in delivered.of("at_least_once")] == [0, 0]
    assert [each.doubled for each in delivered.of("at_most_once")] == [0, 0]
    assert delivered.of("exactly_once") == [EXACT, EXACT]
