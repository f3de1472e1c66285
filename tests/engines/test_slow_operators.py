"""A slow user function does not keep checkpoints from completing, and is named where it does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import HERE, Job, ids_in, stop

from exactlyonce.engines.local.inputs import BATCH_RECORDS_MAX
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.slow


PAUSE_MS = 50


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "parallelism"), [("slow", "1"), ("slow_behind_a_shuffle", "2")])
def test_checkpoints_complete_at_a_slow_operator(target: str, parallelism: str, job_of: Callable[..., Job]) -> None:
    options = ("--checkpoint-interval", "1s", "--parallelism", parallelism)
    job = job_of(target, "--param", f"pause_ms={PAUSE_MS}", *options, partitions=2)
    job.feed(20_000)
    run = job.start()
    for _ in range(3):
        assert run.await_checkpoint()["records_in"] < 5_000
    stop(run)
    assert "restarting" not in run.said
    told = [event for event in run.events if event["event"] == "checkpoint"]
    assert max(event["duration_ms"] for event in told) < PAUSE_MS * BATCH_RECORDS_MAX / 2
    assert 0 < len(ids_in(job.kafka, f"{job.name}-out", 1)) < 10_000


@pytest.mark.exhaustive
def test_the_reason_names_the_operator_that_hangs(job_of: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    job = job_of("stuck", "--param", f"folder={tmp_path}", "--checkpoint-interval", "1s", partitions=2)
    job.feed(400)
    run = job.start("--checkpoint-timeout", "15s", "--until", "latest")
    noted = run.await_event(lambda event: "its checkpoints wait" in event.get("text", ""))
    assert re.search(r"worker 0 has been in operator 'enrich' for \d{2,} s", noted["text"])
    restarted = run.await_event(lambda event: "restarting" in event.get("text", ""))
    assert re.search(r"15000 ms: worker 0 has been in operator 'enrich' for \d+ s", restarted["text"])
    assert "no producer" not in run.said
    (tmp_path / "wait").unlink()
    assert run.wait() == 0, run.said
    job.assert_totals()


@pytest.mark.exhaustive
def test_a_replay_takes_the_slices_that_the_first_run_took(job_of: Callable[..., Job]) -> None:
    """The limits of slices decide the order of the output here: an audit along the order logs finds no difference."""
    job = job_of("slices", "--parallelism", "2", "--num-retained", "100", partitions=2)
    job.kafka.create_topic(f"{job.name}-more", 2)
    job.feed(600)
    job.feed(600, "more")
    job.finish()
    servers = ("--bootstrap-servers", job.kafka.bootstrap_servers)
    line = ("pipelines:slices", "--param", f"name={job.name}", *servers, "--on", "driver", "--json")
    audit = subprocess.run(
        [sys.executable, "-m", "exactlyonce.cli.main", "audit", *line],
        cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
    report = json.loads(audit.stdout)
    assert (report["findings"], report["unjudged"], report["records_in"]) == ([], [], 1200)
    ids = ids_in(job.kafka, f"{job.name}-out", 2400)
    assert sorted(map(abs, ids)) == sorted([*range(1200)] * 2)
