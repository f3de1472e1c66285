"""A session that its program stops in the middle of bounded work: the call says so, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from program import CELL

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]

PROGRAM = """\
import sys
from pyspark.sql import SparkSession
from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.spark import backfill
from stopped_pipeline import pipeline


def done(progress=None):
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    given = {"bootstrap_servers": sys.argv[1], "parallelism": 2, "chunk_records": 5}
    return backfill(spark, pipeline, progress=progress and progress(spark), **given)


def stopping(spark):
    def on_progress(progress):
        if "checkpoint 2, " in str(progress):
            spark.stop()
    return on_progress


try:
    done(stopping)
except ExactlyOnceError as error:
    print(type(error).__name__, error)
print(done().checkpoint)
"""


def test_a_session_is_stopped_in_the_second_checkpoint(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    (tmp_path / "stopped_pipeline.py").write_text(CELL.format(name=topic_name))
    (tmp_path / "program.py").write_text(PROGRAM)
    for suffix in ("in", "out"):
        kafka.create_topic(f"{topic_name}-{suffix}", 1)
    kafka.produce(f"{topic_name}-in", [str(number) for number in range(12)])
    own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "program.py", kafka.bootstrap_servers],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **own},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    said, newest = ended.stdout.splitlines()[0], ended.stdout.splitlines()[-1]
    assert said.startswith(f"StageFailed The Spark session was stopped before {topic_name}: checkpoint 2"), ended
    assert newest == "3"
    outputs = [json.loads(record.value or b"") for record in kafka.read_committed(f"{topic_name}-out")]
    assert sorted(outputs) == sorted(2 * number // (number - 13) for number in range(12))
