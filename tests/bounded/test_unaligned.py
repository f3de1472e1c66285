"""Bounded work on what unaligned checkpoints leave behind: it refuses to go on from one, and computes it again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from auditing import audited
from bounded import HERE, Silent, load_pipeline
from running import QUICK, Run, assert_totals, orders

from exactlyonce.checkpoint.records.history import History
from exactlyonce.cli.main import main
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.submit import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.slow


class Slow:
    """`slow_behind_a_shuffle`, unaligned, with full channels."""

    def __init__(self, kafka: KafkaCluster, name: str, count: int) -> None:
        self.kafka, self.name, self.count = kafka, name, count
        self.fed: list[tuple[str, str]] = []
        kafka.create_topic(f"{name}-in", 3)
        self.feed()
        self.runs: list[Run] = []

    def feed(self) -> None:
        more = orders(self.count, first=len(self.fed))
        self.kafka.produce(f"{self.name}-in", more)
        self.fed += more

    @property
    def history(self) -> History:
        return read_history(ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers}), self.name)

    def start(self, parallelism: int, *arguments: str, pause_ms: int = 1, env: dict[str, str] | None = None) -> Run:
        target = ("pipelines:slow_behind_a_shuffle", f"--param=name={self.name}", f"--param=pause_ms={pause_ms}")
        options = ("--unaligned", "--num-retained", "100", "--parallelism", str(parallelism), *arguments)
        self.runs.append(Run(self.kafka.bootstrap_servers, *target, *options, env=env))
        return self.runs[-1]

    def kill_with_records_on_their_way(self, parallelism: int) -> None:
        """The checkpoint that the next incarnation goes on from is unaligned, and so is the one before."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            job = self.start(parallelism, *QUICK)
            for _ in range(4):
                job.await_event(lambda event: event["event"] == "checkpoint")
            job.kill()
            history = self.history
            latest = history.latest
            if latest is not None and latest.channel_logs and history.manifests[latest.previous].channel_logs:
                return
            self.feed()
        raise AssertionError("no checkpoint had anything on its way")

    def finish(self, parallelism: int, *arguments: str) -> None:
        last = self.start(parallelism, "--until", "latest", *(arguments or QUICK), pause_ms=0)
        assert last.wait() == 0, last.said


@pytest.fixture
def slow(topic_name: str) -> Any:
    made: list[Slow] = []

    def make(kafka: KafkaCluster, count: int) -> Slow:
        made.append(Slow(kafka, topic_name, count))
        return made[-1]

    yield make
    for each in (run for job in made for run in job.runs):
        if each.process.poll() is None:
            each.kill()


@pytest.mark.exhaustive
def test_spark_goes_on_from_aligned_checkpoints_only(
    slow: Callable[..., Slow], kafka: KafkaCluster, topic_name: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    job = slow(kafka, 4_000)
    job.kill_with_records_on_their_way(2)
    incarnation = job.history.newest_incarnation
    monkeypatch.chdir(HERE.parents[1] / "engines")
    target = ("pipelines:slow_behind_a_shuffle", "--param", f"name={topic_name}", "--param", "pause_ms=1")
    for command in ("backfill", "catch-up"):
        assert main([command, *target, "--take-over", "--bootstrap-servers", kafka.bootstrap_servers]) == 2
        said = capsys.readouterr().err
        assert "is unaligned" in said
        assert f"`exactlyonce run {target[0]} --param name={topic_name} --param pause_ms=1 --until latest`" in said
    assert job.history.newest_incarnation == incarnation
    assert_state_is_shown(kafka, topic_name, capsys)
    loaded = load_pipeline("pipelines", "slow_behind_a_shuffle", topic_name, pause_ms="1")
    options = RunOptions(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), parallelism=2)
    work = CatchUp(loaded, options, Silent())
    with pytest.raises(ConfigError, match="is unaligned"):
        work.lead(in_process, tmp_path)
    job.finish(2)
    assert work.lead(in_process, tmp_path).checkpoints == 0
    assert_totals(kafka, f"{topic_name}-out", job.fed)


def assert_state_is_shown(kafka: KafkaCluster, topic_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command and as a DataFrame, alike."""
    servers = kafka.bootstrap_servers
    assert main(["state", topic_name, "totals", "--json", "--bootstrap-servers", servers]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    options = {"state": topic_name, "operator": "totals", "keyType": "str", "kafka.bootstrap.servers": servers}
    source = ExactlyOnceDataSource(options)
    reader: Any = source.reader(source.schema())
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert lines
    assert sorted((row["key"], row["value"], row["checkpoint"]) for row in rows) == sorted(
        (line["key"], line["state"], line["checkpoint"]) for line in lines
    )


@pytest.mark.exhaustive
def test_an_audit_computes_intervals_with_records_on_their_way(
    slow: Callable[..., Slow], kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    job = slow(kafka, 5_000)
    for parallelism in (3, 2):
        job.kill_with_records_on_their_way(parallelism)
    job.finish(3)
    manifests = job.history.manifests
    both = [each for each in manifests.values() if each.channel_logs and manifests[each.previous].channel_logs]
    assert both
    dealt = [e for e in manifests.values() if manifests[e.previous].channel_logs]
    assert any(each.parallelism != manifests[each.previous].parallelism for each in dealt)
    loaded = load_pipeline("pipelines", "slow_behind_a_shuffle", topic_name, pause_ms="0")
    client = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    last = max(manifests)
    report = audited(loaded, client, tmp_path, 1, last)
    assert report.findings == []
    assert report.checkpoints == list(range(1, last + 1))
