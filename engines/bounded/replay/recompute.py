"""The output of an interval, computed again from the checkpoint before it: nothing is written but files.

Invariants: exactly the records between the two Sn are read, by the manifest's own subtasks, along its order logs, on
the state of the checkpoint before it; what was on its way there is taken first, and what was on its way at the end is
not; no block, no transaction, no lease; what cannot be computed as it was the first time is an error that says why,
never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import RESTORED, Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.bounded.ranges import Reading
from exactlyonce.engines.bounded.replay.sharing import topic_of
from exactlyonce.engines.bounded.stages import compute, refuse_loops
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.bounded.unit.messages import Unit
from exactlyonce.engines.bounded.unit.staging import OutputBatch, OutputFile, read_outputs
from exactlyonce.engines.bounded.workplace import workplace
from exactlyonce.engines.plan import plan
from exactlyonce.engines.runtime.blocks import whole_or_halt
from exactlyonce.engines.runtime.in_flight import frames_of, records_by_channel
from exactlyonce.pipeline.errors import ConfigError, GraphError, Halt, TopicError
from exactlyonce.pipeline.loading import Loaded


@dataclass(frozen=True)
class CheckpointInterval:
    """What lies between two checkpoints that follow each other: (base, manifest]."""

    base: Manifest
    manifest: Manifest

    @property
    def ranges(self) -> tuple[Reading, ...]:
        """What was read in it. A partition that is new in it began at its beginning."""
        starts = {(each.source, each.partition): each.offset for each in self.base.offsets}
        return tuple(
            Reading(each.source, each.topic, each.partition, starts.get((each.source, each.partition), 0), each.offset)
            for each in self.manifest.offsets
        )

    @property
    def offsets(self) -> int:
        """How many offsets; records at most."""
        return sum(each.length for each in self.ranges)


def interval_of(history: History, checkpoint: int) -> CheckpointInterval:
    """The interval that *checkpoint* ended; ConfigError where there is none any more, or never was."""
    manifest = history.manifests.get(checkpoint)
    if manifest is None:
        kept = ", ".join(str(each.checkpoint) for each in history.retained) or "none"
        raise ConfigError(
            f"{history.pipeline} has no checkpoint {checkpoint}: it is expired, or was never completed. Name one of "
            f"those that are retained: {kept}."
        )
    if manifest.kind == RESTORED:
        raise ConfigError(
            f"Checkpoint {checkpoint} of {history.pipeline} was restored from a savepoint: it ended no interval, and "
            f"has no output."
        )
    base = history.manifests.get(manifest.previous)
    if base is None or base is manifest:
        what = "was the first" if base is manifest else f"began at checkpoint {manifest.previous}, which is expired"
        raise ConfigError(
            f"The interval of checkpoint {checkpoint} of {history.pipeline} {what}: it cannot be computed again. Those "
            f"of later ones can; --num-retained of `exactlyonce run` says how many are kept."
        )
    return CheckpointInterval(base, manifest)


@dataclass(frozen=True)
class Recomputed:
    """The outputs of an interval, staged."""

    files: Mapping[tuple[str, int], OutputFile]
    """By sink and subtask; one that puts out nothing has none."""
    records: int
    """Messages that were read."""
    skipped: int
    """Of those, left out: they do not decode, or `Manifest.skips` has them."""

    def outputs(self, sink: str, subtask: int) -> Iterator[OutputBatch]:
        """What a sink subtask puts out, in order."""
        file = self.files.get((sink, subtask))
        return iter(()) if file is None else read_outputs(file.file)


@contextmanager
def recomputed(
    loaded: Loaded,
    client: ClientConfig,
    interval: CheckpointInterval,
    submit: Submit,
    staging: Path,
    *,
    origins: bool = False,
) -> Iterator[Recomputed]:
    """Compute *interval* again; its outputs are there until the end of the block, with *origins* if they are wanted.

    Raises what makes it impossible: `GraphError` if the pipeline is another one now, `ConfigError` if it has loops,
    `Halt` if input, state or order logs are gone or do not fit, an error of the user's function.
    """
    manifest = interval.manifest
    graph = loaded.pipeline.build()
    if graph.fingerprint() != manifest.fingerprint:
        raise GraphError(
            f"Checkpoint {manifest.checkpoint} was taken by another graph than {manifest.pipeline!r} has now: its "
            f"interval can be computed again only by the pipeline as it was then."
        )
    refuse_loops(graph)
    _require_same_topics(client, manifest)
    with workplace(staging, f"replay-{manifest.pipeline}-{manifest.checkpoint}") as folder:
        common = _common(loaded, client, interval, folder, origins=origins)
        physical = plan(graph, manifest.parallelism)
        logs, left = _order_logs(client, common, manifest), _left_in_flight(client, common, manifest)
        receipts = compute(physical, common, interval.ranges, submit, logs, left)
        _require_same_topics(client, manifest)
        files = {(file.sink, file.subtask): file for receipt in receipts for file in receipt.outputs}
        yield Recomputed(files, sum(each.records for each in receipts), sum(each.skipped_count for each in receipts))


def partition_counts(client: ClientConfig, history: History, manifest: Manifest, sink: str) -> list[int]:
    """How many partitions the topic of *sink* may have had when the output of *manifest* was written: first as many as
    the manifest says, then what else is known, for a producer sees new partitions sooner or later than the leader."""
    topic, own = topic_of(manifest, sink)
    found = {count for each in history.retained for id, name, count in each.sinks if (id, name) == (sink, topic)}
    with closing(Topics(client)) as topics, suppress(TopicError):
        found.add(topics.describe([topic])[topic].partitions)
    return [own, *sorted(found - {own})]


def _require_same_topics(client: ClientConfig, manifest: Manifest) -> None:
    topics = Topics(client)
    try:
        found = topics.describe(sorted({each.topic for each in manifest.offsets}))
    finally:
        topics.close()
    for each in manifest.offsets:
        if found[each.topic].topic_id != each.topic_id:
            raise Halt(
                f"Topic {each.topic!r} was deleted and created again since checkpoint {manifest.checkpoint}: what was "
                f"read then is gone."
            )


def _common(loaded: Loaded, client: ClientConfig, interval: CheckpointInterval, folder: Path, *, origins: bool) -> Unit:
    """What all units have in common."""
    manifest = interval.manifest
    return Unit(
        reference=loaded.reference,
        fingerprint=manifest.fingerprint,
        client={name: str(value) for name, value in client.settings.items()},
        task="",
        subtask=0,
        parallelism=manifest.parallelism,
        checkpoint=manifest.checkpoint,
        base=msgspec.structs.replace(interval.base, order_logs=(), committables=()),
        incarnation=manifest.incarnation,
        attempt=manifest.attempt,
        topic=find_topic(client.confluent(), manifest.pipeline),
        topic_ids={each.topic: each.topic_id for each in manifest.offsets},
        readings=(),
        channels=(),
        order=None,
        write_state=False,
        origins=origins,
        folder=str(folder),
        storage=manifest.storage,
        drops_fields=True,  # as the run did that took the checkpoint, if its code has fewer; no state is written here
        skips=manifest.skips,
    )


def _left_in_flight(client: ClientConfig, common: Unit, manifest: Manifest) -> dict[tuple[str, int], dict[str, int]]:
    """By task and subtask, and channel, how many records were on their way at the end of the interval."""
    reader = block_storage(client, common.topic, common.storage)
    with whole_or_halt(manifest):
        return {(log.task, log.subtask): records_by_channel(frames_of(log, reader)) for log in manifest.channel_logs}


def _order_logs(client: ClientConfig, common: Unit, manifest: Manifest) -> dict[tuple[str, int], tuple[bytes, ...]]:
    """By task and subtask, the order logs of the interval, one after the other; those of aborted checkpoints too."""
    refs = [ref for log in manifest.order_logs for ref in log.blocks]
    with whole_or_halt(manifest):
        bodies = {ref: block.body for ref, block in block_storage(client, common.topic, common.storage).fetch(refs)}
    found: dict[tuple[str, int], tuple[bytes, ...]] = {}
    for log in manifest.order_logs:
        place = (log.task, log.subtask)
        found[place] = (*found.get(place, ()), *(bodies[ref] for ref in log.blocks))
    return found
