"""A decided transaction that the broker's timeout aborted while everything was down is repaired by copying it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from running import Job

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker

TIMEOUTS = (
    "--checkpoint-interval", "300ms", "--checkpoint-timeout", "2s", "--restart-budget", "1s",
    "--transaction-timeout", "6s",
)  # fmt: skip


@pytest.fixture
def quick_broker(own_broker: Callable[..., KafkaCluster]) -> KafkaCluster:
    """A broker that looks at transactions' timeouts every half second."""
    return own_broker({"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"})


def lose_one(job: Job) -> Committable:
    """Commit all committables of the undelivered checkpoint but one, and wait until the broker has aborted that one."""
    manifest = job.history().unfinalized
    assert manifest is not None
    assert len(manifest.committables) == 4, "two sinks at parallelism 2"
    transactions = Transactions(ClientConfig({"bootstrap.servers": job.kafka.bootstrap_servers}))
    lost, *others = manifest.committables
    for each in others:
        transactions.end_until_answered(each.transactional_id, each.producer_id, each.epoch, commit=True)
    deadline = time.monotonic() + LIMIT_S
    while (state := transactions.describe([lost.transactional_id])[lost.transactional_id]) is None or (
        state.state != "CompleteAbort"
    ):
        assert time.monotonic() < deadline, f"the broker aborts it: {state}"
        time.sleep(0.1)  # the broker's own timeout must pass
    transactions.close()
    return lost


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [None, "repair-copied", "repair-recorded", "coordinator-committed"])
def test_one_of_four_is_lost(
    killed: str | None, quick_broker: KafkaCluster, job_of: Callable[..., Job], failpoint: Any
) -> None:
    """Exactly the lost transaction is written again, also when the repair itself is killed; all output is exact."""
    job = job_of("diamond", "--parallelism", "2", *TIMEOUTS, cluster=quick_broker)
    quick_broker.create_topic(f"{job.name}-more", 3)
    job.feed(4000)
    job.feed(4000, "more")
    job.finish(env=failpoint("coordinator-decided"), code=-9)
    lost = lose_one(job)
    if killed is not None:
        job.finish(env=failpoint(killed), code=-9)
    last = job.finish()
    if killed is None:
        assert f"{lost.transactional_id} repaired" in last.said
    job.assert_totals()
    job.assert_copies()
    assert job.history().unfinalized is None
