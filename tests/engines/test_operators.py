"""Every kind of operator, in one process and in several: what comes out is what a plain computation gives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blank_manifest import blank_manifest
from running import QUICK, Job, run_here, visible

from exactlyonce import KafkaSink, KafkaSource, Pipeline
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.engines.runtime.assembler import key_places
from exactlyonce.errors import GraphError
from exactlyonce.testing.cluster import KafkaCluster

JobOf = Callable[..., Job]


@pytest.mark.exhaustive(but=["inline"])
@pytest.mark.parametrize("parallelism", [pytest.param(0, id="inline"), 3])
def test_everything(parallelism: int, kafka: KafkaCluster, job_of: JobOf, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = job_of("everything", "--param", f"log={log}")
    kafka.create_topic(f"{job.name}-more", 3)
    fed = [(key, json.loads(value)) for key, value in job.feed(600, customers=20)]
    given = [order for _, order in fed]
    more = [json.loads(value) for _, value in job.feed(300, "more", customers=20)]
    if parallelism:
        job.finish("--parallelism", str(parallelism))
    else:
        job.finish_here()
    assert seen(job, "tags", 600, "tag") == Counter(f"c-{order['customer']}" for order in given)
    assert seen(job, "late", 300, "id") == Counter(order["id"] for order in given if order["id"] % 2)
    echoed = [(record.key, json.loads(record.value or b"")["id"]) for record in visible(kafka, f"{job.name}-echo", 600)]
    assert Counter(echoed) == Counter((key.encode(), order["id"]) for key, order in fed)
    doubled = [order for order in given if order["id"] % 2 == 0] + more
    per_customer = Counter(order["customer"] for order in doubled)
    numbers = sum(2 * n + 2 * n // 3 for n in per_customer.values())
    assert len(visible(kafka, f"{job.name}-numbers", numbers)) == numbers, "each twice, every third once more"
    third = Counter({customer: 2 * n // 3 for customer, n in per_customer.items() if n > 1})
    assert seen(job, "third", third.total(), "customer") == third
    largest: dict[str, int] = {}
    for record in visible(kafka, f"{job.name}-largest", 600):
        pair = json.loads(record.value or b"")
        assert pair["largest"] >= largest.get(pair["customer"], 0)
        largest[pair["customer"]] = pair["largest"]
    customers = {order["customer"] for order in given}
    assert largest == {each: max(o["total"] for o in given if o["customer"] == each) for each in customers}
    lines = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert lines == {"open": parallelism or 1, "close": parallelism or 1}


def seen(job: Job, topic: str, count: int, field: str) -> Counter[Any]:
    return Counter(json.loads(each.value or b"")[field] for each in visible(job.kafka, f"{job.name}-{topic}", count))


@pytest.mark.exhaustive  # the sample of tests of event time rescales, too
def test_rescaling(job_of: JobOf) -> None:
    job = job_of("linear")
    for finish in (job.finish_here, partial(job.finish, "--parallelism", "2"), job.finish_here):
        job.feed(1000, customers=50)
        finish()
    job.assert_totals()


@pytest.mark.exhaustive
def test_a_topic_that_is_partitioned_by_the_key(job_of: JobOf) -> None:
    job = job_of("partitioned", partitions=4)
    for _ in range(2):
        job.feed(1000, by_customer=True)
        job.finish("--parallelism", "2")
    job.assert_totals()
    assert "parallelism 2" in job.finish("--parallelism", "3", code=2).said


@pytest.mark.exhaustive
def test_a_topic_that_is_partitioned_otherwise(kafka: KafkaCluster, job_of: JobOf) -> None:
    """The first record that is elsewhere ends the run, before an output of it is visible."""
    job = job_of("misplaced", partitions=4)
    kafka.create_topic(f"{job.name}-out", 1)
    job.feed(100, by_customer=True)
    said = job.finish("--parallelism", "2", code=3).said
    assert "which belongs to partition" in said
    assert "of 4, by murmur2_random" in said
    assert not visible(kafka, f"{job.name}-out", 0)
    job.finish()
    job.assert_totals()


def test_partitions_that_cannot_place_keys() -> None:
    pipeline = Pipeline("p")
    one, other = (pipeline.source(topic, KafkaSource(topic, value=str)) for topic in ("one", "other"))
    keyed = one.union(other).key_by(lambda word: word, partitioned="consistent", id="keyed")
    keyed.reduce("last", max).sink("out", KafkaSink("out"))
    graph = pipeline.build()

    def placed(**counts: int) -> Any:
        offsets = [SourceOffset(topic, topic, "id", p, 0) for topic, count in counts.items() for p in range(count)]
        return key_places(graph, graph.node("keyed"), blank_manifest(offsets=tuple(offsets)), 2, 0)

    assert (placed(one=4, other=4).partitioner, placed(one=4, other=4).partitions) == ("consistent", 4)
    with pytest.raises(GraphError, match="its sources one, other have 4, 6 partitions: a key has its state in one"):
        placed(one=4, other=6)
    with pytest.raises(GraphError, match="source 'other' is new since checkpoint 7"):
        placed(one=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("partitioned", "linear", "was made with key_by(..., partitioned=...), so 2 subtasks have it otherwise"),
        ("linear", "partitioned", "was made without partitioned=, so 2 subtasks have it otherwise"),
    ],
)
def test_state_that_another_key_by_has_placed(first: str, second: str, said: str, job_of: JobOf) -> None:
    """It is refused before a run could miss it; the code of before goes on."""
    job = job_of(first, "--parallelism", "2", partitions=4)
    job.feed(100, by_customer=True)
    job.finish()
    assert said in job.finish(target=f"pipelines:{second}", code=2).said
    job.feed(100, by_customer=True)
    job.finish()
    job.assert_totals()


@pytest.mark.exhaustive(but=["offsets-40"])
@pytest.mark.parametrize(("start", "expected"), [("latest", 0), ("offsets", 40)])
def test_start_positions(start: str, expected: int, kafka: KafkaCluster, job_of: JobOf) -> None:
    job = job_of("starting", "--param", f"start={start}", partitions=1)
    for count in (100, 10):
        job.feed(count)
        job.finish_here()
    assert len(visible(kafka, f"{job.name}-out", expected + 10)) == expected + 10


def test_streams_from_before_and_behind_a_shuffle(kafka: KafkaCluster, job_of: JobOf) -> None:
    """Barriers of streams in one task would wait for each other: refused with several subtasks, exact with one."""
    job = job_of("enriched")
    job.feed(100)
    arguments = ("--param", f"name={job.name}", "--until", "latest", *QUICK, "--parallelism", "2")
    code, said = run_here(kafka.bootstrap_servers, "pipelines:enriched", *arguments)
    assert code == 2, said
    assert "Run it with parallelism 1" in said
    job.finish_here()
    assert len(visible(kafka, f"{job.name}-out", 200)) == 200
