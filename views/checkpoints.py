"""The checkpoints of a pipeline, or of a sink of Spark, whether they can be restored, and the blocks that they need.

Unclaimed blocks, which no manifest needs, are on their way to the next checkpoint, or orphans. They are searched for in
the present storage and in former ones. A former storage that is gone is reported, and is no error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, TypeVar

import msgspec

from exactlyonce.checkpoint.block_storage import DamagedBlock, Scanned, UnreadableBlock
from exactlyonce.checkpoint.kept_blocks import first_places
from exactlyonce.checkpoint.records.encoding import DamagedRecord, decode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    BlockRef,
    CheckpointStats,
    Finalized,
    Manifest,
    SourceOffset,
    StoredBlock,
    slowest,
    slowest_first,
)
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import DecisionRecord
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower, read_log, read_topic, stable_end
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic, found
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.blocks import Storages, block_storage, damaged_among, references, references_or_why
from exactlyonce.engines.local.monitoring.page import ShownAborted
from exactlyonce.engines.savepoints.exported import DamagedSavepoint, ExportedSavepoint
from exactlyonce.engines.savepoints.retained import require_savepoint
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable, TopicError
from exactlyonce.pipeline.event_time import NO_FLOOR, shown_time
from exactlyonce.state.errors import DamagedState

R = TypeVar("R")


@dataclass(frozen=True)
class BlockSurvey:
    """The blocks of a pipeline; see `survey`."""

    references: Mapping[int, frozenset[BlockRef] | str]
    """The blocks that each retained checkpoint needs, or why they are unknown."""
    scanned: Mapping[str, Scanned]
    first_places: tuple[int, ...]
    """The offsets from which the next run searches for orphans, by partition of the topic."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Former storages that cannot be read, each with the reason."""

    @property
    def claimed(self) -> set[BlockRef]:
        """The blocks that some checkpoint needs."""
        return {ref for refs in self.references.values() if not isinstance(refs, str) for ref in refs}

    @property
    def unclaimed(self) -> list[StoredBlock]:
        """The scanned blocks that no checkpoint needs; empty if a checkpoint's references are unknown."""
        if self.damaged:
            return []
        keys = {ref.key for ref in self.claimed}
        stored = ((storage, ref) for storage, scanned in self.scanned.items() for ref in scanned.blocks)
        return [StoredBlock(storage, ref) for storage, ref in stored if ref.key not in keys]

    def written_at_ms(self, refs: Iterable[BlockRef]) -> int | None:
        """When the first of *refs* was put; None if it is not known of any."""
        known = (scanned.written_at_ms.get(ref.key) for ref in refs for scanned in self.scanned.values())
        return min((at_ms for at_ms in known if at_ms is not None), default=None)

    @property
    def damaged(self) -> dict[int, str]:
        """Why a checkpoint cannot be restored, by its number."""
        return {checkpoint: why for checkpoint, why in self.references.items() if isinstance(why, str)}


def survey(storages: Storages, history: History, *, deep: bool) -> BlockSurvey:
    """Scan the blocks of *history*, which has a manifest: all if *deep*, else those where the next run searches."""
    places = first_places(history)
    scanned, unreachable = dict[str, Scanned](), dict[str, str]()
    for storage in history.storages:
        scan = partial(storages.of(storage).since, (0,) * len(places) if deep else places)
        blocks = _answer_or_why(storage, history, scan)
        if isinstance(blocks, str):
            unreachable[storage] = blocks
        else:
            scanned[storage] = blocks
    return BlockSurvey(needed_blocks(storages, history, history.retained), scanned, places, unreachable)


def needed_blocks(
    storages: Storages, history: History, manifests: Iterable[Manifest]
) -> dict[int, frozenset[BlockRef] | str]:
    """The blocks that each checkpoint of *manifests*, from *history*, needs, or why they are unknown."""
    return {
        manifest.checkpoint: _answer_or_why(
            manifest.storage, history, partial(references_or_why, manifest, storages.of(manifest.storage))
        )
        for manifest in manifests
    }


def _answer_or_why(storage: str, history: History, look: Callable[[], R]) -> R | str:
    """The answer of *look*; or why there is none: *storage* is a former one, or refuses a block."""
    try:
        return look()
    except (StorageUnavailable, ConfigError) as error:
        if storage not in (history.storage, TOPIC):
            return f"{storage}, where it is kept, cannot be looked at: {error}"
        if isinstance(error, UnreadableBlock):
            return str(error)
        raise


class Phases(msgspec.Struct, kw_only=True):
    """The times of a checkpoint and of its subtasks; None is not known."""

    decided_at_ms: int | None
    committed_at_ms: int | None
    slowest: str
    """The slowest subtask, in words."""
    subtasks: list[dict[str, Any]]
    """See `SubtaskStats.figures`; the slowest comes first."""
    aborted: list[ShownAborted]
    """The aborted checkpoints before it."""


@dataclass(frozen=True)
class CheckpointView:
    manifest: Manifest
    finalized: Finalized | None
    damage: str = ""
    """Why it cannot be restored; empty: no damage is known."""

    @property
    def state(self) -> str:
        """Either "damaged", or "finalized" once all of it is committed, or "decided"."""
        return "damaged" if self.damage else "finalized" if self.finalized else "decided"

    @property
    def duration_ms(self) -> int:
        """From its trigger until it was committed; until it was complete if its mark does not tell."""
        mark, manifest = self.finalized, self.manifest
        end_ms = mark.at_ms if mark is not None and mark.decided_at_ms else manifest.completed_at_ms
        return max(0, end_ms - manifest.triggered_at_ms)  # clocks may be set back

    @property
    def bytes_in_flight(self) -> int | None:
        """Size of the in-flight records; None: the manifest names lists of them, which are not read."""
        logs = self.manifest.channel_logs
        return None if any(log.indexed for log in logs) else sum(ref.size for log in logs for ref in log.blocks)

    @cached_property
    def stats(self) -> CheckpointStats:
        """Why it took as long as it did; empty if its mark does not tell."""
        if self.finalized is not None and self.finalized.stats:
            with suppress(DamagedRecord):  # nothing rests on them
                return decode(self.finalized.stats, CheckpointStats)
        return CheckpointStats(self.manifest.checkpoint)

    @cached_property
    def phases(self) -> Phases:
        """`stats` for a program or a page, with the times of the whole."""
        mark, stats, triggered_at_ms = self.finalized, self.stats, self.manifest.triggered_at_ms
        return Phases(
            decided_at_ms=(mark.decided_at_ms if mark is not None else 0) or None,
            committed_at_ms=mark.at_ms if mark is not None else None,
            slowest=slowest(stats.subtasks),
            subtasks=[subtask.figures for subtask in slowest_first(stats.subtasks)],
            aborted=[
                ShownAborted(each.checkpoint, triggered_at_ms - each.before_ms, each.lasted_ms, each.reason)
                for each in stats.aborted
            ],
        )

    def fate(self, name: str) -> str:
        """The fate of one of its committables, by transactional id or name."""
        return dict(self.finalized.fates).get(name, "empty") if self.finalized else "decided"

    @property
    def fates(self) -> Counter[str]:
        """The number of its committables by fate."""
        names = [committable.transactional_id for committable in self.manifest.committables]
        return Counter(map(self.fate, [*names, *(committable.name for committable in self.manifest.staged)]))


@dataclass(frozen=True)
class CheckpointsView:
    """The last *last* of the retained checkpoints, oldest first."""

    history: History
    last: int
    damaged: dict[int, str] = field(default_factory=dict)
    """Why a checkpoint cannot be restored, by its number."""

    @property
    def checkpoints(self) -> list[CheckpointView]:
        return [self._view(manifest) for manifest in self.history.retained[-self.last :]]

    def one(self, checkpoint: int) -> CheckpointView:
        """Checkpoint number *checkpoint*; ConfigError if it is not retained."""
        manifest = self.history.manifests.get(checkpoint)
        if manifest is None:
            raise ConfigError(
                f"{self.history.pipeline} has no checkpoint {checkpoint}, or keeps it no longer. "
                f"`exactlyonce checkpoints {self.history.pipeline}` lists those that it keeps."
            )
        return self._view(manifest)

    def _view(self, manifest: Manifest) -> CheckpointView:
        number = manifest.checkpoint
        return CheckpointView(manifest, self.history.finalized.get(number), self.damaged.get(number, ""))

    @property
    def older(self) -> int:
        """The number of retained checkpoints before these."""
        return max(0, len(self.history.manifests) - self.last)

    @property
    def is_spark_sink(self) -> bool:
        return self.history.latest is not None and self.history.latest.is_spark_sink


def checkpoints(config: ClientConfig, pipeline: str, last: int, only: int | None = None) -> CheckpointsView:
    """The *last* checkpoints of *pipeline*. Damage is known as far as their indexes show: no state is read.

    *only*: of this one alone. `CheckpointsView.one` has it.
    """
    topic = find_topic(config, pipeline)
    with (
        closing(LogFollower(config, pipeline)) as log,
        closing(Storages(config, topic, stays_connected=True)) as storages,
    ):
        history = log.look()
        asked = history.retained[-last:] if only is None else [CheckpointsView(history, last).one(only).manifest]
        needed = needed_blocks(storages, history, asked)
        damaged = {checkpoint: why for checkpoint, why in needed.items() if isinstance(why, str)}
        # Those that have expired meanwhile are not damaged, and are in the history no more.
        return CheckpointsView(log.look() if damaged else history, last, damaged)


class Start(NamedTuple):
    """A start of the workers, as far as the topic still shows it."""

    at_ms: int
    is_restart: bool
    """Whether the workers of a run were restarted; else a run began."""
    restarts: int = 1
    """Restarts between two retained checkpoints are known together."""
    before: int = 0
    """The first checkpoint after restarts."""


def starts(history: History, manifests: Sequence[Manifest]) -> Iterator[Start]:
    """The runs, and the restarts of their workers between *manifests*, which are in their order."""
    for incarnation in history.incarnations.values():
        yield Start(incarnation.started_at_ms, is_restart=False)
    for before, after in pairwise(manifests):
        if after.incarnation == before.incarnation and after.attempt > before.attempt:
            count = after.attempt - before.attempt
            yield Start(after.triggered_at_ms, is_restart=True, restarts=count, before=after.checkpoint)


def recorded(config: ClientConfig, pipeline: str) -> tuple[History, list[Manifest]]:
    """The decisions, and all manifests in their order that the log has: also expired ones until it is compacted."""
    with closing(Topics(config)) as topics:
        name = found(topics, pipeline).name
        log = read_log(topics, name, stable_end(topics, name))
    history, manifests = History(pipeline), dict[int, Manifest]()
    for record in log.items:
        if isinstance(record, DecisionRecord):
            history.read(record.key, record.value, record.digest)
            if (newest := history.latest) is not None:
                manifests[newest.checkpoint] = newest
    return history, [manifests[checkpoint] for checkpoint in sorted(manifests)]


def lags(config: ClientConfig, manifests: Sequence[Manifest]) -> dict[int, int]:
    """The records by checkpoint that were in the topics at its trigger, by their timestamps, and not read.

    A checkpoint with a topic that is gone has none.
    """
    lag: dict[int, int] = {}
    with closing(Topics(config)) as topics:
        for manifest in manifests:
            ends: dict[str, Mapping[int, int]] = {}
            try:
                for topic in {offset.topic for offset in manifest.in_cluster}:
                    ends[topic] = topics.offsets_at(topic, manifest.triggered_at_ms)
            except TopicError:
                continue
            lag[manifest.checkpoint] = sum(
                max(0, ends[offset.topic].get(offset.partition, 0) - offset.offset) for offset in manifest.in_cluster
            )
    return lag


class SourceWatermark(NamedTuple):
    """The watermark of a source with event time."""

    source: str
    at_ms: int | None
    """None: one of its partitions has had no record yet."""
    held_back_by: str
    """The partition that comes last."""
    splits: int


def source_watermarks(manifest: Manifest) -> Iterator[SourceWatermark]:
    """Those at the barrier of *manifest*; a source of which every split has ended has none."""
    timed = {offset.source for offset in manifest.offsets if offset.floor != NO_FLOOR}
    for source in sorted(timed):
        splits = [offset for offset in manifest.offsets if offset.source == source and not offset.ended]
        if splits:
            last = min(splits, key=lambda offset: offset.floor)
            at = last.in_cluster or last
            yield SourceWatermark(source, manifest.late_up_to(last), f"{at.topic}[{at.partition}]", len(splits))


WAITS_MS = 5_000
"""A partition that is so far behind others in event time is named, if it has no records."""


class AwaitedPartition(NamedTuple):
    """A partition without new records that holds back what other partitions have brought, by event time."""

    source: str
    place: str
    others_ms: int
    """The event time up to which another one has come."""
    since_ms: int
    """It has had no record at least since then."""

    def text(self, now_ms: int) -> str:
        return (
            f"Source {self.source!r}: {self.place} has had no record for {shown_duration(now_ms - self.since_ms)} at "
            f"least, and holds back results: another has come to {shown_time(self.others_ms)}"
        )


def awaited_partitions(
    manifests: Sequence[Manifest], at_end: Callable[[SourceOffset], bool], groups: Mapping[str, str]
) -> Iterator[AwaitedPartition]:
    """The one of each of the *groups* of sources that meet, by source, if there is one: in the last two of *manifests*
    at least it is as it was, while others are further. *at_end*: a position has no record after it."""
    newest, before = manifests[-1], manifests[-2::-1]
    by_group: dict[str, list[SourceOffset]] = {}
    for offset in newest.offsets:
        if not offset.ended:
            by_group.setdefault(groups.get(offset.source, offset.source), []).append(offset)
    for offsets in by_group.values():
        slowest, furthest = (choose(offsets, key=lambda offset: offset.floor) for choose in (min, max))
        same = [*takewhile(partial(_has, slowest), before)]
        if furthest.floor - slowest.floor >= WAITS_MS and same and at_end(slowest):
            at, others_ms = slowest.in_cluster or slowest, newest.late_up_to(furthest)
            assert others_ms is not None
            yield AwaitedPartition(slowest.source, f"{at.topic}[{at.partition}]", others_ms, same[-1].triggered_at_ms)


def _has(offset: SourceOffset, manifest: Manifest) -> bool:
    """Whether *manifest* has the split of *offset* at the same place and the same event time."""
    return any(
        (other.source, other.identity, other.partition, other.offset, other.floor)
        == (offset.source, offset.identity, offset.partition, offset.offset, offset.floor)
        for other in manifest.offsets
    )


@dataclass(frozen=True)
class VerifiedSavepoint:
    """A savepoint that was read whole and compared with its SHA-256."""

    pipeline: str
    """Name of the pipeline; empty: unreadable in an exported one."""
    checkpoint: int
    damage: tuple[str, ...]
    """One sentence for each damage; none: it is whole."""
    parts: int
    """Its blocks, or the files of an exported one."""
    finalized: bool = True
    """Whether all of its output is committed."""


def verified(config: ClientConfig, pipeline: str, checkpoint: int) -> VerifiedSavepoint:
    """Read every block of a savepoint in the topic of *pipeline*; ConfigError if there is none of that number."""
    topic, history = read_topic(config, pipeline)
    manifest, parts = require_savepoint(history, checkpoint), 0
    with closing(block_storage(config, topic, manifest.storage, stays_connected=True)) as blocks:
        try:
            wanted = references(manifest, blocks)
            parts, damage = len(wanted), tuple(damaged_among(wanted, blocks).values())
        except (DamagedBlock, UnreadableBlock, DamagedState) as error:
            damage = (str(error),)
    return VerifiedSavepoint(pipeline, checkpoint, damage, parts, checkpoint in history.finalized)


def verified_export(url: str) -> VerifiedSavepoint:
    """Read every file of the savepoint that was exported to *url*."""
    try:
        export = ExportedSavepoint.at(url)
        return VerifiedSavepoint(export.saved.pipeline, export.saved.checkpoint, tuple(export.damage()), export.files)
    except DamagedSavepoint as error:
        return VerifiedSavepoint("", 0, (str(error),), 0)
