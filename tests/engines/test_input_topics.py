"""A topic that is deleted, made anew or truncated under a pipeline stops it; nothing is skipped in silence."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from running import Job, Run, visible
from waiting import until

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import TopicError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster

HALTED = 6
KEPT = 60
JobOf = Callable[..., Job]


def delete(kafka: KafkaCluster, topic: str) -> None:
    admin = kafka.admin()  # which takes its answers with it
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    topics = Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))
    with pytest.raises(TopicError):
        until(lambda: not topics.describe([topic]))
    topics.close()


def noted(job: Job) -> dict[tuple[str, int], tuple[int, str]]:
    newest = job.history().latest
    assert newest is not None
    return {(each.topic, each.partition): (each.offset, each.topic_id) for each in newest.offsets}


def halted(run: Run, *texts: str) -> None:
    assert run.wait() == HALTED, run.said
    assert [text for text in texts if text not in run.said] == [], run.said


def read_all(run: Run, job: Job) -> None:
    run.await_event(lambda event: event["event"] == "checkpoint" and event["records_in"] >= len(job.fed))


def test_a_topic_that_is_made_anew_under_a_job(kafka: KafkaCluster, job_of: JobOf) -> None:
    job = job_of("linear", partitions=1)
    job.feed(100)
    run = job.start()
    read_all(run, job)
    before = noted(job)
    run.process.send_signal(signal.SIGSTOP)
    delete(kafka, job.topic)
    kafka.create_topic(job.topic)
    kafka.produce(job.topic, job.fed * 5)
    run.process.send_signal(signal.SIGCONT)
    halted(run, job.topic)
    assert noted(job) == before
    job.assert_totals()


@pytest.mark.exhaustive(but=["input"])
@pytest.mark.parametrize("which", ["input", "output"])
def test_a_topic_that_is_deleted_under_an_idle_job(which: str, kafka: KafkaCluster, job_of: JobOf) -> None:
    job = job_of("linear")
    job.feed(100)
    run = job.start("--inline")
    read_all(run, job)
    topic = f"{job.name}-{which.removesuffix('put')}"
    delete(kafka, topic)
    halted(run, f"{'Topic' if which == 'input' else 'Output topic'} '{topic}' was deleted")
    if which == "output":
        assert "created topic" not in job.finish_here(code=HALTED)


def test_an_output_that_is_made_anew_between_two_runs(kafka: KafkaCluster, job_of: JobOf) -> None:
    """Every start halts until the user accepts the new topic; then the run goes on into it, and stays there."""
    job = job_of("linear")
    job.feed(50)
    job.finish_here()
    out = f"{job.name}-out"
    delete(kafka, out)
    kafka.create_topic(out)
    lost = len(job.fed)
    job.feed(30)
    for _ in range(2):
        said = job.finish_here(code=HALTED)
        assert f"Output topic '{out}' was deleted and created again since checkpoint" in said
        assert f"--accept-new-output {out}" in said
    assert f"Output topic '{out}' was deleted and created again" in job.command("doctor", job.name, "--json", code=1)
    assert "writes to no such topic" in job.finish_here("--accept-new-output", "other", code=2)
    assert "that is accepted" in job.finish_here("--accept-new-output", out)
    job.feed(20)
    job.finish_here()
    assert len(visible(kafka, out, len(job.fed) - lost)) == len(job.fed) - lost


def cut(cluster: OwnCluster, topic: str) -> None:
    """Cut the log of partition 0 at offset `KEPT`, as an unclean leader election does, while the broker is down."""
    folder = cluster.broker.data_dir / "topics" / f"{topic}-0"
    log = folder / "00000000000000000000.log"
    data, end = log.read_bytes(), 0
    while end < len(data) and int.from_bytes(data[end : end + 8], "big") < KEPT:  # by the offsets that batches begin at
        end += 12 + int.from_bytes(data[end + 8 : end + 12], "big")
    assert end < len(data)
    log.write_bytes(data[:end])
    for file in folder.iterdir():
        if file.suffix in (".index", ".timeindex", ".snapshot"):
            file.unlink()  # made again from the log


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("running", [False, True])
def test_a_log_that_was_truncated_and_grew_again(running: bool, stoppable: OwnCluster, job_of: JobOf) -> None:
    job = job_of("linear", cluster=stoppable, partitions=1)
    for _ in range(10):
        job.feed(10)
    run = job.start(*(() if running else ("--until", "latest")))
    read_all(run, job)
    assert running or run.wait() == 0
    before, fed = noted(job), list(job.fed)
    stoppable.broker.kill()
    cut(stoppable, job.topic)
    stoppable.broker.start()
    job.feed(90)
    halted(run if running else job.start(), "log was truncated", f"{job.topic}[0]")
    assert noted(job) == before
    job.fed = fed
    job.assert_totals()
