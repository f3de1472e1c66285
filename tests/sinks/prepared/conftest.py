"""Fixtures of the tests of prepared sinks: each test runs on PostgreSQL and on MariaDB."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SINKS = Path(__file__).parents[1]
ENGINES, BOUNDED = SINKS.parent / "engines", SINKS.parent / "bounded" / "folds"
RIGS = [*(str(SINKS / store / "rig") for store in ("", "postgres", "mysql", "prepared")), str(ENGINES), str(BOUNDED)]
sys.path[:0] = RIGS


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, Any]]:
    """Those that were started, by name."""
    servers: dict[str, Any] = {}
    yield servers
    for each in servers.values():
        each.remove()


@pytest.fixture(params=["postgres", "mariadb"])
def preparing(request: pytest.FixtureRequest, _servers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server, empty; see `Preparing`."""
    pytest.importorskip("psycopg")
    pytest.importorskip("pymysql")
    from mariadb_server import MariaDB, required
    from postgres_server import PostgresServer
    from preparing import PreparingMariaDB, PreparingPostgres

    name = request.param
    if name not in _servers:
        if name == "mariadb":
            required()
        server = PostgresServer() if name == "postgres" else MariaDB()
        server.start()
        _servers[name] = server
    made = {"postgres": PreparingPostgres, "mariadb": PreparingMariaDB}[name](_servers[name], monkeypatch)
    yield made
    made.close()


@pytest.fixture
def run(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`run("prepared_totals:totals", "--param", ...)` starts `exactlyonce run`; killed with the test."""
    from running import Run

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*RIGS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    runs: list[Any] = []

    def start(target: str, *arguments: str, **options: Any) -> Any:
        runs.append(Run(kafka.bootstrap_servers, target, *arguments, **options))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.kill()


@pytest.fixture
def job(kafka: Any, topic_name: str, preparing: Any, run: Any) -> Any:
    """A pipeline that has not run yet, fed with 2,000 orders."""
    from prepared_job import PreparedJob

    made = PreparedJob(kafka, topic_name, preparing, run)
    made.feed()
    return made
