"""The output of an interval, recomputed from the checkpoint before it; only files are written.

Invariants: the manifest's own subtasks read exactly the records between the two Sn, along its order logs, on the state
of its base; in-flight records of the base go first, those of the end are left out; no block, transaction or lease; what
cannot be recomputed exactly is an error, never a guess. The expected output of a sink is that of committed checkpoints
alone, whatever the sink has kept of it. Several intervals are computed in parts, as many together as a chunk of a
backfill has records: files between stages are gone with their part, the outputs stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import RESTORED, Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import partitioner_in
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.bounded.stages import (
    Computation,
    Executors,
    PartListener,
    Submit,
    compute_together,
    outputs_by_sink,
    refuse_loops,
)
from exactlyonce.engines.bounded.unit.messages import Reading, Stage
from exactlyonce.engines.bounded.unit.staging import (
    OutputFile,
    RecomputedOutput,
    StagedRange,
    batches_of,
    count_of,
    flat,
    stage_messages,
)
from exactlyonce.engines.bounded.workplace import chunk_records, free_bytes, require_room, workplace
from exactlyonce.engines.external_checks.input_topics import InputTopics
from exactlyonce.engines.external_checks.preflight import by_kind
from exactlyonce.engines.plan import TaskSpec, plan
from exactlyonce.engines.runtime.cut import whole_or_halt
from exactlyonce.engines.runtime.in_flight import frames_of, records_by_channel
from exactlyonce.pipeline.errors import ConfigError, GraphError, Halt, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.sizes import counted


@dataclass(frozen=True)
class CheckpointInterval:
    """The interval between two consecutive checkpoints: (base, manifest]."""

    base: Manifest
    manifest: Manifest

    @property
    def ranges(self) -> tuple[Reading, ...]:
        """The ranges that were read. A new partition began at its beginning."""
        starts = {(start.source, start.partition): start.offset for start in self.base.offsets}
        return tuple(
            Reading(
                end.source, end.topic, end.topic_id, end.partition,
                starts.get((end.source, end.partition), 0), end.offset,
            )
            for end in self.manifest.offsets
        )  # fmt: skip

    @property
    def offsets(self) -> int:
        """The number of offsets; there may be fewer records."""
        return sum(reading.length for reading in self.ranges)


def retained(history: History, checkpoint: int) -> Manifest:
    """The manifest of *checkpoint*; ConfigError if there is none."""
    manifest = history.manifests.get(checkpoint)
    if manifest is None:
        kept = ", ".join(str(each.checkpoint) for each in history.retained) or "none"
        raise ConfigError(
            f"{history.pipeline} has no checkpoint {checkpoint}: it is expired, or was never completed. Name one of "
            f"those that are retained: {kept}."
        )
    return manifest


def interval_of(history: History, checkpoint: int) -> CheckpointInterval:
    """The interval that *checkpoint* ended; ConfigError if there is none."""
    manifest = retained(history, checkpoint)
    if manifest.kind == RESTORED:
        raise ConfigError(
            f"Checkpoint {checkpoint} of {history.pipeline} was restored from a savepoint: it ended no interval, and "
            f"has no output."
        )
    base = history.manifests.get(manifest.previous)
    if base is None or base is manifest:
        why = "was the first" if base is manifest else f"began at checkpoint {manifest.previous}, which is expired"
        raise ConfigError(
            f"The interval of checkpoint {checkpoint} of {history.pipeline} {why}: it cannot be computed again. Those "
            f"of later ones can; --num-retained of `exactlyonce run` says how many are kept."
        )
    return CheckpointInterval(base, manifest)


@dataclass(frozen=True)
class Recomputed:
    """The outputs of an interval, staged. They are compared and written again by lane; see `unit.staging`."""

    manifest: Manifest
    files: Mapping[str, Sequence[OutputFile]]
    """By sink, in the order of subtasks; a subtask without output has none."""
    records: int
    skipped: int
    """Messages left out: they do not decode, or `Manifest.skips` has them."""
    staged_bytes: int
    """The size of all staged files, also of those between stages."""

    def is_by_partition(self, sink: str) -> bool:
        """Whether the lanes of a sink are partitions."""
        return self.manifest.partitions_of(sink) is not None

    def lanes(self, sink: str) -> range:
        """The lanes of a sink."""
        partitions = self.manifest.partitions_of(sink)
        return range(self.manifest.parallelism if partitions is None else partitions)

    def outputs(self, sink: str, lane: int) -> Iterator[RecomputedOutput]:
        """The outputs of a lane, in order."""
        return flat(batches_of(self.files.get(sink, ()), lane, by_partition=self.is_by_partition(sink)))

    def count(self, sink: str, lane: int) -> int:
        """The number of outputs in a lane."""
        return count_of(self.files.get(sink, ()), lane, by_partition=self.is_by_partition(sink))


class Recomputation(NamedTuple):
    """An interval that can be computed again."""

    manifest: Manifest
    computation: Computation


def recomputation(
    loaded: Loaded,
    client: ClientConfig,
    interval: CheckpointInterval,
    files: str,
    *,
    outputs: str = "",
    origins: bool = False,
    store_rows: bool = False,
) -> Recomputation:
    """The recomputation of *interval*, whose staged files are at *files*. See `Stage` for the others.

    Raises `GraphError` if the pipeline has changed, `ConfigError` if it has loops, `Halt` if state or order
    logs are gone.
    """
    manifest = interval.manifest
    graph = loaded.pipeline.build()
    if graph.fingerprint() != manifest.fingerprint:
        raise GraphError(
            f"Checkpoint {manifest.checkpoint} was taken by another graph than {manifest.pipeline!r} has now: its "
            f"interval can be computed again only by the pipeline as it was then."
        )
    refuse_loops(graph)
    require_same_topics(client, graph, manifest)
    common = _common(loaded, client, interval, files, outputs=outputs, origins=origins, store_rows=store_rows)
    logs, left = _order_logs(client, common, manifest), _left_in_flight(client, common, manifest)
    return Recomputation(manifest, Computation(plan(graph, manifest.parallelism), common, interval.ranges, logs, left))


def recompute(recomputations: Sequence[Recomputation], client: ClientConfig, submit: Submit) -> list[Recomputed]:
    """Compute intervals of one pipeline again; their units run together.

    Raises `Halt` if input is gone or does not fit, and errors of the user's functions.
    """
    settings = client.as_text
    receipts = compute_together([each.computation for each in recomputations], settings, submit)
    for manifest, computation in recomputations:
        require_same_topics(client, computation.plan.graph, manifest)
    return [
        Recomputed(
            manifest,
            outputs_by_sink(own),
            sum(receipt.records for receipt in own),
            sum(receipt.skipped_count for receipt in own),
            sum(receipt.staged_bytes for receipt in own),
        )
        for (manifest, _), own in zip(recomputations, receipts, strict=True)
    ]


@contextmanager
def recomputed(
    loaded: Loaded, client: ClientConfig, interval: CheckpointInterval, submit: Submit, staging: str | Path
) -> Iterator[Recomputed]:
    """Recompute *interval*; its outputs exist until the end of the block. Raises as `recomputation` and `recompute`."""
    with workplace(staging, f"replay-{interval.manifest.pipeline}-{interval.manifest.checkpoint}") as files:
        (again,) = recompute([recomputation(loaded, client, interval, files)], client, submit)
        yield again


def in_parts(intervals: Iterable[CheckpointInterval], most: Callable[[], int]) -> Iterator[list[CheckpointInterval]]:
    """*intervals* in parts that are computed together, of as many offsets as *most* gives before each, or of one."""
    waiting = deque(intervals)
    while waiting:
        left = most()
        part = [waiting.popleft()]
        left -= part[0].offsets
        while waiting and waiting[0].offsets <= left:
            part.append(waiting.popleft())
            left -= part[-1].offsets
        yield part


def topic_of(manifest: Manifest, sink: str) -> tuple[str, int]:
    """The topic of a sink, and its number of partitions then."""
    return next((output.topic, output.partitions) for output in manifest.sinks if output.sink == sink)


def partition_counts(client: ClientConfig, history: History, manifest: Manifest, sink: str) -> list[int]:
    """The partition counts that the topic of *sink* may have had when *manifest* was written, the manifest's first.

    A producer sees new partitions sooner or later than the leader.
    """
    topic, _ = topic_of(manifest, sink)
    present: list[int] = []
    with closing(Topics(client)) as topics, suppress(TopicError):
        present.append(topics.describe([topic])[topic].partitions)
    return counts_before(history, manifest, sink, present)


def counts_before(history: History, manifest: Manifest, sink: str, present: Iterable[int]) -> list[int]:
    """`partition_counts`, where *present* has the count that the topic has now, if it exists."""
    topic, own = topic_of(manifest, sink)
    outputs = [output for retained in history.retained for output in retained.sinks]
    counts = {*present, *(known.partitions for known in outputs if (known.sink, known.topic) == (sink, topic))}
    return [own, *sorted(counts - {own})]


def require_same_topics(client: ClientConfig, graph: LogicalGraph, manifest: Manifest) -> None:
    """Raise Halt if an input topic of *manifest* was replaced since then; readers check other splits themselves."""
    with closing(Topics(client)) as own, closing(InputTopics(own)) as topics:
        elsewhere = [source for source in by_kind(graph)[0].values() if source.client is not None]
        described = {**own.describe(sorted({at.topic for at in manifest.in_cluster})), **topics.describe(elsewhere)}
    for read in (offset.in_cluster or offset for offset in manifest.offsets):
        if read.topic in described and described[read.topic].topic_id != read.topic_id:
            raise Halt(
                f"Topic {read.topic!r} was deleted and created again since checkpoint {manifest.checkpoint}: what was "
                f"read then is gone."
            )


def _common(
    loaded: Loaded,
    client: ClientConfig,
    interval: CheckpointInterval,
    files: str,
    *,
    outputs: str,
    origins: bool,
    store_rows: bool,
) -> Stage:
    manifest = interval.manifest
    spec = TaskSpec(
        reference=loaded.reference,
        parallelism=manifest.parallelism,
        incarnation=manifest.incarnation,
        attempt=manifest.attempt,
        manifest=msgspec.structs.replace(interval.base, order_logs=(), committables=()),
        topic=find_topic(client, manifest.pipeline),
        storage=manifest.storage,
        drops_fields=True,  # the run that took the checkpoint may have dropped fields; no state is written here
        skips=manifest.skips,
        output_partitions=_output_partitions(client, manifest),
        partitioners={output.sink: partitioner_in(manifest, output.sink, client.settings) for output in manifest.sinks},
    )
    return Stage(
        spec=spec,
        fingerprint=manifest.fingerprint,
        checkpoint=manifest.checkpoint,
        write_state=False,
        origins=origins,
        store_rows=store_rows,
        files=files,
        outputs=outputs,
        rules=manifest.rules,
        by_partition=bool(manifest.outputs_by_partition),
    )


def _output_partitions(client: ClientConfig, manifest: Manifest) -> dict[str, int]:
    """The number of partitions by sink: those over which outputs were distributed, as far as it is known.

    Otherwise as many as the checkpoint has, or more that its producers may have known.
    """
    counts = {output.sink: output.partitions for output in manifest.sinks}
    with closing(Topics(client)) as topics:
        for output in manifest.sinks:
            with suppress(TopicError):
                present = topics.describe([output.topic])[output.topic].partitions
                counts[output.sink] = max(output.partitions, present)
    return {**counts, **dict(manifest.outputs_by_partition)}


def _left_in_flight(client: ClientConfig, common: Stage, manifest: Manifest) -> dict[tuple[str, int], dict[str, int]]:
    """The number of in-flight records at the end of the interval, by task and subtask, and channel."""
    reader = block_storage(client, common.spec.topic, common.spec.storage)
    with whole_or_halt(manifest):
        return {(log.task, log.subtask): records_by_channel(frames_of(log, reader)) for log in manifest.channel_logs}


def _order_logs(client: ClientConfig, common: Stage, manifest: Manifest) -> dict[tuple[str, int], tuple[bytes, ...]]:
    """The order logs of the interval by task and subtask, in order, also of aborted checkpoints."""
    refs = [ref for log in manifest.order_logs for ref in log.blocks]
    reader = block_storage(client, common.spec.topic, common.spec.storage)
    with whole_or_halt(manifest):
        bodies = {ref: block.body for ref, block in reader.fetch(refs)}
    logs: dict[tuple[str, int], tuple[bytes, ...]] = {}
    for log in manifest.order_logs:
        place = (log.task, log.subtask)
        logs[place] = (*logs.get(place, ()), *(bodies[ref] for ref in log.blocks))
    return logs


class ExpectedLane(msgspec.Struct, frozen=True):
    """The outputs of a lane of one checkpoint."""

    checkpoint: int
    lane: int
    by_partition: bool
    """Whether the lane is a partition; see `unit.staging`."""
    outputs: StagedRange
    """A message with the `OutputFile` of each subtask, in order."""


class ExpectedOutput:
    """The expected output of a sink. Its constructor refuses a hopeless one before executors start."""

    def __init__(
        self,
        loaded: Loaded,
        client: ClientConfig,
        sink: str | None = None,
        *,
        first: int | None = None,
        last: int | None = None,
        chunk_records: int | None = None,
    ) -> None:
        """The output of the checkpoints from *first* to *last*, by default of all that can be computed. *sink* is
        optional in a pipeline with one. *chunk_records*: see `CatchUp`; a checkpoint is computed as a whole."""
        self._loaded, self._client, self._chunk_records = loaded, client, chunk_records
        self.sink = _chosen(loaded, sink)
        self._intervals = list(_intervals(read_history(client, loaded.pipeline.name), first, last))

    @property
    def offsets(self) -> int:
        """The offsets that are read; there may be fewer records."""
        return sum(interval.offsets for interval in self._intervals)

    @contextmanager
    def computed(self, executors: Executors, progress: PartListener) -> Iterator[list[ExpectedLane]]:
        """Compute it. The staged outputs exist until the end of the block. ConfigError once it is known that they will
        not fit into the staging room."""
        name, staging = self._loaded.pipeline.name, executors.staging
        progress.began(self._intervals[-1].manifest, self.offsets)
        done = shuffled_bytes = outputs_bytes = 0

        def most() -> int:
            if self._chunk_records is not None:
                return self._chunk_records
            offset_bytes = (shuffled_bytes + outputs_bytes) / done if done else 0.0
            return chunk_records(executors.cores(), offset_bytes=offset_bytes, free_bytes=free_bytes(staging))

        with workplace(staging, f"expected-{name}") as files:
            lanes: list[ExpectedLane] = []
            for part in in_parts(self._intervals, most):
                offsets = sum(interval.offsets for interval in part)
                if done:
                    left = self.offsets - done
                    require_room(
                        staging,
                        outputs_bytes / done * left + shuffled_bytes / done * offsets,
                        f"the outputs of sink {self.sink!r} and others for the other {counted(left, 'offset')}",
                        "take fewer checkpoints, by first and last",
                    )
                done += offsets
                for again in self._recomputed(part, files, executors):
                    lanes += self._lanes(again, files)
                    kept = sum(file.file.size for own in again.files.values() for file in own)
                    outputs_bytes += kept
                    shuffled_bytes += again.staged_bytes - kept
                progress.passed(offsets)
            yield lanes

    def _recomputed(self, part: Sequence[CheckpointInterval], files: str, executors: Executors) -> list[Recomputed]:
        """Compute the intervals of *part*; their outputs are at *files*."""
        name, first = self._loaded.pipeline.name, part[0].manifest.checkpoint
        with workplace(executors.staging, f"expected-{name}-{first}") as between:
            work = []
            for interval in part:
                own = f"{interval.manifest.checkpoint}-"
                again = recomputation(
                    self._loaded, self._client, interval, f"{between}{own}", outputs=f"{files}{own}", origins=True,
                    store_rows=True,
                )  # fmt: skip
                work.append(again)
            return recompute(work, self._client, executors.submit)

    def _lanes(self, again: Recomputed, files: str) -> Iterator[ExpectedLane]:
        number = again.manifest.checkpoint
        (outputs,) = stage_messages(f"{files}outputs-{number}", [[*again.files.get(self.sink, ())]])
        for lane in again.lanes(self.sink):
            if again.count(self.sink, lane):
                yield ExpectedLane(number, lane, again.is_by_partition(self.sink), outputs)


def _chosen(loaded: Loaded, sink: str | None) -> str:
    sinks = [node.id for node in loaded.pipeline.build().sinks]
    if sink is None and len(sinks) == 1:
        return sinks[0]
    if sink not in sinks:
        raise ConfigError(f"Say whose output is meant, by sink: one of {', '.join(sinks)}.")
    return str(sink)


def _intervals(history: History, first: int | None, last: int | None) -> Iterator[CheckpointInterval]:
    """The intervals of committed checkpoints, oldest first; ConfigError without one, or without *first* or *last*."""
    if first is not None:
        interval_of(history, first)
    if last is not None and last > history.checkpoint_latest:
        raise ConfigError(
            f"Checkpoint {last} of {history.pipeline} was not taken yet: the newest is {history.checkpoint_latest}. "
            f"Name that one, or leave last out."
        )
    found = False
    for number, manifest in sorted(history.manifests.items()):
        wanted = (first is None or number >= first) and (last is None or number <= last)
        if not wanted or number not in history.finalized:
            continue
        if manifest.kind != RESTORED and manifest.previous in history.manifests and manifest.previous != number:
            found = True
            yield interval_of(history, number)
    if not found:
        raise ConfigError(
            f"{history.pipeline} has no checkpoint there whose interval can be computed again: it needs the checkpoint "
            f"before it. --num-retained of `exactlyonce run` says how many are kept."
        )
