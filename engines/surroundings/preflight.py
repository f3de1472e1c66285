"""Checks of the topics before anything is read, and of the input topics at every checkpoint: what can be known to fail
is refused here, with what fixes it.

Invariants: offsets go with the id of the topic that they were read from, and with the leader epoch of the last record;
a partition that was added is read from offset 0, whenever it is noticed, so that nothing of it is skipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from exactlyonce.checkpoint.records.manifest import Manifest, RecordPlace, SourceOffset
from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.connectors.source import Readable
from exactlyonce.pipeline.errors import ConfigError, Facts, GraphError, Halt, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks.kafka.sink import gives_times
from exactlyonce.sinks.writer import WritesToTopic

TIMESTAMP_TYPE, LOG_APPEND_TIME = "message.timestamp.type", "LogAppendTime"
Offsets = dict[str, dict[int, int]]
"""By source and partition."""
Seen = Mapping[str, tuple[Topic | None, ...]]
"""By topic, what every live broker knows of it now; see `Topics.seen_by_each`."""


@dataclass
class Inputs:
    """The input topics of an incarnation, and their partitions as they are now."""

    topics: Topics
    sources: Mapping[str, Readable]
    described: Mapping[str, Topic]
    """By topic name; ids never change, partitions only become more."""
    targets: Offsets
    """Where a bounded run ends: the last stable offsets of now; empty when unbounded."""

    @property
    def topic_ids(self) -> dict[str, str]:
        """By topic name."""
        return {name: topic.topic_id for name, topic in self.described.items()}

    @property
    def counted(self) -> tuple[tuple[str, str, int], ...]:
        """(source id, topic, partitions) of every source."""
        return tuple((id, each.topic, self.described[each.topic].partitions) for id, each in self.sources.items())

    def require_read(self, places: Iterable[RecordPlace]) -> None:
        """ConfigError where one of *places* is in no partition that the pipeline reads."""
        for place in places:
            topic = self.described.get(place.topic)
            if topic is None or place.partition >= topic.partitions:
                there = ", ".join(f"{each.name} with {each.partitions} partitions" for each in self.described.values())
                raise ConfigError(f"--skip {place}: the pipeline reads no such partition. It reads {there}.")

    def start_offsets(self) -> tuple[SourceOffset, ...]:
        """Where a pipeline without a checkpoint begins."""
        return tuple(
            SourceOffset(source, each.topic, self.described[each.topic].topic_id, partition, offset)
            for source, each in sorted(self.sources.items())
            for partition, offset in sorted(each.first_offsets(source, self.topics).items())
        )

    def first_offsets(self) -> Offsets:
        """The same, by source and partition."""
        found: Offsets = {source: {} for source in self.sources}
        for each in self.start_offsets():
            found[each.source][each.partition] = each.offset
        return found

    def offsets_from(self, manifest: Manifest) -> Offsets:
        """Sn of every partition; a partition added since then begins at its beginning."""
        found = self.added_since(manifest)
        for noted in manifest.offsets:
            found[noted.source][noted.partition] = noted.offset
        return found

    def added_since(self, manifest: Manifest) -> Offsets:
        """Where the partitions begin that *manifest* does not have: at 0, though retention may have been there."""
        noted = {(each.source, each.partition) for each in manifest.offsets}
        return {
            source: {p: 0 for p in range(self.described[each.topic].partitions) if (source, p) not in noted}
            for source, each in self.sources.items()
        }

    def look_again(self, manifest: Manifest, seen_by_each: Seen) -> None:
        """Raise Halt if a topic is not the one that is read any more; take note of partitions that were added.

        Called after all has been read that the next manifest will name, so that what was read of a topic made anew
        shows. A run up to a target takes no more partitions. *manifest* is the newest.
        """
        described = {}
        for name, known in self.described.items():
            now = _now(known, seen_by_each[name])
            if now is None:
                raise _deleted(manifest, known)
            if now.topic_id != known.topic_id:
                raise _made_anew(manifest, name, known.topic_id, now.topic_id)
            described[name] = known if self.targets else now
        self.described = described

    def check_continuity(self, manifest: Manifest) -> None:
        """Raise Halt if what lies after Sn is not all there any more."""
        noted = {source.source for source in manifest.offsets}
        if noted - set(self.sources) or set(self.sources) - noted:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} was taken with sources {sorted(noted)}, the pipeline has "
                f"{sorted(self.sources)} now. A source is found again by its id: give it the old id, or start over "
                f"with `exactlyonce reset {manifest.pipeline}`."
            )
        for topic in sorted({each.topic for each in manifest.offsets}):
            self._check_topic(manifest, topic)

    def _check_topic(self, manifest: Manifest, name: str) -> None:
        topic = self.described.get(name)
        if topic is None:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} was read from topic {name!r}, which the pipeline reads no longer. "
                f"Give the source its old topic, {_reset(manifest)}."
            )
        require_unread(self.topics, manifest, topic)


def require_unread(topics: Topics, manifest: Manifest, topic: Topic) -> None:
    """Raise Halt if *topic* is not the one that *manifest* has read, or what lies behind Sn is not all there."""
    name, offsets = topic.name, [each for each in manifest.offsets if each.topic == topic.name]
    if offsets[0].topic_id != topic.topic_id:
        raise _made_anew(manifest, name, offsets[0].topic_id, topic.topic_id)
    first, end = topics.start_offsets(name), topics.end_offsets(name, committed=False)
    added = [SourceOffset("", name, "", each, 0) for each in sorted(first.keys() - {o.partition for o in offsets})]
    for each in offsets + added:
        if each.partition not in first:
            raise Halt(f"Partition {each.partition} of topic {name!r} is gone since checkpoint {manifest.checkpoint}.")
        if each.offset < first[each.partition]:
            raise Halt(
                f"Input is missing: checkpoint {manifest.checkpoint} goes on at {name}[{each.partition}] offset "
                f"{each.offset}, but the topic begins at {first[each.partition]} now: retention has taken offsets "
                f"{each.offset} to {first[each.partition] - 1}.\n"
                f"  Choices: restore them from a replica or backup and run again; {_reset(manifest)}.",
                **_place(each),
            )
        if each.offset > end[each.partition]:
            raise _truncated(manifest, each, f"the topic ends at {end[each.partition]}")
    for source in sorted({each.source for each in offsets}):
        _require_epochs(topics, manifest, name, [each for each in offsets if each.source == source])


def _require_epochs(topics: Topics, manifest: Manifest, name: str, offsets: list[SourceOffset]) -> None:
    """Raise Halt if records that were read are gone though the log has grown beyond their offsets again."""
    ends = topics.epoch_ends(name, {o.partition: o.leader_epoch for o in offsets if o.leader_epoch >= 0})
    for each in offsets:
        end = ends.get(each.partition, each.offset)
        if end < each.offset:
            until = "is gone from the log" if end < 0 else f"ends at offset {end} now"
            raise _truncated(manifest, each, f"what leader epoch {each.leader_epoch} wrote there {until}")


def _reset(manifest: Manifest) -> str:
    return f"or `exactlyonce reset {manifest.pipeline}` and recompute from what is there"


def _made_anew(manifest: Manifest, name: str, before: str, now: str) -> Halt:
    return Halt(
        f"Topic {name!r} was deleted and created again since checkpoint {manifest.checkpoint}: its id was {before}, "
        f"now it is {now}. The checkpoint's offsets mean nothing in it.\n"
        f"  Choices: restore the old topic; {_reset(manifest)}."
    )


def _deleted(manifest: Manifest, topic: Topic) -> Halt:
    return Halt(
        f"Topic {topic.name!r} was deleted since checkpoint {manifest.checkpoint}; its id was {topic.topic_id}. What "
        f"the pipeline had not read of it is gone.\n"
        f"  Choices: restore the topic; give the source another one, {_reset(manifest)}."
    )


def _truncated(manifest: Manifest, read: SourceOffset, how: str) -> Halt:
    return Halt(
        f"Input is missing: checkpoint {manifest.checkpoint} has read {read.topic}[{read.partition}] up to offset "
        f"{read.offset}, but {how}: its log was truncated. Other records may have the offsets of those that were read, "
        f"and would be skipped.\n"
        f"  Choices: restore it from a replica or backup; {_reset(manifest)}.",
        **_place(read),
    )


def _place(read: SourceOffset) -> Facts:
    return {"operator": read.source, "topic": read.topic, "partition": read.partition, "offset": read.offset}


def check_operators(graph: LogicalGraph, manifest: Manifest) -> None:
    """Raise GraphError if the checkpoint has state that no operator of the pipeline takes; a new one begins empty."""
    kept, found = {each.operator for each in manifest.operators}, {node.id for node in graph.stateful}
    if lost := sorted(kept - found):
        new = ", ".join(map(repr, sorted(found - kept)))
        beside = f" (but has {new}, of which there is no state)" if new else ""
        raise GraphError(
            f"Checkpoint {manifest.checkpoint} has state of {', '.join(map(repr, lost))}, and the pipeline has no such "
            f"operator{beside}. State is found again by the operator's id: give the operator its old id; or take "
            f"a savepoint with the old code, and begin from it with --map or --allow-dropped-state; or start over with "
            f"`exactlyonce reset {manifest.pipeline}`."
        )


def refuse_new_places(graph: LogicalGraph, parallelism: int, manifest: Manifest, added: Offsets) -> None:
    """Raise Halt where partitions were *added* to a topic whose partitions say which subtask has the state of a key:
    producers deal its keys out anew, and a key's next record would meet another subtask, without its state."""
    for source in sorted(graph.placing_sources if parallelism > 1 else ()):
        if added[source]:
            raise Halt(
                f"The topic of source {source!r} has got partitions {sorted(added[source])} since checkpoint "
                f"{manifest.checkpoint}. Its partitions say which of the {parallelism} subtasks has the state of a key "
                f"(key_by(..., partitioned=True)), and with more of them keys go elsewhere, away from their state.\n"
                f"  Choices: `exactlyonce reset {manifest.pipeline}` and recompute from what is there, without "
                f"partitioned=True if partitions may be added again; or restore the topic as it was."
            )


def check_inputs(topics: Topics, graph: LogicalGraph, *, bounded: bool) -> Inputs:
    """Look at every input topic; TopicError for a missing one."""
    sources = {node.id: cast("Readable", node.source) for node in graph.sources}
    described = topics.describe(sorted({each.topic for each in sources.values()}))
    targets = {}
    if bounded:
        targets = {name: topics.end_offsets(each.topic, committed=True) for name, each in sources.items()}
    return Inputs(topics, sources, described, targets)


@dataclass
class OutputTopics:
    """The output topics of an incarnation, and their partitions as they are now."""

    topics: Topics
    sinks: Mapping[str, WritesToTopic]
    described: Mapping[str, Topic]
    """By topic name; ids never change, partitions only become more. Without those that are to be created."""

    @property
    def counted(self) -> tuple[tuple[str, str, int], ...]:
        """(sink id, topic, partitions) of every sink."""
        return tuple((id, sink.topic, self.described[sink.topic].partitions) for id, sink in self.sinks.items())

    @property
    def foreseen(self) -> tuple[tuple[str, str, int], ...]:
        """The same, though topics may be missing, which will be created."""
        known = {name: topic.partitions for name, topic in self.described.items()}
        return tuple(
            (id, sink.topic, known.get(sink.topic, sink.create_partitions or 1)) for id, sink in self.sinks.items()
        )

    def create_missing(self, manifest: Manifest | None, note: Callable[[str], None]) -> None:
        """Create the topics that there are not; Halt if *manifest*, the newest, shows that they were written to."""
        written = {topic for _, topic, _ in manifest.sinks} if manifest and manifest.checkpoint else set()
        for id, sink in self.sinks.items():
            if sink.topic in self.described:
                continue
            if manifest is not None and sink.topic in written:
                raise _output_gone(manifest, sink.topic, "was deleted")
            self.topics.create(sink.topic, partitions=sink.create_partitions or 1)
            note(f"sink {id}: created topic {sink.topic} with {sink.create_partitions} partitions")
            self.described = {**self.described, **self.topics.describe([sink.topic])}

    def note_times(self, note: Callable[[str], None]) -> None:
        """Say where a topic does not keep the times that its sink gives."""
        for id, sink in self.sinks.items():
            if not gives_times(sink):
                continue
            try:
                kind = self.topics.settings(sink.topic).get(TIMESTAMP_TYPE)
            except ConfigError as error:
                note(f"sink {id}: whether topic {sink.topic} keeps the times of timestamp= is not known: {error}")
                continue
            if kind == LOG_APPEND_TIME:
                note(
                    f"sink {id}: topic {sink.topic} has {TIMESTAMP_TYPE}={LOG_APPEND_TIME}, so its records get the "
                    f"time of their append, and not that of timestamp=: set it to CreateTime, or leave out timestamp="
                )

    def look_again(self, manifest: Manifest, seen_by_each: Seen) -> None:
        """Raise Halt if a topic is not the one that is written to any more; count its partitions, which may have grown.

        *manifest* is the newest.
        """
        described = {}
        for name, known in self.described.items():
            now = _now(known, seen_by_each[name])
            if now is None:
                raise _output_gone(manifest, name, "was deleted")
            if now.topic_id != known.topic_id:
                raise _output_gone(manifest, name, "was deleted and created again")
            described[name] = now
        self.described = described


def _now(known: Topic, seen: Sequence[Topic | None]) -> Topic | None:
    """What *known* is now that brokers have *seen* it so: another, if one broker knows another; None if none knows any.

    A partition counts once every broker knows it: to a client that asks one of the others it would be missing.
    """
    there = [each for each in seen if each is not None]
    if another := next((each for each in there if each.topic_id != known.topic_id), None):
        return another
    if not there:
        return None
    if len(there) < len(seen):
        return known
    return msgspec.structs.replace(known, partitions=max(known.partitions, min(each.partitions for each in there)))


def _output_gone(manifest: Manifest, name: str, what: str) -> Halt:
    return Halt(
        f"Output topic {name!r} {what} since checkpoint {manifest.checkpoint} or before: what the pipeline wrote to it "
        f"is gone, and it would go on behind the gap.\n"
        f"  Choices: restore the topic from a replica or backup and run again; {_reset(manifest)}."
    )


def check_outputs(topics: Topics, graph: LogicalGraph) -> OutputTopics:
    """Look at every output topic; TopicError for a missing one that the sink does not create. Nothing is changed."""
    sinks = {node.id: cast("WritesToTopic", node.sink) for node in graph.sinks if node.sink and node.sink.topic}
    inputs = {node.source.topic for node in graph.sources if node.source is not None}
    described: dict[str, Topic] = {}
    for id, sink in sinks.items():
        if sink.topic in inputs:
            raise ConfigError(
                f"Sink {id!r} writes to topic {sink.topic!r}, which the pipeline reads: it would never end."
            )
        try:
            described |= topics.describe([sink.topic])
        except TopicError:
            if sink.create_partitions is None:
                raise TopicError(
                    f"Sink {id!r}: topic {sink.topic!r} does not exist. Create it, or let the sink do so: "
                    f"KafkaSink({sink.topic!r}, create_partitions=4)."
                ) from None
    return OutputTopics(topics, sinks, described)
