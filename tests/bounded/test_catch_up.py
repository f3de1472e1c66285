"""Obstacles to a backfill or a catch-up: other incarnations, other code, stop offsets that cannot be reached."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from auditing import audited
from bounded import HERE, Fed, Silent, catch_up, load_pipeline, start
from running import orders
from settled import await_readable

from exactlyonce.checkpoint import leader
from exactlyonce.cli.main import main
from exactlyonce.engines.bounded import catch_up as catching_up
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchUp, default_parallelism
from exactlyonce.engines.bounded.stages import Executors, in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.errors import ConfigError, Fenced, GraphError, RecordError
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.broker


def command(fed: Fed, monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> int:
    """The exit code of a command on `broad` here; none gets as far as Java, nor to another test's session."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr("exactlyonce.engines.spark.session._running", lambda sessions: None)
    pipeline = ["bounded_pipelines:broad", "--param", f"name={fed.name}"]
    return main([name, *pipeline, "--bootstrap-servers", fed.kafka.bootstrap_servers, *options])


@pytest.mark.exhaustive
def test_a_running_pipeline_is_left_alone(
    fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    running = start(fed, "bounded_pipelines:broad")
    try:
        running.await_event(lambda event: event["event"] == "checkpoint")
        fed.feed(300)
        assert command(fed, monkeypatch, "backfill") == 2
    finally:
        running.kill()
    said = capsys.readouterr().err
    assert f"is running: process {running.process.pid} on {os.uname().nodename}" in said
    assert "last heartbeat" in said
    assert "--take-over" in said
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert command(fed, monkeypatch, "backfill", "--on", "spark") == 2
    assert "Spark needs Java 17 or 21" in capsys.readouterr().err
    catch_up(fed, load_pipeline("bounded_pipelines", "broad", fed.name), 2, tmp_path / "staging")
    fed.assert_output()
    fed.assert_nothing_left()


def test_what_is_refused_at_once(fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("catch-up",): f"begin with `exactlyonce backfill bounded_pipelines:broad --param name={fed.name}`",
        ("backfill", "--spark-conf", "spark.speculation=true"): "spark.speculation is on",
        ("backfill", "--master", "spark://nowhere:7077"): "--staging is needed with --master",
        ("backfill", "--on", "driver", "--spark-conf", "a=b"): "--on driver starts no Spark, so --spark-conf cannot",
        ("backfill", "--to", "yesterday"): "to is 'yesterday'. Write one of: latest, ",
        ("backfill", "--to", "2026-11-01T00:00:00"): "has no time zone",
        ("backfill", "--to", "group:"): "group:NAME (the offsets of a consumer group",
        ("backfill", "--to", "group:nobody"): "with to='group:nobody': the group has no offset in topic",
        ("backfill", "--to", '{"a": 1}'): "which is no offsets by topic and partition: Expected `object`",
        ("backfill", "--chunk-records", "0"): "must be at least 1",
    }
    for (name, *options), said in wrong.items():
        assert command(fed, monkeypatch, name, *options) == 2
        assert said in capsys.readouterr().err


def test_what_is_refused_before_anybody_is_fenced(
    fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A width or an end that cannot be is refused before Spark starts, and the other instance goes on."""
    fed.feed(30)
    monkeypatch.setattr("exactlyonce.engines.bounded.catch_up.COLUMNS_SIZE_MAX", 1 << 20)
    with pytest.raises(ConfigError, match=r"more than a checkpoint .* has room for.* Use --parallelism \d+ at most"):
        judged(fed, load_pipeline("bounded_pipelines", "fine", fed.name), 10_000)
    catch_up(fed, load_pipeline("bounded_pipelines", "broad", fed.name), 1, tmp_path)
    before = fed.history().incarnation_latest
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    wrong = {
        ("--to", f'{{"{fed.name}-in": {{"0": 1}}}}'): f"Every partition of {fed.name}-in needs an end",
        ("--on", "spark"): "Spark needs Java 17 or 21",
    }
    for options, said in wrong.items():
        assert command(fed, monkeypatch, "catch-up", "--take-over", *options) == 2
        assert said in capsys.readouterr().err
    assert fed.history().incarnation_latest == before


def judged(fed: Fed, loaded: Loaded, parallelism: int, *, no_output: bool = False) -> CatchUp:
    progress = Silent()
    work = CatchUp(
        loaded, RunOptions(fed.config), progress, parallelism=parallelism, from_nothing=True, no_output=no_output
    )
    work.judge()
    return work


def test_what_comes_while_spark_starts(fed: Fed, tmp_path: Path) -> None:
    """What was judged is judged again: another command has written output; a run has begun."""
    fed.feed(100)
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)
    history, other = judged(fed, loaded, 1, no_output=True), judged(fed, loaded, 1)
    catch_up(fed, loaded, 1, tmp_path)
    before = fed.history().incarnation_latest
    executors = Executors(in_process, tmp_path, lambda: 1)
    with pytest.raises(ConfigError, match="has written output up to checkpoint 1"):
        history.run(executors)
    assert fed.history().incarnation_latest == before, "nobody was fenced"
    running = start(fed, "bounded_pipelines:broad")
    try:
        running.await_event(lambda event: event["event"] == "started")
        with pytest.raises(ConfigError, match=f"is running: process {running.process.pid}"):
            other.run(executors)
    finally:
        running.kill()
    fed.feed(50)
    catch_up(fed, loaded, 1, tmp_path)
    fed.assert_output()


def test_more_units_than_key_groups_are_clamped(fed: Fed) -> None:
    work = judged(fed, load_pipeline("bounded_pipelines", "narrow", fed.name), 3)
    assert (work.parallelism, work.options.parallelism) == (2, 2)
    (note,) = cast(Silent, work.progress).notes
    assert note.startswith("parallelism 3 is more than the 2 key groups of the pipeline")


def test_state_kept_by_partition_keeps_its_width(fed: Fed, tmp_path: Path) -> None:
    """Another width is refused before anybody is fenced; the width of the state is the default."""
    loaded = load_pipeline("pipelines", "partitioned", fed.name)
    fed.feed(30, by_customer=True)
    catch_up(fed, loaded, 2, tmp_path)
    before = fed.history().incarnation_latest
    with pytest.raises(GraphError, match="run it with parallelism 2, as before"):
        judged(fed, loaded, 3)
    assert fed.history().incarnation_latest == before


def test_the_default_width_is_what_there_is_room_for() -> None:
    """More cores than units that a checkpoint has room for: so many units, and a note."""
    notes: list[str] = []
    assert default_parallelism(200, 128, notes.append) == 128
    (note,) = notes
    assert note.startswith("Spark has 200 cores, and a checkpoint of this pipeline has room for 128 units")
    assert default_parallelism(4, 128, notes.append) == 4
    assert len(notes) == 1


def test_stop_offsets(fed: Fed, tmp_path: Path) -> None:
    fed.feed(90)
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)
    ends = {f"{fed.name}-in": {0: 10, 1: -1, 2: 0, 3: 0}, f"{fed.name}-more": {0: 5, 1: 0, 2: 0}}

    def to(**changed: dict[int, int]) -> Any:
        named = {**ends, **{f"{fed.name}-{topic}": offsets for topic, offsets in changed.items()}}
        return catch_up(fed, loaded, 2, tmp_path, to=named)

    summary = to()
    reached = {(each.source, each.partition): each.offset for each in summary.manifest.offsets}
    assert (reached["left", 0], reached["right", 0]) == (10, 5)
    assert summary.records == sum(reached.values())
    for offsets, said in (
        ({0: 10, 1: -1, 2: 0, 3: 100_000}, "lies beyond the end"),
        ({0: 9, 1: -1, 2: 0, 3: 0}, "cannot be taken back to 9"),
        ({0: 10}, "Every partition of .* needs an end: 0, 1, 2, 3"),
    ):
        with pytest.raises(ConfigError, match=said):
            to(**{"in": offsets})
    catch_up(fed, loaded, 1, tmp_path)
    fed.assert_output()


@pytest.mark.exhaustive
def test_an_error_leaves_nothing_open(fed: Fed, tmp_path: Path) -> None:
    fed.feed(100)
    with pytest.raises(RecordError, match=r"Operator 'totals' raised ZeroDivisionError"):
        catch_up(fed, load_pipeline("pipelines", "raising", fed.name), 2, tmp_path)
    failed = fed.history()
    assert failed.living(int(time.time() * 1000)) is None, "another host need not wait until it counts as dead"
    assert failed.newest_incarnation is not None
    assert "ZeroDivisionError" in failed.newest_incarnation.failure

    def failing(stage: str, work: Sequence[bytes]) -> list[bytes]:
        answers = in_process(stage, work)
        if stage.endswith(", publish"):
            raise OSError("the driver lost its executors")
        return answers

    fixed = load_pipeline("pipelines", "linear", fed.name)
    with pytest.raises(OSError, match="lost its executors"):
        catch_up(fed, fixed, 2, tmp_path, submit=failing)
    assert not fed.open_transactions(), "also before anybody comes again"
    catch_up(fed, fixed, 2, tmp_path)
    fed.assert_nothing_left()


@pytest.mark.exhaustive
def test_whoever_is_overtaken_ends(fed: Fed, tmp_path: Path) -> None:
    fed.feed(300)
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)

    stages: list[str] = []

    def overtaken(stage: str, work: Sequence[bytes]) -> list[bytes]:
        stages.append(stage)
        if len(stages) == 2:
            catch_up(fed, loaded, 1, tmp_path / "other")
        return in_process(stage, work)

    with pytest.raises(Fenced, match="has taken over from incarnation 1"):
        catch_up(fed, loaded, 2, tmp_path / "this", submit=overtaken)
    fed.assert_output()
    assert not fed.open_transactions()


def test_heartbeats_go_on_while_a_job_runs(fed: Fed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exactlyonce.engines.connections.UPKEEP_INTERVAL_S", 0.05)
    fed.feed(100)
    seen: set[int] = set()

    def lasting(stage: str, work: Sequence[bytes]) -> list[bytes]:
        deadline = time.monotonic() + LIMIT_S
        while len(seen) < 3:
            assert time.monotonic() < deadline, f"no heartbeats came but {seen}"
            incarnation = fed.history().newest_incarnation
            assert incarnation is not None
            seen.add(incarnation.heartbeat_ms)
        return in_process(stage, work)

    catch_up(fed, load_pipeline("pipelines", "linear", fed.name), 1, tmp_path, submit=lasting)
    assert len(seen) == 3


class Following(Silent):
    """Feeds more after the first checkpoint, and asks for the end once all of it is read."""

    def __init__(self, fed: Fed, feed: Callable[[], None]) -> None:
        super().__init__()
        self.fed, self.feed = fed, feed
        self.records, self.stopping = 0, threading.Event()

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        super().advanced(advanced, offsets)
        self.records += advanced.records
        if len(self.checkpoints) == 1:
            self.feed()
        elif self.records == len(self.fed.all):
            self.stopping.set()

    def follow(self, loaded: Loaded, folder: Path, **options: Any) -> None:
        catch_up(self.fed, loaded, 2, folder, follow=True, stopping=self.stopping, progress=self, **options)


def test_small_chunks_of_one_that_follows_need_no_executors(
    fed: Fed, loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver computes small chunks if it may. In any case it writes the output of a chunk, if that is little."""
    given: list[str] = []

    def executors(stage: str, work: Sequence[bytes]) -> list[bytes]:
        given.append(stage.partition(", ")[2])
        return in_process(stage, work)

    def feed() -> None:
        monkeypatch.setattr(catching_up, "SMALL_RECORDS", 1)
        fed.feed(60)

    fed.feed(60)
    Following(fed, feed).follow(loaded("broad"), tmp_path, submit=executors, small_here=True)
    stages = [*given]
    given.clear()
    fed.feed(60)
    catch_up(fed, loaded("broad"), 2, tmp_path, submit=executors)
    assert [*stages, "publish"] == given, "the first chunk stays here, and so does what the second publishes"
    fed.assert_output()
    fed.assert_nothing_left()


@pytest.mark.exhaustive
def test_a_partition_that_is_added_is_followed(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    """It is read from its first record. An offset has the leader epoch of the record before it, or none."""

    def grow() -> None:
        more = orders(30, first=2_000_000)
        fed.kafka.add_partitions(f"{fed.name}-more", 4)
        fed.kafka.produce(f"{fed.name}-more", more, 3)
        fed.right += more

    fed.feed(90)
    Following(fed, grow).follow(loaded("broad"), tmp_path)
    fed.assert_output()
    fed.assert_nothing_left()
    history = fed.history()
    latest = history.latest
    assert latest is not None
    assert latest.kind == "checkpoint"
    assert history.living(0) is None, "no final checkpoint was due, and yet nobody need wait for its silence"
    right = {each.partition: (each.offset, each.leader_epoch) for each in latest.offsets if each.source == "right"}
    assert right.keys() == {0, 1, 2, 3}
    assert right[2] == (0, -1)
    assert all(epoch == (0 if offset else -1) for offset, epoch in right.values())


@pytest.mark.exhaustive
def test_an_output_topic_that_grows(fed: Fed, tmp_path: Path) -> None:
    class Widening(Silent):
        def advanced(self, advanced: Advanced, offsets: int) -> None:
            if not self.checkpoints:
                fed.kafka.add_partitions(f"{fed.name}-out", 7)
            super().advanced(advanced, offsets)

    fed.feed(900)
    progress = Widening()
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)
    catch_up(fed, loaded, 2, tmp_path, progress=progress, chunk_records=500)
    counts = [{output.sink: output.partitions for output in manifest.sinks}["out"] for manifest in progress.checkpoints]
    assert counts == [counts[0], *[7] * (len(counts) - 1)]
    assert counts[0] < 7
    await_readable(fed.kafka, f"{fed.name}-out")
    assert len(fed.kafka.read_committed(f"{fed.name}-out")) == len(fed.all)
    report = audited(loaded, fed.config, tmp_path)
    assert (report.findings, report.checkpoints[-1]) == ([], progress.checkpoints[-1].checkpoint)


def test_executors_with_another_version_of_the_module(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    """They say so, and nothing of the checkpoint is there."""
    fed.feed(30)
    ours = loaded("broad")
    theirs = replace(ours, reference={**ours.reference, "attribute": "fine"})
    with pytest.raises(GraphError, match="the executors have another version of its module"):
        catch_up(fed, theirs, 2, tmp_path)
    assert fed.history().checkpoint_latest == 0
    assert not fed.open_transactions()


def test_a_close_that_raises(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    fed.feed(100)
    closing, progress = loaded("closing"), Silent()
    summary = catch_up(fed, closing, 2, tmp_path, progress=progress, chunk_records=50)
    assert (summary.records_out, summary.checkpoints) == (100, 2)
    (note,) = (each for each in progress.notes if "close()" in each)
    assert note.startswith("close() of operator 'copy' raised RuntimeError: connection already closed (")
    fed.kafka.produce(f"{fed.name}-in", [("x", json.dumps({"id": 1, "customer": "x", "total": -1}))])
    with pytest.raises(RecordError, match="Operator 'copy' raised ValueError: negative"):
        catch_up(fed, closing, 2, tmp_path)


@pytest.mark.exhaustive
def test_a_publication_that_is_swept_beside(fed: Fed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def upkeep_after(upkeep: Callable[[], None], work: Callable[[Any], list[bytes]]) -> list[bytes]:
        answers = work(None)
        upkeep()
        return answers

    monkeypatch.setattr(catching_up, "with_heartbeat", upkeep_after)
    monkeypatch.setattr(leader, "WATCH_INTERVAL_MS", 0)
    fed.feed(90)
    summary = catch_up(fed, load_pipeline("bounded_pipelines", "broad", fed.name), 2, tmp_path, chunk_records=30)
    assert summary.manifest.checkpoint > 2
    fed.assert_output()
