"""A source of all topics of a pattern: each record once, also of topics that come later, whatever is killed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from auditing import audited
from bounded import Silent, load_pipeline
from running import Job, stop
from waiting import until

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.options import RunOptions

pytestmark = pytest.mark.broker

REFUSED, BAD_RECORD, HALTED = 2, 3, 6
STEPS = ("worker-acknowledged", "coordinator-decided")


class Topics:
    """Topics NAME-in-... of a job, in which records have keys."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def add(self, name: str, partitions: int, count: int) -> str:
        topic = self.job.kafka.create_topic(f"{self.job.name}-in-{name}", partitions)
        self.job.feed(count, f"in-{name}")
        return topic

    @property
    def noted(self) -> set[str]:
        """The topics that the newest checkpoint names."""
        newest = self.job.history().latest
        return set() if newest is None else {at.topic.rpartition("-")[2] for at in newest.in_cluster}

    def assert_output(self) -> None:
        self.job.assert_output()


@pytest.fixture
def topics_of(job_of: Callable[..., Job]) -> Callable[..., Topics]:
    return lambda *arguments: Topics(job_of("source_pipelines:patterned", *arguments))


def test_topics_that_come_later(topics_of: Any) -> None:
    """A run takes up topics and partitions that come while it runs. It is killed once a checkpoint has a new topic, and
    a wider one follows."""
    topics = topics_of("--parallelism", "2")
    job = topics.job
    topics.add("a", 2, 300)
    topics.add("b.c", 3, 300)
    run = job.start()
    run.await_checkpoint()
    topics.add("d", 1, 300)
    job.kafka.add_partitions(f"{job.name}-in-a", 3)
    until(lambda: topics.noted == {"a", "b.c", "d"})
    run.kill()
    topics.add("e", 2, 300)
    job.feed(300, "in-a")
    run = job.start("--parallelism", "1", "--inline")
    topics.assert_output()
    stop(run)


@pytest.mark.exhaustive
def test_bounded_work_takes_up_topics(topics_of: Any, tmp_path: Path) -> None:
    """An audit computes all of it again."""
    topics = topics_of("--num-retained", "100")
    job = topics.job
    topics.add("a", 2, 300)
    job.finish_here()
    topics.add("0", 2, 300)
    job.feed(300, "in-a")
    loaded = load_pipeline("source_pipelines", "patterned", job.name)
    options = RunOptions(job.config, CheckpointSettings(num_retained=100), parallelism=2)
    summary = CatchUp(loaded, options, Silent(), chunk_records=400).lead(in_process, tmp_path / "staging")
    assert summary.records == 600
    assert len({at.topic for at in summary.manifest.in_cluster}) == 2
    topics.assert_output()
    report = audited(loaded, options.client, tmp_path)
    assert (report.findings, report.records_in) == ([], 900)
    assert report.checkpoints[-1] == summary.manifest.checkpoint
    assert not CatchUp(loaded, options, Silent()).lead(in_process, tmp_path / "staging").records


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_right_after_a_topic_is_found(step: str, topics_of: Any, failpoint: Any) -> None:
    """Before and after the first checkpoint that names the topic: its records come once."""
    topics = topics_of("--parallelism", "2")
    topics.add("b", 2, 200)
    topics.job.finish()
    topics.add("a", 3, 400)
    topics.add("c", 1, 100)
    topics.job.run_killed(failpoint(step), 2)
    topics.job.finish()
    topics.assert_output()


def test_a_topic_that_is_deleted(topics_of: Any) -> None:
    """It stops the run with the choices, and the next one at its start; so does another topic of its name."""
    topics = topics_of("--inline")
    topics.add("a", 1, 50)
    gone = topics.add("b", 1, 50)
    run = topics.job.start()
    run.await_checkpoint()
    topics.job.kafka.delete_topics([gone])
    assert run.wait() == HALTED, run.said
    for said in (run.said, topics.job.finish_here(until="running", code=HALTED)):
        assert f"Topic '{gone}' was deleted since checkpoint" in said
        assert "Choices: restore the topic" in said
    topics.job.kafka.create_topic(gone, 1)
    said = topics.job.finish_here(until="running", code=HALTED)
    assert f"Topic '{gone}' was deleted and created again since checkpoint" in said


def test_a_record_that_does_not_decode(topics_of: Any) -> None:
    """It is named by its topic, and left out by its split."""
    topics = topics_of()
    topics.add("a", 1, 20)
    bad = topics.add("b", 1, 20)
    topics.job.kafka.produce(bad, [("k", "{}")])
    said = topics.job.finish_here(code=BAD_RECORD)
    assert f"offset 20: in {bad}[0], the value is not Order" in said
    option = re.search(r"--skip '?(topics:\S+:1:20@?\w*)'?", said)
    assert option is not None, said
    topics.job.finish_here("--skip", option.group(1))
    topics.assert_output()


def test_dead_letters_have_the_topic(topics_of: Any) -> None:
    topics = topics_of("--param", "dead=yes")
    job = topics.job
    job.kafka.create_topic(f"{job.name}-dead", 1)
    bad = topics.add("b", 1, 20)
    job.kafka.produce(bad, [("k", "{}")])
    job.finish_here()
    topics.assert_output()
    (letter,) = job.kafka.read_committed(f"{job.name}-dead")
    assert letter.value == b"{}"
    assert bad.encode() in b" ".join(value for _, value in letter.headers)


def test_an_output_that_matches(topics_of: Any) -> None:
    topics = topics_of("--param", "out=in-copies")
    said = topics.job.finish_here(code=REFUSED)
    assert f"Sink 'copies' writes to topic '{topics.job.name}-in-copies', which the pipeline reads" in said


def test_no_topic_matches(topics_of: Any) -> None:
    assert "source orders: there is nothing to read at topics:" in topics_of().job.finish_here()


@pytest.mark.exhaustive
def test_a_savepoint(topics_of: Any, tmp_path: Path) -> None:
    """It goes on in the topics where it was, under another parallelism."""
    topics = topics_of("--until", "latest")
    job = topics.job
    topics.add("a", 2, 200)
    job.finish()
    tmp_path.joinpath("exports").mkdir()
    job.command("savepoint", job.name, "--to", f"file://{tmp_path}/exports")
    job.command("reset", job.name, "--yes", "--force")
    (savepoint,) = (tmp_path / "exports").glob(f"{job.name}-*")
    topics.add("0", 1, 100)
    job.feed(100, "in-a")
    job.finish("--from-savepoint", f"file://{savepoint}", "--parallelism", "3")
    topics.assert_output()
