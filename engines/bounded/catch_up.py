"""The way from the newest checkpoint to stop offsets, in checkpoints: backfill, catch-up, and following the input.

Invariants: each chunk is a complete checkpoint, from which a later run of any engine continues; a parallelism for which
a manifest has no room is refused before anything is read.

The way of a record: `CatchUp` chooses a chunk; `advance` makes a checkpoint of it. `stages.compute` has the units of
each stage done, by executors or in this process: `unit.assembly` reads a unit's input, from the source or from staged
files (`unit.ordering`), and runs its operators; `unit.outgoing` stages what goes to the next stage and to sinks. Then
`unit.outgoing.publish` writes the outputs of Kafka's partitions in transactions, and the leader decides.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol

import msgspec

from exactlyonce.checkpoint.leader import UPKEEP_INTERVAL_S
from exactlyonce.checkpoint.records.encoding import COLUMNS_SIZE_MAX
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import HISTORY, Manifest
from exactlyonce.checkpoint.succession import last_look
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.engines.bounded.advance import Advanced, advance, first_part, offsets_in, readings, rest, stop_offsets
from exactlyonce.engines.bounded.result_tables import html_details, html_result, html_table
from exactlyonce.engines.bounded.stages import (
    Executors,
    Submit,
    WorkListener,
    in_process,
    in_process_keeping,
    refuse_unbounded,
    splittable_tasks,
)
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.messages import Reading
from exactlyonce.engines.bounded.unit.ordering import OPEN_READERS_MAX
from exactlyonce.engines.bounded.workplace import THIS_MACHINE, chunk_records, first_chunk_records, free_bytes
from exactlyonce.engines.connections import with_heartbeat
from exactlyonce.engines.external_checks.preflight import Inputs, Offsets, check_operators
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import Plan, plan
from exactlyonce.engines.processes import is_known_dead
from exactlyonce.engines.runtime.assembler import placed_by_partition, refuse_to_distribute
from exactlyonce.engines.runtime.source_decoder import Skipped
from exactlyonce.engines.savepoints.restoring import is_restored
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.names import setting
from exactlyonce.pipeline.positions import LATEST, Position
from exactlyonce.pipeline.sink import AT_MOST_ONCE
from exactlyonce.pipeline.sizes import counted

FOLLOW_PAUSE_MIN_S = 0.1
FOLLOW_PAUSE_MAX_S = 1.0
SMALL_RECORDS = 20_000
"""A chunk of so many records at most, with so much state and so few units, takes less time in this process than the
launch of its tasks on Spark."""
SMALL_STATE_BYTES = 16 << 20
SMALL_UNITS = 16
"""Of all stages."""
Counted = tuple[str, str, int]
"""(id of a source or a sink, topic, partitions) by now."""
REFERENCE_BYTES = 90
"""The size of a reference to a block in the lists of a manifest, before they are deflated; so of the others."""
COMMITTABLE_BYTES = 150
WRITTEN_BYTES = 16
"""One partition in a committable; the topic's name is there once."""
STAGED_BYTES = 400
"""A staged committable, with its blocks and its place in the ledger."""
OFFSET_BYTES = 90
"""An Sn with the offsets of skipped records."""


def refuse_if_running(history: History) -> None:
    """Raise `ConfigError` while an instance seems to run the pipeline."""
    now_ms = SystemClock().now_ms()
    newest = history.living(now_ms)
    if newest is None or is_known_dead(newest):
        return
    since_ms = now_ms - newest.heartbeat_ms
    last = datetime.fromtimestamp(newest.heartbeat_ms / 1000, timezone.utc).isoformat(timespec="seconds")
    raise ConfigError(
        f"Pipeline {history.pipeline!r} is running: process {newest.process} on {newest.host}, incarnation "
        f"{newest.incarnation}, last heartbeat at {last}, {since_ms / 1000:.0f} s ago. Stop it first, or take its "
        f"place with --take-over: it then ends without losing anything."
    )


def refuse_at_most_once(graph: LogicalGraph) -> None:
    """Raise ConfigError where a sink delivers at most once: its outputs wait for the decision in a living process."""
    for node in graph.sinks:
        if node.sink is not None and node.sink.delivery == AT_MOST_ONCE:
            raise ConfigError(
                f"Sink {node.id!r} delivers at most once, which bounded work cannot do: a unit has ended, or is tried "
                f"again, before its checkpoint is decided. Give the sink another delivery, or use `exactlyonce run`."
            )


def skip_lines(skipped: Iterable[Skipped]) -> Iterator[str]:
    """A line for each source: how many records a checkpoint has skipped of it, where, and why the first."""
    for source, group in groupby(skipped, lambda partition: partition.source):
        partitions = list(group)
        count = counted(sum(partition.count for partition in partitions), "record")
        where = ", ".join(f"{p.topic}[{p.partition}] {p.count:,}" for p in partitions)
        (_, first), *_ = partitions[0].first
        yield f"skipped: {count} of source {source!r} ({where}), the first: {first}"


class CatchUpProgress(WorkListener, Protocol):
    """The listener to a catch-up."""

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        """Another checkpoint is finalized, over so many offsets."""


@dataclass
class Summary:
    """The result of a catch-up. A notebook shows it as a table."""

    manifest: Manifest = field(repr=False)
    """The manifest of the newest checkpoint."""
    checkpoints: int = 0
    records: int = 0
    skipped: dict[tuple[str, int], Skipped] = field(default_factory=dict)
    """By source and partition, records that do not decode."""
    records_out: int = 0
    parallelism: int = 1
    """Units of each stage."""
    work_ms: int = 0
    """The time of units, without the driver's work between checkpoints."""

    @property
    def checkpoint(self) -> int:
        """The number of the newest checkpoint."""
        return self.manifest.checkpoint

    @property
    def offsets(self) -> dict[str, dict[int, int]]:
        """The offset at which the next work begins, by source and partition."""
        return self.manifest.offsets_by_source

    @property
    def skipped_count(self) -> int:
        """The number of skipped records."""
        return sum(partition.count for partition in self.skipped.values())

    def _repr_html_(self) -> str:
        columns = "checkpoint", "checkpoints", "records in", "skipped", "records out", "parallelism", "time of units"
        figures = (
            self.checkpoint, self.checkpoints, self.records, self.skipped_count, self.records_out, self.parallelism,
            shown_duration(self.work_ms),
        )  # fmt: skip
        offsets = [(at.source, at.topic, at.partition, at.offset) for at in self.manifest.offsets]
        skipped = [
            (skips.source, skips.topic, skips.partition, skips.count, "; ".join(text for _, text in skips.first))
            for skips in self.skipped.values()
        ]
        return html_result(
            f"{self.manifest.pipeline}: up to checkpoint {self.checkpoint}",
            html_table(columns, [figures]),
            html_table(("source", "topic", "partition", "skipped", "the first"), skipped),
            html_details("next offsets", html_table(("source", "topic", "partition", "next offset"), offsets)),
        )

    def add(self, advanced: Advanced) -> None:
        self.manifest = advanced.manifest
        self.checkpoints += 1
        self.records += advanced.records
        for skipped in advanced.skipped:
            place = skipped.source, skipped.partition
            self.skipped.setdefault(place, Skipped(skipped.source, skipped.topic, skipped.partition)).add(skipped)
        self.records_out += advanced.records_out
        self.work_ms += advanced.elapsed_ms


@dataclass
class CatchUp:
    """One way to stop offsets. `judge` refuses a hopeless one before executors start and before anybody is fenced."""

    loaded: Loaded
    options: RunOptions
    progress: CatchUpProgress
    to: Position = LATEST
    """Where it ends."""
    chunk_records: int | None = None
    """The most records of a checkpoint; None: by the number of units and the free staging room, see `chunk_records`."""
    _: KW_ONLY
    parallelism: int | None = None
    """Units of each stage; None: as the state kept by partition demands, else as many as there are cores."""
    from_nothing: bool = False
    """Whether it may begin without a checkpoint, as a backfill does."""
    follow: bool = False
    small_here: bool = False
    """Whether small chunks are computed in this process. `lead` drops it for a plan with many units."""
    no_output: bool = False
    """Whether only state is computed, since the outputs are another application's."""
    take_over: bool = False
    """Whether an instance that seems to run is fenced."""
    command_name: str = ""
    """The pipeline as a command line names it; empty: its module and attribute."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set to ask for a clean end, which comes after the present checkpoint."""
    records: int | None = None
    """By `judge`, the offsets up to the stop offsets; None if a savepoint says where they begin."""
    _subtasks_max: int = 0
    _splittable: set[str] = field(default_factory=set)
    """See `Computation.splittable`."""
    _judged: list[str] = field(default_factory=list)
    """The notes of `judge`, which are not repeated."""
    _noted: set[str] = field(default_factory=set)
    """The notes of units, which are not repeated."""

    def judge(self) -> None:
        """Raise what stands in the way; the first notes are told."""
        if self.chunk_records is not None and self.chunk_records < 1:
            raise ConfigError(f"{setting('chunk_records')} is {self.chunk_records}: it must be at least 1.")
        name, graph = self.loaded.pipeline.name, self.loaded.pipeline.build()
        with closing(LogFollower(self.options.client, name)) as follower:
            history = follower.look()
        latest, restoration = history.latest, self.options.restoration
        begins = restoration is not None and not is_restored(restoration, latest)
        if latest is None and not self.from_nothing and not begins:
            raise ConfigError(
                f"Pipeline {name!r} has no checkpoint to go on from: begin with `exactlyonce backfill {self._name}` or "
                f"`exactlyonce run {self._name}`."
            )
        if not begins:
            self._refuse_written(latest)
            self._refuse_unaligned(latest)
        if not self.take_over:
            refuse_if_running(history)
        begun = None if begins or history.condemned else latest
        self._judge_parallelism(graph, begun)
        self._judge_topics(begun)

    def _refuse_written(self, latest: Manifest | None) -> None:
        """Raise ConfigError if work without output would follow on checkpoint *latest*, which had its output."""
        if self.no_output and latest is not None and not latest.has_no_output:
            raise ConfigError(
                f"{latest.pipeline} has written output up to checkpoint {latest.checkpoint}: {setting('no_output')} "
                f"is for history before its first output. Leave it out."
            )

    def _judge_parallelism(self, graph: LogicalGraph, begun: Manifest | None) -> None:
        """Take the parallelism of state that is kept by partition; no more subtasks than key groups."""
        placed = [] if begun is None else placed_by_partition(graph, begun)
        if self.parallelism is None and placed:
            self.parallelism = placed[0].parallelism
        if self.parallelism is not None and graph.shuffles and self.parallelism > graph.max_parallelism:
            self.progress.note(
                f"parallelism {self.parallelism} is more than the {graph.max_parallelism} key groups of the pipeline, "
                f"its max_parallelism: {graph.max_parallelism} units of each stage are used"
            )
            self.parallelism = graph.max_parallelism
        if self.parallelism is not None and begun is not None:
            refuse_to_distribute(graph, begun, self.parallelism)
        self.options = replace(self.options, parallelism=self.parallelism or 1)

    def _judge_topics(self, begun: Manifest | None) -> None:
        """*begun* is the checkpoint that the work goes on from; None: it begins with nothing, or from a savepoint."""
        physical = self._plan()

        def note(text: str) -> None:
            self._judged.append(text)
            self.progress.note(text)

        with closing(self._connections(physical, note, in_process, THIS_MACHINE)) as connections:
            inputs = connections.pipeline_topics.inputs
            if begun is not None:
                check_operators(physical.graph, begun)
                inputs.check_continuity(begun)
                self.records = offsets_in(self._remaining(inputs, inputs.offsets_from(begun)))
            elif self.options.restoration is None:
                starts: Offsets = {source: {} for source in inputs.ids}
                for start in inputs.start_offsets():
                    starts[start.source][start.partition] = start
                self.records = offsets_in(self._remaining(inputs, starts))
            self._subtasks_max = _refuse_too_wide(physical, connections)

    def choose_parallelism(self, executors: Executors) -> None:
        """Unless the parallelism is known, or there is nothing to read, take one unit for each core."""
        if self.parallelism is None and (self.follow or self.no_output or self.records != 0):
            self.parallelism = default_parallelism(executors.cores(), self._subtasks_max, self.progress.note)
            self.options = replace(self.options, parallelism=self.parallelism)

    def run(self, executors: Executors) -> Summary:
        """Catch up, after `judge`."""
        self.choose_parallelism(executors)
        return self.lead(executors.submit, executors.staging)

    def lead(self, submit: Submit, staging: str | Path) -> Summary:
        """Lead the pipeline until the stop offsets are reached or, when it follows, until it is stopped."""
        physical = self._plan()
        self._splittable = splittable_tasks(physical)
        self.small_here = self.small_here and len(physical.tasks) * physical.parallelism <= SMALL_UNITS
        if self.small_here:
            self.progress.note(
                f"chunks of {SMALL_RECORDS:,} records at most are computed in this process, while the state has no "
                f"more than {SMALL_STATE_BYTES >> 20} MiB; --on spark changes that"
            )
        with closing(self._connections(physical, self._note, submit, staging)) as connections, closing(KEPT):
            _refuse_too_wide(physical, connections)
            self._judge_again(connections)
            summary = Summary(connections.recover(), parallelism=physical.parallelism)
            with connections.failing():
                self._refuse_written(summary.manifest)
                self._refuse_unaligned(summary.manifest)
                self._reach(connections, summary, submit, staging)
                if self.follow:
                    self._go_on(connections, summary, submit, staging)
            connections.drive(connections.leader.conclude())
        return summary

    def _judge_again(self, connections: PipelineConnections) -> None:
        """Raise what has come to stand in the way since `judge`, while Spark started. Nobody is fenced yet."""
        history = connections.drive(last_look(connections.pipeline, connections.log.peek_at_stable, connections.clock))
        if not self.take_over:
            refuse_if_running(history)
        if self.options.restoration is None:
            self._refuse_written(history.latest)

    def _go_on(self, connections: PipelineConnections, summary: Summary, submit: Submit, staging: str | Path) -> None:
        """Follow the input until the end is asked for."""
        idle_s = silent_s = 0.0
        while not self.stopping.wait(pause_s := follow_pause_s(idle_s)):
            if self._reach(connections, summary, submit, staging):
                idle_s = silent_s = 0.0
                continue
            idle_s, silent_s = idle_s + pause_s, silent_s + pause_s
            if silent_s >= UPKEEP_INTERVAL_S:
                connections.drive(connections.leader.upkeep())
                silent_s = 0.0

    def _is_left(self, remaining: Sequence[Reading], manifest: Manifest) -> bool:
        """Whether there is work after *manifest*: records, or the end of a history, whose last checkpoint says so."""
        return any(reading.length for reading in remaining) or (self.no_output and manifest.kind == HISTORY)

    def _stays_here(self, chunk: Sequence[Reading], manifest: Manifest) -> bool:
        """Whether this process computes *chunk* after *manifest*."""
        if not self.small_here or offsets_in(chunk) > SMALL_RECORDS:
            return False
        return sum(operator.state_bytes for operator in manifest.operators) <= SMALL_STATE_BYTES

    def _plan(self) -> Plan:
        physical = plan(self.loaded.pipeline.build(), self.options.parallelism)
        refuse_at_most_once(physical.graph)
        refuse_unbounded(physical.graph)
        return physical

    def _connections(
        self, physical: Plan, note: Callable[[str], None], submit: Submit, staging: str | Path
    ) -> PipelineConnections:
        """The connections of a leader that has looked, and fenced nobody."""
        connections = PipelineConnections(
            physical, self.options, note, lambda *_: None, self.loaded.reference, (submit, staging),
            without_output=self.no_output,
        )  # fmt: skip
        try:
            connections.look()
        except BaseException:
            connections.close()
            raise
        return connections

    @property
    def _name(self) -> str:
        return self.command_name or "{module}:{attribute}".format(**self.loaded.reference)

    def _refuse_unaligned(self, manifest: Manifest | None) -> None:
        if manifest is not None and manifest.channel_logs:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} of {manifest.pipeline!r} is unaligned: {manifest.records_in_flight} "
                f"records were on their way between operators, and bounded work goes on from aligned checkpoints only. "
                f"Make one with `exactlyonce run {self._name} --until latest`, whose last checkpoint is aligned, or by "
                f"stopping a run; then run this again."
            )

    def _note(self, text: str) -> None:
        if text in self._judged:
            self._judged.remove(text)
        else:
            self.progress.note(text)

    def _reach(self, connections: PipelineConnections, summary: Summary, submit: Submit, staging: str | Path) -> bool:
        """Advance to the present stop offsets; False if the work stands there."""
        connections.drive(connections.leader.look_at_inputs())
        remaining = self._remaining(connections.pipeline_topics.inputs, connections.pipeline_topics.offsets)
        total = offsets_in(remaining)
        if not self._is_left(remaining, summary.manifest):
            return False
        self.progress.began(summary.manifest, total)

        def with_upkeep(submit: Submit, stage: str, work: Sequence[bytes]) -> list[bytes]:
            return with_heartbeat(lambda: connections.drive(connections.leader.upkeep()), lambda _: submit(stage, work))

        publish = partial(with_upkeep, in_process_keeping) if self.follow else None
        most = self.chunk_records or first_chunk_records(
            summary.parallelism,
            min((partitions for _, _, partitions in connections.pipeline_topics.outputs.foreseen), default=None),
            free_bytes=free_bytes(staging),
            timeout_ms=connections.transaction_timeout_ms,
        )
        while self._is_left(remaining, summary.manifest) and not self.stopping.is_set():
            chunk = first_part(remaining, most, OPEN_READERS_MAX * summary.parallelism)
            if self.no_output and summary.manifest.kind != HISTORY:  # a savepoint, or the end of another history
                chunk = tuple(msgspec.structs.replace(reading, end=reading.start) for reading in remaining)
            here = self._stays_here(chunk, summary.manifest)
            advanced = advance(
                self.loaded, self.options, connections, summary.manifest, ranges=chunk,
                submit=partial(with_upkeep, in_process_keeping if here else submit), submit_small=publish,
                staging=THIS_MACHINE if here else staging, splittable=self._splittable,
                to=() if self.follow else remaining, without_output=self.no_output,
            )  # fmt: skip
            remaining = rest(remaining, chunk, advanced.manifest.offsets)
            summary.add(advanced)
            self._note_units(advanced)
            connections.publish_offsets()
            offsets = offsets_in(chunk)
            self.progress.advanced(advanced, offsets)
            if self.chunk_records is None and offsets:
                most = chunk_records(
                    summary.parallelism,
                    offset_bytes=advanced.staged_bytes / offsets,
                    free_bytes=free_bytes(staging),
                    offset_ms=advanced.publishing_ms / offsets,
                    timeout_ms=connections.transaction_timeout_ms,
                )
        return True

    def _note_units(self, advanced: Advanced) -> None:
        """Note the records that units have skipped, and the notes of units: these once, for units repeat them."""
        for line in skip_lines(advanced.skipped):
            self.progress.note(self.options.client.redact(line))
        for text in dict.fromkeys(note for receipt in advanced.receipts for note in receipt.notes):
            if text not in self._noted:
                self._noted.add(text)
                self.progress.note(self.options.client.redact(text))

    def _remaining(self, inputs: Inputs, starts: Offsets) -> tuple[Reading, ...]:
        """The ranges from *starts* to the stop offsets."""
        return readings(starts, stop_offsets(self.to, inputs, starts), inputs.others)


def follow_pause_s(idle_s: float) -> float:
    """The pause before the next look for records, *idle_s* after the last ones: a tenth of that time.

    >>> [follow_pause_s(idle_s) for idle_s in (0.0, 4.0, 60.0)]
    [0.1, 0.4, 1.0]
    """
    return min(FOLLOW_PAUSE_MAX_S, max(FOLLOW_PAUSE_MIN_S, idle_s / 10))


def _refuse_too_wide(physical: Plan, connections: PipelineConnections) -> int:
    """The most subtasks that a manifest has room for; ConfigError if the plan has more."""
    topics = connections.pipeline_topics
    most = subtasks_max(physical.graph, topics.inputs.counted, topics.outputs.foreseen)
    if physical.parallelism > most:
        raise ConfigError(
            f"Parallelism {physical.parallelism} is more than a checkpoint of this pipeline has room for: its manifest "
            f"names the state of each subtask, and all partitions that it reads and writes. Use --parallelism {most} "
            f"at most, or topics with fewer partitions."
        )
    return most


def subtasks_max(graph: LogicalGraph, sources: Iterable[Counted], sinks: Iterable[Counted]) -> int:
    """The most subtasks of *graph* over which its state can be distributed, and for which a manifest has room."""
    widest = graph.max_parallelism if graph.shuffles else COLUMNS_SIZE_MAX
    tasks = plan(graph, min(2, widest)).tasks  # at 1 there are fewer, for nothing is shuffled
    outputs = list(sinks)
    fixed_bytes = sum(partitions * OFFSET_BYTES + len(source) + len(topic) for source, topic, partitions in sources)
    fixed_bytes += WRITTEN_BYTES * sum(partitions for _, _, partitions in outputs)
    subtask_bytes = REFERENCE_BYTES * (len(tasks) + len(graph.stateful))
    subtask_bytes += STAGED_BYTES * sum(not node.sink.transactional for node in graph.sinks if node.sink is not None)

    def size(subtasks: int) -> int:
        publishers = sum(
            min(subtasks, partitions) * (COMMITTABLE_BYTES + len(sink) + len(topic))
            for sink, topic, partitions in outputs
        )
        return fixed_bytes + subtasks * subtask_bytes + publishers

    return max(1, bisect_right(range(1, widest + 1), COLUMNS_SIZE_MAX * 9 // 10, key=size))


def default_parallelism(cores: int, most: int, note: Callable[[str], None]) -> int:
    """One unit for each core, but *most* at most, which is noted."""
    if cores > most:
        note(
            f"Spark has {cores} cores, and a checkpoint of this pipeline has room for {most} units of each stage: that "
            f"many are used"
        )
    return min(cores, most)
