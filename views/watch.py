"""A pipeline as its checkpoint topic and the brokers show it, again and again: without the processes that run it.

Invariants: nothing is written and nobody fenced. What only the processes know, as rates of operators, is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.checkpoint.requests import TxnState
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.local.monitoring.page import (
    ABORTED,
    CHECKPOINTS,
    COMPLETED,
    NOTES,
    SAMPLES,
    CheckpointDetails,
    PipelineState,
    ShownCheckpoint,
    ShownPartition,
    ShownSavepoint,
    ShownWatermark,
    drawn,
)
from exactlyonce.engines.local.monitoring.serving import LATE_S, LATE_TIMES, Verdict
from exactlyonce.engines.pending_output import WaitingLook, WaitingOutput
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ExactlyOnceError, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sizes import counted
from exactlyonce.views.checkpoints import CheckpointView, awaited_partitions, source_watermarks, starts

RUNNING, ENDED, FAILED, SILENT, NEW, UNKNOWN = "running", "ended", "failed", "silent", "new", "unknown"
"""What is known of its processes: one has written a heartbeat lately; the last has ended cleanly; the last has ended by
its own failure; the last has not ended, and writes none; there was none yet; the topic could not be read."""
TIMEOUT_MS = 5_000


class Seen(NamedTuple):
    """What the last successful look has seen."""

    at_ms: int | None
    """None: there was none."""
    history: History
    waiting: list[WaitingOutput]
    partitions: list[ShownPartition]
    """With the records from Sn of the newest checkpoint on that readers can see."""


class Watch:
    """Looks at *pipeline*; `look` may be called as often as one likes. With its *graph* the nodes are known, too."""

    def __init__(self, config: ClientConfig, pipeline: str, graph: LogicalGraph | None = None) -> None:
        self._pipeline = pipeline
        self._nodes = lru_cache(1)(lambda parallelism: [*drawn(plan(graph, parallelism))] if graph else [])
        """The graph with *parallelism*, which rarely changes."""
        self._groups = graph.time_groups if graph else {}
        self._letters = graph.dead_letter_limits if graph else {}
        """The sinks of dead letters."""
        self._log = LogFollower(config, pipeline)
        self._topics = Topics(config, timeout_ms=TIMEOUT_MS)
        self._waiting = WaitingLook(config, pipeline, TIMEOUT_MS)
        self._known = Seen(None, History(pipeline), [], [])
        self._seen: dict[int, CheckpointView] = {}
        """The last `CHECKPOINTS`, also expired ones. Replaced whole, for any thread may ask for details."""
        self._samples = deque[tuple[int, int, int]](maxlen=SAMPLES)

    def close(self) -> None:
        for client in (self._log, self._topics, self._waiting):
            client.close()

    def look(self, now_ms: int) -> PipelineState:
        """Its state at *now_ms*, in milliseconds since 1970.

        While the brokers cannot be asked it has what was seen last, and when that was.
        """
        problem = ""
        try:
            history = self._log.look()
            history.halt_if_damaged()
            self._known = Seen(now_ms, history, self._waiting.look(history), [*self._partitions(history.latest)])
        except ExactlyOnceError as error:
            problem = str(error)
        as_of_ms, history, waiting, partitions = self._known
        views = {**self._seen, **dict(self._retained(history))}
        self._seen = dict(sorted(views.items())[-CHECKPOINTS:])
        seen = [*self._seen.values()]
        state, verdict = self._verdict(history, seen, problem, now_ms)
        lags = [partition.lag for partition in partitions if partition.lag is not None]
        rate = _rate(seen) if state == RUNNING else 0
        figures = {"records_per_s": rate, "lag": None, "open_transactions": None}
        if as_of_ms is not None:
            figures["lag"] = sum(lags) if partitions or not (history.latest and history.latest.offsets) else None
            figures["open_transactions"] = sum(output.state in TxnState.OPEN for output in waiting)
        if self._letters:
            counts = [_records_by_sink(view.manifest) for view in seen]
            figures["dead_letters"] = sum(of.get(sink, 0) for of in counts for sink in self._letters)
        if not problem:
            self._samples.append((now_ms, rate, sum(lags)))
        newest = history.newest_incarnation
        return PipelineState(
            pipeline=self._pipeline, at_ms=now_ms, as_of_ms=as_of_ms, state=state, well=verdict.well,
            sentence=verdict.sentence,
            cause=_cause(waiting, now_ms) or (self._silence(seen, partitions, now_ms) if state == RUNNING else ""),
            from_topic=True,
            parallelism=history.latest.parallelism if history.latest else 0,
            incarnation=newest.incarnation if newest else 0, restarts=0,
            figures=figures, samples=list(self._samples), workers=[],
            graph=self._nodes(history.latest.parallelism if history.latest else 1),
            checkpoints=[shown for view in seen for shown in _with_aborted(view)][-CHECKPOINTS:],
            partitions=partitions,
            watermarks=[
                ShownWatermark(
                    id=source.source, at_ms=source.at_ms, held_back_by=source.held_back_by, late=None, came=None
                )
                for source in source_watermarks(history.latest)
            ] if history.latest else [],
            savepoints=[_savepoint(manifest) for manifest in reversed(history.savepoints.values())],
            transactions=[output.figures(now_ms) for output in waiting],
            notes=[*_story(history)][:NOTES],
        )  # fmt: skip

    def has_news(self) -> bool:
        """Whether there is a decision that `look` has not seen."""
        return self._log.has_news()

    def checkpoint(self, number: int) -> CheckpointDetails | None:
        """The details of one checkpoint; None: it is not known."""
        if (known := self._seen.get(number)) is None:
            shown = (shown for view in self._seen.values() for shown in _with_aborted(view))
            return next((_opened(aborted) for aborted in shown if aborted.id == number), None)
        manifest = known.manifest
        parts = [
            *((snapshot.operator, "state", snapshot.state_bytes) for snapshot in manifest.operators),
            *((sink, "records", count) for sink, count in _records_by_sink(manifest).items()),
        ]
        return CheckpointDetails(
            **{**msgspec.structs.asdict(_shown(known)), **msgspec.structs.asdict(known.phases)}, parts=parts
        )

    def _retained(self, history: History) -> Iterator[tuple[int, CheckpointView]]:
        """The last `CHECKPOINTS` of *history*; one that has not changed is the one that was seen before."""
        for manifest in history.retained[-CHECKPOINTS:]:
            number, before = manifest.checkpoint, self._seen.get(manifest.checkpoint)
            mark = history.finalized.get(number)
            same = before is not None and before.manifest is manifest and before.finalized is mark
            yield number, before if before is not None and same else CheckpointView(manifest, mark)

    def _silence(self, seen: Sequence[CheckpointView], partitions: Sequence[ShownPartition], now_ms: int) -> str:
        """The partition without records that others wait for, by event time."""
        ends = {(each.topic, each.partition) for each in partitions if each.lag == 0}
        manifests = [view.manifest for view in seen]
        awaited = awaited_partitions(manifests, lambda at: _place(at) in ends, self._groups) if manifests else iter(())
        return next((f"{one.text(now_ms)}; idle= of its EventTime ends that" for one in awaited), "")

    def _partitions(self, manifest: Manifest | None) -> Iterator[ShownPartition]:
        offsets = () if manifest is None else manifest.in_cluster
        ends: dict[str, Mapping[int, int]] = {}
        for topic in sorted({offset.topic for offset in offsets}):
            try:
                ends[topic] = self._topics.end_offsets(topic, committed=True)
            except TopicError:  # it was deleted; the run says so
                ends[topic] = {}
        for offset in offsets:
            end = ends[offset.topic].get(offset.partition)
            lag = None if end is None else max(0, end - offset.offset)
            yield ShownPartition(
                source=offset.source, topic=offset.topic, partition=offset.partition, offset=offset.offset, lag=lag
            )

    def _verdict(
        self, history: History, seen: Sequence[CheckpointView], problem: str, now_ms: int
    ) -> tuple[str, Verdict]:
        newest = history.newest_incarnation
        if problem:
            return UNKNOWN, Verdict(False, problem.rstrip("."))
        if newest is None:
            return NEW, Verdict(False, "there is no run of it yet in this cluster")
        last = f"checkpoint {seen[-1].manifest.checkpoint} is {_ago(seen[-1], now_ms)} old" if seen else "no checkpoint"
        beat = shown_duration(max(0, now_ms - newest.heartbeat_ms))
        if newest.exit_code:
            return FAILED, Verdict(False, f"its last run {newest.end.rstrip('.')}; that was {beat} ago; {last}")
        if newest.ended:
            return ENDED, Verdict(True, f"its last run ended cleanly, {beat} ago; {last}")
        if history.living(now_ms) is None:
            return SILENT, Verdict(
                False,
                f"process {newest.process} on {newest.host} ran it, and has shown no sign of life for {beat}: it was "
                f"killed, or reaches no broker. Nothing is lost: the next run goes on; {last}",
            )
        if (decided := history.unfinalized) is not None and now_ms - decided.completed_at_ms > LATE_S * 1000:
            late = f"checkpoint {decided.checkpoint} was decided {_ago(seen[-1], now_ms)} ago, and is not committed yet"
            return RUNNING, Verdict(False, late)
        allowed_s = max(LATE_S, LATE_TIMES * _usual_s(seen))
        started_ms = max(newest.started_at_ms, seen[-1].manifest.completed_at_ms if seen else 0)
        if (now_ms - started_ms) / 1000 > allowed_s:
            return RUNNING, Verdict(False, f"it runs, but {last}; one should be complete every {allowed_s:.3g} s")
        return RUNNING, Verdict(True, f"running; {last}")


def _place(position: SourceOffset) -> tuple[str, int]:
    at = position.in_cluster or position
    return at.topic, at.partition


def _ago(view: CheckpointView, now_ms: int) -> str:
    return shown_duration(max(0, now_ms - view.manifest.completed_at_ms))


def _usual_s(seen: Sequence[CheckpointView]) -> float:
    """The median time from one checkpoint to the next, in seconds; 0 if there are fewer than two."""
    at_ms = [view.manifest.completed_at_ms for view in seen]
    steps = sorted(after - before for before, after in pairwise(at_ms))
    return steps[len(steps) // 2] / 1000 if steps else 0.0


def _rate(seen: Sequence[CheckpointView]) -> int:
    """Records of topics read per second, from the last checkpoint but one to the last."""
    if len(seen) < 2:
        return 0
    before, after = (view.manifest for view in seen[-2:])
    positions = [{(at.topic_id, at.partition): at.offset for at in manifest.in_cluster} for manifest in (before, after)]
    read = sum(max(0, offset - positions[0].get(place, offset)) for place, offset in positions[1].items())
    return int(read * 1000 / max(1, after.completed_at_ms - before.completed_at_ms))


def _cause(waiting: Sequence[WaitingOutput], now_ms: int) -> str:
    """The transaction that the broker aborts next, if that is soon: it holds readers back meanwhile."""
    left = [(left_ms, output) for output in waiting if (left_ms := output.left_ms(now_ms)) is not None]
    left_ms, nearest = min(left, key=lambda pair: pair[0], default=(0, None))
    if nearest is None or nearest.timeout_ms is None or left_ms > nearest.timeout_ms / 2:
        return ""
    opened = shown_duration(nearest.open_ms(now_ms) or 0)
    return (
        f"transaction {nearest.name} is open for {opened}, holds back readers of its topics, and is aborted by the "
        f"broker in {shown_duration(left_ms)}"
    )


def _records_by_sink(manifest: Manifest) -> dict[str, int]:
    counts: dict[str, int] = {}
    for committable in manifest.committables:
        counts[committable.sink] = counts.get(committable.sink, 0) + committable.records
    for staged in manifest.staged:
        counts[staged.sink] = counts.get(staged.sink, 0) + staged.records
    return counts


def _with_aborted(view: CheckpointView) -> list[ShownCheckpoint]:
    """A checkpoint, after those that were aborted before it."""
    aborted = [
        ShownCheckpoint(
            id=aborted.checkpoint, triggered_ms=aborted.triggered_at_ms, outcome=ABORTED,
            duration_ms=aborted.lasted_ms, reason=aborted.reason,
        )
        for aborted in view.phases.aborted
    ]  # fmt: skip
    return [*aborted, _shown(view)]


def _opened(aborted: ShownCheckpoint) -> CheckpointDetails:
    """The details of an aborted checkpoint."""
    return CheckpointDetails(**msgspec.structs.asdict(aborted), notes=[aborted.reason or ""])


def _shown(view: CheckpointView) -> ShownCheckpoint:
    manifest = view.manifest
    return ShownCheckpoint(
        id=manifest.checkpoint, triggered_ms=manifest.triggered_at_ms, outcome=COMPLETED, kind=manifest.kind,
        duration_ms=view.duration_ms, bytes=manifest.written_bytes, state_bytes=manifest.state_bytes,
        records_committed=manifest.records_committed, slowest=view.phases.slowest,
    )  # fmt: skip


def _savepoint(manifest: Manifest) -> ShownSavepoint:
    return ShownSavepoint(manifest.checkpoint, manifest.completed_at_ms, manifest.state_bytes)


def _story(history: History) -> Iterator[tuple[int, str]]:
    """What happened, newest first, as far as the log still has it: runs, restarts of workers, repairs."""
    told: list[tuple[int, str]] = []
    for known in history.incarnations.values():
        began = f"incarnation {known.incarnation} began: process {known.process} on {known.host}"
        told.append((known.started_at_ms, began))
        if known.cancelled:
            told.append((known.heartbeat_ms, f"incarnation {known.incarnation} was cancelled"))
        elif known.exit_code:
            told.append((known.heartbeat_ms, f"incarnation {known.incarnation} {known.end}"))
        elif known.ended:
            told.append((known.heartbeat_ms, f"incarnation {known.incarnation} ended cleanly"))
    for start in starts(history, history.retained):
        if start.is_restart:
            restarts = f"{counted(start.restarts, 'restart')} of the workers before checkpoint {start.before}"
            told.append((start.at_ms, restarts))
    for manifest in history.retained:
        if manifest.is_savepoint:
            told.append((manifest.completed_at_ms, f"savepoint {manifest.checkpoint}"))
        for repair in history.repairs_of(manifest.checkpoint):
            what = f"checkpoint {manifest.checkpoint} was repaired: the broker had aborted {repair.replaced}"
            told.append((manifest.completed_at_ms, what))
    yield from sorted(told, reverse=True)
