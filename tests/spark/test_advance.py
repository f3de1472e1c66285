"""`exactlyonce backfill` and `catch-up` as their users run them: what they say, and every process killed or failing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bounded import HERE, Fed, catch_up, exported_and_reset, load_pipeline, run_local

from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow]


@pytest.fixture
def fed(kafka: Any, topic_name: str) -> Fed:
    """The input of `broad`."""
    return Fed(kafka, topic_name)


class Command:
    """`exactlyonce NAME bounded_pipelines:broad ...` as a process, with failpoints armed."""

    def __init__(self, fed: Fed, name: str, *options: str, folder: Path, failpoints: str = "") -> None:
        fired = folder / "fired"
        fired.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "exactlyonce.cli.main", name, "bounded_pipelines:broad"]
        pipeline = ["--param", f"name={fed.name}", "--bootstrap-servers", fed.kafka.bootstrap_servers]
        path = os.pathsep.join([str(HERE.parents[1] / "engines"), os.environ.get("PYTHONPATH", "")])
        armed = {"EXACTLYONCE_FAILPOINTS": failpoints, "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
        self.fired = fired
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        with self.stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(
                [*command, *pipeline, "--json", "--staging", str(folder / "staging"), *options],
                cwd=HERE, env={**os.environ, "PYTHONPATH": path, **armed}, stdout=out, stderr=err,
            )  # fmt: skip

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(LIMIT_S)

    def await_fired(self, failpoint: str) -> None:
        """Return once a process has stopped itself at *failpoint*."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.fired / failpoint).exists():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, f"{failpoint} is not met"
            time.sleep(0.05)  # a file of another process has no event to wait for

    @property
    def summary(self) -> dict[str, Any]:
        """The line of JSON."""
        found: dict[str, Any] = json.loads(self.stdout.read_text().splitlines()[-1])
        return found


def descendants(pid: int) -> Iterator[int]:
    """All processes below *pid*."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)


def java_of(pid: int) -> int:
    """The JVM that a driver has started."""
    return next(each for each in descendants(pid) if Path(f"/proc/{each}/comm").read_text().strip() == "java")


def is_gone(pid: int) -> bool:
    """Whether no process of this id runs."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


@pytest.fixture
def ending() -> Iterator[list[int]]:
    """Process ids that are killed when the test ends, if they live."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def assert_finished(fed: Fed, folder: Path) -> None:
    """Whoever comes next, without Spark, finds and leaves everything as if nothing had happened."""
    pipeline = load_pipeline("bounded_pipelines", "broad", fed.name)
    summary = catch_up(fed, pipeline, 2, folder / "staging")
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    fed.assert_nothing_left()


@pytest.mark.exhaustive
def test_speculation_in_sparks_own_settings(fed: Fed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What spark-defaults.conf turns on is refused as well, before anything is begun; Spark's lines are kept in a file
    where one is named."""
    fed.feed(300)
    (tmp_path / "spark-defaults.conf").write_text("spark.speculation true\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    command = Command(fed, "backfill", "--spark-log", str(tmp_path / "spark.log"), folder=tmp_path)
    assert command.wait() == 2
    assert command.stderr.read_text().startswith("exactlyonce: spark.speculation is on")
    assert "log4j" in (tmp_path / "spark.log").read_text()
    assert f"{fed.name}.checkpoints" not in fed.kafka.admin().list_topics().topics


@pytest.mark.exhaustive
def test_backfill_run_and_catch_up(fed: Fed, tmp_path: Path) -> None:
    """Backfill with Spark, run locally, catch up with Spark: one output; each begins where the other ended."""
    fed.feed(6_000)
    command = Command(fed, "backfill", "--chunk-records", "5000", folder=tmp_path)
    assert command.wait() == 0, command.stderr.read_text()
    assert (command.summary["records_in"], command.summary["checkpoints"]) == (9_000, 2)
    assert command.summary["records_out"] == 27_000
    assert [json.loads(line)["event"] for line in command.stderr.read_text().splitlines()], "our lines, and no others"
    fed.assert_output()
    fed.feed(600)
    run_local(fed, 3)
    fed.feed(600)
    command = Command(fed, "catch-up", "--parallelism", "3", folder=tmp_path)
    assert command.wait() == 0, command.stderr.read_text()
    assert command.summary["records_in"] == 900
    assert_finished(fed, tmp_path)


@pytest.mark.exhaustive
def test_backfill_from_a_savepoint(fed: Fed, tmp_path: Path) -> None:
    """Killed before the restored state is decided, the same command begins from the savepoint all the same; it goes on
    from there, at another parallelism, with one output."""
    fed.feed(3_000)
    run_local(fed, 2)
    exports = tmp_path / "exports"
    exports.mkdir()
    url = exported_and_reset(fed, exports)
    fed.feed(600)
    options = ("--from-savepoint", url, "--parallelism", "3")
    killed = Command(fed, "backfill", *options, folder=tmp_path, failpoints="savepoint-written=kill")
    assert killed.wait() == -signal.SIGKILL
    assert fed.history().latest is None
    command = Command(fed, "backfill", *options, folder=tmp_path)
    assert command.wait() == 0, command.stderr.read_text()
    assert command.summary["records_in"] == 900
    assert "restored from savepoint" in command.stderr.read_text()
    assert fed.history().manifests[0].kind == "restored"
    assert_finished(fed, tmp_path)


@pytest.mark.exhaustive
def test_blocks_outside_of_the_topic(fed: Fed, tmp_path: Path) -> None:
    """Executors write state as files, read it in the next chunk, and what a killed one has written is removed."""
    root = tmp_path / "blocks"
    root.mkdir()
    fed.storage = f"file://{root}"
    fed.feed(6_000)
    options = ("--checkpoint-storage", fed.storage, "--chunk-records", "5000", "--master", "local[2,3]")
    command = Command(fed, "backfill", *options, folder=tmp_path, failpoints="unit-computed=kill@3")
    assert command.wait() == 0, command.stderr.read_text()
    assert (command.fired / "unit-computed").exists()
    fed.assert_output()
    history = fed.history()
    assert history.latest is not None
    assert (history.storage, history.latest.checkpoint) == (fed.storage, 2)
    assert_finished(fed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("computing", "publishing"), [("kill", "raise"), ("raise", "kill")])
def test_tasks_that_fail_are_tried_again(computing: str, publishing: str, fed: Fed, tmp_path: Path) -> None:
    """A Python worker killed, or failing, after its work, or after its pre-commit: another attempt, one output."""
    fed.feed(3_000)
    armed = f"unit-computed={computing},publication-flushed={publishing}"
    command = Command(fed, "backfill", "--master", "local[2,3]", folder=tmp_path, failpoints=armed)
    assert command.wait() == 0, command.stderr.read_text()
    assert {each.name for each in command.fired.iterdir()} == {"unit-computed", "publication-flushed"}
    fed.assert_output()
    fed.assert_nothing_left()
    assert_finished(fed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("failpoint", ["unit-computed", "publication-flushed"])
def test_the_jvm_is_killed_under_a_task(failpoint: str, fed: Fed, tmp_path: Path, ending: list[int]) -> None:
    """Without its JVM the driver ends with a message, and whoever comes next finishes what was begun."""
    fed.feed(3_000)
    command = Command(fed, "backfill", folder=tmp_path, failpoints=f"{failpoint}=stop")
    command.await_fired(failpoint)
    ending += descendants(command.process.pid)
    os.kill(java_of(command.process.pid), signal.SIGKILL)
    assert command.wait() not in (0, 70), command.stderr.read_text()
    assert "Traceback" not in command.stderr.read_text().splitlines()[-1]
    assert_finished(fed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("failpoint", ["coordinator-checked", "coordinator-committed"])
def test_the_jvm_is_killed_at_the_decision(failpoint: str, fed: Fed, tmp_path: Path, ending: list[int]) -> None:
    """At the manifest and at the end of the checkpoint Spark is not needed any more: the driver ends well."""
    fed.feed(3_000)
    command = Command(fed, "backfill", folder=tmp_path, failpoints=f"{failpoint}=stop")
    command.await_fired(failpoint)
    ending += descendants(command.process.pid)
    os.kill(java_of(command.process.pid), signal.SIGKILL)
    os.kill(command.process.pid, signal.SIGCONT)
    assert command.wait() == 0, command.stderr.read_text()
    fed.assert_output()
    assert_finished(fed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("failpoint", ["advance-published"])
def test_the_driver_is_killed(failpoint: str, fed: Fed, tmp_path: Path, ending: list[int]) -> None:
    """The JVM and its workers end with the driver, and whoever comes next finishes what was begun."""
    fed.feed(3_000)
    command = Command(fed, "backfill", folder=tmp_path, failpoints=f"{failpoint}=stop")
    command.await_fired(failpoint)
    ending += descendants(command.process.pid)
    command.process.kill()
    assert command.wait() == -9
    deadline = time.monotonic() + LIMIT_S
    while not all(map(is_gone, ending)):
        assert time.monotonic() < deadline, "what the driver started outlives it"
        time.sleep(0.1)  # other processes' ends have no event to wait for
    assert_finished(fed, tmp_path)
