"""An input topic that is deleted, made anew or truncated under a pipeline stops it; nothing is skipped in silence."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from running import QUICK, Run, assert_totals, orders

from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import TopicError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster

pytestmark = pytest.mark.broker

HALTED = 6
KEPT = 60


def delete(kafka: KafkaCluster, topic: str) -> None:
    """Returns once it is gone."""
    admin = kafka.admin()  # which takes its answers with it
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    topics, deadline = Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})), time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline:
            topics.describe([topic])
    except TopicError:
        return
    finally:
        topics.close()
    raise AssertionError(f"{topic} is still there")


def noted(kafka: KafkaCluster, pipeline: str) -> dict[tuple[str, int], tuple[int, str]]:
    """(offset, topic id) by topic and partition, in the newest manifest."""
    newest = read_history({"bootstrap.servers": kafka.bootstrap_servers}, pipeline).latest
    assert newest is not None
    return {(each.topic, each.partition): (each.offset, each.topic_id) for each in newest.offsets}


@pytest.mark.exhaustive(but=["0"])
@pytest.mark.parametrize("away_s", [0, pytest.param(10, marks=pytest.mark.slow)])
def test_a_topic_that_is_made_anew_under_a_job(
    away_s: float, kafka: KafkaCluster, topic_name: str, run: Callable[..., Any]
) -> None:
    """The job halts and names the topic, and no checkpoint has an offset of the new one, which the worker has read
    while the coordinator slept."""
    topic = kafka.create_topic(f"{topic_name}-in")
    fed = orders(100)
    kafka.produce(topic, fed)
    job = run("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
    while job.await_checkpoint()["records_in"] < 100:
        pass
    before = noted(kafka, topic_name)
    job.process.send_signal(signal.SIGSTOP)
    delete(kafka, topic)
    time.sleep(away_s)  # not to wait for anything: so that clients ask for it while it is away, or do not
    kafka.create_topic(topic)
    kafka.produce(topic, orders(500, first=100))
    job.process.send_signal(signal.SIGCONT)
    assert job.wait() == HALTED, job.said
    assert topic in job.said
    assert noted(kafka, topic_name) == before
    assert_totals(kafka, f"{topic_name}-out", fed)


def test_a_topic_that_is_deleted_under_an_idle_job(
    kafka: KafkaCluster, topic_name: str, run: Callable[..., Any]
) -> None:
    """The job halts though it has nothing to read, and says that the topic is gone."""
    topic = kafka.create_topic(f"{topic_name}-in")
    kafka.produce(topic, orders(100))
    job = run("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
    while job.await_checkpoint()["records_in"] < 100:
        pass
    delete(kafka, topic)
    assert job.wait() == HALTED, job.said
    assert f"Topic '{topic}' was deleted" in job.said


def cut(cluster: OwnCluster, topic: str) -> None:
    """What an unclean leader election does to partition 0: the log of a broker that is down ends at offset `KEPT`."""
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
def test_a_log_that_was_truncated_and_grew_again(
    running: bool, stoppable: OwnCluster, topic_name: str, run: Callable[..., Any]
) -> None:
    """The pipeline halts where records that it has read are gone, though other records have their offsets now: at its
    next start, and while it runs."""
    cluster = stoppable
    topic = cluster.create_topic(f"{topic_name}-in")
    for first in range(0, 100, 10):
        cluster.produce(topic, orders(10, first=first))
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
    job = run(*arguments, *(() if running else ("--until", "latest")), servers=cluster.bootstrap_servers)
    while job.await_checkpoint()["records_in"] < 100:
        pass
    assert running or job.wait() == 0
    before = noted(cluster, topic_name)
    cluster.broker.kill()
    cut(cluster, topic)
    cluster.broker.start()
    cluster.produce(topic, orders(90, first=1000))
    if not running:
        job = run(*arguments, servers=cluster.bootstrap_servers)
    assert job.wait() == HALTED, job.said
    assert "the log was truncated" in job.said or "its log was truncated" in job.said
    assert f"{topic}[0]" in job.said
    assert noted(cluster, topic_name) == before
    assert_totals(cluster, f"{topic_name}-out", orders(100))


@pytest.mark.exhaustive(but=["deleted"])
@pytest.mark.parametrize("again", [False, True], ids=["deleted", "made anew"])
def test_an_output_topic_that_is_gone(
    again: bool, kafka: KafkaCluster, topic_name: str, run: Callable[..., Run]
) -> None:
    """A job whose output topic is deleted halts, whether or not there is another one of its name; and the next run
    does not make it anew either."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(100))
    job = run("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
    job.await_event(lambda event: event["event"] == "checkpoint" and event["records_in"] >= 100)
    delete(kafka, f"{topic_name}-out")
    if again:
        kafka.create_topic(f"{topic_name}-out")
    assert job.wait() == 6, job.said
    assert f"Output topic '{topic_name}-out' was deleted" in job.said
    if not again:
        after = run("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
        assert after.wait() == 6, after.said
        assert "created topic" not in after.said
