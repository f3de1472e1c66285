"""The broker restarts, dies, or is away for a minute while a pipeline runs: it waits, goes on, and is exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from running import QUICK, assert_totals, orders

from exactlyonce.testing.cluster import KafkaCluster, OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def _restarted(cluster: OwnCluster) -> None:
    cluster.broker.restart()


def _killed(cluster: OwnCluster) -> None:
    cluster.broker.kill()
    cluster.broker.start()


def _away_for_a_minute(cluster: OwnCluster) -> None:
    cluster.broker.kill()
    threading.Event().wait(60)
    cluster.broker.start()


@pytest.mark.exhaustive  # test_quiet.py has a broker that is killed
@pytest.mark.parametrize("fault", [_restarted, _killed, _away_for_a_minute])
def test_a_broker_that_comes_back(
    fault: Callable[[OwnCluster], None], stoppable: OwnCluster, topic_name: str, run: Any
) -> None:
    """No kill of the job, no loss and no double: what was fed before and after is all counted."""
    cluster = stoppable
    cluster.create_topic(f"{topic_name}-in", 3)
    fed = orders(3000)
    cluster.produce(f"{topic_name}-in", fed)
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", "--parallelism", "2", *QUICK)
    job = run(*arguments, servers=cluster.bootstrap_servers)
    job.await_checkpoint()
    fault(cluster)
    more = orders(3000, first=3000)
    cluster.produce(f"{topic_name}-in", more)
    job.await_checkpoint()
    job.process.send_signal(15)
    assert job.wait() == 0, job.said
    assert run(*arguments, "--until", "latest", servers=cluster.bootstrap_servers).wait() == 0
    assert_totals(cluster, f"{topic_name}-out", fed + more)


@pytest.mark.docker
def test_the_spine_in_a_container(container_kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any) -> None:
    """A kill between decision and commit is recovered from on a Kafka that runs in a container."""
    kafka = container_kafka
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = orders(5000)
    kafka.produce(f"{topic_name}-in", fed)
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", "--parallelism", "2", "--until", "latest", *QUICK)
    killed = run(*arguments, servers=kafka.bootstrap_servers, env=failpoint("coordinator-decided"))
    assert killed.wait() == -9
    assert run(*arguments, servers=kafka.bootstrap_servers).wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)
