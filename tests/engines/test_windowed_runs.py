"""Windows in runs that are killed, at any parallelism: what comes out is what a few lines of SQL say of the topic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Job
from window_clicks import Clicks

from exactlyonce.cli.main import main

pytestmark = pytest.mark.broker

WINDOWS = ["tumbling", "hopping", "session", "daily", "folded", "topics"]


def clicks_of(job_of: Callable[..., Job], window: str, *arguments: str) -> Clicks:
    return Clicks(job_of("window_pipelines:windowed", "--param", f"window={window}", *arguments), window)


@pytest.mark.exhaustive(but=["tumbling", "session"])
@pytest.mark.parametrize("window", WINDOWS)
def test_results_are_those_of_sql_over_the_topic(window: str, job_of: Callable[..., Job]) -> None:
    clicks = clicks_of(job_of, window)
    clicks.feed()
    clicks.job.finish_here()
    clicks.feed()
    clicks.end()
    clicks.job.finish_here()
    clicks.assert_as_by_sql()


@pytest.mark.exhaustive(but=["hopping-hashmap"])
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("window", WINDOWS)
def test_kills_and_other_parallelism_make_no_difference(
    window: str, backend: str, job_of: Callable[..., Job], failpoint: Any, tmp_path: Path
) -> None:
    clicks = clicks_of(job_of, window, "--state-backend", backend)
    clicks.crowd(6_000)
    for parallelism, name, nth in (
        (2, "timed-firing", 1),
        (3, "timed-fired", 2),
        (1, "worker-frozen", 1),
        (2, "coordinator-committed", 1),
    ):
        clicks.feed(300)
        armed = failpoint(name, nth=nth)
        clicks.job.start("--until", "latest", "--parallelism", str(parallelism), env=armed).wait()
        assert (tmp_path / "fired" / name).exists()
    clicks.end()
    clicks.job.finish("--parallelism", "2")
    clicks.assert_as_by_sql()


@pytest.mark.exhaustive(but=["folded"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_savepoint_is_shown_and_goes_on_at_another_parallelism(
    window: str, job_of: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No window that it has open is lost, and none that has fired comes again; accumulators are migrated."""
    clicks = clicks_of(job_of, window)
    clicks.feed()
    clicks.job.finish("--parallelism", "3")

    def command(*arguments: str) -> str:
        capsys.readouterr()
        assert main([*arguments, "--bootstrap-servers", clicks.job.kafka.bootstrap_servers]) == 0
        return capsys.readouterr().out

    name = clicks.job.name
    shown = [json.loads(line) for line in command("state", name, "counts", "--json").splitlines()]
    clicks.assert_open(shown)
    url = json.loads(command("savepoint", name, "--to", f"file://{tmp_path}", "--json"))["url"]
    command("reset", name, "--yes", "--force")
    clicks.feed()
    clicks.end()
    version = ("--param", "version=2") if window == "folded" else ()
    clicks.job.finish("--parallelism", "2", "--from-savepoint", url, *version)
    clicks.assert_as_by_sql()
