"""Checks of a pipeline's topics and other inputs, before anything is read and at every checkpoint; answers to its
leader about them.

Invariants: offsets go with the id of their topic and the leader epoch of the last record; reading continues where the
newest manifest ends; an added partition is read from offset 0, whenever it is noticed; a split of another source has
the number under which it was first found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.checkpoint.records.manifest import TOPICS, Manifest, MarkedPlace, Output, RecordPlace, SourceOffset
from exactlyonce.connectors.kafka.partitioning import DEFAULT, SETTING, partitioner, partitioner_in
from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.connectors.source import FindsSplits, ReadsTopic
from exactlyonce.engines.external_checks.input_topics import InputTopics, Seen
from exactlyonce.pipeline.errors import ConfigError, Facts, GraphError, Halt, TopicError, Unavailable
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.names import checkpoint_topic, setting
from exactlyonce.pipeline.secrets import look_up
from exactlyonce.sinks.kafka.sink import gives_keys, gives_newest_rows, gives_partitions, gives_times
from exactlyonce.sinks.writer import WritesToTopic

MADE_ANEW = "was deleted and created again"
TIMESTAMP_TYPE, LOG_APPEND_TIME = "message.timestamp.type", "LogAppendTime"
Offsets = dict[str, dict[int, SourceOffset]]
"""Where to go on, by source and split."""
ELSEWHERE_TIMEOUT_MS = 5_000
"""For one look at the topics of other clusters, between two heartbeats."""


@dataclass
class Inputs:
    """The inputs of an incarnation, and their partitions or other splits as they are now."""

    topics: InputTopics
    sources: Mapping[str, ReadsTopic]
    """Those that read topics."""
    described: Mapping[str, Topic]
    """By place; ids never change, partitions only become more."""
    targets: dict[str, dict[int, int]]
    """The end of a bounded run, by source and partition: the last stable offsets at its start. A source without topic
    has none, and ends with its splits. Empty when unbounded."""
    others: Mapping[str, FindsSplits] = field(default_factory=dict)
    """The sources that read no topic, or a pattern of topics."""

    def __post_init__(self) -> None:
        self._finders = {id: source.finder(id, self.topics.own) for id, source in self.others.items()}
        self.matched: dict[str, Topic] = {}
        """The topics of patterns, by name; their partitions are not counted."""
        self._found: Offsets = {id: {} for id in self.others}
        """The start of each split since the last look at a manifest that lacked it."""
        self._gone: Offsets = {id: {} for id in self.others}
        """The ended splits of the manifest at the last look that are gone from the source."""

    def close(self) -> None:
        for finder in self._finders.values():
            finder.close()

    def read(self, *, elsewhere: bool) -> list[ReadsTopic]:
        """The sources that read topics of the checkpoints' cluster; *elsewhere*: of other clusters."""
        return [source for source in self.sources.values() if (source.client is not None) == elsewhere]

    @property
    def ids(self) -> set[str]:
        """The sources."""
        return {*self.sources, *self.others}

    @property
    def patterns(self) -> set[str]:
        """The sources that read the topics of a pattern."""
        return {id for id, source in self.others.items() if source.place.startswith(TOPICS)}

    @property
    def watched(self) -> set[str]:
        """The topics of the checkpoints' cluster, as far as they are known."""
        return {*self.matched, *(source.topic for source in self.read(elsewhere=False))}

    @property
    def counted(self) -> tuple[tuple[str, str, int], ...]:
        """(source id, place, partitions) of every source that reads a topic."""
        return tuple((id, source.place, self.described[source.place].partitions) for id, source in self.sources.items())

    def require_read(self, places: Iterable[RecordPlace]) -> None:
        """ConfigError where one of *places* is in no partition that the pipeline reads. Other splits may still come."""
        others = {source.place for source in self.others.values()}
        for place in places:
            if place.topic in others:
                continue
            topic = self.described.get(place.topic)
            if topic is None or place.partition >= topic.partitions:
                topics = self.described.items()
                there = ", ".join([*(f"{name} with {topic.partitions} partitions" for name, topic in topics), *others])
                raise ConfigError(f"--skip {place}: the pipeline reads no such partition. It reads {there}.")

    def settled(
        self, manifest: Manifest, asked: Iterable[RecordPlace], note: Callable[[str], None]
    ) -> Iterator[RecordPlace]:
        """The places *asked* for, by the numbers that this run gives to their splits; *manifest* is the newest.

        A number that no manifest has is another run's, and may have been another split's there. Raises ConfigError
        unless its place has a mark.
        """
        sources = {source.place: id for id, source in self.others.items()}
        for place in asked:
            if place.topic not in sources:
                yield RecordPlace(place.topic, place.partition, place.offset)
                continue
            id = sources[place.topic]
            if not self.others[id].repeats:
                raise ConfigError(
                    f"--skip {place}: the number may be another row's in this run, since rows may have changed. "
                    f"Set on_error= of source {id!r}, which leaves such rows out; or correct the row and run again."
                )
            splits = {split.partition: split for split in manifest.offsets if split.source == id}
            found = self._found[id].get(place.partition)
            if isinstance(place, MarkedPlace):
                numbers = [n for n, split in {**self._found[id], **splits}.items() if split.mark == place.mark]
            elif found is not None and place.partition not in splits:
                raise ConfigError(
                    f"--skip {place}: no checkpoint has split {place.partition} of {place.topic} yet, so it may have "
                    f"been another one when an error named the record. It is {found.topic_id!r} now: if the record is "
                    f"there, write --skip {place}@{found.mark}. Otherwise run without this option, and the error names "
                    f"the record again."
                )
            else:
                numbers = [n for n in splits if n == place.partition]
            if not numbers:
                note(f"--skip {place}: {place.topic} has no such split, so there is nothing to leave out")
            yield from (RecordPlace(place.topic, number, place.offset) for number in numbers)

    def start_offsets(self, known: Container[str] = ()) -> tuple[SourceOffset, ...]:
        """The first offsets of a pipeline without a checkpoint, but for *known* sources."""
        for id in self._finders:
            if id not in known:
                self._find(id, ())
        in_topics = (
            SourceOffset(id, source.place, self.described[source.place].topic_id, partition, offset)
            for id, source in sorted(self.sources.items())
            if id not in known
            for partition, offset in sorted(source.first_offsets(id, self.topics.of(source)).items())
        )
        found = (start for id, starts in sorted(self._found.items()) if id not in known for start in starts.values())
        return (*in_topics, *found)

    def offsets_from(self, manifest: Manifest) -> Offsets:
        """Sn of every split; one that was added since then begins at its beginning, one that is gone is left out."""
        offsets = self.added_since(manifest)
        for noted in manifest.offsets:
            offsets[noted.source][noted.partition] = noted
        for id, gone in self._gone.items():
            offsets[id] = {split: start for split, start in offsets[id].items() if split not in gone}
        return offsets

    def added_since(self, manifest: Manifest) -> Offsets:
        """The starts of splits that *manifest* lacks; of partitions 0, even where retention has removed records.

        An ended split that is gone is among them as it is, see `SourceReader.add`; but not in `offsets_from`.
        """
        noted = {(offset.source, offset.partition) for offset in manifest.offsets}
        added = {
            id: {
                p: SourceOffset(id, source.place, self.described[source.place].topic_id, p, 0)
                for p in range(self.described[source.place].partitions)
                if (id, p) not in noted
            }
            for id, source in self.sources.items()
        }
        for id, starts in self._found.items():
            added[id] = {split: start for split, start in starts.items() if (id, split) not in noted}
            added[id] |= {split: start for split, start in self._gone[id].items() if (id, split) in noted}
        return added

    def without_splits(self, noted: Sequence[SourceOffset]) -> Iterator[str]:
        """Where each source that reads no topic looks that had no split so far; *noted*: by the newest manifest."""
        known = {offset.source for offset in noted}
        for id, source in self.others.items():
            if id not in known and not self._found[id]:
                yield f"source {id}: there is nothing to read at {source.looks_at}"

    def find_splits(self, noted: Sequence[SourceOffset]) -> None:
        """Raise Halt if a split that was *noted* by the newest manifest has changed or is gone; find new ones."""
        for id in self._finders:
            known = {offset.partition: offset for offset in noted if offset.source == id}
            self._found[id] = {split: start for split, start in self._found[id].items() if split not in known}
            self._gone[id] = {split: start for split, start in self._gone[id].items() if split in known}
            self._find(id, known.values())

    def _find(self, id: str, known: Iterable[SourceOffset]) -> None:
        found, known = self._found[id], tuple(known)
        looked = self._finders[id].find((*known, *found.values()))
        found |= {start.partition: start for start in looked if not start.ended}
        self._gone[id] |= {start.partition: start for start in looked if start.ended}
        if id in self.patterns:
            self._match((*known, *found.values()))
            if self.targets:
                self.targets[id] = self.latest((*known, *found.values()))

    def _match(self, positions: Iterable[SourceOffset]) -> None:
        """Take note of the topics of patterns at *positions*."""
        for position in positions:
            at = position.in_cluster
            if at is not None and at.topic not in self.matched:
                self.matched[at.topic] = Topic(at.topic, at.topic_id, 0)

    def latest(self, positions: Iterable[SourceOffset], moment_ms: int | None = None) -> dict[int, int]:
        """The last stable offset of the *positions* in topics, or their offset at a moment, by split."""
        by_topic: dict[str, list[tuple[int, int]]] = {}
        for position in positions:
            if (at := position.in_cluster) is not None:
                by_topic.setdefault(at.topic, []).append((position.partition, at.partition))
        ends: dict[int, int] = {}
        for topic, splits in by_topic.items():
            of_topic = (
                self.topics.own.end_offsets(topic, [partition for _, partition in splits], committed=True)
                if moment_ms is None
                else self.topics.own.offsets_at(topic, moment_ms)
            )
            ends |= {split: of_topic[partition] for split, partition in splits}
        return ends

    def look_again(self, manifest: Manifest, seen_by_each: Seen) -> None:
        """Raise Halt if a topic was deleted or made anew; take note of added partitions, unless the run is bounded.

        Called once everything that the next manifest will name has been read. *manifest* is the newest.
        """
        described = dict(self.described)
        for name, seen in seen_by_each.items():
            known = described.get(name) or self.matched[name]
            now = _still_there(manifest, known, name, seen)
            if name in described and not self.targets:
                described[name] = now
        self.described = described

    def check_continuity(self, manifest: Manifest) -> None:
        """Raise Halt if records after Sn are missing."""
        noted = {offset.source for offset in manifest.offsets}
        empty = self.others.keys() - noted
        """Those that had no split yet, or are new: they begin at their beginning."""
        if noted | empty != self.ids:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} was taken with sources {sorted(noted)}, the pipeline has "
                f"{sorted(self.ids)} now. A source is found again by its id: give it the old id, or start over "
                f"with `exactlyonce reset {manifest.pipeline}`."
            )
        read = {source.place: source for source in self.sources.values()}
        places = {*read, *(source.place for source in self.others.values())}
        for name, in_topic in sorted({(offset.topic, offset.in_topic) for offset in manifest.offsets}):
            if name not in places:
                what = "topic" if in_topic else "place"
                raise ConfigError(
                    f"Checkpoint {manifest.checkpoint} was read from {what} {name!r}, which the pipeline reads no "
                    f"longer. Give the source its old {what}, {_reset(manifest)}."
                )
            if name in read:
                require_unread(self.topics.of(read[name]), manifest, self.described[name], name)
        matched = {at.topic: at.topic_id for at in manifest.in_cluster if at.source in self.patterns}
        for name, topic_id in sorted(matched.items()):
            try:
                topic = self.topics.own.describe([name])[name]
            except TopicError:
                raise _deleted(manifest, name, topic_id) from None
            require_unread(self.topics.own, manifest, topic, name)
        self.find_splits(manifest.offsets)


def require_unread(topics: Topics, manifest: Manifest, topic: Topic, place: str) -> None:
    """Raise Halt if *topic* is not the one that *manifest* has read at *place*, or if records after Sn are missing."""
    name, offsets = place, manifest.positions_at(place)
    if offsets[0].topic_id != topic.topic_id:
        raise _made_anew(manifest, name, offsets[0].topic_id, topic.topic_id)
    first, end = topics.start_offsets(topic.name), topics.end_offsets(topic.name, committed=False)
    added = sorted(first.keys() - {read.partition for read in offsets})
    for read in (*offsets, *(SourceOffset("", name, "", partition, 0) for partition in added)):
        if read.partition not in first:
            raise Halt(f"Partition {read.partition} of topic {name!r} is gone since checkpoint {manifest.checkpoint}.")
        if read.offset < first[read.partition]:
            raise Halt(
                f"Input is missing: checkpoint {manifest.checkpoint} goes on at {name}[{read.partition}] offset "
                f"{read.offset}, but the topic begins at {first[read.partition]} now: retention has taken offsets "
                f"{read.offset} to {first[read.partition] - 1}.\n"
                f"  Choices: restore them from a replica or backup and run again; {_reset(manifest)}.",
                **_place(read),
            )
        if read.offset > end[read.partition]:
            raise _truncated(manifest, read, f"the topic ends at {end[read.partition]}")
    for source in sorted({read.source for read in offsets}):
        _require_epochs(topics, manifest, topic.name, [read for read in offsets if read.source == source])


def _require_epochs(topics: Topics, manifest: Manifest, name: str, offsets: list[SourceOffset]) -> None:
    """Raise Halt if records that were read are gone, and the log has grown beyond their offsets again."""
    ends = topics.epoch_ends(name, {read.partition: read.leader_epoch for read in offsets if read.leader_epoch >= 0})
    for read in offsets:
        end = ends.get(read.partition, read.offset)
        if end < read.offset:
            until = "is gone from the log" if end < 0 else f"ends at offset {end} now"
            raise _truncated(manifest, read, f"what leader epoch {read.leader_epoch} wrote there {until}")


def _still_there(manifest: Manifest, known: Topic, name: str, seen: Sequence[Topic | None]) -> Topic:
    """The topic *known*, at place *name*, as it is now. Raises Halt if it was deleted or made anew."""
    now = _now(known, seen)
    if now is None:
        raise _deleted(manifest, name, known.topic_id)
    if now.topic_id != known.topic_id:
        raise _made_anew(manifest, name, known.topic_id, now.topic_id)
    return now


def _deleted(manifest: Manifest, name: str, topic_id: str) -> Halt:
    return Halt(
        f"Topic {name!r} was deleted since checkpoint {manifest.checkpoint}; its id was {topic_id}. What the pipeline "
        f"had not read of it is gone.\n"
        f"  Choices: restore the topic; give the source another one, {_reset(manifest)}."
    )


def _reset(manifest: Manifest) -> str:
    return f"or `exactlyonce reset {manifest.pipeline}` and recompute from what is there"


def _made_anew(manifest: Manifest, name: str, before: str, now: str) -> Halt:
    return Halt(
        f"Topic {name!r} was deleted and created again since checkpoint {manifest.checkpoint}: its id was {before}, "
        f"now it is {now}. The checkpoint's offsets mean nothing in it.\n"
        f"  Choices: restore the old topic; {_reset(manifest)}."
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


def by_kind(graph: LogicalGraph) -> tuple[dict[str, ReadsTopic], dict[str, FindsSplits]]:
    """The sources of *graph* that read topics, and the others, by id."""
    topics, others = {}, {}
    for node in graph.sources:
        if node.source is not None and node.source.topic is not None:
            topics[node.id] = cast("ReadsTopic", node.source)
        else:
            others[node.id] = cast("FindsSplits", node.source)
    return topics, others


def require_variables(graph: LogicalGraph) -> None:
    """Raise `ConfigError` if a source or sink refers to a variable that the environment lacks."""
    for node in graph.nodes:
        for description in (node.source, node.sink):
            for name, value in getattr(description, "__dict__", {}).items():
                if isinstance(value, str) and value.startswith("env:"):
                    try:
                        look_up(name, value)
                    except ConfigError as error:
                        kind = "Source" if node.source is not None else "Sink"
                        raise ConfigError(f"{kind} {node.id!r}: {error}", operator=node.id) from None


def check_services(graph: LogicalGraph) -> None:
    """Ask the services of all sources and sinks. Raises `ConfigError` or `Unavailable`, with the source or sink."""
    for node in graph.nodes:
        try:
            if node.source is not None:
                node.source.check_services()
            if node.sink is not None:
                node.sink.check_services(graph.type_of(node.inputs[0]))
        except (ConfigError, Unavailable) as error:
            kind = "Source" if node.source is not None else "Sink"
            raise type(error)(f"{kind} {node.id!r}: {error}", operator=node.id) from error


def check_operators(graph: LogicalGraph, manifest: Manifest) -> None:
    """Raise GraphError if the checkpoint has state that no operator of the pipeline takes; a new one begins empty."""
    before, now = {snapshot.operator for snapshot in manifest.operators}, {node.id for node in graph.stateful}
    if lost := sorted(before - now):
        new = ", ".join(map(repr, sorted(now - before)))
        added = f" (but has {new}, of which there is no state)" if new else ""
        raise GraphError(
            f"Checkpoint {manifest.checkpoint} has state of {', '.join(map(repr, lost))}, and the pipeline has no such "
            f"operator{added}. State is found again by the operator's id: give the operator its old id; or take "
            f"a savepoint with the old code, and begin from it with --map or --allow-dropped-state; or start over with "
            f"`exactlyonce reset {manifest.pipeline}`."
        )


def refuse_new_places(graph: LogicalGraph, parallelism: int, manifest: Manifest, added: Offsets) -> None:
    """Raise Halt where partitions were *added* to a topic whose partitions place the state of keys in subtasks.

    Producers distribute its keys anew, so a key's next record would meet a subtask without its state.
    """
    for source in sorted(graph.placing_sources if parallelism > 1 else ()):
        if any(not start.ended for start in added[source].values()):
            raise Halt(
                f"The topic of source {source!r} has got partitions {sorted(added[source])} since checkpoint "
                f"{manifest.checkpoint}. Its partitions say which of the {parallelism} subtasks has the state of a key "
                f"(key_by(..., partitioned=True)), and with more of them keys go elsewhere, away from their state.\n"
                f"  Choices: `exactlyonce reset {manifest.pipeline}` and recompute from what is there, without "
                f"partitioned=True if partitions may be added again; or restore the topic as it was."
            )


@dataclass
class OutputTopics:
    """The output topics of an incarnation, and their partitions as they are now."""

    topics: Topics
    sinks: Mapping[str, WritesToTopic]
    described: Mapping[str, Topic]
    """By topic name, without topics to be created; ids never change, partitions only become more."""
    accepted: Collection[str] = ()
    """The topics that the user lets the pipeline go on into, though they are not those that it has written to."""
    by_key: Collection[str] = ()
    """The sinks whose outputs a partitioner distributes by their keys."""
    compacted: Collection[str] = ()
    """The sinks whose missing topics are made to keep the newest record of each key: they write changes."""
    setting: str | None = None
    """The client's partitioner, if the user has set one."""
    partitioners: dict[str, str] = field(default_factory=dict)
    """By sink id; known once they are settled."""
    begun: set[str] = field(default_factory=set)
    """The sinks of `by_key` whose outputs begin with this run."""

    @property
    def known(self) -> ask.Outputs:
        """The topic of every sink; its partitioner once they are settled."""
        topics = ((id, self.described[sink.topic]) for id, sink in self.sinks.items())
        return tuple(
            Output(id, topic.name, topic.partitions, topic.topic_id, self.partitioners.get(id, ""))
            for id, topic in topics
        )

    @property
    def partitions(self) -> dict[str, int]:
        """The number of partitions by sink id."""
        return {output.sink: output.partitions for output in self.known}

    @property
    def foreseen(self) -> tuple[tuple[str, str, int], ...]:
        """(sink id, topic, partitions) of every sink, also of topics to be created."""
        known = {name: topic.partitions for name, topic in self.described.items()}
        return tuple(
            (id, sink.topic, known.get(sink.topic, sink.create_partitions or 1)) for id, sink in self.sinks.items()
        )

    def create_missing(self, manifest: Manifest | None, note: Callable[[str], None]) -> None:
        """Create missing topics. Halt if *manifest*, the newest, shows that a missing topic was written to, or another
        one in the place of a topic, unless that is accepted."""
        written = {output.topic for output in manifest.sinks} if manifest and manifest.checkpoint else set()
        if manifest is not None:
            self._require_same(manifest, note)
        for id, sink in self.sinks.items():
            if sink.topic in self.described:
                continue
            if manifest is not None and sink.topic in written and sink.topic not in self.accepted:
                raise output_gone(manifest, sink.topic, "was deleted")
            compacted = id in self.compacted
            settings = {"cleanup.policy": "compact"} if compacted else None
            self.topics.create(sink.topic, partitions=sink.create_partitions or 1, settings=settings)
            kind = "compacted topic" if compacted else "topic"
            note(f"sink {id}: created {kind} {sink.topic} with {sink.create_partitions} partitions")
            self.described = {**self.described, **self.topics.describe([sink.topic])}

    def _require_same(self, manifest: Manifest, note: Callable[[str], None]) -> None:
        for name, before in manifest.output_ids.items():
            if name not in self.described or self.described[name].topic_id == before:
                continue
            if name not in self.accepted:
                raise output_gone(manifest, name, MADE_ANEW)
            note(f"topic {name} is not the one that checkpoint {manifest.checkpoint} has written to: that is accepted")

    def settle_partitioners(self, manifest: Manifest | None, note: Callable[[str], None]) -> None:
        """Find the partitioner of each output: that of *manifest*, from which the pipeline goes on, else the chosen
        one. ConfigError where another one is chosen than the keys of the output lie by."""
        settings = {} if self.setting is None else {SETTING: self.setting}
        for id, sink in self.sinks.items():
            chosen = sink.partitioner or self.setting
            if chosen is not None:
                partitioner(chosen)
            if manifest is None or not manifest.writes(id, sink.topic):
                self.partitioners[id] = chosen or DEFAULT
                self.begun |= {id} & {*self.by_key}
                continue
            known = self.partitioners[id] = partitioner_in(manifest, id, settings)
            if id not in self.by_key:
                self.partitioners[id] = chosen or known
            elif chosen not in (None, known):
                raise ConfigError(
                    f"Sink {id!r}: checkpoint {manifest.checkpoint} has put the keys of topic {sink.topic!r} into "
                    f"partitions by {known}, and this run is to do so by {chosen}: a key would go on in another "
                    f"partition, and readers would see its records out of order. Nothing was changed.\n"
                    f'  Choices: partitioner="{known}", or leave it out, to go on as before; or another topic; or, if '
                    f"readers bear that order, another id for the sink, which begins a new output."
                )
            elif known != DEFAULT and not manifest.partitioner_of(id):
                note(
                    f"sink {id}: topic {sink.topic} keeps the partitioner {known}, by which it was written so far; new "
                    f"outputs have {DEFAULT}, as Java's clients and Spark do"
                )

    def note_times(self, note: Callable[[str], None]) -> None:
        """Note each topic that does not keep the times that its sink gives."""
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
        """Raise Halt if a topic was deleted or made anew; count its partitions, which may have grown."""
        described = {}
        for name, known in self.described.items():
            now = _now(known, seen_by_each[name])
            if now is None:
                raise output_gone(manifest, name, "was deleted")
            if now.topic_id != known.topic_id:
                raise output_gone(manifest, name, MADE_ANEW)
            described[name] = now
        self.described = described


def _now(known: Topic, seen: Sequence[Topic | None]) -> Topic | None:
    """The topic *known*, as brokers have *seen* it: another, if one broker knows another; None if none knows it.

    A partition counts once every broker knows it: a client that asks one of the others would miss it.
    """
    views = [topic for topic in seen if topic is not None]
    if another := next((topic for topic in views if topic.topic_id != known.topic_id), None):
        return another
    if not views:
        return None
    if len(views) < len(seen):
        return known
    return msgspec.structs.replace(known, partitions=max(known.partitions, min(topic.partitions for topic in views)))


def output_gone(manifest: Manifest, name: str, what: str) -> Halt:
    return Halt(
        f"Output topic {name!r} {what} since checkpoint {manifest.checkpoint} or before: what the pipeline wrote to it "
        f"is gone, and it would go on after the gap.\n"
        f"  Choices: restore the topic from a replica or backup and run again; go on into the topic that is there, "
        f"without the records before: `exactlyonce run ... --accept-new-output {name}`; {_reset(manifest)}."
    )


class PipelineTopics:
    """The topics of a pipeline. The first look is `look_at_inputs`, then `look_at_outputs`."""

    def __init__(
        self,
        topics: Topics,
        graph: LogicalGraph,
        parallelism: int,
        note: Callable[[str], None],
        *,
        bounded: bool,
        accepted: Collection[str] = (),
        partitioner: str | None = None,
    ) -> None:
        """*accepted*: see `OutputTopics`. *partitioner*: the client's, if the user has set one."""
        self.inputs: Inputs
        self.outputs: OutputTopics
        self.offsets: Offsets = {}
        """Sn of the newest manifest."""
        self.added: Offsets = {}
        """The first offsets of partitions that the newest manifest lacks."""
        self._topics, self._graph, self._parallelism, self._note = topics, graph, parallelism, note
        self._input_topics = InputTopics(topics)
        self._bounded, self._accepted, self._setting = bounded, accepted, partitioner
        self.restored: Manifest | None = None
        """What is known of the outputs of a savepoint that begins the pipeline, for want of a manifest."""

    def close(self) -> None:
        """Close the connections to sources that are not in the cluster of the checkpoints."""
        self._input_topics.close()
        if hasattr(self, "inputs"):
            self.inputs.close()

    def look_at_inputs(self) -> None:
        """Look at every input topic; TopicError, which names all missing topics, for a missing one."""
        topics = self._input_topics
        sources, others = by_kind(self._graph)
        try:
            described = topics.describe(sources.values())
        except TopicError as error:
            _, missing = self._described_outputs()
            raise TopicError("\n".join([str(error), *missing])) from None
        targets: dict[str, dict[int, int]] = {}
        if self._bounded:
            ends = ((id, topics.of(source).end_offsets(source.topic, committed=True)) for id, source in sources.items())
            targets = {**dict(ends), **{id: {} for id in others}}
        self.inputs = Inputs(topics, sources, described, targets, others)

    def look_at_outputs(self) -> None:
        """Look at every output topic; TopicError, which names all, for missing ones that no sink creates."""
        sinks = self._sinks_of_topics()
        inputs = [node.source for node in self._graph.sources if node.source is not None]
        if any(source.reads(checkpoint_topic(self._graph.pipeline_id)) for source in inputs):
            raise ConfigError(
                f"The pattern of a source matches {checkpoint_topic(self._graph.pipeline_id)!r}, the topic of the "
                f'pipeline\'s own checkpoints. Let it leave that out, as "(?!.*[.]checkpoints).*" does.'
            )
        for id, sink in sinks.items():
            if any(source.reads(sink.topic) for source in inputs):
                raise ConfigError(
                    f"Sink {id!r} writes to topic {sink.topic!r}, which the pipeline reads: it would never end."
                )
        described, missing = self._described_outputs()
        if missing:
            raise TopicError("\n".join(missing))
        written = {sink.topic for sink in sinks.values()}
        if unknown := sorted({*self._accepted} - written):
            raise ConfigError(
                f"{setting('accept_new_output')} {unknown[0]}: the pipeline writes to no such topic. It writes to "
                f"{', '.join(sorted(written)) or 'none'}."
            )
        by_key = {
            node.id for node in self._graph.sinks if node.id in sinks
            if gives_keys(node.sink, self._graph.type_of(node.inputs[0])) and not gives_partitions(node.sink)
        }  # fmt: skip
        compacted = {
            node.id for node in self._graph.sinks if node.id in sinks
            and gives_newest_rows(node.sink, self._graph.type_of(node.inputs[0]))
        }  # fmt: skip
        self.outputs = OutputTopics(self._topics, sinks, described, self._accepted, by_key, compacted, self._setting)

    def _sinks_of_topics(self) -> dict[str, WritesToTopic]:
        """The sinks that write to a topic, by id."""
        return {
            node.id: cast("WritesToTopic", node.sink) for node in self._graph.sinks if node.sink and node.sink.topic
        }

    def _described_outputs(self) -> tuple[dict[str, Topic], list[str]]:
        """The output topics, and a sentence for each missing one that its sink does not create."""
        described: dict[str, Topic] = {}
        missing: list[str] = []
        for id, sink in self._sinks_of_topics().items():
            try:
                described |= self._topics.describe([sink.topic])
            except TopicError:
                if sink.create_partitions is None:
                    missing.append(
                        f"Sink {id!r}: topic {sink.topic!r} does not exist. Create it, or let the sink do so: "
                        f"KafkaSink({sink.topic!r}, create_partitions=4)."
                    )
        return described, missing

    def __call__(self, request: ask.Request) -> Any:
        """The answer, or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.StartOffsets():
                offsets = self.inputs.start_offsets()
                self._note_empty(())
                return offsets
            case ask.CheckContinuity(manifest):
                check_operators(self._graph, manifest)
                self.inputs.check_continuity(manifest)
                return self._note_empty(manifest.offsets)
            case ask.LookAtInputs(newest):
                self._find_splits(newest)
                return self._take_note(newest, self._topics.seen_by_each(self.inputs.watched, APPEND_TIMEOUT_MS))
            case ask.CheckRemoteInputs(newest):
                elsewhere = self.inputs.read(elsewhere=True)
                return self._take_note(newest, self._input_topics.seen_by_each(elsewhere, ELSEWHERE_TIMEOUT_MS))
            case ask.LookAtTopics(newest):
                self._find_splits(newest)
                read = self.inputs.watched
                seen = self._topics.seen_by_each((*read, *self.outputs.described), APPEND_TIMEOUT_MS)
                self._take_note(newest, {name: seen[name] for name in read})
                return self.outputs.look_again(newest, seen)
            case ask.SetPosition(manifest):
                self.offsets, self.added = self.inputs.offsets_from(manifest), self.inputs.added_since(manifest)
                return refuse_new_places(self._graph, self._parallelism, manifest, self.added)
            case ask.CreateOutputs(newest):
                if newest is None and self.restored is None:
                    self.inputs.find_splits(())  # a source that cannot begin leaves no topic behind
                self.outputs.settle_partitioners(newest or self.restored, self._note)
                self.outputs.create_missing(newest, self._note)
                return self.outputs.note_times(self._note)
            case ask.KnownOutputs():
                return self.outputs.known
        return NotImplemented

    def _note_empty(self, noted: Sequence[SourceOffset]) -> None:
        for empty in self.inputs.without_splits(noted):
            self._note(empty)

    def _find_splits(self, newest: Manifest) -> None:
        if not self.inputs.targets:
            self.inputs.find_splits(newest.offsets)

    def _take_note(self, newest: Manifest, seen: Seen) -> None:
        before = self.inputs.described
        self.inputs.look_again(newest, seen)
        for name, topic in self.inputs.described.items():
            if topic.partitions > before[name].partitions:
                self._note(f"topic {name} has {topic.partitions} partitions now: the new ones are read from offset 0")
