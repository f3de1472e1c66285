"""Every kind of operator, in one process and in several: what comes out is what a plain computation gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, orders

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker


@pytest.mark.exhaustive(but=["arguments1"])
@pytest.mark.parametrize("arguments", [(), ("--parallelism", "2"), ("--parallelism", "3"), ("--inline",)])
def test_everything(arguments: tuple[str, ...], kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path) -> None:
    """Maps, resources, side outputs, unions, flat maps, states that end, reductions, metadata, five sinks."""
    fed, more = orders(600, customers=20), orders(300, customers=20, first=10_000)
    for topic, records in ((f"{topic_name}-in", fed), (f"{topic_name}-more", more)):
        kafka.create_topic(topic, 3)
        kafka.produce(topic, records)
    log = tmp_path / "log"
    job = run(
        "pipelines:everything", "--param", f"name={topic_name}", "--param", f"log={log}", "--until", "latest", *QUICK,
        *arguments,
    )  # fmt: skip
    assert job.wait() == 0, job.said
    given = [json.loads(value) for _, value in fed]
    assert counted(kafka, f"{topic_name}-tags", "tag") == Counter(f"c-{order['customer']}" for order in given)
    assert counted(kafka, f"{topic_name}-late", "id") == Counter(o["id"] for o in given if o["id"] % 2)
    echoed = kafka.read_committed(f"{topic_name}-echo")
    came_through = Counter((record.key, json.loads(record.value or b"")["id"]) for record in echoed)
    assert came_through == Counter((key.encode(), json.loads(value)["id"]) for key, value in fed)
    doubled = [o for o in given if o["id"] % 2 == 0] + [json.loads(value) for _, value in more]
    per_customer = Counter(order["customer"] for order in doubled)
    numbers = [record.value or b"" for record in kafka.read_committed(f"{topic_name}-numbers")]
    assert len(numbers) == sum(2 * n + 2 * n // 3 for n in per_customer.values()), "each twice, every third once more"
    largest: dict[str, int] = {}
    for record in kafka.read_committed(f"{topic_name}-largest"):
        pair = json.loads(record.value or b"")
        assert pair["largest"] >= largest.get(pair["customer"], 0)
        largest[pair["customer"]] = pair["largest"]
    expected = {c: max(o["total"] for o in given if o["customer"] == c) for c in {o["customer"] for o in given}}
    assert largest == expected
    subtasks = int(arguments[1]) if len(arguments) == 2 else 1
    lines = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert lines == {"open": subtasks, "close": subtasks}


def counted(kafka: KafkaCluster, topic: str, field: str) -> Counter[Any]:
    """How often each value of *field* is in *topic*."""
    return Counter(json.loads(record.value or b"")[field] for record in kafka.read_committed(topic))


def test_rescaling(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """State moves with its key groups when the parallelism changes, up and down."""
    from running import assert_totals

    kafka.create_topic(f"{topic_name}-in", 4)
    fed: list[tuple[str, str]] = []
    for parallelism in ("1", "3", "2", "1"):
        batch = orders(1000, customers=50, first=len(fed))
        kafka.produce(f"{topic_name}-in", batch)
        fed += batch
        arguments = ("--param", f"name={topic_name}", "--until", "latest", "--parallelism", parallelism)
        job = run("pipelines:linear", *arguments, *QUICK)
        assert job.wait() == 0, job.said
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_topic_that_is_partitioned_by_the_key(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Nothing is shuffled where the user says so; state then stays with its partitions, and rescaling is refused."""
    from running import assert_totals

    kafka.create_topic(f"{topic_name}-in", 4)
    fed = [(json.loads(value)["customer"], value) for _, value in orders(2000)]
    arguments = ("pipelines:partitioned", "--param", f"name={topic_name}", "--until", "latest", *QUICK, "--parallelism")
    for half in (fed[:1000], fed[1000:]):
        kafka.produce(f"{topic_name}-in", half)
        assert run(*arguments, "2").wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)
    refused = run(*arguments, "3")
    assert refused.wait() == 2
    assert "parallelism 2" in refused.said


@pytest.mark.exhaustive(but=["latest-0"])
@pytest.mark.parametrize(("start", "expected"), [("earliest", 100), ("latest", 0), ("offsets", 40)])
def test_start_positions(start: str, expected: int, kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A pipeline without a checkpoint begins where its source says, and keeps to it."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(100))
    arguments = ("--param", f"name={topic_name}", "--param", f"start={start}", "--until", "latest", *QUICK)
    assert run("pipelines:starting", *arguments).wait() == 0
    kafka.produce(f"{topic_name}-in", orders(10, first=100))
    assert run("pipelines:starting", *arguments).wait() == 0
    assert len(kafka.read_committed(f"{topic_name}-out")) == expected + 10


def test_streams_from_before_and_behind_a_shuffle(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """United in one task, their barriers would wait for each other: refused with several subtasks, exact with one."""
    kafka.create_topic(f"{topic_name}-in", 2)
    kafka.produce(f"{topic_name}-in", orders(100))
    arguments = ("pipelines:enriched", "--param", f"name={topic_name}", "--until", "latest", *QUICK, "--parallelism")
    refused = run(*arguments, "2")
    assert refused.wait() == 2, refused.said
    assert "Run it with parallelism 1" in refused.said
    done = run(*arguments, "1")
    assert done.wait() == 0, done.said
    assert len(kafka.read_committed(f"{topic_name}-out")) == 200
