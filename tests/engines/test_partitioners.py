"""A key stays in its partition, whichever engine or version writes an output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from running import Job

from exactlyonce.checkpoint.records import encoding as wire
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.partitioning import DEFAULT, OF_LIBRARY, PARTITIONERS

COUNT, PARTITIONS = 60, 4


def places(job: Job) -> dict[bytes, set[int]]:
    """The partitions of each key of NAME-out."""
    found = defaultdict[bytes, set[int]](set)
    for record in job.kafka.read_committed(f"{job.name}-out"):
        found[record.key or b""].add(record.partition)
    return found


def by(name: str, keys: dict[bytes, set[int]]) -> dict[bytes, set[int | None]]:
    return {key: {PARTITIONERS[name](key, PARTITIONS)} for key in keys}


def test_a_pipeline_of_an_older_version_keeps_its_partitioner(
    job_of: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once; an audit expects what each version wrote; another partitioner is refused."""
    job = job_of("linear", "--num-retained", "50")
    with monkeypatch.context() as older:
        older.setitem(wire._WRITTEN, Manifest, wire._VERSIONS[Manifest][7])
        job.feed(COUNT)
        job.finish_here("--kafka", f"partitioner={OF_LIBRARY}")
    job.feed(COUNT)
    assert f"-out keeps the partitioner {OF_LIBRARY}" in job.finish_here()
    found = places(job)
    assert found == by(OF_LIBRARY, found)
    assert job.audited()["unjudged"] == []
    refusal = job.finish_here("--kafka", f"partitioner={DEFAULT}", code=2)
    assert f"by {OF_LIBRARY}, and this run is to do so by {DEFAULT}" in refusal


def test_bounded_work_and_runs_put_a_key_into_one_partition(job_of: Callable[..., Job]) -> None:
    """By the partitioner of Java's clients; whoever begins in a topic with keys by another one is told so."""
    job = job_of("linear", "--num-retained", "50")
    topic = job.kafka.create_topic(f"{job.name}-out", PARTITIONS)
    job.kafka.produce(topic, [(str(number), "{}") for number in range(1000, 1100)])
    job.feed(COUNT)
    assert f"the keys of topic {topic} lie in partitions by {OF_LIBRARY}" in job.finish_here()
    job.feed(COUNT)
    job.command("catch-up", *job._target, "--on", "driver", "--num-retained", "50")
    ours = {key: found for key, found in places(job).items() if key.startswith(b"c")}
    assert len(ours) == 17
    assert ours == by(DEFAULT, ours)
    assert job.audited()["unjudged"] == []
