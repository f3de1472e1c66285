"""The brokers' word on a topic at a checkpoint or a start, and what follows from it where they do not agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce.checkpoint.records.manifest import Manifest, MarkedPlace, Output, RecordPlace, SourceOffset
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.kafka.partitioning import DEFAULT, OF_LIBRARY
from exactlyonce.connectors.kafka.topics import Topic
from exactlyonce.engines.external_checks.preflight import Inputs, Offsets, OutputTopics
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.sinks import KafkaSink

KNOWN = Topic("orders", "old", 2)
AFTER = (SourceOffset("in", "orders", "old", 0, 7), SourceOffset("in", "orders", "old", 1, 9))
NEWEST = blank_manifest(checkpoint=5, offsets=AFTER)


def of(partitions: int) -> Topic:
    return msgspec.structs.replace(KNOWN, partitions=partitions)


def looked_at(*views: Topic | None, targets: dict[str, dict[int, int]] | None = None) -> Inputs:
    """Inputs of which each broker has its own view: no embedded cluster has brokers that lag behind."""
    source: Any = KafkaSource("orders", value=bytes)
    nobody: Any = None
    inputs = Inputs(nobody, {"in": source}, {"orders": KNOWN}, targets or {})
    inputs.look_again(NEWEST, {"orders": views})
    return inputs


def test_one_broker_that_knows_the_new_topic_is_enough() -> None:
    """Another id on any broker is a halt with both ids: a record may have been read there."""
    other = Topic("orders", "new", 2)
    with pytest.raises(Halt, match="'orders' was deleted and created again since checkpoint 5: its id was old, now it"):
        looked_at(KNOWN, KNOWN, other)


def test_a_topic_that_no_broker_knows_was_deleted() -> None:
    """While one broker has it under its id, nobody can have read another topic."""
    looked_at(None, KNOWN, None)
    with pytest.raises(Halt, match="'orders' was deleted since checkpoint 5; its id was old"):
        looked_at(None, None, None)


def numbers(offsets: Offsets) -> dict[str, dict[int, int]]:
    """The offsets by source and partition; each is of its own source, partition and topic."""
    for source, partitions in offsets.items():
        for partition, start in partitions.items():
            assert (start.source, start.topic, start.topic_id, start.partition) == (source, "orders", "old", partition)
    return {source: {p: start.offset for p, start in partitions.items()} for source, partitions in offsets.items()}


def test_partitions_count_once_every_broker_knows_them() -> None:
    seen = looked_at(of(5), of(4))
    assert numbers(seen.added_since(NEWEST)) == {"in": {2: 0, 3: 0}}
    assert numbers(seen.offsets_from(NEWEST)) == {"in": {0: 7, 1: 9, 2: 0, 3: 0}}
    assert numbers(looked_at(of(5), None, of(1)).offsets_from(NEWEST)) == {"in": {0: 7, 1: 9}}


def test_a_run_up_to_a_target_takes_no_more_partitions() -> None:
    seen = looked_at(of(3), targets={"in": {0: 10, 1: 10}})
    assert numbers(seen.offsets_from(NEWEST)) == {"in": {0: 7, 1: 9}}


def test_a_skip_finds_its_split_by_the_mark() -> None:
    """A number that no manifest has may have been another split's; one that a manifest has stays."""
    known, new = SourceOffset("in", "file:/in", "a", 0, 7), SourceOffset("in", "file:/in", "b", 1, 0)
    nobody: Any = SimpleNamespace(own=None)
    finder = SimpleNamespace(find=lambda _: [new], close=lambda: None)
    source: Any = SimpleNamespace(repeats=True, place="file:/in", finder=lambda *_: finder)
    inputs = Inputs(nobody, {}, {}, {}, {"in": source})
    newest = blank_manifest(checkpoint=5, offsets=(known,))
    inputs.find_splits(newest.offsets)
    cases = [
        (RecordPlace("orders", 1, 3), [RecordPlace("orders", 1, 3)]),
        (RecordPlace("file:/in", 0, 3), [RecordPlace("file:/in", 0, 3)]),
        (MarkedPlace("file:/in", 4, 3, new.mark), [RecordPlace("file:/in", 1, 3)]),
        (MarkedPlace("file:/in", 1, 3, known.mark), [RecordPlace("file:/in", 0, 3)]),
        (MarkedPlace("file:/in", 1, 3, "0"), []),
        (RecordPlace("file:/in", 2, 3), []),
    ]
    notes = list[str]()
    for asked, settled in cases:
        assert list(inputs.settled(newest, [asked], notes.append)) == settled
    assert [note.partition(": ")[0] for note in notes] == ["--skip file:/in:1:3@0", "--skip file:/in:2:3"]
    with pytest.raises(
        ConfigError, match=rf"no checkpoint has split 1 of .*It is 'b' now.*--skip file:/in:1:3@{new.mark}"
    ):
        list(inputs.settled(newest, [RecordPlace("file:/in", 1, 3)], notes.append))


class Described:
    """The topics of a cluster."""

    def __init__(self, *topics: Topic) -> None:
        self.by_name = {topic.name: topic for topic in topics}

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: self.by_name[name] for name in names}

    def create(self, name: str, *, partitions: int, settings: Mapping[str, str] | None) -> None:
        self.by_name[name] = Topic(name, "created", partitions)


def begun(*, written: Output, there: Topic | None, accepted: tuple[str, ...] = (), checkpoint: int = 5) -> list[str]:
    """The notes of a run that begins after a checkpoint with the output *written*, where *there* is the topic now."""
    topics: Any = Described(*([there] if there else []))
    sink: Any = KafkaSink("totals", create_partitions=2)
    outputs = OutputTopics(topics, {"out": sink}, dict(topics.by_name), accepted)
    notes = list[str]()
    outputs.create_missing(blank_manifest(checkpoint=checkpoint, sinks=(written,)), notes.append)
    assert outputs.known == (Output("out", "totals", 2, topics.by_name["totals"].topic_id),)
    return notes


def test_an_output_that_was_made_anew_between_two_runs() -> None:
    """A topic with another id than the checkpoint's is a halt with the choices, until the user accepts it."""
    written, other = Output("out", "totals", 2, "old"), Topic("totals", "new", 2)
    for there, how in ((other, "was deleted and created again"), (None, "was deleted")):
        with pytest.raises(Halt, match=rf"'totals' {how} since checkpoint 5.*\n.*--accept-new-output totals.*reset p"):
            begun(written=written, there=there)
    assert begun(written=written, there=msgspec.structs.replace(other, topic_id="old")) == []
    (accepted,) = begun(written=written, there=other, accepted=("totals",))
    assert accepted == "topic totals is not the one that checkpoint 5 has written to: that is accepted"
    (created,) = begun(written=written, there=None, accepted=("totals",))
    assert created == "sink out: created topic totals with 2 partitions"


def test_an_output_of_which_nothing_is_known() -> None:
    """A checkpoint of an earlier version takes the topic that is there, and so does one before the first output."""
    other = Topic("totals", "new", 2)
    assert begun(written=Output("out", "totals", 2), there=other) == []
    assert begun(written=Output("out", "totals", 2, "old"), there=other, checkpoint=0) == []
    assert begun(written=Output("old", "elsewhere", 2, "old"), there=other) == []


def settled(
    newest: Manifest | None, given: str | None = None, setting: str | None = None, **changes: Any
) -> tuple[str, list[str]]:
    """The partitioner of the output of a pipeline that goes on from *newest*, and the notes."""
    nobody: Any = None
    sink: Any = KafkaSink("totals", key=str, partitioner=given)
    outputs = OutputTopics(nobody, {"out": sink}, {}, **{"by_key": ["out"], "setting": setting, **changes})
    notes = list[str]()
    outputs.settle_partitioners(newest, notes.append)
    return outputs.partitioners["out"], notes


OLDER = blank_manifest(checkpoint=5, sinks=(Output("out", "totals", 4),))
"""Of a version that wrote no partitioner."""


def test_a_new_output_has_javas_partitioner_or_the_chosen_one() -> None:
    """The sink's own wins over the client's setting; a sink that now writes to another topic begins a new output."""
    elsewhere = blank_manifest(sinks=(Output("out", "old-totals", 4, partitioner=OF_LIBRARY),))
    for newest in (None, elsewhere):
        assert settled(newest) == (DEFAULT, [])
        assert settled(newest, setting="fnv1a") == ("fnv1a", [])
        assert settled(newest, "murmur2", "fnv1a") == ("murmur2", [])


def test_an_output_keeps_the_partitioner_of_its_manifests() -> None:
    newest = blank_manifest(sinks=(Output("out", "totals", 4, partitioner="fnv1a"),))
    assert settled(newest) == settled(newest, "fnv1a") == settled(newest, setting="fnv1a") == ("fnv1a", [])
    for chosen in ({"given": DEFAULT}, {"setting": DEFAULT}):
        with pytest.raises(ConfigError, match=r"by fnv1a.*by murmur2_random.*(?s:.*)another id for the sink"):
            settled(newest, **chosen)


def test_an_output_of_an_older_version_keeps_the_librarys_partitioner_and_says_so() -> None:
    """Unless the setting has named another one all along; its next manifest names it, so nothing is said again."""
    partitioner, (note,) = settled(OLDER)
    assert (partitioner, note.partition(":")[0]) == (OF_LIBRARY, "sink out")
    assert "keeps the partitioner consistent_random" in note
    assert settled(OLDER, setting=DEFAULT) == (DEFAULT, [])
    newer = blank_manifest(checkpoint=6, sinks=(Output("out", "totals", 4, partitioner=OF_LIBRARY),))
    assert settled(newer) == (OF_LIBRARY, [])
    with pytest.raises(ConfigError, match="by consistent_random"):
        settled(OLDER, DEFAULT)


def test_an_output_without_keys_takes_any_partitioner() -> None:
    assert settled(OLDER, DEFAULT, by_key=()) == (DEFAULT, [])
    assert settled(OLDER, by_key=()) == (OF_LIBRARY, [])


def test_an_unknown_partitioner_in_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mine' is unknown"):
        settled(None, setting="mine")
