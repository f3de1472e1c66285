"""A slow user function does not keep checkpoints from completing, and is named where it does."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import HERE, QUICK, assert_totals, orders

from exactlyonce.engines.local.pace import BATCH_RECORDS_MAX
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "pause_ms", "arguments"),
    [
        ("pipelines:slow", 50, ()),
        ("pipelines:slow_behind_a_shuffle", 50, ("--parallelism", "2")),
        ("pipelines:slow", 100, ("--checkpoint-timeout", "60s")),
    ],
    ids=["50ms", "50ms-behind-a-shuffle", "100ms-and-60s"],
)
def test_checkpoints_complete_at_a_slow_operator(
    target: str, pause_ms: int, arguments: tuple[str, ...], kafka: KafkaCluster, topic_name: str, run: Any
) -> None:
    """With a quarter of an hour of work in front of it checkpoints come in order, none of them waits as long as a full
    batch takes, and a stop ends it cleanly."""
    kafka.create_topic(f"{topic_name}-in", 2)
    kafka.produce(f"{topic_name}-in", orders(20_000))
    parameters = (target, "--param", f"name={topic_name}", "--param", f"pause_ms={pause_ms}", *arguments)
    job = run(*parameters)
    for _ in range(3):
        assert job.await_checkpoint()["records_in"] < 5_000
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said
    told = [event for event in job.events if event["event"] == "checkpoint"]
    assert max(event["duration_ms"] for event in told) < pause_ms * BATCH_RECORDS_MAX / 2
    seen = [record.value for record in kafka.read_committed(f"{topic_name}-out")]
    assert 0 < len(seen) < 10_000


@pytest.mark.exhaustive
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
    assert re.search(r"worker 0 has been in operator 'enrich' for \d{2,} s", noted["text"])
    restarted = job.await_event(lambda event: "restarting" in event.get("text", ""))
    assert re.search(r"15000 ms: worker 0 has been in operator 'enrich' for \d+ s", restarted["text"])
    assert "no producer" not in job.said
    (tmp_path / "wait").unlink()
    assert job.wait() == 0, job.said
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_replay_takes_the_slices_that_the_first_run_took(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Where the limits of slices decide the order of the output, an audit along the order logs finds no difference."""
    for topic, first in ((f"{topic_name}-in", 0), (f"{topic_name}-more", 100_000)):
        kafka.create_topic(topic, 2)
        kafka.produce(topic, orders(600, first=first))
    parameters = ("pipelines:slices", "--param", f"name={topic_name}")
    job = run(*parameters, "--parallelism", "2", "--until", "latest", "--num-retained", "100", *QUICK)
    assert job.wait() == 0, job.said
    line = (*parameters, "--bootstrap-servers", kafka.bootstrap_servers, "--in-process", "--json")
    audit = subprocess.run(
        [sys.executable, "-m", "exactlyonce.cli.main", "audit", *line],
        cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
    report = json.loads(audit.stdout)
    assert (report["findings"], report["unjudged"], report["records_in"]) == ([], [], 1200)
    ids = [json.loads(record.value or b"")["id"] for record in kafka.read_committed(f"{topic_name}-out")]
    assert sorted(map(abs, ids)) == sorted([*range(600), *range(100_000, 100_600)] * 2)
