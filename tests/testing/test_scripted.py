"""Scripts that say where a process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.scripted import CRASH, fired, script_topic

if TYPE_CHECKING:
    from exactlyonce.testing.cluster import KafkaCluster


INCARNATIONS = """
import os, sys
from exactlyonce.testing.scripted import crash_once
for incarnation in range(3):
    if (child := os.fork()) == 0:
        crash = crash_once(sys.argv[1], int)
        print([crash(record) for record in (b"1", b"CRASH 1", b"2", b"CRASH 3", b"4")], flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_each_crash_kills_once(tmp_path: Path) -> None:
    path = str(tmp_path / "fired")
    done = subprocess.run([sys.executable, "-c", INCARNATIONS, path], stdout=subprocess.PIPE, text=True)
    killed = -signal.SIGKILL
    assert done.stdout.splitlines() == [f"{killed:d}", f"{killed:d}", "[[1], [], [2], [], [4]]", "0"]
    assert fired(path) == [1, 3]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_pipeline_survives_its_script(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    script: list[Any] = [*range(1, 50), CRASH, CRASH, *range(50, 100)]
    script_topic(kafka, f"{topic_name}-in", script)
    kafka.create_topic(f"{topic_name}-out")
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", "scripted_pipeline:scripted"]
    arguments = ["--param", f"name={topic_name}", "--until", "latest", "--checkpoint-interval", "100ms"]
    path = tmp_path / "fired"
    run = subprocess.run(
        [*command, *arguments, "--bootstrap-servers", kafka.bootstrap_servers], cwd=Path(__file__).parent,
        env={**os.environ, "SCRIPT_FIRED": str(path)}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert fired(path) == [script.index(CRASH), script.index(CRASH) + 1]
    expected = [[number, sum(range(number % 2, number + 1, 2))] for number in range(1, 100)]
    assert [json.loads(record.value or b"") for record in kafka.read_committed(f"{topic_name}-out")] == expected
