"""Bounded work on what unaligned checkpoints leave behind: it refuses to go on from one, and computes it again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from auditing import audited
from bounded import Silent, load_pipeline
from running import Job, exactlyonce

from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.slow


@pytest.fixture
def job(run: Any, kafka: KafkaCluster, topic_name: str) -> Job:
    options = ("--unaligned", "--num-retained", "100", "--param", "pause_ms=1")
    return Job(run, kafka, topic_name, "slow_behind_a_shuffle", *options)


def kill_with_records_on_their_way(job: Job, parallelism: int) -> None:
    """The checkpoint that the next incarnation goes on from is unaligned, and so is the one before."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        job.feed(4_000)
        incarnation = job.start("--parallelism", str(parallelism))
        for _ in range(4):
            incarnation.await_event(lambda event: event["event"] == "checkpoint")
        incarnation.kill()
        history = job.history()
        latest = history.latest
        if latest is not None and latest.channel_logs and history.manifests[latest.previous].channel_logs:
            return
    raise AssertionError("no checkpoint had anything on its way")


@pytest.mark.exhaustive
def test_spark_goes_on_from_aligned_checkpoints_only(job: Job, kafka: KafkaCluster, tmp_path: Path) -> None:
    kill_with_records_on_their_way(job, 2)
    incarnation = job.history().newest_incarnation
    target = ("pipelines:slow_behind_a_shuffle", "--param", f"name={job.name}", "--param", "pause_ms=1")
    for command in ("backfill", "catch-up"):
        said = exactlyonce(kafka, command, *target, "--take-over", code=2)
        assert "is unaligned" in said
        assert f"`exactlyonce run {target[0]} --param name={job.name} --param pause_ms=1 --until latest`" in said
    assert job.history().newest_incarnation == incarnation
    assert_state_is_shown(kafka, job.name)
    loaded = load_pipeline("pipelines", "slow_behind_a_shuffle", job.name, pause_ms="1")
    work = CatchUp(loaded, RunOptions(job.config, parallelism=2), Silent())
    with pytest.raises(ConfigError, match="is unaligned"):
        work.lead(in_process, tmp_path)
    job.finish("--parallelism", "2", "--param", "pause_ms=0")
    assert work.lead(in_process, tmp_path).checkpoints == 0
    job.assert_totals()


def assert_state_is_shown(kafka: KafkaCluster, topic_name: str) -> None:
    """By the command and as a DataFrame, alike."""
    lines = [
        json.loads(line) for line in exactlyonce(kafka, "state", "show", topic_name, "totals", "--json").splitlines()
    ]
    options = {"state": topic_name, "operator": "totals", "keyType": "str"}
    options["kafka.bootstrap.servers"] = kafka.bootstrap_servers
    source = ExactlyOnceDataSource(options)
    reader: Any = source.reader(source.schema())
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert lines
    assert sorted((row["key"], row["value"], row["checkpoint"]) for row in rows) == sorted(
        (line["key"], line["state"], line["checkpoint"]) for line in lines
    )


@pytest.mark.exhaustive
def test_an_audit_computes_intervals_with_records_on_their_way(job: Job, tmp_path: Path) -> None:
    for parallelism in (3, 2):
        kill_with_records_on_their_way(job, parallelism)
    job.finish("--parallelism", "3", "--param", "pause_ms=0")
    manifests = job.history().manifests
    both = [each for each in manifests.values() if each.channel_logs and manifests[each.previous].channel_logs]
    assert both
    dealt = [e for e in manifests.values() if manifests[e.previous].channel_logs]
    assert any(each.parallelism != manifests[each.previous].parallelism for each in dealt)
    loaded = load_pipeline("pipelines", "slow_behind_a_shuffle", job.name, pause_ms="0")
    last = max(manifests)
    report = audited(loaded, job.config, tmp_path, 1, last)
    assert report.findings == []
    assert report.checkpoints == list(range(1, last + 1))
