"""A run of several incarnations has one restart strategy: what any incarnation completes is progress to it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer
from running import QUICK, Run, assert_totals, orders

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster


@contextmanager
def no_decision_counts(kafka: KafkaCluster, pipeline: str) -> Iterator[None]:
    """A transaction of somebody else's holds readers back in the decision log; it is aborted in the end."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{pipeline}-elsewhere"})
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    producer.produce(f"{pipeline}.checkpoints", b"", b"", 0)
    producer.flush(LIMIT_S)
    yield
    producer.abort_transaction(LIMIT_S)


def another_incarnation(job: Run) -> None:
    """Wait until one ends that could not learn what became of its decision."""
    job.await_event(lambda event: "A new incarnation begins" in event.get("text", ""))


@pytest.mark.exhaustive
@pytest.mark.broker
@pytest.mark.slow
def test_incarnations_that_complete_checkpoints_never_use_up_the_strategy(
    kafka: KafkaCluster, topic_name: str, run: Any
) -> None:
    """Three incarnations end one after the other, each of which has completed a checkpoint: two attempts are enough."""
    kafka.create_topic(f"{topic_name}-in", 2)
    fed: list[tuple[str, str]] = []
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
    job = run(*arguments, "--restart", "fixed_delay:attempts=2,delay=1s")
    for _ in range(4):
        kafka.produce(f"{topic_name}-in", more := orders(200, first=len(fed)))
        fed += more
        job.await_checkpoint()
        if len(fed) < 800:
            with no_decision_counts(kafka, topic_name):
                another_incarnation(job)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert [event["incarnation"] for event in job.events if event["event"] == "started"] == [1, 2, 3, 4]
    assert run(*arguments, "--until", "latest").wait() == 0  # a stop may come before all that was fed is read
    assert_totals(kafka, f"{topic_name}-out", fed)
