"""The page on declarative pipelines is done as it says, in processes of Spark's own runner."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive(matrix=True)]

PAGE = (Path(__file__).parents[2] / "docs" / "spark-pipelines.md").read_text()
RUNNER = Path(sys.executable).parent / "spark-pipelines"


def block(kind: str) -> str:
    return PAGE.partition(f"\n```{kind}\n")[2].partition("```\n")[0]


def feed(kafka: KafkaCluster, first: int, last: int) -> None:
    orders = [{"id": n, "customer": f"customer {n % 7}", "total": 50 * (n % 4)} for n in range(first, last)]
    kafka.produce("orders", [(str(order["customer"]), json.dumps(order)) for order in orders])


def test_each_run_writes_what_is_new_once(own_broker: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    """After a full refresh the sink refuses, until that is undone, or it adopts: then all is written again."""
    kafka = own_broker()
    for topic in ("orders", "large-orders"):
        kafka.create_topic(topic, partitions=2)
    source = tmp_path / "transformations" / "large_orders.py"
    source.parent.mkdir()
    source.write_text(block("py"))
    once = "configuration:\n  spark.sql.pipelines.maxFlowRetryAttempts: '0'\n"  # else it waits to try again
    spec = once + block("yaml").replace("/srv/large-orders", str(tmp_path / "storage"))
    (tmp_path / "spark-pipeline.yml").write_text(spec)
    environment = {
        **os.environ, "EXACTLYONCE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip

    def run(*words: str, code: int = 0) -> str:
        ended = subprocess.run(
            [RUNNER, "run", "--spec", "spark-pipeline.yml", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def written() -> int:
        return len(kafka.read_committed("large-orders"))

    feed(kafka, 0, 100)
    run()
    assert written() == 50
    said = run("--full-refresh-all", code=1)
    (old,) = set(re.findall(r"has been written to by another query, ([0-9a-f-]+), up to batch 0;", said))
    shutil.rmtree(tmp_path / "storage" / "_checkpoints" / "large_orders" / "large" / "1")
    feed(kafka, 100, 200)
    run()
    assert written() == 100
    adopting = block("py").replace('"topic": "large-orders"}', f'"topic": "large-orders", "adoptQuery": "{old}"}}')
    source.write_text(adopting)
    run("--full-refresh-all")
    assert written() == 200
