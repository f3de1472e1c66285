"""Records of Kafka as rows: the batch read, and the streaming read, journaled in Spark's checkpoint location.

Invariants: offsets are resolved once, on the driver, before a record is read; "latest" is the last stable offset, so
that no range ends within an open transaction; missing records are an error, or left out if the user allows it
(`failOnDataLoss` false). A task reads exactly its range, of the topic with the id that the driver saw; rows of a task
have the order of their partition, and none across tasks. A stream's offset names each topic's id and the start of the
next batch by partition, in one canonical order, because Spark compares texts; a repeated batch has the same ranges; an
added topic or partition is read from its beginning, and one that is left out keeps its place. Offsets of a consumer
group only show how far a stream is: nothing reads them back, and a broker that refuses them stops nothing.

`Cut` is the part of a topic that belongs to a checkpoint: input up to Sn, output of it and those before. With `after`
the cut of an older checkpoint is taken away, so that the older cut and the rest have each record once. Invariants: the
checkpoints are chosen once, and their output is committed as a whole, below the ends of the topics. These are asked for
before the writers of later checkpoints, so that a transaction that was committed below them is known as a later one, or
is none.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaException
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import RESTORED, Manifest, SourceOffset
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.group_offsets import GroupOffsets
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.connectors.kafka.topics import EARLIEST, LATEST, Topic, Topics
from exactlyonce.connectors.kafka.visible import CutScan, Scan, scan_to_cut, visible_runs
from exactlyonce.engines.bounded.audit import claims_of
from exactlyonce.engines.bounded.unit.visible_lanes import Claim
from exactlyonce.engines.processes import not_collecting
from exactlyonce.engines.savepoints.contents import origin_in_topic
from exactlyonce.engines.savepoints.retained import choose_checkpoint, chosen_checkpoint
from exactlyonce.engines.spark.shown_errors import shown_alone
from exactlyonce.engines.spark.source.read_options import Bound, CutOptions, ReadOptions
from exactlyonce.engines.spark.source.record_columns import RecordColumns
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, TopicError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from exactlyonce.checkpoint.clock import Clock
    from exactlyonce.pipeline.loading import Reference

BATCH_RECORDS = 10_000
"""Records of one Arrow batch: more would leave the processor's cache before they become columns."""
CHOICES = "Give offsets that are there, or failOnDataLoss=false to read what is left."


@dataclass(frozen=True)
class LaterOutput:
    """The output after a checkpoint, which may lie among the output up to it."""

    first: int
    """No record of it, and of no open transaction, is before this offset."""
    writers: frozenset[tuple[int, int]]
    """Producer id and epoch of each of its transactions."""
    log_end: int
    """All markers of the checkpoint are before this offset, also markers of records in other parts of the range."""


@dataclass(frozen=True)
class Range:
    """Offsets [start, end) of one partition."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    later: LaterOutput | None = None
    """The output that is left out at the end; None: all committed records are read."""
    after: LaterOutput | None = None
    """The output to which the read is limited; None: it begins with the first record. Not without `later`."""

    @property
    def size(self) -> int:
        """The number of offsets; there may be fewer records."""
        return max(0, self.end - self.start)


@dataclass(frozen=True)
class TopicContents:
    """The offsets of a topic for readers of committed records."""

    name: str
    topic_id: str
    first: Mapping[int, int]
    end: Mapping[int, int]
    """The last stable offsets."""

    def only(self, partitions: Iterable[int]) -> TopicContents:
        """The *partitions* of the topic alone."""
        wanted = sorted(partitions)
        if unknown := [partition for partition in wanted if partition not in self.end]:
            raise ConfigError(
                f"assign names partitions {unknown} of {self.name!r}, which has {sorted(self.end)}. Correct it."
            )
        first, end = ({partition: offsets[partition] for partition in wanted} for offsets in (self.first, self.end))
        return replace(self, first=first, end=end)


def contents_of(topics: Topics, names: Iterable[str]) -> dict[str, TopicContents]:
    """Each topic at present; `TopicError` for a missing one."""
    return _contents(topics, topics.describe(names).values())


def _contents(topics: Topics, described: Iterable[Topic]) -> dict[str, TopicContents]:
    by_name = {topic.name: topic for topic in described}
    spans = topics.spans(by_name.values())
    return {name: TopicContents(name, by_name[name].topic_id, span.first, span.end) for name, span in spans.items()}


def subscribed(options: ReadOptions, topics: Topics) -> dict[str, TopicContents]:
    """The topics to read at present, by name; of a pattern maybe none. `TopicError` for a missing one."""
    if options.pattern is not None:
        return _matching(options, topics)
    now = contents_of(topics, sorted(options.topics))
    if options.assigned is None:
        return now
    return {name: topic.only(options.assigned[name]) for name, topic in now.items()}


def _matching(options: ReadOptions, topics: Topics) -> dict[str, TopicContents]:
    matching = [topic for name, topic in sorted(topics.all().items()) if options.matches(name)]
    with suppress(TopicError):  # one was deleted after the list was made
        return _contents(topics, matching)
    left: dict[str, TopicContents] = {}
    for topic in matching:
        try:
            left |= _contents(topics, [topic])
        except TopicError:
            if topics.facts(topic.name) is not None:
                raise
    return left


def resolve_all(bound: Bound, topics: Topics, now: Mapping[str, TopicContents]) -> dict[str, dict[int, int]]:
    """The offset of every partition of the topics *now*."""
    if missing := sorted(set(bound.by_partition or ()) - set(now)):
        raise ConfigError(
            f"{bound.option} names the topic {missing[0]}, and the cluster has no such topic. Correct it."
        )
    return {name: resolve(bound, topics, topic) for name, topic in now.items()}


def resolve(bound: Bound, topics: Topics, topic: TopicContents) -> dict[int, int]:
    """The offset of every partition. At a time: the first record of that time or later, else the end."""
    wanted: Mapping[int, int] = dict.fromkeys(topic.first, bound.number)
    if bound.by_partition is not None:
        wanted = bound.by_partition.get(topic.name, {})
    if set(wanted) != set(topic.first):
        raise ConfigError(
            f"{bound.option} names partitions {sorted(wanted)} of {topic.name!r}, which has {sorted(topic.first)}. "
            f"Name each of them, with -2 for the earliest offset and -1 for the latest."
        )
    if bound.timestamps:
        at = {time_ms: topics.offsets_at(topic.name, time_ms) for time_ms in set(wanted.values())}
        # not beyond the end, which was asked for before
        return {partition: min(at[time_ms][partition], topic.end[partition]) for partition, time_ms in wanted.items()}
    named = {EARLIEST: topic.first, LATEST: topic.end}
    return {partition: named[n][partition] if n in named else n for partition, n in wanted.items()}


def ranges_between(options: ReadOptions, topics: Topics, cut: Cut | None = None) -> list[Range]:
    """The ranges of a batch: at least one, if only an empty one."""
    now = subscribed(options, topics)
    if cut is not None:
        cut.require_known(sorted(now))
    if not now:
        raise ConfigError(f"The cluster has no topic that subscribePattern {options.pattern!r} matches. Correct it.")
    starts, ends = (resolve_all(bound, topics, now) for bound in (options.start, options.end))
    ranges: list[Range] = []
    for name, topic in now.items():
        for partition, start in sorted(starts[name].items()):
            wanted = Range(name, topic.topic_id, partition, start, ends[name][partition])
            if wanted.start > wanted.end:
                raise ConfigError(
                    f"{wanted.topic}[{partition}] is to be read from offset {start} ({options.start.option}) to offset "
                    f"{wanted.end} ({options.end.option}), which lies before it."
                )
            ranges.append(available(wanted, topic, options.fail_on_data_loss))
    if cut is not None:
        ranges = cut.ranges(ranges, now, topics)
    return split([range_ for range_ in ranges if range_.size], options.partitions_min) or ranges[:1]


def available(wanted: Range, topic: TopicContents, fail_on_data_loss: bool) -> Range:
    """*wanted*, or its part in the topic; `RangeGone` if that is less, unless the user allows it."""
    first, end = topic.first.get(wanted.partition, 0), topic.end.get(wanted.partition, 0)
    if wanted.start == wanted.end <= end or first <= wanted.start <= wanted.end <= end:
        return wanted
    if fail_on_data_loss:
        raise RangeGone(
            f"Input is missing: {wanted.topic}[{wanted.partition}] is to be read from offset {wanted.start} to "
            f"{wanted.end - 1}, but readers can see offsets {first} to {end - 1} of it: retention took the rest, the "
            f"log was truncated, an open transaction holds readers back, or the offsets are wrong. {CHOICES}"
        )
    return replace(wanted, start=min(max(wanted.start, first), end), end=min(wanted.end, end))


def split(ranges: Sequence[Range], partitions_min: int) -> list[Range]:
    """*ranges* in at least *partitions_min* parts of about the same size, if there are as many offsets.

    >>> [(part.start, part.end) for part in split([Range("t", "", 0, 0, 90), Range("t", "", 1, 0, 10)], 4)]
    [(0, 22), (22, 45), (45, 67), (67, 90), (0, 10)]
    """
    total = sum(whole.size for whole in ranges)
    if len(ranges) >= partitions_min or not total:
        return list(ranges)
    parts = []
    for whole in ranges:
        count = min(whole.size, -(-whole.size * partitions_min // total))
        cuts = [whole.start + whole.size * number // count for number in range(count + 1)]
        parts += [replace(whole, start=start, end=end) for start, end in pairwise(cuts)]
    return parts


def shares(ranges: Sequence[Range], offsets_max: int | None) -> list[Range]:
    """*ranges*, cut to *offsets_max* in all: each in proportion to its size, and at least one.

    >>> [cut.size for cut in shares([Range("t", "", 0, 0, 90), Range("t", "", 1, 0, 9), Range("t", "", 2, 5, 6)], 12)]
    [9, 2, 1]
    """
    sizes = [whole.size for whole in ranges]
    if offsets_max is None or sum(sizes) <= offsets_max:
        return list(ranges)
    waiting = sorted((place for place, size in enumerate(sizes) if size), key=sizes.__getitem__, reverse=True)
    cut_sizes = dict.fromkeys(waiting[:offsets_max], 1)
    spare, rest, counted = offsets_max - len(cut_sizes), sum(sizes) - len(waiting), 0
    for place in cut_sizes if spare else ():
        cut_sizes[place] += (counted + sizes[place] - 1) * spare // rest - counted * spare // rest
        counted += sizes[place] - 1
    return [replace(whole, end=whole.start + cut_sizes.get(place, 0)) for place, whole in enumerate(ranges)]


def require_same_topic(now: TopicContents | Topic, topic_id: str) -> None:
    """Raise `RangeGone` if the topic has another id than *topic_id*."""
    if now.topic_id != topic_id:
        raise RangeGone(
            f"Topic {now.name!r} was deleted and made anew: its id was {topic_id}, now it is {now.topic_id}. "
            f"Offsets noted before mean nothing in it. Run the query again; a stream, with a new checkpoint location."
        )


class Cut:
    """The records up to a checkpoint of a pipeline: all, or those after another one. Made before the topics are looked
    at."""

    def __init__(self, config: ClientConfig, options: CutOptions) -> None:
        self._config, self._pipeline = config, options.pipeline
        history = read_history(config, options.pipeline)
        self._manifest = self._chosen(history, options)
        self._after = None if options.after is None else self._beginning(history, options.after)

    def _chosen(self, history: History, options: CutOptions) -> Manifest:
        newest_whole = max(history.finalized, default=None)
        if options.checkpoint is None and options.moment is None and newest_whole in history.manifests:
            return history.manifests[newest_whole]
        manifest = chosen_checkpoint(history, options.checkpoint, options.moment)
        if manifest.checkpoint not in history.finalized:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} of {history.pipeline} is decided, and its output is not all "
                f"committed yet: try again, or name an older one."
            )
        return manifest

    def _beginning(self, history: History, number: int) -> Manifest:
        """Checkpoint *number*, from which the pipeline has gone on, without going back, to the chosen one."""
        after, end = choose_checkpoint(history, number), self._manifest.checkpoint
        if number > end:
            raise ConfigError(f"after is {number}, and topics are read up to checkpoint {end}. Name an older one.")
        for manifest in _between(history, after, self._manifest):
            if manifest.kind == RESTORED and manifest.origin != origin_in_topic(manifest.previous):
                raise ConfigError(
                    f"Checkpoint {manifest.checkpoint} of {self._pipeline} was restored from {manifest.origin}, so "
                    f"what was read and written since checkpoint {number} is no single interval. Name checkpoint "
                    f"{manifest.checkpoint} or a later one by after, or an older one than it by checkpoint."
                )
        return after

    @property
    def _ends(self) -> tuple[Manifest, ...]:
        return (self._manifest,) if self._after is None else (self._after, self._manifest)

    def ranges(self, wanted: Sequence[Range], now: Mapping[str, TopicContents], topics: Topics) -> list[Range]:
        """The parts of *wanted*, which are of the topics *now*, that belong to the interval."""
        outputs = sorted({range_.topic for range_ in wanted} & _outputs(self._manifest))
        ends = {name: topics.end_offsets(name, committed=False) for name in outputs}
        later: list[list[Claim]] = []
        if outputs:  # after the ends: a commit below them is known
            history = read_history(self._config, self._pipeline)
            later = [self._claims_after(history, end.checkpoint) for end in self._ends]
            self._require_same_outputs(history, now, outputs)
        return [
            self._output(range_, now[range_.topic], ends[range_.topic][range_.partition], later)
            if range_.topic in outputs
            else self._input(range_, now[range_.topic])
            for range_ in wanted
        ]

    def require_known(self, names: Sequence[str]) -> None:
        """Raise ConfigError for a topic that the pipeline does not have, or both reads and writes."""
        for end in self._ends:
            inputs, outputs = {read.topic for read in end.in_cluster}, _outputs(end)
            for name in names:
                if name in inputs and name in outputs:
                    raise ConfigError(
                        f"{self._pipeline} reads {name!r} and writes to it: no part is of one checkpoint."
                    )
                if name not in inputs | outputs:
                    raise ConfigError(
                        f"{self._pipeline} has no topic {name!r} at checkpoint {end.checkpoint}. It reads "
                        f"{', '.join(sorted(inputs)) or 'none'}, and writes exactly once to "
                        f"{', '.join(sorted(outputs)) or 'none'}."
                    )

    def _input(self, wanted: Range, topic: TopicContents) -> Range:
        """*wanted* up to Sn, from that of `after` on; a partition that was added later has nothing."""
        end = _next_offset(self._manifest, topic, wanted.partition)
        if self._after is None:
            return replace(wanted, end=max(wanted.start, end))
        begin = _next_offset(self._after, topic, wanted.partition)
        if end < begin:
            raise ConfigError(
                f"{self._pipeline} was at offset {begin} of {wanted.topic}[{wanted.partition}] at checkpoint "
                f"{self._after.checkpoint}, and at offset {end} at checkpoint {self._manifest.checkpoint}: it went "
                f"back between them. Name another checkpoint by after."
            )
        if begin < min(wanted.start, end):
            raise self._gone(wanted, begin)
        start = max(wanted.start, begin)
        return replace(wanted, start=start, end=max(start, end))

    def _output(self, wanted: Range, topic: TopicContents, log_end: int, later: Sequence[Sequence[Claim]]) -> Range:
        """*wanted*, to the end of the log, with the writers after the checkpoints."""
        *after, end = (self._later(wanted, topic, log_end, claims) for claims in later)
        if not after:
            return replace(wanted, end=max(log_end, wanted.start), later=end)
        own = (claim for claim in later[0] if claim.place == (wanted.topic, wanted.partition))
        firsts = [claim.first_offset for claim in own if claim.writer not in end.writers and not claim.given_up]
        if min(firsts, default=wanted.start) < wanted.start:
            raise self._gone(wanted, min(firsts))
        return replace(wanted, start=after[0].first, end=max(log_end, after[0].first), later=end, after=after[0])

    def _later(self, wanted: Range, topic: TopicContents, log_end: int, claims: Sequence[Claim]) -> LaterOutput:
        """The transactions of *claims* in the partition of *wanted*.

        They have no record before their first one, before the stable end, and before the log's own beginning.
        """
        own = [claim for claim in claims if claim.place == (wanted.topic, wanted.partition)]
        first = max(topic.first[wanted.partition], min([wanted.end, *(claim.first_offset for claim in own)]))
        return LaterOutput(first, frozenset(claim.writer for claim in own), log_end)

    def _gone(self, wanted: Range, start: int) -> RangeGone:
        """The error for records that are missing from offset *start* on, where the topic begins later."""
        return RangeGone(
            f"Records are missing: those of {wanted.topic}[{wanted.partition}] after the checkpoint begin at offset "
            f"{start}, and the topic begins at {wanted.start}: retention took the rest. Name a later checkpoint by "
            f"after; or leave it out, to read all that is left up to checkpoint {self._manifest.checkpoint}."
        )

    def _claims_after(self, history: History, number: int) -> list[Claim]:
        """The transactions of all checkpoints after *number*."""
        later = [manifest for manifest in history.retained if manifest.checkpoint > number]
        before = number
        for manifest in later:
            if manifest.previous != before:
                raise ConfigError(
                    f"Checkpoints between {before} and {manifest.checkpoint} of {self._pipeline} have expired: which "
                    f"records they have written is not known any more, so its output at checkpoint {number} is not, "
                    f"either. Name checkpoint {manifest.checkpoint} or a later one, or read its input alone."
                )
            before = manifest.checkpoint
        return [claim for manifest in later for claim in claims_of(history, manifest)]

    def _require_same_outputs(self, history: History, now: Mapping[str, TopicContents], outputs: Sequence[str]) -> None:
        """Raise ConfigError for an output topic that was made anew since a checkpoint of the interval."""
        for manifest in _between(history, self._after, self._manifest) if self._after is not None else ():
            for name in outputs:
                if manifest.output_ids.get(name, now[name].topic_id) != now[name].topic_id:
                    raise ConfigError(
                        f"Topic {name!r} was made anew since checkpoint {manifest.checkpoint}, and the output of that "
                        f"one is lost. Name a later checkpoint by after."
                    )


def _between(history: History, after: Manifest, end: Manifest) -> list[Manifest]:
    """The retained checkpoints after *after*, up to *end*."""
    return [manifest for manifest in history.retained if after.checkpoint < manifest.checkpoint <= end.checkpoint]


def _outputs(manifest: Manifest) -> set[str]:
    """The topics that its pipeline writes to exactly once."""
    return {output.topic for output in manifest.sinks}


def _next_offset(manifest: Manifest, topic: TopicContents, partition: int) -> int:
    """Sn of a partition of *topic*, which *manifest* has read; 0 of one that was added later."""
    own = [read for read in manifest.in_cluster if read.topic == topic.name]
    require_same_topic(topic, own[0].topic_id)
    return max((read.offset for read in own if read.partition == partition), default=0)


class RangesReader(DataSourceReader):
    def __init__(self, options: ReadOptions, reference: Reference | None, schema: StructType) -> None:
        """*reference* of the pipeline with the types, if any."""
        require_schema(RecordColumns(options, reference), schema)
        self._options, self._reference = options, reference

    @shown_alone
    def partitions(self) -> Sequence[InputPartition]:
        """One task for each range; Spark asks on the driver, once for each loaded frame."""
        config = self._options.client()
        config.check()
        cut = None if self._options.cut is None else Cut(config, self._options.cut)
        with closing(Topics(config)) as topics:
            return [InputPartition(wanted) for wanted in ranges_between(self._options, topics, cut)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return record_batches(self._options, RecordColumns(self._options, self._reference), partition.value)


def require_schema(columns: RecordColumns, schema: StructType) -> None:
    """Raise `ConfigError` if the user gives another schema than ours."""
    ours = columns.schema
    if schema != ours:
        raise ConfigError(f"The schema is always {ours.simpleString()}. Leave .schema(...) out, and use select.")


def record_batches(options: ReadOptions, columns: RecordColumns, wanted: Range) -> Iterator[pa.RecordBatch]:
    """The rows of a range."""
    if not wanted.size:
        return
    if wanted.later is not None:
        yield from _batches_of_cut(options, columns, wanted, wanted.later)
        return
    config = options.client()
    topics = Topics(config)
    reader = RangeReader(wanted.topic, wanted.partition, wanted.start, wanted.end, config)
    try:
        _require_same_topic(topics, wanted)
        while (batch := _next(reader, columns)) is not None:
            yield batch
        _require_same_topic(topics, wanted)
    except (RangeGone, TopicError) as error:
        if options.fail_on_data_loss:
            raise
        rest = _left(topics, replace(wanted, start=reader.position))
        if rest.size and isinstance(error, TopicError):  # the topic is there, and may not be read
            raise
        yield from record_batches(options, columns, rest)
    finally:
        reader.close()
        topics.close()


def _batches_of_cut(
    options: ReadOptions, columns: RecordColumns, wanted: Range, later: LaterOutput
) -> Iterator[pa.RecordBatch]:
    """The rows of a range without those *later* and those not after its beginning. A transaction that is open among
    them is waited for.

    Raises `RangeGone` if some of the range, or of the log that tells which rows are later, was removed meanwhile.
    """
    config, place, after = options.client(), (wanted.topic, wanted.partition), wanted.after
    before, cut, end = CutScan(Scan(0), set(), 0), None, wanted.end
    with closing(Log(config)) as log:
        if after is not None:
            before = scan_to_cut(log, *place, after.first, after.log_end, after.writers)
        if wanted.end > later.first:
            cut = scan_to_cut(log, *place, later.first, later.log_end, later.writers)
            end = min(wanted.end, cut.end)
    bounds = {wanted.start, end, before.end, later.first}
    for first, last in pairwise(sorted(bound for bound in bounds if wanted.start <= bound <= end)):
        is_mixed, cut_here = first < before.end, cut if first >= later.first else None
        if not is_mixed and cut_here is None:
            yield from record_batches(options, columns, replace(wanted, start=first, end=last, later=None, after=None))
            continue
        scanned = before.scanned if cut_here is None else cut_here.scanned
        for writer, messages in visible_runs(config, *place, first, last, scanned):
            if (cut_here is None or writer in cut_here.writers) and not (is_mixed and writer in before.writers):
                yield columns.batch(*place, messages)
    if after is not None or cut is not None:
        _require_not_expired(config, wanted, later.first if after is None else after.first)


def _require_not_expired(config: ClientConfig, wanted: Range, scanned_from: int) -> None:
    """Raise unless the log was there from *scanned_from* on: a scan of removed offsets is an empty one."""
    with closing(Topics(config)) as topics:
        now = contents_of(topics, [wanted.topic])[wanted.topic]
    require_same_topic(now, wanted.topic_id)
    if now.first[wanted.partition] > scanned_from:
        raise RangeGone(
            f"The output of the checkpoint has expired while it was read: {wanted.topic}[{wanted.partition}] begins at "
            f"offset {now.first[wanted.partition]} now, and was to be read from offset {scanned_from}. Load the "
            f"DataFrame again, which then has what retention has left."
        )


def _require_same_topic(topics: Topics, wanted: Range) -> None:
    require_same_topic(topics.describe([wanted.topic])[wanted.topic], wanted.topic_id)


def _left(topics: Topics, wanted: Range) -> Range:
    """The rest of *wanted*; nothing of a topic that was deleted or made anew."""
    if topics.facts(wanted.topic) is None:
        return replace(wanted, end=wanted.start)
    now = contents_of(topics, [wanted.topic])[wanted.topic]
    if now.topic_id != wanted.topic_id:
        return replace(wanted, end=wanted.start)
    return available(wanted, now, fail_on_data_loss=False)


def _next(reader: RangeReader, columns: RecordColumns) -> pa.RecordBatch | None:
    """The next rows, maybe none if records are left out; None at the end."""
    with not_collecting():
        messages = reader.read(BATCH_RECORDS)
        return columns.batch(reader.topic, reader.partition, messages) if messages else None


class TopicOffsets(msgspec.Struct, frozen=True, omit_defaults=True):
    """The start of the next batch in one topic."""

    topic_id: str
    offsets: Mapping[int, int]
    began: Mapping[int, int] = {}
    """The start of the first batch with a topic that was found later: a repetition of that batch begins there, too."""


Offsets = dict[str, TopicOffsets]
"""By topic."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of topics. Spark keeps one on the driver while the query runs, and sends another to the tasks."""

    def __init__(
        self, options: ReadOptions, reference: Reference | None, schema: StructType, clock: Clock | None = None
    ) -> None:
        """*reference* of the pipeline with the types, if any."""
        require_schema(RecordColumns(options, reference), schema)
        self._options, self._reference = options, reference
        self._clock = clock or SystemClock()
        self._topics: Topics | None = None
        self._group: GroupOffsets | None = None
        self._published: dict[str, Any] | None = None
        self._target: Offsets | None = None
        """The end of a query with the trigger `availableNow`."""
        self._seen: Offsets | None = None
        """The ends of the topics when a batch was last planned."""
        self._planned_ms: int | None = None
        """The time of the last batch with records."""

    @shown_alone
    def initialOffset(self) -> dict[str, Any]:
        """The start of a query without a checkpoint."""
        now = self._contents()
        starts = resolve_all(self._options.start, self._connected(), now)
        return _encoded({name: TopicOffsets(topic.topic_id, starts[name]) for name, topic in now.items()})

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of `maxOffsetsPerTrigger`, else of `minOffsetsPerTrigger`; `latestOffset` knows of both."""
        most, least = self._options.offsets_per_trigger_max, self._options.offsets_per_trigger_min
        if most is not None:
            return ReadMaxRows(most)
        return ReadMinRows(least) if least is not None else ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends of the topics when the last batch was planned, for the progress of the query."""
        return None if self._seen is None else _encoded(self._seen)

    @shown_alone
    def prepareForTriggerAvailableNow(self) -> None:
        """Leave later records for another query."""
        self._target = _ends(self._contents())

    @shown_alone
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the batch that begins at *start*; *start* itself if there is nothing, or too little as yet."""
        begin, now = _decoded(start), self._contents()
        self._publish(start)
        if self._options.fail_on_data_loss:
            self._refuse_deleted(begin, now)
        self._seen = _ends(now)
        ranges = self._ranges(begin, self._seen if self._target is None else self._target, now)
        if not isinstance(limit, ReadAllAvailable) and self._waits(sum(whole.size for whole in ranges)):
            return start
        offsets, starts = defaultdict[str, dict[int, int]](dict), defaultdict[str, dict[int, int]](dict)
        for share in shares(ranges, limit.max_rows if isinstance(limit, ReadMaxRows) else None):
            offsets[share.topic][share.partition] = share.end
            starts[share.topic][share.partition] = share.start
        ends = {name: _moved(begin.get(name), now[name].topic_id, ends, starts[name]) for name, ends in offsets.items()}
        return _encoded(begin | ends)  # keeps topics that may be subscribed to again

    @shown_alone
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One task for each range of a batch."""
        ranges = [wanted for wanted in self._ranges(_decoded(start), _decoded(end), self._contents()) if wanted.size]
        return [InputPartition(part) for part in split(ranges, self._options.partitions_min)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return record_batches(self._options, RecordColumns(self._options, self._reference), partition.value)

    def _publish(self, finished: dict[str, Any]) -> None:
        """Publish *finished*, the end of the last batch, as the offsets of a group, if one is named.

        Spark asks for the next batch after it, but calls `commit` only once there is one: the lag would stay.
        """
        if not self._options.commit_group or finished == self._published:
            return
        self._published = finished
        offsets = [
            SourceOffset("", name, topic.topic_id, partition, offset)
            for name, topic in _decoded(finished).items()
            for partition, offset in topic.offsets.items()
        ]
        try:
            if self._group is None:
                self._group = GroupOffsets(self._options.client(), self._options.commit_group, _note)
            self._group.publish(offsets)
            self._group.settle()  # Spark may end this process at any time
        except KafkaException as error:
            _note(f"no offsets are published: {self._options.client().redact(error.args[0].str())}.")

    def stop(self) -> None:
        for connected in (self._topics, self._group):
            if connected is not None:
                connected.close()

    def _waits(self, waiting: int) -> bool:
        """Whether *waiting* offsets are too few for a batch, and the last one is not long ago."""
        least, now_ms = self._options.offsets_per_trigger_min, self._clock.monotonic_ms()
        if least is None or self._target is not None or not waiting:
            return False
        delay_ms = self._options.trigger_delay_max_ms
        if waiting < least and self._planned_ms is not None and now_ms - self._planned_ms < delay_ms:
            return True
        self._planned_ms = now_ms
        return False

    def _refuse_deleted(self, begin: Offsets, now: Mapping[str, TopicContents]) -> None:
        """Raise if a topic of the pattern is gone. A missing one that is subscribed to by name raises anyway."""
        for name in begin:
            if name not in now and self._options.matches(name):
                raise RangeGone(
                    f"Topic {name!r} was deleted, and records of it may not have been read. Set failOnDataLoss to "
                    f"false to go on without them."
                )

    def _ranges(self, begin: Offsets, end: Offsets, now: Mapping[str, TopicContents]) -> list[Range]:
        """The ranges from *begin* to *end*, as far as the topics still have them."""
        lossless = self._options.fail_on_data_loss
        if lossless:
            _require_subscribed(begin, end, now)
        ranges = []
        for name, topic in now.items():
            if name not in end:  # subscribed to since the batch was planned
                continue
            starts = self._starts(begin.get(name), topic, end[name])
            if lossless:
                require_same_topic(topic, end[name].topic_id)
            elif topic.topic_id != end[name].topic_id:  # the batch is gone; present records are the next one's
                continue
            for partition, until in sorted(end[name].offsets.items()):
                if partition not in topic.end:  # it is assigned no more
                    continue
                start = starts.get(partition, 0)
                ranges.append(available(Range(name, topic.topic_id, partition, start, until), topic, lossless))
        return ranges

    def _starts(self, begin: TopicOffsets | None, topic: TopicContents, end: TopicOffsets) -> Mapping[int, int]:
        """The starts in a topic of the batch to *end*; one that the query has not read before begins at its earliest
        offsets, those of when the batch was planned."""
        if begin is None:
            return end.began or topic.first
        try:
            require_same_topic(topic, begin.topic_id)
        except RangeGone:
            if self._options.fail_on_data_loss:
                raise
            return end.began or topic.first
        return begin.offsets

    def _contents(self) -> dict[str, TopicContents]:
        return subscribed(self._options, self._connected())

    def _connected(self) -> Topics:
        if self._topics is None:
            config = self._options.client()
            config.check()
            self._topics = Topics(config)
        return self._topics


def _note(text: str) -> None:
    """Show *text* in the log of Spark's driver."""
    print(f"exactlyonce: {text}", file=sys.stderr, flush=True)


def _require_subscribed(begin: Offsets, end: Offsets, now: Mapping[str, TopicContents]) -> None:
    """Raise if a repeated batch has records of a topic or a partition that is no longer read."""
    for name, until in end.items():
        before = _moved(begin.get(name), until.topic_id, {}, {}).offsets
        if name not in now:
            left_out = set(until.offsets)
        elif now[name].topic_id == until.topic_id:
            left_out = set(until.offsets) - set(now[name].end)
        else:
            left_out = set()
        if any(before.get(partition) != until.offsets[partition] for partition in left_out):
            subject = f"Topic {name!r}" if name not in now else f"A partition of {sorted(left_out)} of topic {name!r}"
            raise RangeGone(
                f"{subject} is not subscribed to any more, or was deleted, and records of it are in a batch that was "
                f"planned and is not known to be done. Subscribe to it until that is; or set failOnDataLoss to false "
                f"to leave them out."
            )


def _moved(
    before: TopicOffsets | None, topic_id: str, ends: Mapping[int, int], starts: Mapping[int, int]
) -> TopicOffsets:
    """The offsets *ends* of a batch that begins at *starts*, with those *before* of partitions that are not read at
    present."""
    if before is None or before.topic_id != topic_id:
        return TopicOffsets(topic_id, dict(sorted(ends.items())), dict(sorted(starts.items())))
    return TopicOffsets(topic_id, dict(sorted({**before.offsets, **ends}.items())), before.began)


def _ends(now: Mapping[str, TopicContents]) -> Offsets:
    return {name: TopicOffsets(topic.topic_id, topic.end) for name, topic in now.items()}


def _encoded(offsets: Offsets) -> dict[str, Any]:
    encoded: dict[str, Any] = msgspec.to_builtins(dict(sorted(offsets.items())), str_keys=True)
    return encoded


def _decoded(offsets: dict[str, Any]) -> Offsets:
    try:
        return msgspec.convert(offsets, Offsets, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"The checkpoint location has offsets that this source did not write ({error}). Give the query a "
            f"location of its own, and the offsets of the old one as startingOffsets: docs/spark-jobs.md shows how."
        ) from None
