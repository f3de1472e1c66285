"""A cluster whose executors have a Python of their own: what they need comes packed; without it, the error says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
BASE_PYTHON = Path(sys.base_prefix, "bin", "python3")
"""It has none of our packages."""
PIPELINE = """\
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink

def make(name: str) -> Pipeline:
    pipeline = Pipeline(name)
    numbers = pipeline.source("numbers", KafkaSource(f"{name}-numbers", value=int)).key_by(lambda number: number % 10)
    numbers.reduce("sums", lambda left, right: left + right).sink("out", KafkaSink(f"{name}-sums"))
    return pipeline
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A packed environment with a wheel of this tree, as in docs/spark-cluster.md; versions are those of here."""
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    done(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels), folder=ROOT)
    done(sys.executable, "-m", "venv", "--copies", "--without-pip", str(environment), folder=tmp_path)
    (tmp_path / "here").write_text("".join(sorted(pinned())))
    python = str(environment / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "-q", "-c", "here"]
    done(*install, str(next(wheels.glob("*.whl"))), "pandas", "pyarrow", folder=tmp_path)
    done("tar", "-C", "environment", "--use-compress-program", "gzip -1", "-cf", "environment.tar.gz", ".",
         folder=tmp_path)  # fmt: skip
    return tmp_path / "environment.tar.gz"


def pinned() -> Iterator[str]:
    for each in distributions():
        if each.name != "exactlyonce-kafka":
            yield f"{each.name}=={each.version}\n"


def done(*command: str, folder: Path) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def backfill(
    kafka: Any, name: str, spark_home: Path, executors: int, *settings: str
) -> subprocess.CompletedProcess[str]:
    folder = spark_home.parent
    (folder / "sums.py").write_text(PIPELINE)
    kafka.create_topic(f"{name}-numbers", partitions=2)
    kafka.create_topic(f"{name}-sums", partitions=2)
    kafka.produce(f"{name}-numbers", [(str(number), str(number)) for number in range(1000)])
    environment = {**os.environ, "SPARK_HOME": str(spark_home), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYSPARK_PYTHON", None)
    environment["SPARK_CONNECT_MODE_ENABLED"] = "1"  # left behind by a session of Connect in the parent
    command = [sys.executable, "-m", "exactlyonce.cli.main", "backfill", "sums:make", "--param", f"name={name}"]
    command += ["--bootstrap-servers", kafka.bootstrap_servers, "--master", f"local-cluster[{executors},1,1024]"]
    command += [word for setting in (*settings, "spark.ui.enabled=false") for word in ("--spark-conf", setting)]
    return subprocess.run(
        [*command, "--staging", str(folder / "staging"), "--json"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def test_executors_get_a_packed_environment(kafka: Any, topic_name: str, spark_home: Path, archive: Path) -> None:
    python = "spark.pyspark.python=./environment/bin/python"
    ended = backfill(kafka, topic_name, spark_home, 2, f"spark.archives={archive}#environment", python)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["records_out"] == 1000
    sums = [json.loads(each.value) for each in kafka.read_committed(f"{topic_name}-sums")]
    assert len(sums) == 1000
    assert sorted(sums)[-10:] == [sum(range(last, 1000, 10)) for last in range(10)]
    assert list((spark_home.parent / "staging").iterdir()) == []


def test_executors_without_it_are_told_what_to_do(kafka: Any, topic_name: str, spark_home: Path) -> None:
    python = f"spark.pyspark.python={BASE_PYTHON}"
    ended = backfill(kafka, topic_name, spark_home, 1, python, "spark.task.maxFailures=1")
    assert ended.returncode == 2, ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert "executors have a Python without exactlyonce" in said
    assert "--spark-conf spark.archives=environment.tar.gz#environment" in said
