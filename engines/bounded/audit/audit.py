"""Audit: the output that the input gives, recomputed along the order logs, against the records that readers see.

Invariants: an audit takes no lease, opens no transaction and writes only files of its own; it reports what it cannot
judge, and judges the rest. The work is done in units: partitions are read, intervals computed, and lanes compared, by
digests, and record by record only where these differ. This process holds no records but findings.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from exactlyonce.checkpoint.records.manifest import HISTORY, HISTORY_ENDED, transaction_prefix
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import partitioner_in
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.kafka.visible import is_visible
from exactlyonce.engines.bounded.audit.attribution import VisibleRecords, known_writers
from exactlyonce.engines.bounded.catch_up import chunk_records
from exactlyonce.engines.bounded.replay.recompute import (
    CheckpointInterval,
    Recomputed,
    counts_before,
    interval_of,
    recomputation,
    recompute,
)
from exactlyonce.engines.bounded.result_tables import html_result, html_table
from exactlyonce.engines.bounded.submit import Executors, WorkListener
from exactlyonce.engines.bounded.unit.findings import FOREIGN, Finding, PlainRecord
from exactlyonce.engines.bounded.unit.lane_audit import AuditedLane, LaneAudit, LanePlace
from exactlyonce.engines.bounded.unit.staging import stage_messages
from exactlyonce.engines.bounded.unit.visible_lanes import readers_config
from exactlyonce.engines.bounded.workplace import free_bytes, workplace
from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.errors import (
    BrokerUnavailable,
    ConfigError,
    ExactlyOnceError,
    Halt,
    TopicError,
    Unavailable,
    UserError,
)
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.sizes import counted

SHOWN = 100

_encode = msgspec.msgpack.Encoder().encode
_audited_decoder = msgspec.msgpack.Decoder(AuditedLane)


class AuditProgress(WorkListener, Protocol):
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
    """The first ones."""
    unjudged: list[str] = field(default_factory=list)
    skipped: int = 0
    """Records of the input left out, as by the run."""
    more: Counter[str] = field(default_factory=Counter)
    """The number of the other findings, by kind."""

    def add(self, finding: AuditFinding, shown: int) -> None:
        """Add *finding*; with *shown* ones already, it is counted."""
        if len(self.findings) < shown:
            self.findings.append(finding)
        else:
            self.more[finding.finding.kind] += 1

    @property
    def found(self) -> int:
        """The number of all findings."""
        return len(self.findings) + self.more.total()

    @property
    def hint(self) -> str:
        """A question about findings that a change of the code explains; empty without them."""
        checkpoints = [finding.checkpoint for finding in self.findings if finding.checkpoint is not None]
        if not checkpoints:
            return ""
        return (
            f"Has the code of {self.pipeline} changed since checkpoint {min(checkpoints)}, or what it depends on? Then "
            f"these are the differences between its versions, and no faults: audit with the code of then."
        )

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
        verdict = counted(self.found, "finding") if self.findings else "exactly once: nothing is wrong"
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
        more = html_table(["more findings", "number"], sorted(self.more.items()))
        unjudged = html_table(["not judged"], [(reason,) for reason in self.unjudged])
        sentence = f"{self.verdict} {self.hint}".strip()
        return html_result(sentence, html_table(columns, rows), more, unjudged)


def _numbers(checkpoints: list[int]) -> str:
    if len(checkpoints) == 1 or checkpoints[-1] - checkpoints[0] >= len(checkpoints):
        return ", ".join(map(str, checkpoints))
    return f"{checkpoints[0]} to {checkpoints[-1]}"


class Audit:
    """The audit of a pipeline's retained checkpoints. Its constructor asks which there are, before executors start."""

    def __init__(
        self,
        loaded: Loaded,
        client: ClientConfig,
        first: int | None = None,
        last: int | None = None,
        *,
        ignore_foreign: bool = False,
        shown: int = SHOWN,
    ) -> None:
        """Judge the checkpoints from *first* to *last*. *shown*: the most findings in the report."""
        self._loaded, self._client = loaded, client
        self._ignore_foreign, self._shown = ignore_foreign, shown
        self._report = AuditReport(loaded.pipeline.name)
        self._graph = loaded.pipeline.build()
        self._history = read_history(client, loaded.pipeline.name)
        self._visible = VisibleRecords(self._graph, self._history, self._report.unjudged)
        self._intervals = self._chosen(first, last) if self._has_exact_sinks() else []
        self._staged_bytes = 0

    @property
    def offsets(self) -> int:
        """The offsets of the judged intervals; there may be fewer records."""
        return sum(interval.offsets for interval in self._intervals)

    def run(self, executors: Executors, progress: AuditProgress) -> AuditReport:
        """Judge; once for each `Audit`."""
        report, intervals = self._report, self._intervals
        if intervals:
            progress.began(intervals[-1].manifest, self.offsets)
            with workplace(executors.staging, f"audit-{report.pipeline}") as files:
                manifests = [interval.manifest for interval in intervals]
                self._visible.read(manifests, self._client, executors.submit, files)
            report.records_out = self._visible.count
            for part in self._parts(executors):
                self._judge(part, executors)
                progress.passed(sum(interval.offsets for interval in part))
        self._leave_out_stores(intervals)
        if intervals and not self._ignore_foreign:
            self._add_foreign(intervals)
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
            if history.manifests[number].kind in (HISTORY, HISTORY_ENDED):
                unjudged.append(f"checkpoint {number} was computed without output")
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

    def _parts(self, executors: Executors) -> Iterator[list[CheckpointInterval]]:
        """The intervals in parts that are computed together: as many offsets in each as in a chunk of a backfill."""
        waiting, done = deque(self._intervals), 0
        while waiting:
            most = chunk_records(
                executors.cores(),
                offset_bytes=self._staged_bytes / done if done else 0.0,
                free_bytes=free_bytes(executors.staging),
            )
            part = [waiting.popleft()]
            offsets = part[0].offsets
            while waiting and offsets + waiting[0].offsets <= most:
                part.append(waiting.popleft())
                offsets += part[-1].offsets
            yield part
            done += offsets

    def _judge(self, intervals: Sequence[CheckpointInterval], executors: Executors) -> None:
        possible, recomputations = [], []
        prefix = f"audit-{self._report.pipeline}-{intervals[0].manifest.checkpoint}"
        with workplace(executors.staging, prefix) as files:
            for interval in intervals:
                own = f"{files}{interval.manifest.checkpoint}-"
                try:
                    recomputations.append(recomputation(self._loaded, self._client, interval, own, origins=True))
                except (BrokerUnavailable, Unavailable):
                    raise
                except (UserError, Halt) as error:
                    self._leave_out(interval, error)
                else:
                    possible.append(interval)
            try:
                again = recompute(recomputations, self._client, executors.submit)
                audited = self._audited(again, executors, files)
            except (BrokerUnavailable, Unavailable):
                raise
            except (UserError, Halt) as error:
                if len(possible) == 1:
                    self._leave_out(possible[0], error)
                    return
                audited = None
        if audited is None:  # one of them cannot be computed, the others can
            for interval in possible:
                self._judge([interval], executors)
            return
        for recomputed in again:
            self._report.records_in += recomputed.records
            self._report.skipped += recomputed.skipped
            self._report.checkpoints.append(recomputed.manifest.checkpoint)
            self._staged_bytes += recomputed.staged_bytes
        for lane, answer in audited:
            checkpoint, sink, _ = lane.owner
            for finding in answer.findings:
                self._report.add(AuditFinding(lane.topic, sink, checkpoint, finding), self._shown)
            self._report.more.update(answer.more)
            self._report.unjudged += answer.unjudged

    def _leave_out(self, interval: CheckpointInterval, error: ExactlyOnceError) -> None:
        self._report.unjudged.append(f"checkpoint {interval.manifest.checkpoint} cannot be computed again: {error}")

    def _audited(
        self, again: Sequence[Recomputed], executors: Executors, files: str
    ) -> list[tuple[LaneAudit, AuditedLane]]:
        """The lanes of all sinks, each with its audit."""
        present = self._present(again)
        lanes = [lane for recomputed in again for lane in self._lanes(recomputed, present, files)]
        if not lanes:
            return []
        file = stage_messages(f"{files}lanes", lanes)
        settings = self._client.as_text
        work = [_encode(LanePlace(settings, file, number)) for number, _ in enumerate(lanes)]
        first, last = again[0].manifest.checkpoint, again[-1].manifest.checkpoint
        checkpoints = f"checkpoint {first}" if first == last else f"checkpoints {first} to {last}"
        answers = executors.submit(f"{self._report.pipeline}: {checkpoints}, compare", work)
        return [(lane, _audited_decoder.decode(answer)) for lane, answer in zip(lanes, answers, strict=True)]

    def _lanes(self, recomputed: Recomputed, present: Mapping[str, int], files: str) -> Iterator[LaneAudit]:
        """The lanes that have expected or visible records."""
        manifest, visible = recomputed.manifest, self._visible
        for sink, topic in ((output.sink, output.topic) for output in manifest.sinks):
            outputs = stage_messages(
                f"{files}outputs-{manifest.checkpoint}-{sink}", [[*recomputed.files.get(sink, ())]]
            )
            now = [present[topic]] if topic in present else []
            counts = tuple(counts_before(self._history, manifest, sink, now))
            for number in recomputed.lanes(sink):
                owner = (manifest.checkpoint, sink, number)
                if owner in visible.lanes or recomputed.count(sink, number):
                    yield LaneAudit(
                        pipeline=manifest.pipeline,
                        owner=owner,
                        topic=topic,
                        by_partition=recomputed.is_by_partition(sink),
                        partitioner=partitioner_in(manifest, sink, self._client.settings),
                        placed=sink in visible.placed,
                        timed=sink in visible.timed,
                        partitions=counts,
                        outputs=outputs,
                        seen=tuple(visible.lanes.get(owner, ())),
                        removed=frozenset(visible.removed.get(owner, ())),
                        shown=self._shown,
                    )

    def _present(self, again: Sequence[Recomputed]) -> dict[str, int]:
        """The present number of partitions of the output topics that exist."""
        present = {}
        with closing(Topics(self._client)) as topics:
            for name in sorted({output.topic for recomputed in again for output in recomputed.manifest.sinks}):
                with suppress(TopicError):
                    present[name] = topics.describe([name])[name].partitions
        return present

    # --- foreign records

    def _add_foreign(self, intervals: Sequence[CheckpointInterval]) -> None:
        """Add visible records that no checkpoint names, where every checkpoint that could name them is known.

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
        sinks = {output.topic: output.sink for interval in intervals for output in interval.manifest.sinks}
        weaker = [node.sink for node in self._graph.sinks if node.sink and node.sink.delivery != EXACTLY_ONCE]
        shared = {sink.topic for sink in weaker}
        if first.base.checkpoint == 0:  # else an expired checkpoint may have written there
            self._add_unread(sinks.keys() - shared)
        for visible in self._visible.partitions:
            topic, partition = visible.topic, visible.partition
            if topic in shared:  # a sink that leaves no trace in the log writes to it too
                continue
            end = max(visible.ends.values(), default=visible.start)
            of_first = [
                visible.ends[claim.writer]
                for claim in self._visible.claims[topic, partition]
                if claim.checkpoint == first.manifest.checkpoint and claim.writer in visible.ends
            ]
            first_end = max(of_first, default=visible.start)
            for record in visible.foreign:
                is_older = record.writer[0] in ours and record.offset < first_end and first.base.checkpoint > 0
                is_newer = has_moved and record.offset >= end
                if record.writer in known or is_older or is_newer:
                    continue
                plain = PlainRecord(record.key, record.value, record.headers)
                finding = Finding(FOREIGN, partition, record.offset, None, None, plain)
                self._report.add(AuditFinding(topic, sinks[topic], None, finding), self._shown)
            if visible.foreign_more and not has_moved:
                self._report.unjudged.append(
                    f"{visible.foreign_more} more records in {topic}[{partition}] are of no checkpoint of this pipeline"
                )

    def _add_unread(self, topics: Collection[str]) -> None:
        """Report the partitions of *topics* that have records and no claim."""
        config = readers_config(self._client, self._report.pipeline)
        with closing(Topics(self._client)) as answers:
            for topic in sorted(topics):
                try:
                    starts, ends = answers.start_offsets(topic), answers.end_offsets(topic, committed=True)
                except TopicError:  # it is gone; if there are claims in it, that is reported
                    continue
                places = {
                    partition: (start, ends[partition])
                    for partition, start in sorted(starts.items())
                    if (topic, partition) not in self._visible.claims
                }
                unread = [
                    str(partition)
                    for partition, (start, end) in places.items()
                    if is_visible(config, topic, partition, start, end)
                ]
                if unread:
                    self._report.unjudged.append(
                        f"{topic}[{', '.join(unread)}] has records, and no judged checkpoint has written there: "
                        f"they were not read"
                    )
