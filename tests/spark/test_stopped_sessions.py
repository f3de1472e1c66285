"""A session that ends in the middle of bounded work: the call says so, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ended_session import FOLDER, NAME

from exactlyonce.connectors.embedded.broker import HOST
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]

RIG = Path(__file__).parent / "rig"
STOPPED = (
    "The Spark session was stopped before {}: checkpoint 2, stage in was done. Nothing of its checkpoint is visible"
)


@pytest.mark.parametrize("kind", ["backfill", "follow"])
def test_a_session_is_stopped_in_the_second_checkpoint(
    kind: str, kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """By the program, as a stage begins and while a task computes; a second call does the rest."""
    for suffix in ("in", "out"):
        kafka.create_topic(f"{topic_name}-{suffix}", 1)
    kafka.produce(f"{topic_name}-in", [str(number) for number in range(12)])
    path = os.pathsep.join([str(RIG), str(RIG.parents[1] / "engines")])
    own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": HOST, "PYTHONPATH": path}
    line = [sys.executable, str(RIG / "ended_session.py"), kind, kafka.bootstrap_servers]
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, **own, NAME: topic_name, FOLDER: str(tmp_path)}, capture_output=True,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    began = "exit code 1: exactlyonce" if kind == "follow" else "StageFailed"
    assert printed["error"].startswith(f"{began}: {STOPPED.format(topic_name)}")
    assert printed["checkpoint"] == 3
    outputs = [int(record.value or b"") for record in kafka.read_committed(f"{topic_name}-out")]
    assert sorted(outputs) == [2 * number for number in range(12)]
