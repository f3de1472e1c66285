"""The session of a command: the program's own, that of spark-submit, or one of the command's."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bounded import HERE, Fed

from exactlyonce.cli.main import main
from exactlyonce.engines.spark import submit
from exactlyonce.engines.spark.session import py4j_unlogged, require_connect, require_master, runs_here, session
from exactlyonce.engines.spark.submit import described, watched
from exactlyonce.pipeline.errors import ConfigError, RecordError
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = [pytest.mark.spark, pytest.mark.broker]


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
    monkeypatch.chdir(HERE.parents[1] / "engines")
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


def test_a_signal_leaves_no_traceback_of_py4j(caplog: pytest.LogCaptureFixture) -> None:
    """It logs by its own loggers and by the root; what others log stays."""
    logging_as_py4j = "logging.error('root'); logging.getLogger('py4j.clientserver').error('own')"
    code = compile(logging_as_py4j, "/site-packages/py4j/java_gateway.py", "exec")
    with py4j_unlogged():
        exec(code, {"logging": logging})
        logging.error("another's")
    exec(code, {"logging": logging})
    assert [record.message for record in caplog.records] == ["another's", "root", "own"]


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
def test_the_session_of_the_program(master: str | None, conf: dict[str, str], named: str, spark: SparkSession) -> None:
    with (
        pytest.raises(ConfigError, match=f"This program has a Spark session.*{named}"),
        session(master, conf, "another"),
    ):
        pass
    assert runs_here(spark)


@pytest.mark.parametrize("missing", ["grpc", "google.rpc"])
def test_a_connect_server_needs_the_extra_connect(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    require_connect()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(ConfigError, match=rf"needs {missing}, .* Run: pip install .*connect"):
        require_connect()


def test_an_error_of_the_listener_ends_the_work(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "LOOK_INTERVAL_S", 0.01)

    def refusing(count: int) -> None:
        raise LookupError(f"{count} tasks")

    with pytest.raises(LookupError, match="tasks"):
        watched(spark, spark.range(0, 40, 1, 40).collect, refusing)


@pytest.mark.parametrize("theirs", [None, "the program's own"])
def test_the_callers_description_comes_back(spark: SparkSession, theirs: str | None) -> None:
    """Also after an error; and none, where there was none."""
    context = spark.sparkContext
    context.setLocalProperty("spark.job.description", theirs)  # type: ignore[arg-type]  # None removes it
    try:
        with suppress(KeyError), described(spark, "orders: checkpoint 12, stage totals, 40 units"):
            assert context.getLocalProperty("spark.job.description") == "orders: checkpoint 12, stage totals, 40 units"
            raise KeyError
        assert context.getLocalProperty("spark.job.description") == theirs
    finally:
        context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]  # None removes it
