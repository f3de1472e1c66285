"""The common part of tests of audits: a run of the pipeline that does wrong, and a look at the input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bounded import Fed, Silent
from flawed_pipelines import FLAWED

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

FOLDS = Path(__file__).parent
TARGET = "flawed_pipelines:flawed"


class Quiet(Silent):
    """The `AuditProgress` of an audit."""

    def passed(self, offsets: int) -> None:
        pass


def run_flawed(fed: Fed, *arguments: str, parallelism: int = 2) -> None:
    """`exactlyonce run --until latest` of the pipeline that does wrong."""
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", TARGET, "--param", f"name={fed.name}"]
    options = ["--bootstrap-servers", fed.kafka.bootstrap_servers, "--parallelism", str(parallelism)]
    path = os.pathsep.join([str(FOLDS.parents[1] / "engines"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *options, "--until", "latest", "--checkpoint-interval", "200ms", *arguments],
        cwd=FOLDS, env={**os.environ, "PYTHONPATH": path, FLAWED: "1"},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def order_at(kafka: KafkaCluster, topic: str, partition: int, offset: int) -> int:
    """The id of an input record."""
    records = kafka.read_committed(topic)
    (found,) = [each for each in records if (each.partition, each.offset) == (partition, offset)]
    return int(json.loads(found.value or b"")["id"])
