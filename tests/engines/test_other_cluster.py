"""A source in another cluster than the checkpoints: every question about it goes there."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition
from running import Job, Run, orders, stop, workers_of
from waiting import until

from exactlyonce import Pipeline
from exactlyonce.connectors import Cluster, KafkaSource
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster

pytestmark = pytest.mark.broker
COUNT = 3_000


@pytest.fixture
def job(job_of: Callable[..., Job]) -> Job:
    """Its own cluster has a topic of the name of the input, too: whoever asks there finds nothing."""
    job = job_of("other_cluster", "--parallelism", "2", "--num-retained", "50")
    job.kafka.create_topic(f"{job.name}-out", 2)
    return job


def feed(eu: KafkaCluster, job: Job, count: int = COUNT) -> None:
    more = orders(count, first=len(job.fed))
    eu.produce(f"{job.name}-in", more)
    job.fed += more


def lag_at(eu: KafkaCluster, group: str, topic: str, partitions: int = 3) -> int:
    """As people's tools ask for it."""
    settings = {"bootstrap.servers": eu.bootstrap_servers, "group.id": group}
    with closing(Consumer(settings)) as consumer:
        places = [TopicPartition(topic, partition) for partition in range(partitions)]
        ends = [consumer.get_watermark_offsets(place, timeout=LIMIT_S)[1] for place in places]
        return sum(ends) - sum(max(0, place.offset) for place in consumer.committed(places, timeout=LIMIT_S))


def test_records_of_a_cluster_are_known_by_its_name(
    job_of: Callable[..., Job], kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here both names are of one cluster; the next test has two."""
    monkeypatch.setenv("EU_SERVERS", kafka.bootstrap_servers)
    job = job_of("other_cluster", partitions=2)
    job.kafka.create_topic(f"{topic_name}-out")
    job.feed(50)
    job.finish_here()
    job.assert_totals()
    manifest = job.history().latest
    assert manifest is not None
    assert {read.topic for read in manifest.offsets} == {f"kafka:eu/{topic_name}-in"}
    kafka.delete_topics([f"{topic_name}-in"])
    said = job.finish_here(code=2)
    assert f"topic {topic_name}-in" in said


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "cluster 'eu': bootstrap.servers is not set"),
        ({"bootstrap.servers": "eu"}, "bootstrap.servers has 'eu'"),
        (
            {"bootstrap.servers": "eu:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN",
             "sasl.username": "me", "sasl.password": "hunter2"},
            "cluster 'eu' has sasl.password written out",
        ),
    ],
)  # fmt: skip
def test_settings_of_a_cluster_are_checked_with_the_pipeline(settings: dict[str, str], problem: str) -> None:
    pipeline = Pipeline("p")
    source = KafkaSource("orders", value=bytes, cluster=Cluster("eu", settings))
    pipeline.source("orders", source).sink("out", KafkaSink("orders"))
    with pytest.raises(GraphError, match=problem) as raised:
        pipeline.build()
    assert "hunter2" not in str(raised.value)


def test_one_topic_of_two_clusters_is_read_by_two_sources() -> None:
    """The same one twice is a mistake; and its copy at home may be written to."""
    pipeline = Pipeline("p")
    eu, us = (Cluster(name, {"bootstrap.servers": f"{name}:9092"}) for name in ("eu", "us"))
    streams = [pipeline.source(f"in-{c.name}", KafkaSource("orders", value=bytes, cluster=c)) for c in (eu, us)]
    streams[0].union(streams[1]).sink("out", KafkaSink("orders"))
    places = {node.source.place for node in pipeline.build().sources if node.source is not None}
    assert places == {"kafka:eu/orders", "kafka:us/orders"}
    pipeline.source("again", KafkaSource("orders", value=bytes, cluster=us)).sink("more", KafkaSink("more"))
    with pytest.raises(GraphError, match="'in-us' already reads topic 'kafka:us/orders'"):
        pipeline.build()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_record_of_another_cluster_counts_once(
    job: Job, own_broker: Callable[..., OwnCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through kills of both sides and a minute without the cluster; bounded work and the audit read there, too."""
    eu, dice = own_broker(), random.Random(31)
    topic = eu.create_topic(f"{job.name}-in", 3)
    monkeypatch.setenv("EU_SERVERS", eu.bootstrap_servers)
    feed(eu, job)
    run: Run = job.start()
    for _ in range(3):
        run.await_checkpoint()
        os.kill(dice.choice(workers_of(run)), signal.SIGKILL)
        feed(eu, job)
        run.await_checkpoint()
        run.kill()
        run = job.start()
        feed(eu, job)
    run.await_checkpoint()

    eu.broker.kill()
    threading.Event().wait(60)
    assert run.process.poll() is None
    eu.broker.start()
    feed(eu, job)
    run.await_checkpoint()
    until(lambda: lag_at(eu, job.name, topic) == 0)
    stop(run)
    job.assert_totals()

    feed(eu, job)
    target = ("pipelines:other_cluster", "--param", f"name={job.name}")
    job.command("catch-up", *target, "--on", "driver", "--num-retained", "50")
    job.assert_totals()
    assert job.audited()["unjudged"] == []

    feed(eu, job)
    job.finish()
    job.assert_totals()
    eu.delete_topics([topic])
    assert f"Topic kafka:eu/{topic} is missing" in doctor(job, *target)
    eu.create_topic(topic, 3)
    again = job.finish(code=6)
    assert f"Topic 'kafka:eu/{topic}' was deleted and created again" in again.said
    assert "was deleted and created again" in doctor(job, *target)


def doctor(job: Job, *target: str) -> str:
    """Its findings, in one line."""
    return " ".join(job.command("doctor", *target, code=1).split())
