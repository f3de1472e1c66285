"""The broker restarts, dies, or is away for a minute while a pipeline runs: it waits, goes on, and is exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from running import Job, stop

from exactlyonce.testing.cluster import KafkaCluster, OwnCluster

pytestmark = pytest.mark.slow


def _restarted(cluster: OwnCluster) -> None:
    cluster.broker.restart()


def _away_for_a_minute(cluster: OwnCluster) -> None:
    cluster.broker.kill()
    threading.Event().wait(60)
    cluster.broker.start()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [_restarted, _away_for_a_minute])
def test_a_broker_that_comes_back(
    fault: Callable[[OwnCluster], None], stoppable: OwnCluster, job_of: Callable[..., Job]
) -> None:
    job = job_of("linear", "--parallelism", "2", cluster=stoppable)
    job.feed(3000)
    run = job.start()
    run.await_checkpoint()
    fault(stoppable)
    job.feed(3000)
    run.await_checkpoint()
    stop(run)
    assert run.text == [], "faults leave no lines of librdkafka"
    job.finish()
    job.assert_totals()


@pytest.mark.exhaustive
def test_a_broker_that_comes_back_with_a_lower_cap_on_transactions(
    own_broker: Callable[..., OwnCluster], job_of: Callable[..., Job]
) -> None:
    """The next incarnation takes the new cap; one that is too low ends the run, which names the setting."""
    cluster = own_broker()
    job = job_of("linear", cluster=cluster)
    job.feed(300)
    run = job.start()
    run.await_checkpoint()
    cluster.broker.settings["transaction.max.timeout.ms"] = "300000"
    cluster.broker.restart()
    job.feed(300)
    run.await_event(lambda event: "transaction.max.timeout.ms is lower" in event.get("text", ""))
    run.await_checkpoint()
    cluster.broker.settings["transaction.max.timeout.ms"] = "170000"
    cluster.broker.restart()
    job.feed(300)
    assert run.wait() == 2, run.said
    assert "transaction.max.timeout.ms to 180000 ms or more" in run.said


@pytest.mark.docker
def test_the_spine_in_a_container(container_kafka: KafkaCluster, job_of: Callable[..., Job], failpoint: Any) -> None:
    job = job_of("linear", "--parallelism", "2", cluster=container_kafka)
    job.feed(3000)
    job.finish(env=failpoint("coordinator-decided"), code=-9)
    job.finish()
    job.assert_totals()
