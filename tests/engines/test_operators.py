"""Every kind of operator, in one process and in several: what comes out is what a plain computation gives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, Job, run_here, visible

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
def test_a_topic_that_is_partitioned_by_the_key(kafka: KafkaCluster, job_of: JobOf) -> None:
    job = job_of("partitioned", partitions=4)
    for _ in range(2):
        numbers = range(len(job.fed), len(job.fed) + 1000)
        more = [(f"c{n % 17}", json.dumps({"id": n, "customer": f"c{n % 17}", "total": 1})) for n in numbers]
        kafka.produce(job.topic, more)
        job.fed += more
        job.finish("--parallelism", "2")
    job.assert_totals()
    assert "parallelism 2" in job.finish("--parallelism", "3", code=2).said


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
