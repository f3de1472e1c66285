"""Topics as of a checkpoint: its input and its output are one cut, at every checkpoint, without a session."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from bounded import Fed, catch_up, load_pipeline, run_local, start
from reads import direct, make_anew, transaction
from running import exactlyonce
from settled import await_readable

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.engines.spark.source.history_reading import HistoryReader
from exactlyonce.engines.spark.source.reading import LaterOutput, Range, RangesReader, split
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.spark


@pytest.fixture
def fed(kafka: KafkaCluster, topic_name: str) -> Fed:
    return Fed(kafka, topic_name)


def rows(reader: RangesReader | HistoryReader) -> list[dict[str, Any]]:
    batches = (batch for part in reader.partitions() for batch in reader.read(part))
    return [row for batch in batches for row in batch.to_pylist()]


def ids(fed: Fed, *topics: str, **options: Any) -> Counter[int]:
    """The ids of the records that a read of NAME-TOPIC has."""
    names = ",".join(f"{fed.name}-{topic}" for topic in topics)
    return Counter(json.loads(row["value"])["id"] for row in rows(direct(fed.kafka, names, **options)))


def history_of(fed: Fed) -> HistoryReader:
    source = ExactlyOnceDataSource({"history": fed.name, "kafka.bootstrap.servers": fed.kafka.bootstrap_servers})
    reader = source.reader(source.schema())
    assert isinstance(reader, HistoryReader)
    return reader


def expire_half(kafka: KafkaCluster, topic: str) -> None:
    """Delete the first half of each partition."""
    offsets: dict[int, list[int]] = {}
    for record in kafka.read_committed(topic):
        offsets.setdefault(record.partition, []).append(record.offset)
    kafka.delete_records(topic, {partition: own[len(own) // 2] for partition, own in offsets.items()})


def test_each_checkpoint_is_one_cut(fed: Fed, tmp_path: Path) -> None:
    """Workers write the output of the next checkpoint beside that of the last one; chunks write whole partitions."""
    fed.feed(400)
    catch_up(fed, load_pipeline("bounded_pipelines", "broad", fed.name), 2, tmp_path, chunk_records=150)
    fed.feed(600)
    run_local(fed, 3, "bounded_pipelines:broad", "--num-retained", "500", interval="20ms")
    await_readable(fed.kafka, *(f"{fed.name}-{topic}" for topic in ("copies", "out")))
    history = fed.history()
    manifests = history.manifests
    sizes, listed = [], []
    for number, manifest in sorted(manifests.items()):
        if number not in history.finalized:
            continue
        at = {"pipeline": fed.name, "checkpoint": number}
        given = ids(fed, "in", "more", **at)
        assert given == ids(fed, "copies", **at) == ids(fed, "out", **at, minPartitions=9), number
        assert given.total() == sum(end.offset for end in manifest.offsets if "again" not in end.topic)
        listed.append((number, manifest.kind, sum(end.offset for end in manifest.offsets)))
        sizes.append(given.total())
    assert listed == [
        (row["checkpoint"], row["kind"], sum(at["offset"] for at in row["next_offsets"]))
        for row in rows(history_of(fed))
        if row["state"] == "finalized"
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 3, "those that bounded work retains, and more"
    assert sizes[-1] == len(fed.all) == ids(fed, "out", pipeline=fed.name).total()
    second = sorted(manifests)[1]
    moment = datetime.fromtimestamp(manifests[second].completed_at_ms / 1000, timezone.utc).isoformat()
    assert ids(fed, "out", pipeline=fed.name, asOf=moment).total() == sizes[1]
    expire_half(fed.kafka, f"{fed.name}-out")
    left = Counter(json.loads(record.value or b"")["id"] for record in fed.kafka.read_committed(f"{fed.name}-out"))
    assert 0 < left.total() < len(fed.all)
    for number in sorted(history.finalized.keys() & manifests.keys()):
        at = {"pipeline": fed.name, "checkpoint": number}
        assert ids(fed, "out", **at) == left & ids(fed, "in", "more", **at), "the records that retention has left"
    for topic, options, reason in (
        ("out", {"checkpoint": 999}, "has no checkpoint 999"),
        ("out", {"asOf": "2001-01-01T00:00:00Z"}, r"has no checkpoint of 2001-01-01.* or before. The oldest one .* is"),
        ("other", {}, "has no topic .*-other' at checkpoint"),
    ):
        if topic == "other":
            fed.kafka.create_topic(f"{fed.name}-other")
        with pytest.raises(ConfigError, match=reason):
            direct(fed.kafka, f"{fed.name}-{topic}", pipeline=fed.name, **options).partitions()
    state = {"state": fed.name, "operator": "totals", "kafka.bootstrap.servers": fed.kafka.bootstrap_servers}
    source = ExactlyOnceDataSource({**state, "asOf": moment})
    assert source._state_plan().source.written.checkpoint == second


def test_a_checkpoint_while_the_read_is_planned(fed: Fed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the ends of the topics are asked for, after it, or when the tasks begin: its records are left out."""
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)
    fed.feed(60)
    catch_up(fed, loaded, 2, tmp_path)
    wanted = ids(fed, "in", "more")
    number, ask = fed.history().checkpoint_latest, Topics.end_offsets

    def advance() -> None:
        fed.feed(20)
        catch_up(fed, loaded, 2, tmp_path)
        await_readable(fed.kafka, f"{fed.name}-out")

    def asked(topics: Topics, name: str, *partitions: Any, committed: bool) -> dict[int, int]:
        if committed or name != f"{fed.name}-out":
            return ask(topics, name, *partitions, committed=committed)
        monkeypatch.setattr(Topics, "end_offsets", ask)
        advance()
        ends = ask(topics, name, *partitions, committed=committed)
        advance()
        return ends

    reader = direct(fed.kafka, f"{fed.name}-out", pipeline=fed.name, checkpoint=number)
    monkeypatch.setattr(Topics, "end_offsets", asked)
    planned = reader.partitions()
    assert fed.history().checkpoint_latest == number + 2
    read = Counter(
        json.loads(row["value"])["id"] for part in planned for batch in reader.read(part) for row in batch.to_pylist()
    )
    assert read == wanted


@pytest.mark.exhaustive
def test_a_savepoint_whose_successors_have_expired(fed: Fed, tmp_path: Path) -> None:
    """Its input is known permanently, its output only while all later checkpoints are there."""
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)
    fed.feed(90)
    run = start(fed, "bounded_pipelines:broad", "--parallelism", "2")
    try:
        run.await_event(lambda event: event["event"] == "checkpoint")
        exactlyonce(fed.kafka, "savepoint", fed.name, "--stop")
        assert run.wait() == 0, run.said
    finally:
        run.process.kill()
    savepoint = max(fed.history().savepoints)
    at = {"pipeline": fed.name, "checkpoint": savepoint}
    assert ids(fed, "out", **at) == ids(fed, "in", "more", **at)
    for _ in range(5):
        fed.feed(30)
        catch_up(fed, loaded, 2, tmp_path)
    assert ids(fed, "in", "more", **at).total() <= 90 + 45
    with pytest.raises(ConfigError, match=rf"between {savepoint} and \d+ of {fed.name} have expired"):
        ids(fed, "out", **at)


def test_the_next_checkpoint_is_open(kafka: KafkaCluster, topic_name: str) -> None:
    """Readers are held back by it: records after its first one are read once it has ended, without its own, in as many
    tasks as one likes. Output that goes before a task has read it is an error, also where only its neighbours went."""
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, ["before"])
    first, later, second = (transaction(kafka, name, topic, [name] * 3) for name in ("first", "later", "second"))
    kafka.produce(topic, ["not of any transaction"])
    first.commit_transaction(LIMIT_S)
    second.commit_transaction(LIMIT_S)
    aborted = transaction(kafka, "aborted", topic, ["aborted"])
    aborted.abort_transaction(LIMIT_S)
    servers = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    log = Log(servers)
    writers = {batch.base_offset: (batch.producer_id, batch.epoch) for batch in log.batches(topic, 0, 0)}
    log.close()
    reader = direct(kafka, topic)
    (planned,) = reader.partitions()
    assert planned.value.end == 4, "the stable end"
    log_end = max(writers) + 1
    own = frozenset({writers[4]})
    wanted = Range(topic, planned.value.topic_id, 0, 0, log_end, later=LaterOutput(4, own, log_end))
    later.commit_transaction(LIMIT_S)
    transaction(kafka, "last", topic, ["last"]).commit_transaction(LIMIT_S)
    for partitions_min in (1, 2, 3, log_end):  # a part may end between the records of a transaction and its marker
        parts = [type(planned)(part) for part in split([wanted], partitions_min)]
        values = [row["value"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
        assert values == [b"before", *[b"first"] * 3, *[b"second"] * 3, b"not of any transaction"], partitions_min
    after = type(planned)(replace(wanted, start=7))  # all of it is there to the end
    assert [row["value"] for batch in reader.read(after) for row in batch.to_pylist()][:3] == [b"second"] * 3
    kafka.delete_records(topic, {0: 5})
    with pytest.raises(RangeGone, match=r"has expired while it was read: .* begins at offset 5 now"):
        list(reader.read(after))
    with pytest.raises(RangeGone, match="from offset 0 up to 3, but the topic holds offsets 5 to"):
        list(reader.read(type(planned)(wanted)))
    make_anew(kafka, topic, count=9)
    with pytest.raises(RangeGone, match="was deleted and made anew"):
        list(reader.read(after))
