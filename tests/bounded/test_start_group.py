"""Bounded work that is the first of its pipeline begins at the offsets of a consumer group; so do replay and audit."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bounded import Fed, catch_up, load_pipeline
from confluent_kafka import Consumer, TopicPartition
from running import exactlyonce
from settled import await_readable

COUNT = 60


@pytest.mark.exhaustive
def test_the_first_of_bounded_work(fed: Fed, tmp_path: Path) -> None:
    fed.feed(COUNT)
    group, topic = f"{fed.name}-old", f"{fed.name}-in"
    settings: dict[str, Any] = {"bootstrap.servers": fed.kafka.bootstrap_servers, "group.id": group}
    with closing(Consumer({**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False})) as consumer:
        consumer.subscribe([topic])
        before: list[int] = []
        while len(before) < COUNT:
            before += [json.loads(message.value() or b"")["id"] for message in consumer.consume(COUNT, 1.0)]
        consumer.commit(asynchronous=False)
    fed.feed(COUNT)
    loaded = load_pipeline("pipelines", "moved_over", fed.name, group=group)
    catch_up(fed, loaded, 2, tmp_path)
    with closing(Consumer(settings)) as consumer:
        consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    fed.feed(COUNT)
    catch_up(fed, loaded, 2, tmp_path)

    await_readable(fed.kafka, f"{fed.name}-copies")
    after = [json.loads(record.value or b"")["id"] for record in fed.kafka.read_committed(f"{fed.name}-copies")]
    assert sorted([*before, *after]) == list(range(3 * COUNT))
    target = ("pipelines:moved_over", "--param", f"name={fed.name}", "--param", f"group={group}", "--on", "driver")
    folder = Path(__file__).parents[1] / "engines"
    report = json.loads(exactlyonce(fed.kafka, "audit", *target, "--json", folder=folder))
    assert (report["findings"], report["unjudged"]) == ([], [])
    said = exactlyonce(fed.kafka, "replay", *target, "--checkpoint", "1", "--json", folder=folder)
    assert sum(count["replayed"] for count in json.loads(said)["counts"]) == COUNT
