"""A checkpoint whose transactions timed out while its coordinator slept is repaired by the same incarnation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from running import Job, stop
from test_zombies import await_stopped

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

TIMEOUTS = (
    "--checkpoint-interval", "300ms", "--checkpoint-timeout", "20s", "--restart-budget", "1s",
    "--transaction-timeout", "25s",
)  # fmt: skip


def await_aborted(job: Job) -> None:
    """Until the broker has aborted all that the unfinalized checkpoint has decided."""
    manifest = job.history().unfinalized
    assert manifest is not None
    assert manifest.committables
    ids = [each.transactional_id for each in manifest.committables]
    transactions = Transactions(ClientConfig({"bootstrap.servers": job.kafka.bootstrap_servers}))
    deadline = time.monotonic() + LIMIT_S
    while {each.state for each in transactions.describe(ids).values() if each} != {"CompleteAbort"}:
        assert time.monotonic() < deadline, "the broker's timeout aborts them"
        time.sleep(0.1)  # the broker's own timeout must pass
    transactions.close()


@pytest.mark.exhaustive
def test_a_clean_stop_after_a_repair(
    own_broker: Callable[..., OwnCluster], job_of: Callable[..., Job], failpoint: Any
) -> None:
    """The repairs are visible in the place of what was lost, so that a clean stop ends with 0, and a run goes on."""
    kafka = own_broker({"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"})
    job = job_of("slow", "--param", "pause_ms=1", *TIMEOUTS, cluster=kafka)
    job.feed(3000)
    run = job.start(env=failpoint("coordinator-decided", "stop"))
    await_stopped(run.process.pid)
    await_aborted(job)
    os.kill(run.process.pid, signal.SIGCONT)
    run.await_event(lambda event: event["event"] == "note" and "repaired" in event["text"])
    stop(run)
    job.finish_here()
    job.assert_totals()
