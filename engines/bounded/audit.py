"""Audit: the output that the input gives, recomputed along the order logs, against the records that readers see.

Invariants: an audit takes no lease, opens no transaction and writes only files of its own; it reports what it cannot
judge, and judges the rest. The work is done in units: partitions are read, intervals computed, and lanes compared, by
digests, and record by record only where these differ. This process holds no records but findings.

Visible records belong to checkpoints by the writers that the decision log names. A repair, of several the newest,
stands in for its transaction in all its partitions; every transaction that any record of the log names is known; a lane
is judged in the partitions that hold all that was written for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    HISTORY,
    HISTORY_ENDED,
    LOSS_ACCEPTED,
    Committable,
    Manifest,
    transaction_prefix,
)
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import partitioner_in
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.kafka.visible import Writer, is_visible
from exactlyonce.engines.bounded.recompute import (
    CheckpointInterval,
    Recomputed,
    counts_before,
    in_parts,
    interval_of,
    recomputation,
    recompute,
)
from exactlyonce.engines.bounded.result_tables import html_result, html_table
from exactlyonce.engines.bounded.stages import Executors, PartListener, Submit
from exactlyonce.engines.bounded.unit.lane_audit import (
    FOREIGN,
    AuditedLane,
    Finding,
    LaneAudit,
    PlainRecord,
    lane_name,
)
from exactlyonce.engines.bounded.unit.messages import LANE, PARTITION, WorkPlace
from exactlyonce.engines.bounded.unit.staging import stage_messages
from exactlyonce.engines.bounded.unit.visible_lanes import (
    AuditedOutput,
    Claim,
    ClaimedPartition,
    Place,
    SeenLane,
    SinkLane,
    VisiblePartition,
    readers_config,
)
from exactlyonce.engines.bounded.workplace import chunk_records, free_bytes, workplace
from exactlyonce.pipeline.errors import (
    BrokerUnavailable,
    ConfigError,
    ExactlyOnceError,
    Halt,
    TopicError,
    Unavailable,
    UserError,
)
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.pipeline.sizes import counted
from exactlyonce.sinks.kafka.sink import gives_partitions, gives_times

_partition_decoder = msgspec.msgpack.Decoder(VisiblePartition)


def claims_of(history: History, manifest: Manifest) -> Iterator[Claim]:
    """The claims of *manifest*, in the order in which each lane was written."""
    finalized = history.finalized.get(manifest.checkpoint)
    fates = dict(finalized.fates) if finalized else {}
    stand_ins: dict[str, list[Committable]] = {}
    for repair in history.repairs_of(manifest.checkpoint):
        stand_ins.setdefault(repair.replaced, []).append(repair.committable)
    for original in sorted(manifest.committables, key=lambda committable: committable.checkpoint):
        given_up = fates.get(original.transactional_id) == LOSS_ACCEPTED
        current = {}
        for committable in (original, *stand_ins.get(original.transactional_id, ())):
            current.update({(part.topic, part.partition): (committable, part) for part in committable.written})
        for place, (committable, written) in sorted(current.items()):
            yield Claim(
                checkpoint=manifest.checkpoint,
                sink=original.sink,
                subtask=original.subtask,
                place=place,
                producer_id=committable.producer_id,
                epoch=committable.epoch,
                first_offset=written.first_offset,
                records=written.count,
                given_up=given_up,
                by_partition=manifest.partitions_of(original.sink) is not None,
            )


def known_writers(histories: Iterable[History]) -> set[Writer]:
    """The writers of all transactions that the decision log names."""
    committables = [
        committable
        for history in histories
        for manifest in history.manifests.values()
        for committable in (
            *manifest.committables,
            *(repair.committable for repair in history.repairs_of(manifest.checkpoint)),
        )
    ]
    return {(committable.producer_id, committable.epoch) for committable in committables}


class VisibleRecords:
    """The visible records that the checkpoints of a pipeline claim."""

    def __init__(self, graph: LogicalGraph, history: History, unjudged: list[str]) -> None:
        """*unjudged* takes a sentence on each thing that cannot be compared."""
        self._graph, self._history, self._unjudged = graph, history, unjudged
        self.timed = {node.id for node in graph.sinks if gives_times(node.sink)}
        """The sinks whose outputs have a time of their own in the log."""
        self.placed = {node.id for node in graph.sinks if gives_partitions(node.sink)}
        """The sinks that choose the partitions of their outputs."""
        self.partitions: list[VisiblePartition] = []
        self.claims: defaultdict[Place, list[Claim]] = defaultdict(list)
        self.lanes: defaultdict[SinkLane, list[SeenLane]] = defaultdict(list)
        self.removed: defaultdict[SinkLane, set[int]] = defaultdict(set)
        """The partitions that have lost records, by lane."""
        self.count = 0

    def read(self, manifests: Sequence[Manifest], client: ClientConfig, submit: Submit, files: str) -> None:
        """Read every partition of which *manifests*, oldest first, claim records, in a unit each."""
        for manifest in manifests:
            for claim in claims_of(self._history, manifest):
                self.claims[claim.place].append(claim)
        if not self.claims:
            return
        to_end = manifests[-1] is self._history.latest
        common = AuditedOutput(
            pipeline=self._graph.pipeline_id,
            known=frozenset(known_writers([self._history])),
            timed=frozenset(self.timed),
            placed=frozenset(self.placed),
            partitioners={
                (manifest.checkpoint, output.sink): partitioner_in(manifest, output.sink, client.settings)
                for manifest in manifests
                for output in manifest.sinks
            },
        )
        partitions = [ClaimedPartition(*place, tuple(own), to_end) for place, own in sorted(self.claims.items())]
        of_all, *places = stage_messages(f"{files}partitions", [common, *partitions])
        settings = client.as_text
        work = [_encode(WorkPlace(PARTITION, settings, (of_all, place))) for place in places]
        unread: dict[str, str] = {}
        for answer in submit(f"{self._graph.pipeline_id}: audit, read the output", work):
            visible = _partition_decoder.decode(answer)
            if visible.unread:
                unread.setdefault(visible.topic, visible.unread)
                for claim in self.claims[visible.topic, visible.partition]:
                    self.removed[claim.owner].add(visible.partition)
            else:
                self._add(visible)
        self._unjudged += (f"the output in topic {topic}: {why}" for topic, why in unread.items())
        self._leave_out_times({visible.topic for visible in self.partitions if visible.timed_by_broker})

    def _add(self, visible: VisiblePartition) -> None:
        self.partitions.append(visible)
        self.count += visible.records
        for lane in visible.lanes:
            self.lanes[lane.owner].append(lane)
        for claim in self.claims[visible.topic, visible.partition]:
            if claim.writer in visible.behind:
                self.removed[claim.owner].add(visible.partition)
                self._unjudged.append(
                    f"{visible.topic}[{visible.partition}]: {counted(claim.records, 'record')} of "
                    f"{lane_name(claim.owner, by_partition=claim.by_partition)} are behind an open transaction, which "
                    f"no reader passes: audit again once it has ended"
                )
            elif (in_log := visible.found[claim.writer]) != claim.records:
                self.removed[claim.owner].add(visible.partition)
                why = "its loss was accepted" if claim.given_up else "retention or compaction has removed the others"
                self._unjudged.append(
                    f"{visible.topic}[{visible.partition}] holds {in_log} of {claim.records} records of "
                    f"{lane_name(claim.owner, by_partition=claim.by_partition)}: {why}"
                )

    def _leave_out_times(self, topics: set[str]) -> None:
        """Do not compare times in *topics*, where the broker has replaced them."""
        for node in self._graph.sinks:
            if node.id in self.timed and node.sink is not None and node.sink.topic in topics:
                self.timed.discard(node.id)
                self._unjudged.append(
                    f"the times of the records of sink {node.id}: topic {node.sink.topic} has records with the time of "
                    f"their append (message.timestamp.type=LogAppendTime), and not that of timestamp="
                )


SHOWN = 100

_encode = msgspec.msgpack.Encoder().encode
_audited_decoder = msgspec.msgpack.Decoder(AuditedLane)


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

    def run(self, executors: Executors, progress: PartListener) -> AuditReport:
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
        done = 0

        def most() -> int:
            return chunk_records(
                executors.cores(),
                offset_bytes=self._staged_bytes / done if done else 0.0,
                free_bytes=free_bytes(executors.staging),
            )

        for part in in_parts(self._intervals, most):
            yield part
            done += sum(interval.offsets for interval in part)

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
        settings = self._client.as_text
        work = [_encode(WorkPlace(LANE, settings, (place,))) for place in stage_messages(f"{files}lanes", lanes)]
        first, last = again[0].manifest.checkpoint, again[-1].manifest.checkpoint
        checkpoints = f"checkpoint {first}" if first == last else f"checkpoints {first} to {last}"
        answers = executors.submit(f"{self._report.pipeline}: {checkpoints}, compare", work)
        return [(lane, _audited_decoder.decode(answer)) for lane, answer in zip(lanes, answers, strict=True)]

    def _lanes(self, recomputed: Recomputed, present: Mapping[str, int], files: str) -> Iterator[LaneAudit]:
        """The lanes that have expected or visible records."""
        manifest, visible = recomputed.manifest, self._visible
        for sink, topic in ((output.sink, output.topic) for output in manifest.sinks):
            staged = [*recomputed.files.get(sink, ())]
            (outputs,) = stage_messages(f"{files}outputs-{manifest.checkpoint}-{sink}", [staged])
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

        Among the first judged checkpoint's records may lie records of an expired one; at the end, of a newer one.
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
