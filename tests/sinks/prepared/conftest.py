"""Fixtures of the tests of prepared sinks: each test runs on PostgreSQL and on MariaDB."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[2]
RIGS = [*map(str, (HERE / "rig", TESTS / "engines", TESTS / "bounded" / "folds"))]


@pytest.fixture(params=["postgres", "mariadb"])
def preparing(
    request: pytest.FixtureRequest, database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    for driver in ("psycopg", "pymysql"):
        pytest.importorskip(driver)
    from preparing import PreparingMariaDB, PreparingPostgres

    kind = {"postgres": PreparingPostgres, "mariadb": PreparingMariaDB}[request.param]
    preparing = kind(database_server(request.param), monkeypatch)
    yield preparing
    preparing.close()


@pytest.fixture
def run(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run("prepared_totals:totals", "--param", ...)` starts `exactlyonce run`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*RIGS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    return run


@pytest.fixture
def job(kafka: Any, topic_name: str, preparing: Any, run: Any) -> Any:
    """A pipeline that has not run yet, fed with 2,000 orders."""
    from prepared_job import PreparedJob

    job = PreparedJob(kafka, topic_name, preparing, run)
    job.feed(2000)
    return job
