"""Decided transactions that the broker's timeout aborted, while all were down or asleep, are repaired by copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from running import Job
from waiting import until

from exactlyonce.checkpoint.records.manifest import Committable
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.slow

TIMEOUTS = (
    "--checkpoint-interval", "300ms", "--checkpoint-timeout", "20s", "--restart-budget", "1s",
    "--transaction-timeout", "25s",
)  # fmt: skip


@pytest.fixture
def quick_broker(own_broker: Callable[..., KafkaCluster]) -> KafkaCluster:
    return own_broker({"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"})


def decided(job: Job) -> tuple[Committable, ...]:
    manifest = job.history().unfinalized
    assert manifest is not None
    assert manifest.committables
    return manifest.committables


def await_aborted(transactions: Transactions, committables: Iterable[Committable]) -> None:
    ids = [each.transactional_id for each in committables]
    until(lambda: {each.state for each in transactions.describe(ids).values() if each} == {"CompleteAbort"})
    transactions.close()


def transactions_of(job: Job) -> Transactions:
    return Transactions(job.config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [(), ("repair-copied", "repair-recorded", "coordinator-committed")])
def test_one_of_four_is_lost(
    kills: tuple[str, ...], quick_broker: KafkaCluster, job_of: Callable[..., Job], failpoint: Any
) -> None:
    job = job_of("diamond", "--parallelism", "2", *TIMEOUTS, cluster=quick_broker)
    quick_broker.create_topic(f"{job.name}-more", 3)
    job.feed(4000)
    job.feed(4000, "more")
    job.finish(env=failpoint("coordinator-decided"), code=-9)
    lost, *others = decided(job)
    assert len(others) == 3, "two sinks at parallelism 2"
    transactions = transactions_of(job)
    for each in others:
        transactions.end_until_answered(each.transactional_id, each.producer_id, each.epoch, commit=True)
    await_aborted(transactions, [lost])
    for name in kills:
        job.finish(env=failpoint(name), code=-9)
    last = job.finish()
    if not kills:
        assert f"{lost.transactional_id} repaired" in last.said
    job.assert_output()
    assert job.history().unfinalized is None
