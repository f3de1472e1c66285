"""Savepoints exported to S3 (moto) and to HDFS (MiniDFSCluster), with the checkpoints of the pipeline there as well."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.engines.savepoints.exported import METADATA
from tests.cli.conftest import Command, Orders
from tests.cli.test_restoring import run, states
from tests.cli.test_savepoints import history, taken

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint" / "store" / "files" / "rig"))
BUCKET = "checkpoints"

pytestmark = [pytest.mark.broker, pytest.mark.slow]


@pytest.fixture
def served(orders: Orders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Orders, str]]]:
    """The pipeline with a server of a kind, and a URL in it."""
    from hdfs_server import HdfsServer
    from s3_server import S3Server

    made: list[Any] = []

    def start(kind: str) -> tuple[Orders, str]:
        server: Any = S3Server() if kind == "s3" else HdfsServer(tmp_path_factory.mktemp("hdfs"))
        made.append(server)
        env = server.env if kind == "s3" else {"HADOOP_USER_NAME": getpass.getuser()}
        url = f"s3://{BUCKET}/prod" if kind == "s3" else f"hdfs://{server.host}/prod"
        command = Command(orders.command.folder, {**orders.command.environment, **env})
        return replace(orders, command=command), url

    yield start
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["s3", "hdfs"])
def test_exported_verified_restored_and_deleted(kind: str, served: Callable[[str], tuple[Orders, str]]) -> None:
    """Of a run that goes on, whose blocks lie there too: every file is read and compared; a pipeline begins from it, in
    the topic, and moves back at a savepoint; deleted, it is no savepoint any more, and what lies beside it stays."""
    orders, base = served(kind)
    with orders.running("--checkpoint-storage", f"{base}/blocks", "--parallelism", "2") as process:
        ended = orders.command("savepoint", orders.name, "--to", f"{base}/savepoints", "--json")
        assert ended.code == 0, ended.err
        url = json.loads(ended.out)["url"]
        assert url.startswith(f"{base}/savepoints/{orders.name}-")
        last = taken(orders, "--stop", "--to", f"{base}/savepoints")
        assert process.wait() == 0
    assert history(orders).manifests[last].storage == f"{base}/blocks"
    verified = orders.command("savepoints", "verify", orders.name, url)
    assert (verified.code, "is whole" in verified.out) == (0, True), verified
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    before = len(orders.totals())
    done = run(orders, "--from-savepoint", url)
    assert done.code == 0, done.err
    assert states(orders) == {f"c{number}": 100 for number in range(7)}
    orders.write(70)
    with orders.running() as process:
        number = taken(orders, "--stop")
        process.wait()
    done = run(orders, "--from-savepoint", str(number), "--checkpoint-storage", f"{base}/blocks")
    assert done.code == 0, done.err
    assert states(orders) == {f"c{number}": 110 for number in range(7)}
    assert len(orders.totals()) >= before + 70
    deleted = orders.command("savepoints", "delete", orders.name, url)
    assert deleted.code == 0, deleted.err
    gone = orders.command("savepoints", "verify", orders.name, url)
    assert (gone.code, METADATA in gone.err) == (2, True), gone
    doctor = orders.command("doctor", orders.name, "--deep")
    assert doctor.code == 0, doctor.out
