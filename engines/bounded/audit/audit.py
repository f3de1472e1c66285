"""Audit: the output that the input gives, recomputed along the order logs, against the records that readers see.

Invariants: an audit takes no lease, opens no transaction and writes only files of its own; it reports what it cannot
judge, and judges the rest. Lanes are compared by digests, and record by record only where these differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from exactlyonce.checkpoint.records.committable import transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import RESTORED, Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.audit.attribution import (
    SinkLane,
    VisibleRecords,
    add_to,
    known_writers,
    lane_name,
    new_digests,
)
from exactlyonce.engines.bounded.audit.compare import (
    FOREIGN,
    Expected,
    Finding,
    PlainRecord,
    Seen,
    compare,
    compare_at_random,
)
from exactlyonce.engines.bounded.replay.recompute import (
    CheckpointInterval,
    Recomputed,
    RecomputedOutput,
    interval_of,
    partition_counts,
    recomputed,
)
from exactlyonce.engines.bounded.result_tables import html_result, html_table
from exactlyonce.engines.bounded.submit import Progress, Submit
from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt, Unavailable, UserError
from exactlyonce.pipeline.loading import Loaded


class AuditProgress(Progress, Protocol):
    """The listener to an audit."""

    def passed(self, offsets: int) -> None:
        """So many more offsets are done."""


@dataclass(frozen=True)
class AuditFinding:
    """A finding, and its place."""

    topic: str
    sink: str
    checkpoint: int | None
    """None: no checkpoint accounts for the record."""
    finding: Finding

    @property
    def place(self) -> str:
        """The place of the seen record, or of a missing one, for people."""
        finding = self.finding
        partition = f"{self.topic}[{'?' if finding.partition is None else finding.partition}]"
        if finding.seen is not None:
            return f"{partition} offset {finding.offset}"
        return f"{partition} " + ("at the beginning" if finding.offset is None else f"after offset {finding.offset}")

    @property
    def stem(self) -> str:
        """The input record, for people."""
        origin = self.finding.origin
        return "{}[{}] offset {}".format(*origin) if origin else "no record of the input"


@dataclass
class AuditReport:
    """The result of an audit. A notebook shows it as a table."""

    pipeline: str
    checkpoints: list[int] = field(default_factory=list)
    """The checkpoints that were judged, if only in part."""
    records_in: int = 0
    records_out: int = 0
    """Visible records that were compared."""
    findings: list[AuditFinding] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    skipped: int = 0
    """Records of the input left out, as by the run."""

    @property
    def is_judged(self) -> bool:
        """Whether anything was compared: rows of stores are not read."""
        return bool(self.checkpoints) and (self.records_out > 0 or not self.unjudged)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if not self.checkpoints:
            return f"{self.pipeline}: no checkpoint could be judged."
        if not self.findings and not self.is_judged:
            why = "none of their output could be judged" if self.records_in else "they read no records"
            return f"{self.pipeline}: checkpoints {_numbers(self.checkpoints)}: {why}; nothing was compared."
        verdict = f"{len(self.findings)} findings" if self.findings else "exactly once: nothing is wrong"
        if self.unjudged and not self.findings:
            verdict = f"{verdict} in the judged output"
        skipped = f", {self.skipped:,} of them skipped" if self.skipped else ""
        return (
            f"{self.pipeline}: checkpoints {_numbers(self.checkpoints)}, {self.records_in:,} records in{skipped}, "
            f"{self.records_out:,} out: {verdict}."
        )

    def _repr_html_(self) -> str:
        columns = "finding", "sink", "place", "checkpoint", "from", "expected", "seen"
        rows = [
            (placed.finding.kind, placed.sink, placed.place, placed.checkpoint, placed.stem, placed.finding.expected,
             placed.finding.seen)
            for placed in self.findings
        ]  # fmt: skip
        unjudged = html_table(["not judged"], [(reason,) for reason in self.unjudged])
        return html_result(self.verdict, html_table(columns, rows), unjudged)


def _numbers(checkpoints: list[int]) -> str:
    if len(checkpoints) == 1 or checkpoints[-1] - checkpoints[0] >= len(checkpoints):
        return ", ".join(map(str, checkpoints))
    return f"{checkpoints[0]} to {checkpoints[-1]}"


def offsets_of(client: ClientConfig, pipeline: str, first: int | None, last: int | None) -> int:
    """The offsets that an audit of *pipeline* from checkpoint *first* to *last* reads."""
    history = read_history(client, pipeline)
    return sum(
        CheckpointInterval(history.manifests[manifest.previous], manifest).offsets
        for number, manifest in history.manifests.items()
        if (first is None or number >= first) and (last is None or number <= last)
        if manifest.kind != RESTORED and manifest.previous in history.manifests
    )


class Audit:
    def __init__(
        self,
        loaded: Loaded,
        client: ClientConfig,
        submit: Submit,
        staging: str | Path,
        progress: AuditProgress,
        *,
        ignore_foreign: bool = False,
    ) -> None:
        self._loaded, self._client, self._submit, self._staging = loaded, client, submit, staging
        self._progress, self._ignore_foreign = progress, ignore_foreign
        self._report = AuditReport(loaded.pipeline.name)
        self._graph = loaded.pipeline.build()
        self._history: History
        self._visible: VisibleRecords

    def run(self, first: int | None = None, last: int | None = None) -> AuditReport:
        """Judge the retained checkpoints from *first* to *last*."""
        report = self._report
        self._history = read_history(self._client, self._loaded.pipeline.name)
        self._visible = VisibleRecords(self._client, self._graph, self._history, report.unjudged)
        intervals = self._chosen(first, last) if self._has_exact_sinks() else []
        if intervals:
            self._progress.began(intervals[-1].manifest, sum(interval.offsets for interval in intervals))
        self._visible.read([interval.manifest for interval in intervals])
        report.records_out = self._visible.count
        for interval in intervals:
            self._judge(interval)
            self._progress.passed(interval.offsets)
        self._leave_out_stores(intervals)
        if intervals and not self._ignore_foreign:
            report.findings += self._foreign(intervals)
        return report

    # --- the checkpoints to judge

    def _has_exact_sinks(self) -> bool:
        """Whether there is anything to judge; the other sinks are reported."""
        exact = False
        for node in self._graph.sinks:
            if node.sink is None or node.sink.delivery == EXACTLY_ONCE:
                exact = True
                continue
            self._report.unjudged.append(
                f"sink {node.id} delivers {node.sink.delivery.replace('_', ' ')}: no checkpoint says what it has "
                f"written"
            )
        return exact

    def _chosen(self, first: int | None, last: int | None) -> list[CheckpointInterval]:
        """The intervals that can be recomputed, oldest first."""
        history, unjudged = self._history, self._report.unjudged
        retained = [number for number in sorted(history.manifests) if number > 0]
        intervals = []
        for number in retained:
            if (first is not None and number < first) or (last is not None and number > last):
                continue
            if number not in history.finalized:
                unjudged.append(f"checkpoint {number} is decided, and its output is not all committed yet")
                continue
            try:
                intervals.append(interval_of(history, number))
            except ConfigError as error:
                unjudged.append(str(error))
        if first is not None and (not retained or first < retained[0]):
            until = min(retained[0] - 1 if retained else history.checkpoint_latest, last or 1 << 62)
            unjudged.append(f"checkpoints {first} to {until} are expired: --num-retained says how many are kept")
        if last is not None and last > history.checkpoint_latest:
            unjudged.append(f"checkpoint {last} was not taken yet: the newest is {history.checkpoint_latest}")
        return intervals

    def _leave_out_stores(self, intervals: Sequence[CheckpointInterval]) -> None:
        """Report how much output in stores is not judged."""
        records: Counter[str] = Counter()
        for interval in intervals:
            for committable in interval.manifest.staged:
                records[committable.sink] += committable.records
        self._report.unjudged += (
            f"{count} records of sink {sink!r} are in a store, which is not read: what decides about them is its ledger"
            for sink, count in sorted(records.items())
        )

    # --- the comparison

    def _judge(self, interval: CheckpointInterval) -> None:
        manifest = interval.manifest
        try:
            with recomputed(self._loaded, self._client, interval, self._submit, self._staging, origins=True) as again:
                self._report.records_in += again.records
                self._report.skipped += again.skipped
                self._report.checkpoints.append(manifest.checkpoint)
                for sink, topic, partitions in manifest.sinks:
                    for lane in again.lanes(sink):
                        owner = (manifest.checkpoint, sink, lane)
                        for finding in self._compare(manifest, again, owner, topic, partitions):
                            self._report.findings.append(AuditFinding(topic, sink, manifest.checkpoint, finding))
        except (BrokerUnavailable, Unavailable):
            raise
        except (UserError, Halt) as error:
            self._report.unjudged.append(f"checkpoint {manifest.checkpoint} cannot be computed again: {error}")

    def _compare(
        self, manifest: Manifest, again: Recomputed, owner: SinkLane, topic: str, partitions: int
    ) -> Iterator[Finding]:
        _, sink, lane = owner
        seen, partition_of = self._visible.lanes[owner], self._visible.partition_of
        name = lane_name(owner, by_partition=manifest.partitions_of(sink) is not None)

        def expected(output: RecomputedOutput) -> Expected:
            return Expected(self._visible.plain(output, sink), output.origin)

        digests = new_digests()
        at_random: list[Expected] = []
        for output in again.outputs(sink, lane):
            partition = output.place(partition_of, partitions)
            if partition is None:
                at_random.append(expected(output))
            else:
                add_to(digests[partition], self._visible.plain(output, sink))
        differing = [
            partition
            for partition in sorted({*digests, *seen.digests})
            if digests[partition].digest() != seen.digests[partition].digest()
        ]
        grown = self._seen_wherever(manifest, owner, topic) if differing else None
        if grown is not None:
            differing = []
            outputs = again.outputs(sink, lane)
            keyed = [expected(output) for output in outputs if output.place(partition_of, partitions) is not None]
            if seen.removed:
                self._report.unjudged.append(
                    f"{len(keyed)} records of {name}: {topic} has got partitions, and some of them have lost records"
                )
            else:
                yield from compare_at_random(keyed, grown)
        for partition in differing:
            if partition not in seen.removed:
                outputs = again.outputs(sink, lane)
                own = [expected(output) for output in outputs if output.place(partition_of, partitions) == partition]
                yield from compare(own, self._visible.read_again(owner, (topic, partition)), partition)
        if seen.removed:
            if at_random:
                self._report.unjudged.append(
                    f"{len(at_random)} records without a key of {name}, which may have been in partitions that have "
                    f"lost theirs"
                )
        elif at_random or seen.at_random:
            yield from compare_at_random(at_random, seen.at_random)

    def _seen_wherever(self, manifest: Manifest, owner: SinkLane, topic: str) -> dict[int, list[Seen]] | None:
        """The keyed records of a lane by partition, if its topic has got partitions.

        Each record must be where one of the topic's partition counts puts it: the count that its producer knew is
        unknown. None if the count is known, if the sink chooses partitions itself, or if a record is elsewhere.
        """
        if owner[1] in self._visible.placed or manifest.partitions_of(owner[1]) is not None:
            return None
        counts = partition_counts(self._client, self._history, manifest, owner[1])
        if len(counts) == 1:
            return None
        digests, partition_of = self._visible.lanes[owner].digests, self._visible.partition_of
        seen = {partition: self._visible.read_again(owner, (topic, partition)) for partition in digests}
        fits = all(
            partition in {partition_of(record.key, count) for count in counts}
            for partition, records in seen.items()
            for record, _ in records
        )
        return seen if fits else None

    # --- foreign records

    def _foreign(self, intervals: Sequence[CheckpointInterval]) -> Iterator[AuditFinding]:
        """Visible records that no checkpoint names, where every checkpoint that could name them is known.

        Among the first judged checkpoint's records may lie those of an expired one; at the end, those of a newer one.
        """
        pipeline = self._loaded.pipeline.name
        now = read_history(self._client, pipeline)
        known = known_writers([self._history, now])
        has_moved = now.checkpoint_latest != self._history.checkpoint_latest
        with closing(Transactions(self._client)) as transactions:
            ours = {state.producer_id for state in transactions.list(transaction_prefix(pipeline))}
        ours |= {producer_id for producer_id, _ in known}
        first = intervals[0]
        sinks = {topic: sink for sink, topic, _ in intervals[-1].manifest.sinks}
        weaker = [node.sink for node in self._graph.sinks if node.sink and node.sink.delivery != EXACTLY_ONCE]
        shared = {sink.topic for sink in weaker}
        for (topic, partition), scanned in sorted(self._visible.partitions.items()):
            if topic in shared:  # a sink that leaves no trace in the log writes to it too
                continue
            extents = [(claim, scanned.scanned.extents[writer]) for writer, claim in scanned.claims.items()]
            end = max((extent.stop for _, extent in extents), default=scanned.start)
            firsts = [extent.stop for claim, extent in extents if claim.checkpoint == first.manifest.checkpoint]
            first_end = max(firsts, default=scanned.start)
            for record in scanned.foreign:
                is_older = record.writer[0] in ours and record.offset < first_end and first.base.checkpoint > 0
                is_newer = has_moved and record.offset >= end
                if record.writer in known or is_older or is_newer:
                    continue
                plain = PlainRecord(record.key, record.value, record.headers)
                finding = Finding(FOREIGN, partition, record.offset, None, None, plain)
                yield AuditFinding(topic, sinks[topic], None, finding)
            if scanned.foreign_more and not has_moved:
                self._report.unjudged.append(
                    f"{scanned.foreign_more} more records in {topic}[{partition}] are of no checkpoint of this pipeline"
                )
