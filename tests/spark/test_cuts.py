"""Topics as of a checkpoint, and between two: input and output are one cut, at every checkpoint, without a session."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from blank_manifest import blank_manifest
from bounded import Fed, catch_up, load_pipeline, run_local, start
from confluent_kafka import Producer
from pyspark.sql.datasource import InputPartition
from reads import direct, make_anew, places, transaction
from running import exactlyonce
from settled import await_readable

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest, Output, SourceOffset
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.reader import offset_of
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.engines.spark.source import reading
from exactlyonce.engines.spark.source.history_reading import HistoryReader
from exactlyonce.engines.spark.source.read_options import CutOptions
from exactlyonce.engines.spark.source.reading import (
    Cut,
    LaterOutput,
    Range,
    RangesReader,
    TopicContents,
    split,
)
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


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_interval_is_the_difference_of_two_cuts(fed: Fed, tmp_path: Path) -> None:
    """Of a run whose workers and coordinator are killed in the middle, with aborted transactions: each record that is
    there up to the newer checkpoint is there up to the older one, or after it, once."""
    fed.feed(300)
    fired = tmp_path / "fired"
    fired.mkdir()
    armed = {
        "EXACTLYONCE_FAILPOINTS": "worker-flushed=kill@5,coordinator-decided=kill@9",
        "EXACTLYONCE_FAILPOINTS_FIRED": str(fired),
    }
    options = ("--num-retained", "500", "--checkpoint-interval", "20ms", "--parallelism", "2")
    run = start(fed, "bounded_pipelines:broad", *options, env=armed)
    run.wait()
    assert {path.name for path in fired.iterdir()} == {"worker-flushed", "coordinator-decided"}, run.said
    fed.feed(300)
    catch_up(fed, load_pipeline("bounded_pipelines", "broad", fed.name), 2, tmp_path, chunk_records=150)
    fed.feed(300)
    run_local(fed, 2, "bounded_pipelines:broad", "--num-retained", "500", interval="20ms")
    history = fed.history()
    numbers = sorted(history.finalized.keys() & history.manifests.keys())
    chosen = [numbers[len(numbers) * quarter // 4] for quarter in range(4)] + numbers[-1:]
    assert len(set(chosen)) == 5, numbers
    await_readable(fed.kafka, *(f"{fed.name}-{topic}" for topic in ("copies", "out")))
    for topics in (("in", "more"), ("copies",), ("out",)):
        names = ",".join(f"{fed.name}-{topic}" for topic in topics)
        whole = {
            number: Counter(places(direct(fed.kafka, names, pipeline=fed.name, checkpoint=number))) for number in chosen
        }
        assert whole[chosen[-1]].total() == len(fed.all)
        for after, end in combinations(chosen, 2):
            interval = {"pipeline": fed.name, "after": after, "checkpoint": end}
            rest = Counter(places(direct(fed.kafka, names, **interval)))
            assert whole[end] == whole[after] + rest, (topics, after, end)
            assert rest == Counter(places(direct(fed.kafka, names, **interval, minPartitions=9)))
    for after, end in pairwise(chosen):
        interval = {"pipeline": fed.name, "after": after, "checkpoint": end}
        given = ids(fed, "in", "more", **interval)
        assert given == ids(fed, "copies", **interval) == ids(fed, "out", **interval)
    newest = {"pipeline": fed.name, "after": numbers[-1]}
    assert ids(fed, "in", "more", **newest).total() == ids(fed, "out", **newest).total() == 0, "there is nothing new"
    expire_half(fed.kafka, f"{fed.name}-out")
    expire_half(fed.kafka, f"{fed.name}-in")
    for topic in ("out", "in"):
        with pytest.raises(
            RangeGone, match=rf"Records are missing: .*{topic}\[\d\].* by after; or leave it out, to read"
        ):
            ids(fed, topic, pipeline=fed.name, after=chosen[0])
        assert ids(fed, topic, **newest).total() == 0


OUTPUT = 5
"""The checkpoints of a random log."""


class RandomLog:
    """A partition with the transactions of `OUTPUT` checkpoints of two subtasks, among others'.

    A subtask writes to the next checkpoint before the last one is committed; attempts are aborted, at once or later.
    """

    def __init__(self, kafka: KafkaCluster, name: str, dice: random.Random) -> None:
        self._kafka, self._name, self._dice = kafka, name, dice
        self.topic = kafka.create_topic(name)
        self._producers: dict[tuple[Any, ...], Producer] = {}
        self.firsts: dict[int, list[int]] = {number: [] for number in range(1, OUTPUT + 1)}
        """The first offset of each transaction of a checkpoint."""
        passed, committed, failed = {0: 1, 1: 1}, 0, list[Producer]()
        while committed < OUTPUT:
            subtask = dice.randrange(2)
            match dice.choice(("write", "write", "pass", "fail", "foreign", "commit", "abort")):
                case "write" if passed[subtask] <= OUTPUT:
                    self._write(passed[subtask], subtask)
                case "pass" if passed[subtask] <= committed + 1:
                    passed[subtask] += 1
                case "fail":
                    failed.append(transaction(kafka, f"failed-{dice.random()}", self.topic, ["failed"] * 2))
                case "abort" if failed:
                    failed.pop(dice.randrange(len(failed))).abort_transaction(LIMIT_S)
                case "foreign":
                    kafka.produce(self.topic, ["foreign"])
                case "commit" if min(passed.values()) > committed + 1:
                    committed += 1
                    for key in dice.sample((own := [key for key in self._producers if key[0] == committed]), len(own)):
                        self._producers[key].commit_transaction(LIMIT_S)
        for producer in failed:
            producer.abort_transaction(LIMIT_S)
        await_readable(kafka, self.topic)

    def _write(self, checkpoint: int, subtask: int) -> None:
        key, values = (checkpoint, subtask), [str(checkpoint)] * self._dice.randint(1, 2)
        if key not in self._producers:
            self._producers[key] = transaction(self._kafka, f"{checkpoint}-{subtask}", self.topic, [])
            own = self.firsts[checkpoint]
            self._producers[key].produce(
                self.topic, values.pop(), on_delivery=lambda _, message: own.append(offset_of(message))
            )
        for value in values:
            self._producers[key].produce(self.topic, value)
        assert self._producers[key].flush(LIMIT_S) == 0

    def later(self, config: ClientConfig, number: int) -> LaterOutput:
        """The output after checkpoint *number*."""
        with closing(Log(config)) as log:
            batches = list(log.batches(self.topic, 0, 0))
        end = batches[-1].last_offset + 1
        firsts = [first for checkpoint, own in self.firsts.items() if checkpoint > number for first in own]
        writers = {batch.base_offset: (batch.producer_id, batch.epoch) for batch in batches}
        return LaterOutput(min([end, *firsts]), frozenset(writers[first] for first in firsts), end)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_a_random_log(kafka: KafkaCluster, topic_name: str, seed: int) -> None:
    """What is read between two checkpoints is what their cuts differ in, whoever wrote it, in as many tasks as one
    likes; of the pipeline's own records these are those of the checkpoints between."""
    log = RandomLog(kafka, topic_name, random.Random(seed))
    reader = direct(kafka, log.topic)
    topic_id = reader.partitions()[0].value.topic_id
    later = [log.later(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), n) for n in range(OUTPUT + 1)]

    def read(*parts: Range) -> list[tuple[int, bytes]]:
        batches = (batch for part in parts for batch in reader.read(InputPartition(part)))
        return [(row["offset"], row["value"]) for batch in batches for row in batch.to_pylist()]

    whole = [Range(log.topic, topic_id, 0, 0, end.log_end, later=end) for end in later]
    cuts = [read(part) for part in whole]
    assert [value for _, value in cuts[-1] if value != b"foreign"] == [
        record.value for record in kafka.read_committed(log.topic) if record.value != b"foreign"
    ]
    for after, end in combinations(range(OUTPUT + 1), 2):
        interval = replace(whole[end], start=later[after].first, after=later[after])
        rest = read(interval)
        assert sorted(rest) == rest, "in the order of the partition"
        assert sorted([*cuts[after], *rest]) == cuts[end], (after, end)
        assert {int(value) for _, value in rest if value != b"foreign"} <= set(range(after + 1, end + 1))
        assert read(*split([interval], 4)) == rest


def manifest_of(number: int, offset: int, **changes: Any) -> Manifest:
    at = SourceOffset("orders", "in", "id", 0, offset)
    sinks = (Output("out", "out", 1, "new" if number > 6 else "old"),)
    return blank_manifest(checkpoint=number, previous=number - 1, offsets=(at,), sinks=sinks, **changes)


HISTORY = (
    manifest_of(3, 30),
    manifest_of(5, 50),
    manifest_of(6, 60, kind="restored", origin="savepoint 5"),
    manifest_of(7, 70),
    manifest_of(8, 50, kind="restored", origin="savepoint 5"),
    manifest_of(9, 90),
    manifest_of(10, 95),
)
"""Checkpoint 4 has expired, so has the rewind between 3 and 5 if there was one."""


@pytest.mark.parametrize(
    ("after", "end", "topic", "outcome"),
    [
        (5, 7, "in", (50, 70)),
        (3, 5, "in", (30, 50)),
        (8, 10, "in", (50, 95)),
        (10, None, "in", (95, 95)),
        (8, 10, "out", (100, 100)),
        (2, 10, "in", r"p has no checkpoint 2\. It has 3, 5, 6, 7, 8, 9, 10\."),
        (99, None, "in", r"p has no checkpoint 99\. It has 3, "),
        (10, 9, "in", "after is 10, and topics are read up to checkpoint 9"),
        (7, 9, "in", r"Checkpoint 8 of p was restored from savepoint 5, .* since checkpoint 7 is no single interval"),
        (5, None, "out", "Name checkpoint 8 or a later one by after, or an older one than it by checkpoint"),
        (3, 7, "out", "Checkpoints between 3 and 5 of p have expired"),
        (5, 7, "out", "Topic 'out' was made anew since checkpoint 6"),
        (9, 10, "none", "p has no topic 'none' at checkpoint"),
    ],
)
def test_intervals_of_a_history(
    monkeypatch: pytest.MonkeyPatch, after: int, end: int | None, topic: str, outcome: tuple[int, int] | str
) -> None:
    """What is no single interval is an error, that names the checkpoints that are there, or what to name instead."""

    class Ends:
        def end_offsets(self, name: str, *, committed: bool) -> dict[int, int]:
            return {0: 100}

    history = History("p")
    for manifest in HISTORY:
        history.manifests[manifest.checkpoint] = manifest
        history.finalized[manifest.checkpoint] = Finalized(manifest.checkpoint, 1, 0, ())
    monkeypatch.setattr(reading, "read_history", lambda config, pipeline: history)

    def ranges() -> list[Range]:
        cut = Cut(ClientConfig({"bootstrap.servers": "none:1"}), CutOptions("p", end, None, after))
        cut.require_known([topic])
        topic_id = "id" if topic == "in" else "new"
        now = {topic: TopicContents(topic, topic_id, {0: 0}, {0: 100})}
        return cut.ranges([Range(topic, topic_id, 0, 0, 100)], now, Ends())  # type: ignore[arg-type]  # all that it asks

    if isinstance(outcome, str):
        with pytest.raises(ConfigError, match=outcome):
            ranges()
    else:
        (part,) = ranges()
        assert (part.start, part.end) == outcome
