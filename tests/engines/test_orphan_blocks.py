"""Blocks that nobody refers to are gone after the next completed checkpoint, whoever died over them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, assert_totals, orders
from unreferenced import unreferenced_blocks

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def fed(kafka: KafkaCluster, topic_name: str, records: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """*records*, which are in the input topic now."""
    kafka.create_topic(f"{topic_name}-in", 3)
    kafka.produce(f"{topic_name}-in", records)
    return records


@pytest.mark.exhaustive
def test_a_worker_that_died_with_large_blocks(
    kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any, tmp_path: Path
) -> None:
    """A worker that dies behind blocks of 200,000 long keys, over a checkpoint of as many, leaves none for good."""
    long = "a-name-that-takes-room-in-a-block-" * 2
    records = [
        (str(i % 5), json.dumps({"id": i, "customer": f"{long}{i}", "total": 1})) for i in range(400_000)
    ]  # fmt: skip
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", "--until", "latest")
    fed(kafka, topic_name, records[:200_000])
    first = run(*arguments)
    assert first.wait() == 0, first.said
    kafka.produce(f"{topic_name}-in", records[200_000:])
    job = run(*arguments, env=failpoint("worker-blocks"))
    assert job.wait() == 0, job.said
    assert (tmp_path / "fired" / "worker-blocks").exists()
    assert unreferenced_blocks(kafka, topic_name) == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("place", "nth"), [("coordinator-decided", 3), ("coordinator-committed", 1), ("coordinator-triggered", 3)]
)
def test_a_coordinator_that_died(
    place: str, nth: int, kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any, tmp_path: Path
) -> None:
    """Whatever lies between its death and its last finalized mark is found by the next incarnation."""
    records = fed(kafka, topic_name, orders(6000))
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", "--parallelism", "2", *QUICK)
    assert run(*arguments, env=failpoint(place, nth=nth)).wait() == -9
    assert (tmp_path / "fired" / place).exists()
    last = run(*arguments, "--until", "latest")
    assert last.wait() == 0, last.said
    assert unreferenced_blocks(kafka, topic_name) == set()
    assert_totals(kafka, f"{topic_name}-out", records)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["worker-flushed", "coordinator-decided"])
def test_checkpoints_in_flight_behind_a_completed_one(
    place: str, kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], failpoint: Any, tmp_path: Path
) -> None:
    """With three checkpoints in flight, what the ones behind the newest completed one have written goes as well."""
    records = fed(kafka, topic_name, orders(4000))
    arguments = (
        "pipelines:slow", "--param", f"name={topic_name}", "--param", "pause_ms=1", "--parallelism", "2",
        "--max-concurrent", "3", "--checkpoint-interval", "50ms",
    )  # fmt: skip
    first = run(*arguments, env=failpoint(place, nth=4))
    if place == "coordinator-decided":
        assert first.wait() == -9, first.said
    else:
        first.await_event(lambda event: event["event"] == "note" and "restarting" in event["text"])
        first.await_event(lambda event: event["event"] == "checkpoint")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0, first.said
    assert (tmp_path / "fired" / place).exists()
    last = run(*arguments, "--until", "latest")
    assert last.wait() == 0, last.said
    assert unreferenced_blocks(kafka, topic_name) == set()
    assert_totals(kafka, f"{topic_name}-out", records)
