"""Bounded work that begins from a savepoint, exported or in the topic, rescaled and changed; or from a group."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bounded import HERE, Fed, Silent, catch_up, exported_and_reset, load_pipeline, start
from confluent_kafka import Consumer, TopicPartition
from running import exactlyonce
from settled import await_readable

from exactlyonce.engines.options import Restoration
from exactlyonce.pipeline.errors import ConfigError


@pytest.mark.exhaustive
def test_it_goes_on_from_an_export(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    pipeline, exports = loaded("broad"), tmp_path / "exports"
    exports.mkdir()
    fed.feed(600)
    catch_up(fed, pipeline, 2, tmp_path / "staging")
    asked = Restoration(exported_and_reset(fed, exports))
    for parallelism in (3, 1):
        fed.feed(300)
        progress = Silent()
        summary = catch_up(
            fed, pipeline, parallelism, tmp_path / "staging", restoration=asked, chunk_records=200, progress=progress
        )
        assert any(note.startswith("restored from savepoint") for note in progress.notes) == (parallelism == 3)
        assert (summary.records, summary.checkpoints) == (450, 3)
        fed.assert_output()
        fed.assert_state(pipeline, summary.manifest)
        fed.assert_nothing_left()
        assert summary.manifest.origin.startswith("export ")
    again = json.loads(exactlyonce(fed.kafka, "savepoint", fed.name, "--to", f"file://{tmp_path}", "--json"))["url"]
    with pytest.raises(ConfigError, match="an exported savepoint begins a pipeline that has none"):
        catch_up(fed, pipeline, 2, tmp_path, restoration=Restoration(again))


@pytest.mark.exhaustive
def test_a_savepoint_of_the_topic(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    pipeline = loaded("broad")
    fed.feed(300)
    run = start(fed, "bounded_pipelines:broad", "--parallelism", "2")
    try:
        run.await_event(lambda event: event["event"] == "checkpoint")
        exactlyonce(fed.kafka, "savepoint", fed.name, "--stop")
        assert run.wait() == 0, run.said
    finally:
        run.process.kill()
    latest = fed.history().latest
    assert latest is not None
    number = latest.checkpoint
    fed.feed(300)
    catch_up(fed, pipeline, 2, tmp_path)
    fed.assert_output()
    with pytest.raises(ConfigError, match=rf"has no savepoint {number + 1} in its topic\. It has {number}\."):
        catch_up(fed, pipeline, 2, tmp_path, restoration=Restoration(str(number + 1)))
    with pytest.raises(ConfigError, match="would be written again"):
        catch_up(fed, pipeline, 3, tmp_path, restoration=Restoration(str(number)))
    summary = catch_up(fed, pipeline, 3, tmp_path, restoration=Restoration(str(number), rewind=True))
    assert summary.records >= 450
    assert summary.manifest.origin == f"savepoint {number}"
    fed.assert_state(pipeline, summary.manifest)
    fed.assert_nothing_left()
    assert len(fed.kafka.read_committed(f"{fed.name}-copies")) == len(fed.all) + summary.records


def test_what_the_commands_refuse(fed: Fed, tmp_path: Path) -> None:
    for name, options, message in (
        ("backfill", ("--rewind",), "rewind is for a run that begins from a savepoint: add --from-savepoint"),
        ("catch-up", ("--map", "a=b"), "map is for a run that begins from a savepoint"),
        ("catch-up", ("--from-savepoint", f"file://{tmp_path}/none"), "There is no savepoint at"),
        ("backfill", ("--from-savepoint", "x"), "x"),
    ):
        target = ("bounded_pipelines:broad", "--param", f"name={fed.name}")
        said = exactlyonce(fed.kafka, name, *target, *options, folder=HERE, code=2)
        assert message in " ".join(said.split())
    assert f"{fed.name}.checkpoints" not in fed.kafka.admin().list_topics().topics


# --- the first of a pipeline begins at the offsets of a consumer group ------------------------------------------------


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
