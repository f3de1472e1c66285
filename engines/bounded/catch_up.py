"""The way from the newest checkpoint to stop offsets, in checkpoints: backfill, catch-up, and following the input.

Invariant: each part is a complete checkpoint of its own, so whoever breaks off and comes again, here or with another
engine, goes on at the last of them. What one part publishes becomes visible at once, and the next part's later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Protocol

from exactlyonce.checkpoint.leader import UPKEEP_INTERVAL_S
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.bounded.advance import Advanced, advance
from exactlyonce.engines.bounded.capacity import require_room, subtasks_max
from exactlyonce.engines.bounded.ranges import Reading, parts, readings
from exactlyonce.engines.bounded.stages import refuse_loops
from exactlyonce.engines.bounded.stop_offsets import StopOffsets
from exactlyonce.engines.bounded.submit import Executors, Submit, in_process
from exactlyonce.engines.bounded.workplace import THIS_MACHINE
from exactlyonce.engines.connections import beside
from exactlyonce.engines.options import CHUNK_RECORDS, RunOptions
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import plan
from exactlyonce.engines.processes import is_known_dead
from exactlyonce.engines.runtime.source_decoder import NAMED_MAX, Skipped
from exactlyonce.engines.savepoints.restoring import is_restored
from exactlyonce.engines.surroundings.preflight import check_operators
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.delivery import AT_MOST_ONCE
from exactlyonce.pipeline.errors import ConfigError, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.names import checkpoint_topic, setting

FOLLOW_PAUSE_S = 1.0


def history_if_any(client: ClientConfig, pipeline: str) -> History | None:
    """What is decided in *pipeline* by now; None if it has never run."""
    topics = Topics(client)
    try:
        topics.describe([checkpoint_topic(pipeline)])
    except TopicError:
        return None
    finally:
        topics.close()
    return read_history(client.confluent(), pipeline)


def refuse_if_running(history: History | None) -> None:
    """Raise `ConfigError` while somebody runs the pipeline, as far as can be seen; `--take-over` leaves this out."""
    now_ms = SystemClock().now_ms()
    newest = history.living(now_ms) if history is not None else None
    if newest is None or history is None or is_known_dead(newest):
        return
    since_ms = now_ms - newest.heartbeat_ms
    last = datetime.fromtimestamp(newest.heartbeat_ms / 1000, timezone.utc).isoformat(timespec="seconds")
    raise ConfigError(
        f"Pipeline {history.pipeline!r} is running: process {newest.process} on {newest.host}, incarnation "
        f"{newest.incarnation}, last heartbeat at {last}, {since_ms / 1000:.0f} s ago. Stop it first, or take its "
        f"place with --take-over: it then ends without losing anything."
    )


def refuse_at_most_once(graph: LogicalGraph) -> None:
    """Raise ConfigError where a sink's outputs would have to wait for the decision in a process that lives on."""
    for node in graph.sinks:
        if node.sink is not None and node.sink.delivery == AT_MOST_ONCE:
            raise ConfigError(
                f"Sink {node.id!r} delivers at most once, which bounded work cannot do: a unit has ended, or is tried "
                f"again, before its checkpoint is decided. Give the sink another delivery, or use `exactlyonce run`."
            )


def refuse_unaligned(manifest: Manifest | None, pipeline: str) -> None:
    """Raise ConfigError where records are on their way between operators; *pipeline*: as the command line names it."""
    if manifest is not None and manifest.channel_logs:
        raise ConfigError(
            f"Checkpoint {manifest.checkpoint} of {manifest.pipeline!r} is unaligned: {manifest.records_in_flight} "
            f"records were on their way between operators, and bounded work goes on from aligned checkpoints only. "
            f"Make one with `exactlyonce run {pipeline} --until latest`, whose last checkpoint is aligned, or by "
            f"stopping a run; then run this again."
        )


def named(skipped: Iterable[Skipped]) -> Iterator[str]:
    """Lines that name the first few records that a checkpoint has skipped of each source, and count the others."""
    for source, group in groupby(skipped, lambda each: each.source):
        parts = list(group)
        sentences = [sentence for part in parts for _, sentence in part.first][:NAMED_MAX]
        yield from (f"skipped: {sentence}" for sentence in sentences)
        if more := sum(part.count for part in parts) - len(sentences):
            where = ", ".join(f"{part.topic}[{part.partition}] {part.count:,}" for part in parts)
            yield f"skipped: source {source!r}: {more:,} more records of the same checkpoint; by partition {where}"


class CatchUpProgress(Protocol):
    """The listener to a long command: it is told how it goes."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def began(self, manifest: Manifest, offsets: int) -> None:
        """It goes on from *manifest*, over so many offsets."""

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        """A checkpoint more is finalized, over so many offsets."""


@dataclass
class Summary:
    """What was done."""

    manifest: Manifest
    checkpoints: int = 0
    records: int = 0
    skipped: dict[tuple[str, int], Skipped] = field(default_factory=dict)
    """By source and partition, what was skipped because it does not decode."""
    records_out: int = 0
    parallelism: int = 1
    """How many units each stage had."""
    work_ms: int = 0
    """From first to last of the units, without what the driver does between."""

    @property
    def skipped_count(self) -> int:
        """How many records were skipped."""
        return sum(each.count for each in self.skipped.values())

    def add(self, advanced: Advanced) -> None:
        """One checkpoint more."""
        self.manifest = advanced.manifest
        self.checkpoints += 1
        self.records += advanced.records
        for each in advanced.skipped:
            place = each.source, each.partition
            self.skipped.setdefault(place, Skipped(each.source, each.topic, each.partition)).add(each)
        self.records_out += advanced.records_out
        self.work_ms += advanced.elapsed_ms


@dataclass
class CatchingUp:
    """One incarnation: opened, it leads the pipeline until it is closed."""

    loaded: Loaded
    options: RunOptions
    submit: Submit
    staging: Path
    progress: CatchUpProgress
    stop_offsets: StopOffsets = field(default_factory=StopOffsets)
    chunk_records: int = CHUNK_RECORDS
    follow: bool = False
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set by whoever wants a clean end: it comes after the present checkpoint."""
    judged: list[str] = field(default_factory=list)
    """The notes of `CatchUp.judge`, which are not told again."""
    _told: set[str] = field(default_factory=set)

    def run(self) -> Summary:
        """Until the stop offsets are reached or, when it follows, until it is stopped."""
        physical = plan(self.loaded.pipeline.build(), self.options.parallelism)
        refuse_at_most_once(physical.graph)
        refuse_loops(physical.graph)
        connections = PipelineConnections(
            physical, self.options, self._note, lambda *_: None,
            self.loaded.reference, (self.submit, self.staging),
        )  # fmt: skip
        try:
            connections.look()
            topics = connections.surroundings
            most = subtasks_max(physical.graph, topics.inputs.counted, topics.outputs.foreseen)
            require_room(physical.parallelism, most)
            summary = Summary(connections.recover())
            refuse_unaligned(summary.manifest, "{module}:{attribute}".format(**self.loaded.reference))
            self._reach(connections, summary)
            idle_s = 0.0
            while self.follow and not self.stopping.wait(FOLLOW_PAUSE_S):
                idle_s = 0.0 if self._reach(connections, summary) else idle_s + FOLLOW_PAUSE_S
                if idle_s >= UPKEEP_INTERVAL_S:
                    connections.drive(connections.leader.upkeep())
                    idle_s = 0.0
            connections.drive(connections.leader.conclude())
        finally:
            connections.close()
        return summary

    def _note(self, text: str) -> None:
        if text in self.judged:
            self.judged.remove(text)
        else:
            self.progress.note(text)

    def _reach(self, connections: PipelineConnections, summary: Summary) -> bool:
        """Advance to the stop offsets of now; False if that is where it stands."""
        ranges = self._ranges(connections)
        total = sum(each.length for each in ranges)
        if not total:
            return False
        self.progress.began(summary.manifest, total)

        def submit(stage: str, work: Sequence[bytes]) -> list[bytes]:
            return beside(lambda: connections.drive(connections.leader.upkeep()), lambda _: self.submit(stage, work))

        chunks = list(parts(ranges, self.chunk_records))
        for number, part in enumerate(chunks, 1):
            final = not self.follow and number == len(chunks)
            done = advance(
                self.loaded, self.options, connections, summary.manifest, ranges=part, submit=submit,
                staging=self.staging, final=final,
            )  # fmt: skip
            summary.add(done)
            self._tell(done)
            connections.publish_offsets()
            self.progress.advanced(done, sum(each.length for each in part))
            if self.stopping.is_set():
                break
        return True

    def _tell(self, advanced: Advanced) -> None:
        """What units have skipped, and have to say; that once, for each checkpoint may say it again."""
        for line in named(advanced.skipped):
            self.progress.note(self.options.client.redact(line))
        for text in dict.fromkeys(note for receipt in advanced.receipts for note in receipt.notes):
            if text not in self._told:
                self._told.add(text)
                self.progress.note(self.options.client.redact(text))

    def _ranges(self, connections: PipelineConnections) -> tuple[Reading, ...]:
        connections.drive(connections.leader.look_at_inputs())
        inputs, offsets = connections.surroundings.inputs, connections.surroundings.offsets
        topics = {source: each.topic for source, each in inputs.sources.items()}
        return readings(topics, offsets, self.stop_offsets.ends(inputs, offsets))


@dataclass(kw_only=True)
class CatchUp:
    """The way to stop offsets as a person asks for it: judged, then taken.

    `judge` refuses what cannot work, before executors are started and before anybody is fenced.
    """

    loaded: Loaded
    options: RunOptions
    parallelism: int | None
    """Units of each stage; None: what state that is kept by partition demands, else as many as there are cores."""
    progress: CatchUpProgress
    stop_offsets: StopOffsets
    chunk_records: int = CHUNK_RECORDS
    from_nothing: bool = False
    """Whether it may begin without a checkpoint, as a backfill does."""
    follow: bool = False
    take_over: bool = False
    """Whether an instance that seems to run is fenced."""
    named: str = ""
    """The pipeline as a command line names it; empty: its module and attribute."""
    stopping: threading.Event = field(default_factory=threading.Event)
    _subtasks_max: int = 0
    _notes: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Raise what stands in the way; the first notes are told."""
        if self.chunk_records < 1:
            raise ConfigError(f"{setting('chunk_records')} is {self.chunk_records}: it must be at least 1.")
        name, graph = self.loaded.pipeline.name, self.loaded.pipeline.build()
        named = self.named or "{module}:{attribute}".format(**self.loaded.reference)
        history = history_if_any(self.options.client, name)
        latest = history.latest if history is not None else None
        restoration = self.options.restoration
        begins = restoration is not None and not is_restored(restoration, latest)
        if latest is None and not self.from_nothing and not begins:
            raise ConfigError(
                f"Pipeline {name!r} has no checkpoint to go on from: begin with `exactlyonce backfill {named}` or "
                f"`exactlyonce run {named}`."
            )
        if not begins:
            refuse_unaligned(latest, named)
        if not self.take_over:
            refuse_if_running(history)
        by_partition = any(node.partitioned for node in graph.nodes)
        if self.parallelism is None and by_partition and latest is not None and latest.operators:
            self.parallelism = latest.operators[0].parallelism
        self.options = replace(self.options, parallelism=self.parallelism or 1)
        self._judge_topics(None if begins or (history is not None and history.condemned) else latest)

    def _judge_topics(self, begun: Manifest | None) -> None:
        """*begun* is the checkpoint that the work goes on from; None: it begins with nothing, or from a savepoint."""
        physical = plan(self.loaded.pipeline.build(), self.options.parallelism)
        refuse_at_most_once(physical.graph)
        refuse_loops(physical.graph)
        connections = PipelineConnections(
            physical, self.options, self._note, lambda *_: None, self.loaded.reference,
            (in_process, Path(THIS_MACHINE)),
        )  # fmt: skip
        try:
            connections.look()
            inputs = connections.surroundings.inputs
            if begun is not None:
                check_operators(physical.graph, begun)
                inputs.check_continuity(begun)
                self.stop_offsets.ends(inputs, inputs.offsets_from(begun))
            elif self.options.restoration is None:
                self.stop_offsets.ends(inputs, inputs.first_offsets())
            most = subtasks_max(physical.graph, inputs.counted, connections.surroundings.outputs.foreseen)
        finally:
            connections.close()
        require_room(physical.parallelism, most)
        self._subtasks_max = most

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self.progress.note(text)

    def choose_parallelism(self, executors: Executors) -> None:
        """Unless it is known, it is by how many units run at the same time."""
        if self.parallelism is None:
            self.parallelism = default_parallelism(executors.cores(), self._subtasks_max, self.progress.note)
            self.options = replace(self.options, parallelism=self.parallelism)

    def run(self, executors: Executors) -> Summary:
        """Take the way; after `judge`."""
        self.choose_parallelism(executors)
        work = CatchingUp(
            self.loaded, self.options, executors.submit, executors.staging, self.progress, self.stop_offsets,
            self.chunk_records, self.follow, self.stopping, self._notes,
        )  # fmt: skip
        return replace(work.run(), parallelism=self.options.parallelism)


def default_parallelism(cores: int, most: int, note: Callable[[str], None]) -> int:
    """As many units as there are *cores*, but no more than *most*, which is noted."""
    if cores > most:
        note(
            f"Spark has {cores} cores, and a checkpoint of this pipeline has room for {most} units of each stage: that "
            f"many are used"
        )
    return min(cores, most)
