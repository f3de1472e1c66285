"""Savepoints exported to S3 (moto) and to HDFS (MiniDFSCluster), with the checkpoints of the pipeline there as well."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.engines.savepoints.exported import METADATA
from tests.cli.conftest import Orders, by_customer

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture
def base(block_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in block_server.env.items():
        monkeypatch.setenv(name, value)
    return f"{block_server.url}/prod"


def test_exported_verified_restored_and_deleted(orders: Orders, base: str) -> None:
    command = orders.command
    with orders.running("--checkpoint-storage", f"{base}/blocks", "--parallelism", "2") as run:
        url = command.done("savepoint", orders.name, "--to", f"{base}/savepoints", "--json").json["url"]
        assert url.startswith(f"{base}/savepoints/{orders.name}-")
        last = orders.taken("--stop", "--to", f"{base}/savepoints")
        assert run.wait() == 0
    assert orders.history().manifests[last].storage == f"{base}/blocks"
    assert "is intact" in command.done("savepoints", "verify", orders.name, url).out
    orders.reset()
    before = len(orders.totals())
    orders.ran("--from-savepoint", url)
    assert orders.states() == by_customer(100)
    orders.write(70)
    number = orders.ended_by_savepoint()
    orders.ran("--from-savepoint", str(number), "--checkpoint-storage", f"{base}/blocks")
    assert orders.states() == by_customer(110)
    assert len(orders.totals()) >= before + 70
    command.done("savepoints", "delete", orders.name, url)
    command.refused(METADATA, "savepoints", "verify", orders.name, url)
    command.done("doctor", orders.name, "--deep")
