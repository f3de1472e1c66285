"""Fixtures of the tests of prepared sinks: each test runs on PostgreSQL and on MariaDB."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[2]
RIGS = [*map(str, (HERE / "rig", TESTS / "engines", TESTS / "bounded" / "folds"))]
sys.path[:0] = RIGS


@pytest.fixture(params=["postgres", "mariadb"])
def preparing(
    request: pytest.FixtureRequest, database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    for driver in ("psycopg", "pymysql"):
        pytest.importorskip(driver)
    from preparing import PreparingMariaDB, PreparingPostgres

    kind = {"postgres": PreparingPostgres, "mariadb": PreparingMariaDB}[request.param]
    made = kind(database_server(request.param), monkeypatch)
    yield made
    made.close()


@pytest.fixture
def run(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`run("prepared_totals:totals", "--param", ...)` starts `exactlyonce run`; killed with the test."""
    from running import runs_of

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*RIGS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    with runs_of(kafka) as start:
        yield start


@pytest.fixture
def job(kafka: Any, topic_name: str, preparing: Any, run: Any) -> Any:
    """A pipeline that has not run yet, fed with 2,000 orders."""
    from prepared_job import PreparedJob

    made = PreparedJob(kafka, topic_name, preparing, run)
    made.feed(2000)
    return made
