"""A checkpoint whose transactions timed out while its coordinator slept is repaired by the same incarnation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import assert_totals, orders

from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

TIMEOUTS = (
    "--checkpoint-interval", "300ms", "--checkpoint-timeout", "20s", "--restart-budget", "1s",
    "--transaction-timeout", "25s",
)  # fmt: skip


def await_aborted(servers: dict[str, str], name: str) -> None:
    """Until the broker has aborted all that the unfinalized checkpoint has decided."""
    manifest = read_history(servers, name).unfinalized
    assert manifest is not None
    assert manifest.committables
    ids = [each.transactional_id for each in manifest.committables]
    transactions, deadline = Transactions(ClientConfig(servers)), time.monotonic() + LIMIT_S
    while {each.state for each in transactions.describe(ids).values() if each} != {"CompleteAbort"}:
        assert time.monotonic() < deadline, "the broker's timeout aborts them"
        time.sleep(0.1)  # the broker's own timeout must pass
    transactions.close()


@pytest.mark.exhaustive
def test_a_clean_stop_after_a_repair(
    own_broker: Callable[..., OwnCluster], topic_name: str, run: Any, failpoint: Any
) -> None:
    """The repairs are visible in the place of what was lost, so that a clean stop ends with 0, and a run goes on."""
    kafka = own_broker({"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"})
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = orders(3000)
    kafka.produce(f"{topic_name}-in", fed)
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    job = run(
        "pipelines:slow", "--param", f"name={topic_name}", "--param", "pause_ms=1", *TIMEOUTS,
        servers=kafka.bootstrap_servers, env=failpoint("coordinator-decided", "stop"),
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{job.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline, "the coordinator stops at its failpoint"
        time.sleep(0.01)  # looking at another process
    await_aborted(servers, topic_name)
    os.kill(job.process.pid, signal.SIGCONT)
    job.await_event(lambda event: event["event"] == "note" and "repaired" in event["text"])
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    rest = run(
        "pipelines:slow", "--param", f"name={topic_name}", "--param", "pause_ms=1", "--until", "latest", *TIMEOUTS,
        servers=kafka.bootstrap_servers,
    )  # fmt: skip
    assert rest.wait() == 0, rest.said
    assert_totals(kafka, f"{topic_name}-out", fed)
