"""Programs with a session of their own, by spark-submit, on a cluster and with Spark Connect; one may be stopped."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ended_session import FOLDER, NAME
from program import CELL

from exactlyonce.connectors.embedded.broker import HOST
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]

PROGRAM = Path(__file__).parent / "rig" / "program.py"


def run(kafka: KafkaCluster, name: str, folder: Path, *command: str, **environment: str) -> dict[str, Any]:
    """What the program prints, which computes ten numbers, and then meets one that its function raises on."""
    kafka.create_topic(f"{name}-in", 1)
    kafka.create_topic(f"{name}-out", 1)
    kafka.produce(f"{name}-in", [str(number) for number in range(20)])
    own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **environment}
    ended = subprocess.run(
        [*command, kafka.bootstrap_servers, name, str(folder)],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **own},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    printed: dict[str, Any] = next(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    return printed


def assert_done(printed: dict[str, Any], name: str) -> None:
    assert (printed["records"], printed["checkpoint"], printed["judged"], printed["findings"]) == (10, 1, 10, 0)
    assert printed["lines"][0] == f"{name}: checkpoint 1, stage in, 0 of 2 units; 0 of 10 offsets"
    assert printed["lines"][-1] == f"{name}: checkpoint 1; 10 of 10 offsets"
    first, place, *_, last = printed["cause"].strip().splitlines()
    assert (first, last.split(":")[0]) == ("Traceback (most recent call last):", "ZeroDivisionError")
    assert place.endswith("in double")
    assert printed["facts"] == {"operator": "map-after-in", "topic": f"{name}-in", "partition": 0, "offset": 13}
    assert printed["tags_after"] == ["mine"]
    assert printed["count"] == 3, "the session goes on"


def test_a_submitted_program(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    """Master and name are those of spark-submit, and the session goes on."""
    (tmp_path / "submitted_pipeline.py").write_text(CELL.format(name=topic_name))
    submit = str(Path(sys.executable).parent / "spark-submit")
    line = [submit, "--master", "local[2]", "--name", "mine", str(PROGRAM), "submitted"]
    printed = run(kafka, topic_name, tmp_path, *line)
    assert_done(printed, topic_name)
    assert (printed["master"], printed["name"]) == ("local[2]", "mine")


@pytest.mark.parametrize("kind", ["connect", "cluster"])
def test_a_cell_travels(kind: str, kafka: KafkaCluster, topic_name: str, tmp_path: Path, spark_home: Path) -> None:
    """The file of the cell's module is away while units run, on Spark Connect and in executors of a classic session."""
    line = [sys.executable, str(PROGRAM), kind]
    printed = run(kafka, topic_name, tmp_path, *line, SPARK_HOME=str(spark_home))
    assert_done(printed, topic_name)
    if kind == "connect":
        assert f"{topic_name}: checkpoint 1; stage in; 2 units" in printed["tags"]


RIG = Path(__file__).parent / "rig"
STOPPED = (
    "The Spark session was stopped before {}: checkpoint 2, stage in was done. Nothing of its checkpoint is visible"
)


@pytest.mark.parametrize("kind", ["backfill", "follow"])
def test_a_session_is_stopped(kind: str, kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
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


WRITES = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", False).getOrCreate()
options = f"'kafka.bootstrap.servers' = '{sys.argv[1]}', subscribe = '{sys.argv[2]}'"
spark.sql(f"CREATE TEMPORARY VIEW read USING exactlyonce OPTIONS ({options})")
assert spark.sql("SELECT count(*) FROM read").first()[0] == 3
orders = spark.range(100).selectExpr("id", "'ann' AS customer", "id * 2 AS total").repartition(2)
writing = orders.write.format("exactlyonce").mode("append").option("sinkId", sys.argv[2]).option("sink", "sqlite")
for _ in range(2):
    writing.option("path", sys.argv[3]).option("writeId", "w").option("kafka.bootstrap.servers", sys.argv[1]).save()
"""


def test_a_sink_of_another_package(kafka: KafkaCluster, topic_name: str, tmp_path: Path, shop_sqlite: Path) -> None:
    """`df.write` to the store of the documentation, by the name of its entry point; a repeated write adds nothing.

    The program does not register the format, and reads a topic in SQL.
    """
    kafka.create_topic(topic_name)
    kafka.produce(topic_name, ["1", "2", "3"])
    database = tmp_path / "orders.db"
    own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": HOST, "PYTHONPATH": str(shop_sqlite)}
    line = [sys.executable, "-c", WRITES, kafka.bootstrap_servers, topic_name, str(database)]
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(database)) as db:
        rows = db.execute("SELECT id, customer, total FROM orders ORDER BY id").fetchall()
    assert rows == [(id, "ann", 2 * id) for id in range(100)]
