"""A slow user function does not keep checkpoints from completing, and is named where it does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from running import assert_totals, orders

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]


@pytest.mark.parametrize(
    ("target", "pause_ms", "arguments"),
    [
        ("pipelines:slow", 50, ()),
        ("pipelines:slow_behind_a_shuffle", 50, ("--parallelism", "2")),
        ("pipelines:slow", 30, ("--checkpoint-timeout", "10s")),
    ],
    ids=["50ms", "50ms-behind-a-shuffle", "30ms-and-10s"],
)
def test_checkpoints_complete_at_a_slow_operator(
    target: str, pause_ms: int, arguments: tuple[str, ...], kafka: KafkaCluster, topic_name: str, run: Any
) -> None:
    """With minutes of work in front of it checkpoints come in order, none is late, and a stop ends it cleanly."""
    kafka.create_topic(f"{topic_name}-in", 2)
    kafka.produce(f"{topic_name}-in", orders(6000))
    parameters = (target, "--param", f"name={topic_name}", "--param", f"pause_ms={pause_ms}", *arguments)
    job = run(*parameters)
    for _ in range(3):
        assert job.await_checkpoint()["records_in"] < 1500
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    told = [event for event in job.events if event["event"] == "checkpoint"]
    assert max(event["duration_ms"] for event in told) < 10_000
    seen = [record.value for record in kafka.read_committed(f"{topic_name}-out")]
    assert 0 < len(seen) < 3000


def test_the_reason_names_the_operator_that_hangs(
    kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path
) -> None:
    """While a function does not come back a note says so, and the restart names it; then all is exact."""
    (tmp_path / "wait").touch()
    kafka.create_topic(f"{topic_name}-in", 2)
    fed = orders(400)
    kafka.produce(f"{topic_name}-in", fed)
    parameters = ("pipelines:stuck", "--param", f"name={topic_name}", "--param", f"folder={tmp_path}")
    job = run(*parameters, "--checkpoint-timeout", "15s", "--until", "latest")
    noted = job.await_event(lambda event: "its checkpoints wait" in event.get("text", ""))
    assert "worker 0 has been in operator 'enrich' for 1" in noted["text"]
    restarted = job.await_event(lambda event: "restarting" in event.get("text", ""))
    assert "15000 ms: worker 0 has been in operator 'enrich' for 1" in restarted["text"]
    assert "no producer" not in job.said
    (tmp_path / "wait").unlink()
    assert job.wait() == 0, job.said
    assert_totals(kafka, f"{topic_name}-out", fed)
