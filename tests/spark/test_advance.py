"""`exactlyonce backfill` and `catch-up` as their users run them: what they say, and every process killed or failing."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from auditing import audited
from bounded import HERE, Fed, Files, catch_up, load_pipeline, run_local
from drivers import Driver
from running import Job, orders
from window_clicks import Clicks

from exactlyonce.engines.bounded.advance import PUBLISHER_RECORDS
from exactlyonce.engines.bounded.stages import SPLIT_OFFSETS_MIN
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture
def fed(kafka: Any, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> Fed:
    """The input of `broad`, which processes find in the folder of this test's pipelines."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1] / "engines")]))
    return Fed(kafka, topic_name)


def command(fed: Fed, folder: Path, name: str, *options: str, failpoints: str = "") -> Driver:
    words = ["-m", "exactlyonce.cli.main", name, "bounded_pipelines:broad", "--param", f"name={fed.name}", "--json"]
    words += ["--on", "spark", "--bootstrap-servers", fed.kafka.bootstrap_servers]
    words += ["--staging", str(folder / "staging")]
    return Driver(folder, failpoints, *words, *options, cwd=HERE)


def ended(fed: Fed, folder: Path, name: str, *options: str, failpoints: str = "") -> dict[str, Any]:
    with command(fed, folder, name, *options, failpoints=failpoints) as driver:
        driver.end()
    summary: dict[str, Any] = json.loads(driver.stdout.read_text().splitlines()[-1])
    return summary


def assert_finished(fed: Fed, folder: Path) -> None:
    """A later run without Spark finds and leaves everything as if nothing had happened."""
    pipeline = load_pipeline("bounded_pipelines", "broad", fed.name)
    summary = catch_up(fed, pipeline, 2, folder / "staging")
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    fed.assert_nothing_left()


def test_speculation_in_sparks_own_settings(fed: Fed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation that spark-defaults.conf turns on is refused as well, before anything is begun; Spark's lines are
    kept in a file where one is named."""
    fed.feed(300)
    (tmp_path / "spark-defaults.conf").write_text("spark.speculation true\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with command(fed, tmp_path, "backfill", "--spark-log", str(tmp_path / "spark.log")) as driver:
        driver.end(2)
    assert json.loads(driver.stderr.read_text())["text"].startswith("spark.speculation is on")
    assert "log4j" in (tmp_path / "spark.log").read_text()
    assert not fed.history().incarnation_latest, "nobody has begun"


def test_backfill_run_and_catch_up(fed: Fed, tmp_path: Path) -> None:
    fed.feed(6_000)
    summary = ended(fed, tmp_path, "backfill", "--chunk-records", "5000")
    assert (summary["records_in"], summary["checkpoints"], summary["records_out"]) == (9_000, 2, 27_000)
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines], "our lines, and no others"
    fed.assert_output()
    fed.feed(600)
    run_local(fed, 3)
    fed.feed(600)
    assert ended(fed, tmp_path, "catch-up", "--parallelism", "3")["records_in"] == 900
    assert_finished(fed, tmp_path)


@pytest.mark.parametrize(
    ("computing", "publishing", "orders", "options"),
    [
        ("kill", "raise", 3_000, ()),
        ("kill@3", "kill@2", 2 * PUBLISHER_RECORDS + 600, ("--master", "local[2,3]", "--parallelism", "24")),
    ],
    ids=["by default", "several units a task"],
)
def test_tasks_that_fail_are_tried_again(
    computing: str, publishing: str, orders: int, options: tuple[str, ...], fed: Fed, tmp_path: Path
) -> None:
    """A task whose process dies or that raises is repeated, with units that it had done: output and state are exact."""
    fed.feed(orders)
    armed = f"unit-computed={computing},publication-flushed={publishing}"
    ended(fed, tmp_path, "backfill", *options, failpoints=armed)
    assert {each.name for each in (tmp_path / "fired").iterdir()} == {"unit-computed", "publication-flushed"}
    fed.assert_output()
    fed.assert_nothing_left()
    assert_finished(fed, tmp_path)


def test_executors_are_killed(fed: Fed, tmp_path: Path, spark_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under dynamic allocation and adaptive execution an executor dies with a unit, and another with a publication."""
    monkeypatch.setenv("SPARK_HOME", str(spark_home))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    fed.feed(3_000)
    settings = {
        "spark.pyspark.python": sys.executable, "spark.ui.enabled": "false", "spark.executor.cores": "1",
        "spark.sql.adaptive.enabled": "true", "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
        "spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "2",
        "spark.dynamicAllocation.executorIdleTimeout": "1s",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("--spark-conf", f"{name}={value}")]
    options += ["--master", "local-cluster[2,1,1024]", "--chunk-records", "3000"]
    armed = ("unit-computed", "publication-flushed")
    with command(fed, tmp_path, "backfill", *options, failpoints=",".join(f"{at}=stop" for at in armed)) as driver:
        for failpoint in armed:
            driver.await_fired(failpoint)
            driver.kill_executor_of_stopped()
        driver.end()
    summary = json.loads(driver.stdout.read_text().splitlines()[-1])
    assert (summary["records_in"], summary["checkpoints"], summary["parallelism"]) == (4_500, 2, 2)
    fed.assert_output()
    fed.assert_nothing_left()
    assert_finished(fed, tmp_path)


def test_a_split_whose_task_is_killed(kafka: Any, fed: Fed, tmp_path: Path) -> None:
    """Two units read one partition; one of them dies and is repeated. Output, state and checkpoint are exact."""
    source = f"{fed.name}-wide"
    kafka.create_topic(source, 1)
    kafka.produce(source, orders(2 * SPLIT_OFFSETS_MIN))
    words = ["-m", "exactlyonce.cli.main", "backfill", "bounded_pipelines:wide", "--json", "--on", "spark"]
    words += ["--param", f"name={fed.name}", "--param", f"source={source}", "--master", "local[2,3]"]
    words += ["--bootstrap-servers", kafka.bootstrap_servers, "--staging", str(tmp_path / "staging")]
    with Driver(tmp_path, "unit-computed=kill", *words, cwd=HERE) as driver:
        driver.end()
    assert (tmp_path / "fired" / "unit-computed").exists()
    manifest = fed.history().latest
    assert manifest is not None
    (log,) = (log for log in manifest.order_logs if log.task == "orders")
    assert len(log.blocks) == 2, "both splits have noted what they took"
    loaded = load_pipeline("bounded_pipelines", "wide", fed.name, source=source)
    report = audited(loaded, fed.config, tmp_path)
    assert (report.records_in, report.findings) == (2 * SPLIT_OFFSETS_MIN, [])
    fed.assert_nothing_left()


def test_files_whose_reader_is_killed(kafka: Any, topic_name: str, tmp_path: Path, fed: Fed) -> None:
    """A task whose process dies reads its files again; then the driver dies, and the next one reads new files, too."""
    files, format = Files(kafka, topic_name, tmp_path / "in"), "parquet"
    words = ["-m", "exactlyonce.cli.main", "backfill", "source_pipelines:files", "--json", "--on", "spark"]
    words += ["--bootstrap-servers", kafka.bootstrap_servers, "--staging", str(tmp_path / "staging")]
    words += ["--master", "local[2,3]", "--chunk-records", "4000", "--param", f"name={files.name}"]
    words += ["--param", f"folder={files.folder}", "--param", f"format={format}"]
    for number in range(6):
        files.add(f"{number}.{format}", 900)
    with Driver(tmp_path, "unit-computed=kill@3,advance-published=kill@2", *words, cwd=HERE) as driver:
        driver.end(-signal.SIGKILL)
    assert {each.name for each in (tmp_path / "fired").iterdir()} == {"unit-computed", "advance-published"}
    driver.await_all_ended()
    files.add(f"0-new.{format}", 900)
    with Driver(tmp_path, "publication-flushed=kill", *words, cwd=HERE) as driver:
        driver.end()
    assert (tmp_path / "fired" / "publication-flushed").exists()
    files.assert_output()
    files.assert_nothing_left()
    loaded = load_pipeline("source_pipelines", "files", files.name, format=format, folder=str(files.folder))
    report = audited(loaded, files.config, tmp_path)
    assert (report.findings, report.records_in > 0) == ([], True)


@pytest.mark.parametrize("failpoint", ["unit-computed", "coordinator-committed"])
def test_the_jvm_is_killed(failpoint: str, fed: Fed, tmp_path: Path) -> None:
    """Without its JVM under a task the driver ends with a message, and whoever comes next finishes what was begun.
    Spark is not needed any more at the manifest and at the end of the checkpoint: the driver ends well."""
    fed.feed(3_000)
    with command(fed, tmp_path, "backfill", failpoints=f"{failpoint}=stop") as driver:
        driver.await_fired(failpoint)
        driver.kill_java()
        if failpoint.startswith("coordinator-"):
            driver.process.send_signal(signal.SIGCONT)
            driver.end()
            fed.assert_output()
        else:
            assert driver.process.wait(LIMIT_S) not in (0, 70), driver.said()
            assert "Traceback" not in driver.stderr.read_text().splitlines()[-1]
    assert_finished(fed, tmp_path)


def test_the_driver_is_killed(fed: Fed, tmp_path: Path) -> None:
    fed.feed(3_000)
    with command(fed, tmp_path, "backfill", failpoints="advance-published=stop") as driver:
        driver.await_fired("advance-published")
        driver.process.kill()
        driver.end(-signal.SIGKILL)
        driver.await_all_ended()
    assert_finished(fed, tmp_path)


def test_windows_whose_units_are_killed(run: Any, kafka: Any, topic_name: str, tmp_path: Path, fed: Fed) -> None:
    """A unit dies and is repeated, then a driver; a run goes on with the open windows, and all is what SQL says."""
    name, window = f"{topic_name}-windows", "session"
    clicks = Clicks(Job(run, kafka, name, "window_pipelines:windowed", "--param", f"window={window}"), window)
    words = ["-m", "exactlyonce.cli.main", "backfill", "window_pipelines:windowed", "--json", "--on", "spark"]
    words += ["--bootstrap-servers", kafka.bootstrap_servers, "--staging", str(tmp_path / "staging")]
    words += ["--param", f"name={name}", "--param", f"window={window}"]
    words += ["--chunk-records", "700", "--num-retained", "100"]
    clicks.feed(800)
    with Driver(
        tmp_path, "unit-computed=kill,advance-published=kill@2", *words, "--master", "local[2,3]", cwd=HERE
    ) as driver:
        driver.end(-signal.SIGKILL)
    assert {each.name for each in (tmp_path / "fired").iterdir()} == {"unit-computed", "advance-published"}
    driver.await_all_ended()
    with Driver(tmp_path, "", *words, "--master", "local[2]", cwd=HERE) as driver:
        driver.end()
    clicks.feed(300)
    clicks.end()
    clicks.job.finish("--parallelism", "2", "--num-retained", "100")
    clicks.assert_as_by_sql()
    report = audited(load_pipeline("window_pipelines", "windowed", name, window=window), fed.config, tmp_path)
    assert (report.findings, report.records_in) == ([], 3_303)
