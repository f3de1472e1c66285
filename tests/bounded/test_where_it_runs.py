"""`--on`: small work runs in the command's process and says so, and no Java is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bounded import HERE, Fed, catch_up, load_pipeline

from exactlyonce.cli import spark_arguments
from exactlyonce.cli.main import main

HERE_SAID = "the work runs in this process, without Spark"
NO_JAVA = "Spark needs Java 17 or 21"


class Commands:
    """Commands on `broad` in this process, on a machine without Java, in a program without a session."""

    def __init__(self, fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.fed, self.capsys = fed, capsys
        monkeypatch.chdir(HERE)
        monkeypatch.setattr("exactlyonce.engines.spark.session._running", lambda sessions: None)
        monkeypatch.setenv("JAVA_HOME", "/nowhere")

    def __call__(self, name: str, *options: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        pipeline = ["bounded_pipelines:broad", "--param", f"name={self.fed.name}", "--json"]
        code = main([name, *pipeline, "--bootstrap-servers", self.fed.kafka.bootstrap_servers, *options])
        return code, *self.capsys.readouterr()


@pytest.fixture
def commands(fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(fed, monkeypatch, capsys)


def test_small_work_runs_here(commands: Commands, fed: Fed) -> None:
    """A backfill, a catch-up, an audit and a replay of few records end without a Java, and say where they ran."""
    fed.feed(60)
    code, out, err = commands("backfill")
    figures: dict[str, Any] = json.loads(out)
    assert (code, figures["records_in"], figures["parallelism"]) == (0, 90, 1)
    assert f"90 records at most are to be read: {HERE_SAID}; --on spark changes that" in err
    fed.feed(20)
    code, out, err = commands("catch-up", "--parallelism", "2")
    assert (code, json.loads(out)["records_in"], json.loads(out)["parallelism"]) == (0, 30, 2)
    assert "30 records at most" in err
    fed.assert_output()
    code, out, err = commands("audit")
    assert (code, json.loads(out)["findings"], json.loads(out)["records_in"]) == (0, [], 120)
    assert "120 records at most" in err
    code, out, err = commands("replay", "--checkpoint", "2")
    assert (code, json.loads(out)["agrees"]) == (0, True)
    assert "30 records at most" in err


@pytest.mark.exhaustive
def test_what_goes_to_spark(commands: Commands, fed: Fed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """More records, a Spark that is named, and work without an end go to Spark, unless the user says otherwise."""
    fed.feed(60)
    catch_up(fed, load_pipeline("bounded_pipelines", "broad", fed.name), 1, tmp_path)
    fed.feed(20)
    for options in (("--on", "spark"), ("--spark-log", str(tmp_path / "log")), ("--follow",), ("--repair", "spark")):
        code, _, err = commands("catch-up", *options)
        assert (code, NO_JAVA in err, HERE_SAID in err) == (2, True, False)
    monkeypatch.setattr(spark_arguments, "DRIVER_RECORDS_MAX", 29)
    assert NO_JAVA in commands("catch-up")[2]
    code, out, err = commands("catch-up", "--on", "driver")
    assert (code, json.loads(out)["records_in"], HERE_SAID in err) == (0, 30, False)
    fed.assert_output()
