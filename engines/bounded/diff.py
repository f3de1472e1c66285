"""Diff: the outputs of two versions of a pipeline over the same input, from the state of one checkpoint, compared.

Invariants: both versions begin with the same state, at the same offsets, and take their input by time, so that only
their code differs; both take the same chunks, cut at the same offsets; nothing is written but staged files, and a
running pipeline runs on. No store is asked: the rows that a sink would write are compared, found by its own rule.

From chunk to chunk a version goes on with its state, as a backfill does, but its blocks are staged files, and nobody
decides its checkpoints. Files between stages and superseded state are gone with their chunk. Outputs are kept until the
end, and compared then, all chunks at once. To compare chunk by chunk would take less room, and be wrong: a version may
hold a result back longer than the other, in a window, a timer or a join, so that a key has it in a later chunk. The
outputs of a subtask are read in the order of its chunks, and subtask after subtask: so a key's outputs have the order
of one chunk, whichever of its subtasks holds something back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import msgspec

from exactlyonce.checkpoint.events import PendingCheckpoint
from exactlyonce.checkpoint.records.manifest import (
    LATE_BELOW_LATEST,
    BlockRef,
    Manifest,
    RecordPlace,
    SourceOffset,
)
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history, read_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.blocks import block_storage, staged_blocks
from exactlyonce.engines.bounded.advance import first_part, offsets_in, readings, rest, stop_offsets
from exactlyonce.engines.bounded.recompute import require_same_topics, retained
from exactlyonce.engines.bounded.result_tables import html_result, html_table
from exactlyonce.engines.bounded.stages import (
    Executors,
    PartListener,
    by_sink,
    compute,
    refuse_unbounded,
    splittable_tasks,
)
from exactlyonce.engines.bounded.unit.comparison import Compared, ComparedOutput, KeyDifference, comparisons
from exactlyonce.engines.bounded.unit.messages import Reading, Receipt, Stage, StagedState
from exactlyonce.engines.bounded.unit.ordering import OPEN_READERS_MAX
from exactlyonce.engines.bounded.unit.staging import OutputFile
from exactlyonce.engines.bounded.workplace import (
    CHUNK_RECORDS_MIN,
    PRESUMED_BYTES,
    UNIT_RECORDS_FIRST,
    chunk_records,
    first_chunk_records,
    free_bytes,
    require_room,
    workplace,
)
from exactlyonce.engines.external_checks.input_topics import InputTopics
from exactlyonce.engines.external_checks.preflight import Inputs, by_kind, check_operators
from exactlyonce.engines.plan import Plan, TaskSpec, plan
from exactlyonce.engines.runtime.assembler import placed_by_partition
from exactlyonce.engines.runtime.batch import Coordinates, result_of
from exactlyonce.engines.savepoints.restoring import require_readable
from exactlyonce.pipeline.errors import ConfigError, GraphError, Halt, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.positions import LATEST, Position
from exactlyonce.pipeline.sizes import counted
from exactlyonce.sinks.writer import WritesToTopic

LANES_MIN = 8
"""Outputs are compared in so many lanes at least, each of which has some of the keys."""
SHOWN = 100
SHOWN_EARLIER = 5
COLUMNS = "sink string, key binary, place long, old binary, new binary, old_origin string, new_origin string"

_encode = msgspec.msgpack.Encoder().encode
_compared_decoder = msgspec.msgpack.Decoder(Compared)


KEY, INPUT_RECORD = "key", "input record"
"""What outputs are compared by: a key of messages or of rows, or the input record that rows without a key stem from."""


@dataclass(frozen=True)
class SinkDiff:
    """The comparison of the outputs of one sink."""

    sink: str
    old: int
    """Outputs of the old version."""
    new: int
    keys: int
    """Keys with outputs in either version; messages without a key count as one."""
    differing: int
    """Keys whose outputs differ, in content, number or order."""
    differences: list[KeyDifference]
    """The differences of the first of these keys. A row is JSON, and None if it is deleted."""
    by: str = KEY
    """`KEY`, or `INPUT_RECORD` for rows that a store appends: then that is what `keys` and `differing` count."""

    def named(self, difference: KeyDifference) -> bytes | None:
        """The key of *difference*, or its input record as text."""
        if self.by == KEY or difference.origin is None:
            return difference.key
        result = result_of(Coordinates(*difference.origin))
        return ("{}[{}] {}".format(*difference.origin) if result is None else "{} at {}".format(*result)).encode()


@dataclass
class DiffReport:
    """The result of a diff. A notebook shows it as a table."""

    pipeline: str
    base: int
    """The checkpoint from whose state both versions began."""
    records: int = 0
    """Input records that each version has read."""
    sinks: list[SinkDiff] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    """Sentences on what was not compared."""

    earlier: list[int] = field(default_factory=list)
    """The retained checkpoints before `base`, from which there is more input."""

    @property
    def is_judged(self) -> bool:
        """Whether there were outputs to compare."""
        return bool(self.sinks)

    @property
    def agrees(self) -> bool:
        """Whether outputs were compared, and are the same."""
        return self.is_judged and not any(sink.differing for sink in self.sinks)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        parts = [
            f"{sink.sink}: {sink.differing:,} of {counted(sink.keys, sink.by)} differ"
            for sink in self.sinks
            if sink.differing
        ]
        begun = f"{self.pipeline}: {counted(self.records, 'record')} from checkpoint {self.base} on"
        if self.is_judged:
            return f"{begun}: {'; '.join(parts) or 'the outputs are the same'}."
        why = "neither version gives any output" if self.records else "there is no input after it"
        earlier = f", as of {', '.join(map(str, self.earlier[-SHOWN_EARLIER:]))}" if self.earlier else ""
        return f"{begun}: nothing to compare: {why}. Begin at an earlier checkpoint{earlier}, or at a savepoint."

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The differences as rows of `COLUMNS`."""
        return [
            (
                sink.sink, difference.key, difference.place, difference.old and difference.old.value,
                difference.new and difference.new.value, _origin(difference.old), _origin(difference.new),
            )
            for sink in self.sinks
            for difference in sink.differences
        ]  # fmt: skip

    def frame(self, spark: Any) -> Any:
        """The differences as a DataFrame of the session *spark*."""
        return spark.createDataFrame(self.rows, COLUMNS)

    def _repr_html_(self) -> str:
        sinks = [(sink.sink, sink.old, sink.new, sink.by, sink.keys, sink.differing) for sink in self.sinks]
        return html_result(
            self.verdict,
            html_table(("sink", "old outputs", "new outputs", "compared by", "all", "differing"), sinks),
            html_table(("sink", "key", "place", "old", "new", "old from", "new from"), self.rows),
            html_table(["not compared"], [(reason,) for reason in self.unjudged]),
        )


def _origin(output: ComparedOutput | None) -> str | None:
    return "{}[{}] {}".format(*output.origin) if output is not None and output.origin is not None else None


class _Target(NamedTuple):
    """The target of a sink, for people, and the form of its outputs."""

    place: str
    found_by: str | None = None
    """`StoredRows.found_by`; None: the outputs are messages of a topic."""


def _targets(graph: LogicalGraph) -> dict[str, _Target | None]:
    """The target of each sink; None where nobody can tell what it writes."""
    targets: dict[str, _Target | None] = {}
    for node in graph.sinks:
        if node.sink is None:
            continue
        if node.sink.topic is not None:
            targets[node.id] = _Target(node.sink.topic)
            continue
        stored = node.sink.stored_rows(graph.type_of(node.inputs[0]))
        targets[node.id] = None if stored is None else _Target(stored.place, stored.found_by)
    return targets


def _apart(id: str, old: _Target, new: _Target) -> str:
    """Why the outputs of sink *id* cannot be compared, after "not compared"; empty: they can."""
    if (old.found_by is None) != (new.found_by is None):
        return (
            f"the output of sink {id!r}, which goes to {old.place} by the old version and to {new.place} by the new: "
            f"messages of a topic are no rows of a store"
        )
    if old.found_by == new.found_by:
        return ""
    ways = [f"finds rows by {target.found_by}" if target.found_by else "appends rows" for target in (old, new)]
    return f"the output of sink {id!r}, which {ways[0]} in the old version, and {ways[1]} in the new"


@dataclass
class _Version:
    """One version on its way from chunk to chunk: its newest state, and its outputs so far."""

    loaded: Loaded
    physical: Plan
    files: str
    """The beginning of the locations of its outputs and its state."""
    manifest: Manifest
    """The checkpoint that it has begun at, or the end of a chunk in the form of one: nobody decides it."""
    outputs: list[OutputFile] = field(default_factory=list)
    """Chunk by chunk."""
    offsets: tuple[SourceOffset, ...] = ()
    records: int = 0
    shuffled_bytes: int = 0
    """The size of the files of the last chunk that are gone with it."""
    _blocks: set[BlockRef] = field(default_factory=set)
    """The staged blocks of its state."""

    def __post_init__(self) -> None:
        self.splittable = splittable_tasks(self.physical)

    @property
    def state_files(self) -> str:
        """The beginning of the locations of its blocks."""
        return f"{self.files}state-"

    @property
    def outputs_bytes(self) -> int:
        return sum(output.file.size for output in self.outputs)

    @property
    def state_bytes(self) -> int:
        return sum(ref.size for ref in self._blocks)

    def take(self, receipts: Sequence[Receipt], *, goes_on: bool) -> None:
        """Take note of a chunk. If it *goes_on*, that is from the state in *receipts*; the state before is removed."""
        acks = [receipt.ack for receipt in receipts]
        outputs = [output for receipt in receipts for output in receipt.outputs]
        self.outputs += outputs
        self.records += sum(receipt.records for receipt in receipts)
        self.shuffled_bytes = sum(receipt.staged_bytes for receipt in receipts)
        self.shuffled_bytes -= sum(output.file.size for output in outputs)
        offsets = [at for ack in acks for at in ack.offsets]
        self.offsets = tuple(sorted(offsets, key=lambda at: (at.source, at.partition)))
        if not goes_on:
            return
        before = self.manifest.checkpoint
        chunk = PendingCheckpoint.of(acks, base=before, triggered_ms=0, attempt=self.manifest.attempt)
        self.manifest = msgspec.structs.replace(
            self.manifest,
            checkpoint=chunk.checkpoint,
            base=before,
            previous=before,
            fingerprint=self.physical.graph.fingerprint(),
            parallelism=self.physical.parallelism,
            rules=LATE_BELOW_LATEST,
            offsets=self.offsets,
            operators=chunk.operators,
            order_logs=(),
            committables=(),
            staged=(),
            channel_logs=(),
        )
        self._blocks.update(ref for ack in acks for ref in ack.written)
        needed = self._blocks.intersection(chunk.references(self.manifest))
        if superseded := self._blocks - needed:
            with closing(staged_blocks(self.state_files)) as storage:
                storage.dropped(superseded)
        self._blocks = needed


def _require_same_input(versions: Sequence[_Version]) -> None:
    """Raise Halt where the versions stand at different offsets: then not only their code differs."""
    old, new = versions
    for at, other in zip(old.offsets, new.offsets, strict=True):
        if at.offset != other.offset:
            raise Halt(
                f"{at.topic}[{at.partition}] of source {at.source!r} has given the old version records up to offset "
                f"{at.offset}, and the new one up to {other.offset}: it does not repeat what it gives, so that the "
                f"versions cannot be compared on it."
            )


def _first_chunk_records(offsets: int, width: int, free: int | None) -> int:
    """The records of the first chunk: fewer than of others where *offsets* may not fit into the *free* room, which the
    first chunk measures then.

    >>> [_first_chunk_records(offsets, 2, 40 << 30) for offsets in (5_000_000, 50_000_000)]
    [5000000, 200000]
    >>> _first_chunk_records(50_000_000, 2, None)
    5000000
    """
    if free is not None and 2 * PRESUMED_BYTES * offsets > free / 2:
        return max(CHUNK_RECORDS_MIN, min(UNIT_RECORDS_FIRST * width, int(free / 2 / PRESUMED_BYTES)))
    return first_chunk_records(width, None, free_bytes=free, timeout_ms=None)


class Diff:
    """The diff of versions *old* and *new* of a pipeline. Its constructor refuses a hopeless one before executors
    start: `ConfigError`, `GraphError`, `StateIncompatible`, `Halt`."""

    def __init__(
        self,
        old: Loaded,
        new: Loaded,
        client: ClientConfig,
        *,
        checkpoint: int | None = None,
        to: Position = LATEST,
        chunk_records: int | None = None,
        shown: int = SHOWN,
    ) -> None:
        """*checkpoint* None: the newest savepoint, or else the oldest checkpoint that is retained. *to*, one of
        `TO`, is where the input ends. *chunk_records*: see `CatchUp`. *shown*: the most differences of a sink."""
        self._versions, self._client, self._shown = (old, new), client, shown
        self._chunk_records = chunk_records
        self._graphs = [version.pipeline.build() for version in self._versions]
        self._targets = [_targets(graph) for graph in self._graphs]
        self.name = old.pipeline.name
        self._notes: list[str] = []
        if old.pipeline.name != new.pipeline.name:
            raise GraphError(
                f"These are two pipelines, {old.pipeline.name!r} and {new.pipeline.name!r}, and a diff compares two "
                f"versions of one: give both its name, which its checkpoints have."
            )
        self._topic, self._history = read_topic(client, self.name)
        self._base = self._chosen(checkpoint)
        for graph in self._graphs:
            refuse_unbounded(graph)
            self._require_same_sources(graph)
            blocks = block_storage(client, self._topic, self._base.storage)
            require_readable(graph, self._base, blocks, self._notes.append, drops_fields=True)
            check_operators(graph, self._base)
        self._require_run_goes_on()
        self._ranges = self._read_ranges(to)

    @property
    def offsets(self) -> int:
        """The offsets that each version reads; there may be fewer records."""
        return offsets_in(self._ranges)

    def run(self, executors: Executors, progress: PartListener) -> DiffReport:
        """Compute and compare both versions. Raises `ConfigError` if the checkpoint expires meanwhile."""
        try:
            return self._run(executors, progress)
        except Halt as error:
            if self._base.checkpoint in read_history(self._client, self.name).manifests:
                raise
            raise ConfigError(
                f"Checkpoint {self._base.checkpoint} of {self.name} has expired while it was read: the pipeline runs, "
                f"and keeps only its newest ones. Take a savepoint, which stays, by `exactlyonce savepoint "
                f"{self.name}`: a diff begins there. Or let it run with a larger --num-retained."
            ) from error

    def _run(self, executors: Executors, progress: PartListener) -> DiffReport:
        for note in self._notes:
            progress.note(note)
        progress.began(self._base, 2 * self.offsets)
        report = DiffReport(self.name, self._base.checkpoint)
        report.earlier = sorted(each for each in self._history.manifests if each < self._base.checkpoint)
        width = self._width(executors)
        lanes = max(LANES_MIN, width)
        with workplace(executors.staging, f"diff-{self.name}-{self._base.checkpoint}") as files:
            versions = [
                _Version(loaded, plan(graph, width), f"{files}{side}-", self._base)
                for loaded, graph, side in zip(self._versions, self._graphs, ("old", "new"), strict=True)
            ]
            self._reach(versions, lanes, executors, progress)
            sides = [by_sink(version.outputs) for version in versions]
            report.records = versions[-1].records
            report.sinks += self._compared(sides, files, lanes, executors)
        report.unjudged += self._not_compared()
        return report

    def _reach(self, versions: Sequence[_Version], lanes: int, executors: Executors, progress: PartListener) -> None:
        """Take both versions to the end, chunk by chunk; ConfigError once it is known that their outputs, which
        are kept, will not fit into the staging room."""
        left, done, width = self._ranges, 0, versions[0].physical.parallelism
        most = self._chunk_records or _first_chunk_records(self.offsets, width, free_bytes(executors.staging))
        while True:
            chunk = first_part(left, most, OPEN_READERS_MAX * width)
            length = offsets_in(chunk)
            is_last = length == offsets_in(left) and not any(reading.to_end and reading.length for reading in chunk)
            for version in versions:
                self._advance(version, chunk, lanes, executors, goes_on=not is_last)
                progress.passed(length)
            _require_same_input(versions)
            left, done = rest(left, chunk, versions[0].offsets), done + length
            if not (remaining := offsets_in(left)):
                return
            shuffled = max(version.shuffled_bytes for version in versions) / length
            outputs = sum(version.outputs_bytes for version in versions) / done
            if self._chunk_records is None:
                free = free_bytes(executors.staging)
                most = chunk_records(width, offset_bytes=shuffled + outputs, free_bytes=free)
            states = sum(version.state_bytes for version in versions)
            require_room(
                executors.staging,
                outputs * remaining + shuffled * min(most, remaining) + states,
                f"the outputs of both versions for the other {counted(remaining, 'offset')}",
                "read less: begin at a later checkpoint, or end earlier (--to)",
            )

    def _advance(
        self, version: _Version, chunk: Sequence[Reading], lanes: int, executors: Executors, *, goes_on: bool
    ) -> None:
        """Take *version* over *chunk*; its state is written if it *goes_on*."""
        with workplace(executors.staging, f"diff-{self.name}-{version.manifest.checkpoint + 1}") as files:
            stage = self._stage(version, files, lanes, goes_on=goes_on)
            receipts = compute(
                version.physical, stage, self._client.as_text, chunk, executors.submit, splittable=version.splittable
            )
        version.take(receipts, goes_on=goes_on)

    def _width(self, executors: Executors) -> int:
        """The number of units of each stage: one for each core, as many as the checkpoint has at least."""
        base = self._base.parallelism
        if self._base.channel_logs or any(placed_by_partition(graph, self._base) for graph in self._graphs):
            return base
        width = max(base, min(executors.cores(), *(graph.max_parallelism for graph in self._graphs)))
        try:
            for graph in self._graphs:
                plan(graph, width)
        except GraphError:  # it goes at parallelism 1 alone, as it has run
            return base
        return width

    def _chosen(self, checkpoint: int | None) -> Manifest:
        kept = {manifest.checkpoint: manifest for manifest in self._history.retained}
        if not kept:
            raise ConfigError(f"{self.name} has no checkpoint to begin at: let it run until there is one.")
        if checkpoint is not None:
            return retained(self._history, checkpoint)
        savepoints = [number for number, manifest in kept.items() if manifest.is_savepoint]
        return kept[max(savepoints, default=min((number for number in kept if number), default=0))]

    def _require_run_goes_on(self) -> None:
        """Raise what would keep a run of the new version from going on at the newest checkpoint."""
        newest, graph = self._history.latest, self._graphs[1]
        if newest is not None and newest is not self._base:
            check_operators(graph, newest)
            blocks = block_storage(self._client, self._topic, newest.storage)
            require_readable(graph, newest, blocks, drops_fields=True)

    def _require_same_sources(self, graph: LogicalGraph) -> None:
        """Raise GraphError unless *graph* reads what the checkpoint has offsets of."""
        had = {(read.source, read.topic) for read in self._base.offsets}
        has = {(node.id, node.source.place) for node in graph.sources if node.source is not None}
        if had != has:
            raise GraphError(
                f"Both versions must have the sources of checkpoint {self._base.checkpoint}, with their ids and "
                f"topics: {_listed(had)}. One has {_listed(has)}."
            )

    def _read_ranges(self, to: Position) -> tuple[Reading, ...]:
        require_same_topics(self._client, self._graphs[0], self._base)
        sources, others = by_kind(self._graphs[0])
        for id, source in others.items():
            if not source.repeats:
                raise ConfigError(
                    f"Source {id!r} may give other records the next time, so two versions cannot be compared on them."
                )
        with (
            closing(Topics(self._client)) as own,
            closing(InputTopics(own)) as topics,
            closing(Inputs(topics, sources, topics.describe(sources.values()), {}, others)) as inputs,
        ):
            inputs.find_splits(self._base.offsets)
            starts = inputs.offsets_from(self._base)
            return readings(starts, stop_offsets(to, inputs, starts), others)

    def _stage(self, version: _Version, files: str, lanes: int, *, goes_on: bool) -> Stage:
        base, manifest = self._base, version.manifest
        spec = TaskSpec(
            reference=version.loaded.reference,
            parallelism=version.physical.parallelism,
            incarnation=base.incarnation,
            attempt=base.attempt,
            manifest=msgspec.structs.replace(manifest, order_logs=(), committables=()),
            topic=self._topic,
            storage=base.storage,
            drops_fields=True,
            skips=self._skips,
            output_partitions=self._output_partitions(version.physical.graph),
        )
        return Stage(
            spec=spec,
            fingerprint=version.physical.graph.fingerprint(),
            checkpoint=manifest.checkpoint + 1,
            write_state=goes_on,
            origins=True,
            files=files,
            outputs=f"{version.files}{manifest.checkpoint + 1}-",
            state=StagedState(version.state_files, base.checkpoint),
            by_partition=False,
            lanes=lanes,
        )

    @property
    def _skips(self) -> tuple[RecordPlace, ...]:
        """The records that the run has left out since the checkpoint."""
        later = (each for number, each in self._history.manifests.items() if number > self._base.checkpoint)
        return tuple(dict.fromkeys(place for manifest in later for place in manifest.skips))

    def _output_partitions(self, graph: LogicalGraph) -> dict[str, int]:
        """The partitions of each sink's topic; of a missing one those that it would be created with."""
        counts = {}
        with closing(Topics(self._client)) as topics:
            for node in graph.sinks:
                if node.sink is None or node.sink.topic is None:
                    continue
                sink = cast("WritesToTopic", node.sink)
                counts[node.id] = sink.create_partitions or 1
                with suppress(TopicError):
                    counts[node.id] = topics.describe([sink.topic])[sink.topic].partitions
        return counts

    def _compared(
        self, sides: Sequence[dict[str, list[OutputFile]]], files: str, lanes: int, executors: Executors
    ) -> Iterator[SinkDiff]:
        for sink in sorted({*sides[0], *sides[1]}):
            targets = [target for known in self._targets if (target := known.get(sink)) is not None]
            if _apart(sink, targets[0], targets[-1]):
                continue
            outputs = [side.get(sink, []) for side in sides]
            rows = targets[0].found_by is not None
            work = comparisons(f"{files}compare-{sink}", outputs, lanes, shown=self._shown, rows=rows)
            answers = executors.submit(f"{self.name}: diff, compare {sink}", [_encode(lane) for lane in work])
            done = [_compared_decoder.decode(answer) for answer in answers]
            keyless = [each for compared in done if (each := compared.keyless_difference) is not None]
            keyed = [each for compared in done for each in compared.differences]
            yield SinkDiff(
                sink=sink,
                old=sum(file.records for file in outputs[0]),
                new=sum(file.records for file in outputs[1]),
                keys=sum(compared.keys for compared in done) + any(compared.keyless for compared in done),
                differing=sum(compared.differing for compared in done) + any(keyless),
                differences=[*keyless[:1], *keyed][: self._shown],
                by=INPUT_RECORD if targets[0].found_by == "" else KEY,
            )

    def _not_compared(self) -> Iterator[str]:
        """What was not compared, in sentences."""
        old, new = self._targets
        for id in {**old, **new}:
            was, now = old.get(id, new.get(id)), new.get(id, old.get(id))
            if was is None or now is None:
                yield f"the output of sink {id!r}, which does not say what it writes"
            elif why := _apart(id, was, now):
                yield why
            elif was.place != now.place:
                yield (
                    f"where the outputs of sink {id!r} go: to {was.place} by the old version, to {now.place} by the new"
                )
        if not self._base.operators:
            return
        before = {snapshot.operator for snapshot in self._base.operators}
        for side, graph in zip(("old", "new"), self._graphs, strict=True):
            if missing := sorted({node.id for node in graph.stateful} - before):
                yield (
                    f"the earlier state of {', '.join(map(repr, missing))}, which begins empty in the {side} version: "
                    f"checkpoint {self._base.checkpoint} has none"
                )


def _listed(sources: set[tuple[str, str]]) -> str:
    return ", ".join(f"{id} of {topic}" for id, topic in sorted(sources)) or "none"
