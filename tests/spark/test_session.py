"""The session of a command: the program's own, that of spark-submit, or one of the command's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bounded import HERE, Fed

from exactlyonce.cli.main import main
from exactlyonce.engines.spark.session import require_master, runs_here, session
from exactlyonce.pipeline.errors import ConfigError, RecordError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.broker]
ENGINES = HERE.parents[1] / "engines"
SUBMITTED = """\
import sys

from exactlyonce.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def fed(kafka: KafkaCluster, topic_name: str) -> Fed:
    return Fed(kafka, topic_name)


@pytest.mark.exhaustive
def test_a_program_keeps_its_session(
    spark: SparkSession, fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A backfill runs in the program's session, with as many units as it has cores, and leaves everything as it was."""
    monkeypatch.chdir(HERE)
    fed.feed(60)
    names = ("spark.app.name", "spark.master", "spark.ui.enabled", "spark.network.timeout")
    before, handler = {name: spark.conf.get(name) for name in names}, signal.getsignal(signal.SIGTERM)
    line = ["bounded_pipelines:broad", "--param", f"name={fed.name}", "--staging", str(tmp_path), "--json"]
    assert main(["backfill", *line, "--bootstrap-servers", fed.kafka.bootstrap_servers]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["records_in"], figures["parallelism"]) == (90, 2)
    assert spark.range(3).count() == 3, "it goes on"
    assert {name: spark.conf.get(name) for name in names} == before
    assert signal.getsignal(signal.SIGTERM) is handler
    fed.assert_output()


def test_the_users_traceback_comes_first(
    spark: SparkSession, fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A command shows the traceback of the user's function, then one message; nothing of Spark's or of this package."""
    monkeypatch.chdir(ENGINES)
    fed.feed(100)
    line = ["backfill", "pipelines:raising", "--param", f"name={fed.name}", "--staging", str(tmp_path)]
    line += ["--bootstrap-servers", fed.kafka.bootstrap_servers]
    assert main(line) == RecordError.exit_code
    trace, message = capsys.readouterr().err.split("exactlyonce: ", 1)
    shown = trace[trace.index("Traceback") :].splitlines()
    assert "in fail" in shown[1]
    assert shown[-1].startswith("ZeroDivisionError")
    assert "on the record at" in message
    assert "org.apache" not in trace + message
    assert main([*line, "--json"]) == RecordError.exit_code
    failed = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert failed["traceback"].splitlines() == shown


@pytest.mark.parametrize("master", ["spork://h:7077", "local[", "yarn-client", ""])
def test_a_master_that_spark_does_not_know(master: str) -> None:
    with pytest.raises(ConfigError, match=r"is no URL of a Spark: write local\[4\], spark://host:7077"):
        require_master(master)
    for known in (
        "local",
        "local[*,4]",
        "local-cluster[2,1,1024]",
        "spark://h:7077",
        "yarn",
        "k8s://https://h",
        "sc://h",
    ):
        require_master(known)


@pytest.mark.parametrize(
    ("master", "conf", "named"),
    [
        ("local[3]", {}, "--master"),
        (None, {"spark.x": "1"}, "--spark-conf"),
        ("local", {"spark.x": "1"}, "--master and"),
    ],
)
def test_a_session_that_goes_on_is_not_another_one(
    master: str | None, conf: dict[str, str], named: str, spark: SparkSession
) -> None:
    with (
        pytest.raises(ConfigError, match=f"This program has a Spark session.*{named}"),
        session(master, conf, "another"),
    ):
        pass
    assert runs_here(spark)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_was_submitted_stays(fed: Fed, tmp_path: Path) -> None:
    """Under spark-submit the application has the master, the name and the settings that it was submitted with."""
    fed.feed(60)
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "submitted.py").write_text(SUBMITTED)
    submit = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[3,2]", "--name", "mine"]
    for name, value in {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{events}",
        "spark.eventLog.compress": "false",
        "spark.network.timeout": "500s",
    }.items():
        submit += ["--conf", f"{name}={value}"]
    line = ["backfill", "bounded_pipelines:broad", "--param", f"name={fed.name}", "--json"]
    path = os.pathsep.join([str(HERE), str(ENGINES)])
    ended = subprocess.run(
        [*submit, str(tmp_path / "submitted.py"), *line, "--bootstrap-servers", fed.kafka.bootstrap_servers],
        cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    figures = next(json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"pipeline"'))
    assert (figures["records_in"], figures["parallelism"]) == (90, 3)
    logged = [json.loads(line) for file in events.rglob("events_*") for line in file.open()]
    (application,) = (each for each in logged if each.get("Event") == "SparkListenerApplicationStart")
    (environment,) = (each for each in logged if each.get("Event") == "SparkListenerEnvironmentUpdate")
    settings = environment["Spark Properties"]
    assert application["App Name"] == "mine"
    assert (settings["spark.master"], settings["spark.network.timeout"]) == ("local[3,2]", "500s")
    assert "spark.ui.enabled" not in settings
    fed.assert_output()
