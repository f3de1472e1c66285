"""Files in S3 (moto) and HDFS (MiniDFSCluster), by killed processes and servers: each row once, in any format."""

from __future__ import annotations

import io
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow.parquet as pq
import pytest
import running
from bounded import Silent
from hdfs_server import HdfsServer
from running import Run, assert_updates
from together import STORED_FORMATS
from waiting import until

from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.servers.s3 import S3Server

pytestmark = pytest.mark.slow

RIG = Path(__file__).parent / "rig"
ROWS = int(os.environ.get("EXACTLYONCE_ROWS", "300000"))
KILLS = 6
FAILPOINTS = (
    *("worker-barrier", "worker-frozen", "worker-flushed", "worker-acknowledged", "coordinator-checked"),
    *("coordinator-decided", "store-committing", "store-committed", "coordinator-finalized"),
)


class Filed(running.Job):
    def __init__(
        self, server: S3Server | HdfsServer, kafka: KafkaCluster, name: str, run: Callable[..., Run], folder: Path
    ) -> None:
        self.server, self.folder, self.path = server, folder, f"lake/{name}"
        self.url = f"{server.url}/{self.path}"
        super().__init__(run, kafka, name, "together:filed", "--param", f"url={self.url}", partitions=2)

    def armed(self, failpoint: str, *arguments: str) -> Run:
        fired = self.folder / f"fired-{len(self.incarnations)}"
        fired.mkdir()
        armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}=kill@2", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
        incarnation = self.start(*arguments, env=armed)
        until((fired / failpoint).exists, meanwhile=lambda: self.feed(50), told=lambda: incarnation.said, pause_s=0.2)
        return incarnation

    def loaded(self) -> Loaded:
        params = {"name": self.name, "url": self.url}
        reference: dict[str, object] = {"module": "together", "attribute": "filed", "params": params,
                                        "path": str(RIG)}  # fmt: skip
        return Loaded(load_reference(reference), reference)

    def catch_up(self, parallelism: int) -> None:
        CatchUp(self.loaded(), RunOptions(self.config, parallelism=parallelism), Silent()).lead(in_process, self.folder)

    def contents(self, format: str) -> Iterator[bytes]:
        """The published files, by clients that share no code with the sink."""
        start = f"{self.path}/{format}/"
        if isinstance(self.server, S3Server):
            for key in sorted(self.server.listed(start)):
                if not key.removeprefix(start).startswith("."):
                    yield self.server.get(key)
        else:
            import hdfs_native

            client = hdfs_native.Client(self.server.url)
            for status in client.list_status(f"/{start}"):
                if not status.isdir:
                    yield client.read(status.path).read()

    def rows(self, format: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for content in self.contents(format):
            if format == "jsonl":
                found += [json.loads(line) for line in content.splitlines()]
            elif format == "avro":
                found += [dict(row) for row in fastavro.reader(io.BytesIO(content)) if isinstance(row, dict)]
            else:
                found += pq.read_table(io.BytesIO(content)).to_pylist()
        return found

    def assert_exact(self) -> None:
        for format in STORED_FORMATS:
            rows = sorted(self.rows(format), key=lambda row: int(row["sum"]))  # a customer's sums only grow
            assert_updates(rows, self.fed, f"{format} in {self.url}")


@pytest.fixture
def filed(
    block_server: Any, kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Filed:
    for name, value in block_server.env.items():
        monkeypatch.setenv(name, value)
    path = [str(RIG), str(RIG.parents[1] / "engines"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    return Filed(block_server, kafka, topic_name, run, tmp_path)


@pytest.mark.exhaustive
def test_kills_at_each_step(filed: Filed) -> None:
    """Each incarnation is killed at another failpoint; bounded work takes its turn in between."""
    for number, failpoint in enumerate(FAILPOINTS):
        incarnation = filed.armed(failpoint, "--parallelism", str(1 + number % 3))
        incarnation.kill()
    filed.feed(500)
    filed.catch_up(2)
    filed.feed(500)
    filed.finish("--parallelism", "2")
    filed.assert_exact()


@pytest.mark.exhaustive
def test_rows_come_once_through_kills(filed: Filed) -> None:
    """Some hundred thousand rows, through kills of coordinators and workers: none missing, none doubled."""
    dice = random.Random(7)
    for _ in range(KILLS):
        filed.feed(ROWS // KILLS)
        incarnation = filed.start("--parallelism", str(dice.choice([1, 2, 3])), "--checkpoint-interval", "1s")
        workers = incarnation.await_step("deployed")["workers"]
        incarnation.await_checkpoint()
        incarnation.await_step(dice.choice(["triggered", "acknowledged", "decided"]))
        time.sleep(dice.uniform(0, 0.3))
        if dice.random() < 0.5:
            os.kill(dice.choice(workers), 9)
            incarnation.await_step("deployed")
        incarnation.kill()
    filed.finish("--parallelism", "2", "--checkpoint-interval", "1s")
    filed.assert_exact()
