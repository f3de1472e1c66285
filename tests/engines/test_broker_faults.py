"""The broker restarts, dies, or is away for a minute while a pipeline runs: it waits, goes on, and is exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from running import Job, stop

from exactlyonce.checkpoint.requests import (
    CopyTransaction,
    DescribeProducers,
    EndAnswer,
    Ending,
    EndTransactions,
    ReplayTransaction,
    Request,
    answered,
)
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.connections import Performer
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster


def _restarted(cluster: OwnCluster) -> None:
    cluster.broker.restart()


def _away_for_a_minute(cluster: OwnCluster) -> None:
    cluster.broker.kill()
    threading.Event().wait(60)
    cluster.broker.start()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.docker
def test_the_spine_in_a_container(container_kafka: KafkaCluster, job_of: Callable[..., Job], failpoint: Any) -> None:
    job = job_of("linear", "--parallelism", "2", cluster=container_kafka)
    job.feed(3000)
    job.finish(env=failpoint("coordinator-decided"), code=-9)
    job.finish()
    job.assert_totals()


# --- the end of a decision waits, and says so; what takes long is no silence ------------------------------------------


class Away:
    def end_all(self, endings: Any, *, commit: bool) -> Any:
        raise BrokerUnavailable("127.0.0.1:9092 does not answer")

    def producers(self, partitions: Any) -> Any:
        raise BrokerUnavailable("127.0.0.1:9092 does not answer")


def test_what_is_waited_for_is_said_once_in_a_while() -> None:
    notes: list[str] = []
    nobody: Any = Away()
    nothing: Any = None
    performer = Performer(
        ClientConfig({"bootstrap.servers": "127.0.0.1:9092"}), nobody, nothing, nothing, 1_000, note=notes.append
    )
    assert performer(EndTransactions((Ending("a", 1, 0),), commit=True)) == [EndAnswer.BUSY]
    assert isinstance(answered(DescribeProducers((("t", 0),)), performer).error, BrokerUnavailable)
    assert notes == ["waiting for a broker: 127.0.0.1:9092 does not answer"]
    performer.close()


NOTHING: Any = None


@pytest.mark.parametrize("request_", [CopyTransaction(NOTHING, "a"), ReplayTransaction(NOTHING, NOTHING, "a")])
def test_heartbeats_go_on_while_something_is_written_again(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair that takes minutes, by copy or replay, leaves the coordinator alive to readers of the log."""
    beaten = threading.Semaphore(0)

    def slow(*arguments: Any) -> str:
        assert all(beaten.acquire(timeout=LIMIT_S) for _ in range(3)), "heartbeats come meanwhile"
        return "done"

    monkeypatch.setattr("exactlyonce.engines.connections.UPKEEP_INTERVAL_S", 0.001)
    monkeypatch.setattr("exactlyonce.engines.connections.copy_transaction", slow)
    config = ClientConfig({"bootstrap.servers": "127.0.0.1:9092"})
    performer = Performer(
        config, NOTHING, NOTHING, NOTHING, 1_000, lambda *_: None, replay=slow, beat=beaten.release
    )  # fmt: skip
    assert performer(request_) == "done"
    performer.close()
