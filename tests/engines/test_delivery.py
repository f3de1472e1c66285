"""The deliveries of a sink through crashes, side by side: one doubles, one loses, one does neither."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from running import Job, visible
from test_kill_matrix import run_to_the_end

from exactlyonce.pipeline.sink import Delivery

COUNT = 1000
ONE_CHECKPOINT = ("--checkpoint-interval", "5m")
"""The last one, at the end of the input: what a crash there doubles or loses is all of it."""


class Tally(NamedTuple):
    missing: int
    doubled: int


EXACT = Tally(0, 0)
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
    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        job.feed(COUNT)

    def of(self, delivery: str, count: int = COUNT) -> list[Tally]:
        """Rows in the topic, where *count* records are awaited, and in the database, if there is one."""
        values = [each.value or b"" for each in visible(self.job.kafka, f"{self.job.name}-{delivery}", count)]
        database = self.folder / f"{delivery}.db"
        return [tally(values), *([tally(rows(database))] if database.exists() else [])]


@pytest.fixture
def delivered(job_of: Callable[..., Job], tmp_path: Path) -> Delivered:
    return Delivered(job_of("stored:deliveries", "--param", f"folder={tmp_path}"), tmp_path)


def test_without_a_failure(delivered: Delivered) -> None:
    """All deliveries are exact: a clean end writes what waited for the last checkpoint."""
    delivered.job.finish_here()
    assert [delivered.of(delivery) for delivery in get_args(Delivery)] == [[EXACT, EXACT], [EXACT, EXACT], [EXACT]]


def test_the_last_output_is_not_lost_in_silence(job_of: Callable[..., Job], tmp_path: Path) -> None:
    parameters = (f"--param=database={tmp_path / 'rows.db'}", "--param=delivery=at_most_once")
    job = job_of("stored:changing", *parameters, *ONE_CHECKPOINT)
    job.kafka.create_topic(f"{job.name}-out", cleanup_policy="compact")
    job.feed(20)
    said = job.finish_here(code=3)
    assert "Output is lost" in said
    assert "20 of sink 'out'" in said
    assert job.kafka.read_committed(f"{job.name}-out") == []


@pytest.mark.exhaustive
def test_killed_before_the_decision(delivered: Delivered, failpoint: Any) -> None:
    run_to_the_end(delivered.job, *ONE_CHECKPOINT, env=failpoint("worker-flushed"))
    assert delivered.of("at_least_once", 2 * COUNT) == [ALL_TWICE, ALL_TWICE]
    assert delivered.of("at_most_once") == [EXACT]
    assert delivered.of("exactly_once") == [EXACT, EXACT]


@pytest.mark.exhaustive(but=["coordinator-finalized"])
@pytest.mark.parametrize("name", ["coordinator-decided", "coordinator-finalized"])
def test_killed_behind_the_decision(delivered: Delivered, failpoint: Any, name: str) -> None:
    nth = 2 if name == "coordinator-finalized" else 1  # the first is before anything is read
    run_to_the_end(delivered.job, *ONE_CHECKPOINT, env=failpoint(name, nth=nth))
    assert delivered.of("at_most_once", 0) == [NOTHING]
    assert delivered.of("at_least_once") == [EXACT, EXACT]
    assert delivered.of("exactly_once") == [EXACT, EXACT]
