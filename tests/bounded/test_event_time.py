"""Event time in bounded work: intervals of a run are computed again, and what is computed is what SQL says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from auditing import audited
from bounded import Silent, catch_up, drive, load_pipeline
from losing import QUICK_ABORTS, TIMEOUTS, Together, expire, lose_one
from running import Job, Run, runs_of, stop
from waiting import until
from window_clicks import Clicks

from exactlyonce.engines.bounded.audit import AuditReport
from exactlyonce.engines.bounded.diff import Diff
from exactlyonce.engines.bounded.stages import Executors, in_process
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker


def clicks_on(run: Any, kafka: KafkaCluster, name: str, window: str, *arguments: str) -> Clicks:
    return Clicks(Job(run, kafka, name, "window_pipelines:windowed", "--param", f"window={window}", *arguments), window)


def loaded_of(clicks: Clicks, **params: str) -> Loaded:
    return load_pipeline("window_pipelines", "windowed", clicks.job.name, window=clicks.window, **params)


def assert_audited(clicks: Clicks, staging: Path, checkpoints: int) -> None:
    """All retained intervals, so many at least, are as they are computed again."""
    assert_judged(audited(loaded_of(clicks), clicks.job.config, staging), checkpoints)


def assert_judged(report: AuditReport, checkpoints: int) -> None:
    assert (report.findings, [reason for reason in report.unjudged if "expired" not in reason]) == ([], [])
    assert len(report.checkpoints) >= checkpoints


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", ["hopping", "session", "waiting", "revised"])
def test_intervals_of_a_run_with_kills_are_computed_again(
    window: str, run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    clicks = clicks_on(run, kafka, topic_name, window, "--num-retained", "100")
    for parallelism, killed_at in ((2, "timed-fired"), (3, "coordinator-decided")):
        clicks.feed(300)
        clicks.job.run_killed(failpoint(killed_at), parallelism)
    clicks.end()
    clicks.job.finish("--parallelism", "2")
    clicks.assert_as_by_sql()
    assert_audited(clicks, tmp_path, 3)


@pytest.mark.exhaustive
def test_intervals_between_unaligned_checkpoints_are_computed_again(
    run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    """A replay takes in-flight records before watermarks as the run did, which had some among them."""
    unaligned = ("--unaligned", "--checkpoint-interval", "300ms", "--num-retained", "100", "--param", "pause_ms=4")
    clicks = clicks_on(run, kafka, topic_name, "folded", *unaligned)
    for parallelism, killed_at in ((3, "unaligned-captured"), (2, "timed-fired")):
        clicks.feed(300)
        clicks.job.run_killed(failpoint(killed_at), parallelism)
    clicks.end()
    clicks.job.finish("--parallelism", "2")
    assert sum(bool(manifest.channel_logs) for manifest in clicks.job.history().manifests.values()) > 3
    clicks.assert_as_by_sql()
    assert_audited(clicks, tmp_path, 3)


@pytest.mark.exhaustive(but=["tumbling-timed-fired"])
@pytest.mark.parametrize(
    ("window", "killed_at"),
    [("tumbling", "timed-fired"), ("session", "unit-computed"), ("revised", "coordinator-decided")],
)
def test_backfill_run_and_catch_up_give_together_what_sql_says(
    window: str, killed_at: str, run: Any, kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """The last chunk has records of one key, and ends the windows of all."""
    clicks = clicks_on(run, kafka, topic_name, window, "--num-retained", "100")
    fed: Any = SimpleNamespace(kafka=kafka, name=topic_name, storage="")
    clicks.feed(800)
    fired = tmp_path / "fired"
    assert drive(fed, tmp_path, killed_at, fired, "window_pipelines:windowed", window=window) != 0
    assert (fired / killed_at).exists()
    catch_up(fed, loaded_of(clicks), 3, tmp_path, chunk_records=500)
    assert_audited(clicks, tmp_path, 1)
    clicks.feed(300)
    clicks.job.finish_here()
    clicks.end()
    catch_up(fed, loaded_of(clicks), 2, tmp_path)
    clicks.assert_as_by_sql()
    assert_audited(clicks, tmp_path, 1)


def ids_to(kafka: KafkaCluster, topic: str, job: Job) -> list[int]:
    """The ids in *topic*, once no more come of a run."""
    incarnation, ids = job.start(), list[int]()

    def settled() -> bool:
        incarnation.await_event(lambda event: event["event"] == "checkpoint" and event["records_committed"] == 0)
        before, given = len(ids), [json.loads(of.value or b"")["ids"] for of in kafka.read_committed(topic)]
        ids[:] = chain.from_iterable(given)
        return before == len(ids) > 0

    until(settled, told=lambda: incarnation.said)
    stop(incarnation)
    return sorted(ids)


def has_gone_on(incarnation: Run) -> bool:
    """Whether a checkpoint came after a restart. One that is stopped before that takes no last checkpoint."""
    events = iter(incarnation.events)
    return any("restarting from" in event.get("text", "") for event in events) and any(
        event["event"] == "checkpoint" for event in events
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["by_clock", "in_batches"])
def test_what_goes_by_the_clock_is_computed_again(
    target: str, run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    """The outputs have the times by the clock. A backfill has none, and says so."""
    job = Job(run, kafka, topic_name, f"ordering_pipelines:{target}", "--num-retained", "100")
    fed = 0
    for parallelism, killed_at in ((2, "timed-fired"), (3, "worker-frozen")):
        incarnation = job.start("--parallelism", str(parallelism), env=failpoint(killed_at, nth=4))
        while not has_gone_on(incarnation) or fed < 500:
            clicks: list[dict[str, Any]] = [
                {"id": id, "user": f"u{id % 7}", "at": 0, "amount": 1} for id in range(fed, fed + 50)
            ]
            kafka.produce(f"{topic_name}-in", [(click["user"], json.dumps(click)) for click in clicks])
            fed += len(clicks)
            incarnation.await_checkpoint()
        assert (tmp_path / "fired" / killed_at).exists()
        stop(incarnation)
    assert ids_to(kafka, f"{topic_name}-out", job) == list(range(fed))
    loaded = load_pipeline("ordering_pipelines", target, topic_name)
    assert_judged(audited(loaded, job.config, tmp_path), 3)
    with pytest.raises(ConfigError, match="'gathered' goes by the clock"):
        catch_up(cast(Any, SimpleNamespace(kafka=kafka, name=topic_name, storage="")), loaded, 1, tmp_path)


BEHIND = [0, 0, 300, 2_000, 2_001, 6_000, 15_000]
"""How far in ms an event may lie behind the others of its partition."""


def joined_job(run: Any, kafka: KafkaCluster, name: str, join: str) -> Job:
    """A job with the events of both sides, the same for every name."""
    job = Job(run, kafka, name, "join_pipelines:joined", "--param", f"join={join}", "--num-retained", "100")
    kafka.create_topic(f"{name}-right", 2)
    for topic, partitions in (("in", 3), ("right", 2)):
        for partition in range(partitions):
            chance = random.Random(f"{topic} {partition}")
            users = [f"u{chance.randrange(3) * 6 + partition}" for _ in range(400)]
            times = [10**12 + 100 * number - chance.choice(BEHIND) for number in range(400)]
            events = [
                (user, json.dumps({"id": 3 * number + partition, "user": user, "at": time}))
                for number, (user, time) in enumerate(zip(users, times, strict=True))
            ]
            kafka.produce(f"{name}-{topic}", events, partition)
    return job


@pytest.mark.exhaustive
@pytest.mark.parametrize("join", ["full", "as-of", "lookup", "tumbling-full", "co-process-arrival", "moved"])
def test_a_backfill_of_joins_gives_what_a_run_gives(
    join: str, run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    """What goes by arrival is compared with itself alone: each interval with the same one computed again."""
    ran, backfilled = (joined_job(run, kafka, f"{topic_name}-{how}", join) for how in ("run", "backfill"))
    ran.run_killed(failpoint("worker-frozen", nth=2), 2)
    ran.finish("--parallelism", "2")
    fed: Any = SimpleNamespace(kafka=kafka, name=backfilled.name, storage="")
    found = []
    for job in (ran, backfilled):
        loaded = load_pipeline("join_pipelines", "joined", job.name, join=join)
        if job is backfilled:
            catch_up(fed, loaded, 3, tmp_path, chunk_records=700)
        assert_judged(audited(loaded, job.config, tmp_path), 1)
        found.append(sorted(record.value or b"" for record in kafka.read_committed(f"{job.name}-out")))
    assert len(found[0]) > 40
    assert join in ("lookup", "co-process-arrival") or found[0] == found[1]


def test_two_versions_with_windows_are_compared(run: Any, kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    clicks = clicks_on(run, kafka, topic_name, "tumbling")
    clicks.feed(300)
    clicks.job.finish_here()
    clicks.feed(300)
    clicks.end()
    diff = Diff(loaded_of(clicks), loaded_of(clicks), clicks.job.config)
    report = diff.run(Executors(in_process, tmp_path, lambda: 1), Silent())
    assert report.agrees
    assert all(sink.old == sink.new > 5 for sink in report.sinks)
    assert {sink.sink for sink in report.sinks} == {"out", "late"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_results_that_a_broker_aborted_are_computed_again(
    own_broker: Callable[..., KafkaCluster], topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    kafka = own_broker(QUICK_ABORTS)
    with runs_of(kafka) as run:
        clicks = clicks_on(run, kafka, topic_name, "session", "--checkpoint-interval", "10s", *TIMEOUTS)
        parallel = ("--until", "latest", "--parallelism", "2")
        clicks.feed(600)
        clicks.job.finish(*parallel)
        clicks.feed(600)
        killed = clicks.job.start(*parallel, env=failpoint("coordinator-decided"))
        assert killed.wait() == -9, killed.said
        lost = lose_one(kafka, topic_name, ("out", 1))
        assert lost.records > 10
        seen = {f"{topic_name}-out": expire(kafka, f"{topic_name}-out")}
        clicks.end()
        repaired = clicks.job.finish(*parallel)
        assert f"{lost.transactional_id} repaired" in repaired.said
        clicks.job.kafka = Together(kafka, seen)
        clicks.assert_as_by_sql()
