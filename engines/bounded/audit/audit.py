"""Audit: what the input gives, computed again along the order logs, against what read_committed readers see.

Invariants: it takes no lease, opens no transaction and writes nothing but files of its own; whatever it cannot judge it
says, and judges the rest; records are attributed to checkpoints by the headers of their batches, never by their
contents. Lanes (a sink subtask's records in one partition) are compared by digests first, record by record only where
those differ, so that memory is needed for what is wrong and for records without a key.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from exactlyonce.checkpoint.records.committable import transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.partitioning import partitioner
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.kafka.visible import Scan, VisibleRecord, scan, visible
from exactlyonce.engines.bounded.audit.attribution import Claim, Place, claims_of, known_writers
from exactlyonce.engines.bounded.audit.compare import (
    FOREIGN,
    Expected,
    Finding,
    PlainRecord,
    Seen,
    compare,
    compare_dealt_out,
)
from exactlyonce.engines.bounded.replay.recompute import (
    CheckpointInterval,
    Recomputed,
    interval_of,
    partition_counts,
    recomputed,
)
from exactlyonce.engines.bounded.replay.sharing import RecomputedOutput, flat, topic_of
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt, Unavailable, UserError
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.sink import Sink
from exactlyonce.sinks.kafka.sink import gives_times

FOREIGN_SHOWN = 100
"""Of a partition; more are counted."""
SinkSubtask = tuple[int, str, int]
"""Checkpoint, sink and subtask."""


class AuditProgress(Protocol):
    """The listener to an audit: it is told how it goes."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def began(self, manifest: Manifest, offsets: int) -> None:
        """So many offsets of input are to be computed again, up to *manifest*."""

    def passed(self, offsets: int) -> None:
        """So many more are done."""


@dataclass(frozen=True)
class Found:
    """A finding, and where it is."""

    topic: str
    sink: str
    checkpoint: int | None
    """None: of a record that no checkpoint accounts for."""
    finding: Finding


@dataclass
class AuditReport:
    """The verdict."""

    pipeline: str
    checkpoints: list[int] = field(default_factory=list)
    """Those that were judged, if only in part."""
    records_in: int = 0
    records_out: int = 0
    """Visible records that were compared."""
    findings: list[Found] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    skipped: int = 0
    """Of `records_in`, left out as by the run."""


class Digest:
    """A digest of records in order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.records = 0

    def add(self, record: PlainRecord) -> None:
        """The next record."""
        parts: list[bytes | None] = [record.key, record.value]
        for name, value in record.headers:
            parts += [name.encode(), value]
        if record.timestamp_ms is not None:
            parts.append(b"%d" % record.timestamp_ms)
        lengths = ",".join("-" if part is None else str(len(part)) for part in parts)
        self._hash.update(lengths.encode() + b";" + b"".join(part or b"" for part in parts))
        self.records += 1

    @property
    def digest(self) -> bytes:
        """The same for equal sequences, and, as far as anybody knows, for no others."""
        return self._hash.digest()


@dataclass
class LookedAt:
    """What was seen of one partition."""

    claims: dict[tuple[int, int], Claim]
    """By producer id and epoch, those that are all there."""
    scanned: Scan
    start: int
    end: int
    foreign: list[VisibleRecord] = field(default_factory=list)
    foreign_more: int = 0


def _elsewhere(intervals: Sequence[CheckpointInterval]) -> list[str]:
    """Of each sink whose output is in a store: how much of it is not judged."""
    records: Counter[str] = Counter()
    for interval in intervals:
        for each in interval.manifest.staged:
            records[each.sink] += each.records
    return [
        f"{count} records of sink {sink!r} are in a store, which is not read: what decides about them is its ledger"
        for sink, count in sorted(records.items())
    ]


class Audit:
    """One audit of one pipeline."""

    def __init__(
        self,
        loaded: Loaded,
        client: ClientConfig,
        submit: Submit,
        staging: Path,
        progress: AuditProgress,
        *,
        ignore_foreign: bool = False,
    ) -> None:
        self._loaded, self._client, self._submit, self._staging = loaded, client, submit, staging
        self._progress = progress
        self._ignore_foreign = ignore_foreign
        self._partition_of = partitioner(client.settings)
        self._reading = ClientConfig({"group.id": loaded.pipeline.name, **client.settings})
        """Readers ask for a group; the pipeline's is the one that its user may use."""
        self._log = Log(client, group=loaded.pipeline.name)
        self._topics = Topics(client)
        self._transactions = Transactions(client)
        self._looks: dict[Place, LookedAt] = {}
        self._seen: defaultdict[SinkSubtask, defaultdict[int, Digest]] = defaultdict(lambda: defaultdict(Digest))
        self._dealt_out: defaultdict[SinkSubtask, defaultdict[int, list[Seen]]]
        self._dealt_out = defaultdict(lambda: defaultdict(list))
        self._removed: set[tuple[SinkSubtask, int]] = set()
        self._history: History
        self._report = AuditReport(loaded.pipeline.name)
        self._graph = loaded.pipeline.build()
        self._weaker = {node.id: node.sink for node in self._graph.sinks if node.sink and _is_weaker(node.sink)}
        """By id, the sinks that need not be exact."""
        self._timed = {node.id for node in self._graph.sinks if gives_times(node.sink)}
        """The sinks whose outputs have a time of their own in the log."""

    def run(self, first: int | None = None, last: int | None = None) -> AuditReport:
        """Judge the checkpoints from *first* to *last*, as far as they are retained."""
        try:
            self._history = read_history(self._client.confluent(), self._loaded.pipeline.name)
            intervals = self._chosen(first, last) if self._has_exact_sinks() else []
            if intervals:
                self._progress.began(intervals[-1].manifest, sum(each.offsets for each in intervals))
            self._look_at(intervals)
            for interval in intervals:
                self._judge(interval)
                self._progress.passed(interval.offsets)
            self._report.unjudged += _elsewhere(intervals)
            if intervals and not self._ignore_foreign:
                self._report.findings += self._foreign(intervals)
        finally:
            for each in (self._log, self._topics, self._transactions):
                each.close()
        return self._report

    # --- what is judged

    def _has_exact_sinks(self) -> bool:
        """Whether there is anything to judge; the other sinks are told."""
        for id, sink in self._weaker.items():
            self._report.unjudged.append(
                f"sink {id} delivers {sink.delivery.replace('_', ' ')}: no checkpoint says what it has written"
            )
        return len(self._weaker) < len(self._graph.sinks)

    def _chosen(self, first: int | None, last: int | None) -> list[CheckpointInterval]:
        """The intervals that can be computed again, oldest first."""
        history, unjudged = self._history, self._report.unjudged
        retained = [each for each in sorted(history.manifests) if each > 0]
        found = []
        for number in retained:
            if (first is not None and number < first) or (last is not None and number > last):
                continue
            if number not in history.finalized:
                unjudged.append(f"checkpoint {number} is decided, and its output is not all committed yet")
                continue
            try:
                found.append(interval_of(history, number))
            except ConfigError as error:
                unjudged.append(str(error))
        if first is not None and (not retained or first < retained[0]):
            until = min(retained[0] - 1 if retained else history.checkpoint_latest, last or 1 << 62)
            unjudged.append(f"checkpoints {first} to {until} are expired: --num-retained says how many are kept")
        if last is not None and last > history.checkpoint_latest:
            unjudged.append(f"checkpoint {last} was not taken yet: the newest is {history.checkpoint_latest}")
        return found

    # --- what readers see

    def _look_at(self, intervals: Sequence[CheckpointInterval]) -> None:
        """Read every partition that the checkpoints claim records of."""
        claims: defaultdict[Place, list[Claim]] = defaultdict(list)
        for interval in intervals:
            for claim in claims_of(self._history, interval.manifest):
                claims[claim.place].append(claim)
        latest = self._history.latest
        to_end = bool(intervals) and intervals[-1].manifest is latest
        known = known_writers([self._history])
        scans = {place: self._scan(place, mine, to_end=to_end) for place, mine in sorted(claims.items())}
        self._leave_out_times({topic for (topic, _), (_, scanned) in scans.items() if scanned.timed_by_broker})
        for place, (start, scanned) in scans.items():
            self._looks[place] = self._look(place, claims[place], known, start, scanned)

    def _scan(self, place: Place, mine: list[Claim], *, to_end: bool) -> tuple[int, Scan]:
        """Where to look from, and what batches there are."""
        topic, partition = place
        start = max(min(each.first_offset for each in mine), self._topics.start_offsets(topic)[partition])
        wanted = None if to_end else {each.writer: each.records for each in mine}
        return start, scan(self._log, *place, start, wanted)

    def _leave_out_times(self, topics: set[str]) -> None:
        """*topics* have records whose times the broker has replaced by its own."""
        for node in self._graph.sinks:
            if node.id in self._timed and node.sink is not None and node.sink.topic in topics:
                self._timed.discard(node.id)
                self._report.unjudged.append(
                    f"the times of the records of sink {node.id}: topic {node.sink.topic} has records with the time of "
                    f"their append (message.timestamp.type=LogAppendTime), and not that of timestamp="
                )

    def _look(
        self, place: Place, mine: list[Claim], known: set[tuple[int, int]], start: int, scanned: Scan
    ) -> LookedAt:
        topic, partition = place
        stable_end = self._topics.end_offsets(topic, committed=True)[partition]
        there = {}
        for claim in mine:
            if scanned.counts[claim.writer] == claim.records:
                there[claim.writer] = claim
            else:
                self._removed.add(((claim.checkpoint, claim.sink, claim.subtask), partition))
                why = "its loss was accepted" if claim.given_up else "retention or compaction has removed the others"
                self._report.unjudged.append(
                    f"{topic}[{partition}] holds {scanned.counts[claim.writer]} of {claim.records} records of "
                    f"checkpoint {claim.checkpoint}, sink {claim.sink} subtask {claim.subtask}: {why}"
                )
        look = LookedAt(there, scanned, start, min(stable_end, scanned.end))
        for record in visible(self._reading, *place, look.start, look.end, scanned):
            mine_of = there.get(record.writer)
            if mine_of is not None:
                self._note_seen(mine_of, record)
            elif record.writer not in known and len(look.foreign) < FOREIGN_SHOWN:
                look.foreign.append(record)
            elif record.writer not in known:
                look.foreign_more += 1
        return look

    def _note_seen(self, claim: Claim, record: VisibleRecord) -> None:
        lane = (claim.checkpoint, claim.sink, claim.subtask)
        partition = claim.place[1]
        self._report.records_out += 1
        plain = self._plain(record, claim.sink)
        if self._partition_of(record.key, 1) is None:
            self._dealt_out[lane][partition].append(Seen(plain, record.offset))
        else:
            self._seen[lane][partition].add(plain)

    def _plain(self, record: VisibleRecord | RecomputedOutput, sink: str) -> PlainRecord:
        """What is compared of *record*, which *sink* has written, or should have."""
        time_ms = record.timestamp_ms if sink in self._timed else None
        return PlainRecord(record.key, record.value, tuple(record.headers or ()), time_ms)

    def _expected(self, output: RecomputedOutput, sink: str) -> Expected:
        return Expected(self._plain(output, sink), output.origin)

    # --- what should be there

    def _judge(self, interval: CheckpointInterval) -> None:
        """Compute one interval again, and compare."""
        manifest = interval.manifest
        try:
            with recomputed(self._loaded, self._client, interval, self._submit, self._staging, origins=True) as again:
                self._report.records_in += again.records
                self._report.skipped += again.skipped
                self._report.checkpoints.append(manifest.checkpoint)
                for sink, topic, partitions in manifest.sinks:
                    for subtask in range(manifest.parallelism):
                        for finding in self._compare(interval, again, sink, subtask, topic, partitions):
                            self._report.findings.append(Found(topic, sink, manifest.checkpoint, finding))
        except (BrokerUnavailable, Unavailable):
            raise
        except (UserError, Halt) as error:
            self._report.unjudged.append(f"checkpoint {manifest.checkpoint} cannot be computed again: {error}")

    def _compare(
        self, interval: CheckpointInterval, again: Recomputed, sink: str, subtask: int, topic: str, partitions: int
    ) -> Iterator[Finding]:
        """One sink subtask's records of one checkpoint."""
        place = (interval.manifest.checkpoint, sink, subtask)
        lanes: defaultdict[int, Digest] = defaultdict(Digest)
        dealt_out: list[Expected] = []
        for output in flat(again.outputs(sink, subtask)):
            partition = self._partition_of(output.key, partitions)
            if partition is None:
                dealt_out.append(self._expected(output, sink))
            else:
                lanes[partition].add(self._plain(output, sink))
        has_removed = any(removed == place for removed, _ in self._removed)
        differing = [
            partition
            for partition in sorted({*lanes, *self._seen[place]})
            if lanes[partition].digest != self._seen[place][partition].digest
        ]
        grown = self._seen_wherever(interval.manifest, sink, subtask) if differing else None
        if grown is not None:
            differing = []
            outputs = flat(again.outputs(sink, subtask))
            keyed = [
                self._expected(each, sink) for each in outputs if self._partition_of(each.key, partitions) is not None
            ]
            if has_removed:
                self._report.unjudged.append(
                    f"{len(keyed)} records of checkpoint {place[0]}, sink {sink} subtask {subtask}: {topic} has got "
                    f"partitions, and some of them have lost records"
                )
            else:
                yield from compare_dealt_out(keyed, grown)
        for partition in differing:
            if (place, partition) in self._removed:
                continue
            expected = [
                self._expected(output, sink)
                for output in flat(again.outputs(sink, subtask))
                if self._partition_of(output.key, partitions) == partition
            ]
            yield from compare(expected, self._read_again(place, (topic, partition)), partition)
        if has_removed:
            if dealt_out:
                self._report.unjudged.append(
                    f"{len(dealt_out)} records without a key of checkpoint {place[0]}, sink {sink} subtask {subtask}, "
                    f"which may have been in partitions that have lost theirs"
                )
        elif dealt_out or self._dealt_out[place]:
            yield from compare_dealt_out(dealt_out, self._dealt_out[place])

    def _seen_wherever(self, manifest: Manifest, sink: str, subtask: int) -> dict[int, list[Seen]] | None:
        """By partition, the records with a key of a sink subtask whose topic has got partitions, each where one of the
        counts that it had puts it: which of them its producer knew is not known. None if there was but one count, or a
        record is where none of them puts it.
        """
        counts = partition_counts(self._client, self._history, manifest, sink)
        if len(counts) == 1:
            return None
        lane, topic = (manifest.checkpoint, sink, subtask), topic_of(manifest, sink)[0]
        seen = {partition: self._read_again(lane, (topic, partition)) for partition in self._seen[lane]}
        right = all(
            partition in {self._partition_of(each.record.key, count) for count in counts}
            for partition, some in seen.items()
            for each in some
        )
        return seen if right else None

    def _read_again(self, lane: SinkSubtask, place: Place) -> list[Seen]:
        """The records of a lane that do not have the digest that they should have."""
        look = self._looks.get(place)
        if look is None:
            return []
        mine = {writer for writer, each in look.claims.items() if (each.checkpoint, each.sink, each.subtask) == lane}
        extents = [look.scanned.extents[writer] for writer in mine]
        if not extents:
            return []
        start, end = min(each.start for each in extents), min(look.end, max(each.stop for each in extents))
        return [
            Seen(self._plain(record, lane[1]), record.offset)
            for record in visible(self._reading, *place, start, end, look.scanned)
            if record.writer in mine and self._partition_of(record.key, 1) is not None
        ]

    # --- what nobody accounts for

    def _foreign(self, intervals: Sequence[CheckpointInterval]) -> Iterator[Found]:
        """Visible records that no checkpoint names, where every checkpoint that could name them is known.

        At the beginning, what an expired checkpoint wrote may lie among what the first judged one wrote; at the end,
        what a newer checkpoint has written since.
        """
        now = read_history(self._client.confluent(), self._loaded.pipeline.name)
        known = known_writers([self._history, now])
        has_moved = now.checkpoint_latest != self._history.checkpoint_latest
        pipeline = self._loaded.pipeline.name
        ours = {each.producer_id for each in self._transactions.list(transaction_prefix(pipeline))}
        ours |= {producer_id for producer_id, _ in known}
        first = intervals[0]
        sinks = {topic: sink for sink, topic, _ in intervals[-1].manifest.sinks}
        shared = {sink.topic for sink in self._weaker.values()}
        for (topic, partition), look in sorted(self._looks.items()):
            if topic in shared:  # a sink that leaves no trace in the log writes to it too
                continue
            extents = {claim: look.scanned.extents[writer] for writer, claim in look.claims.items()}
            end = max((each.stop for each in extents.values()), default=look.start)
            edge = max(
                (each.stop for claim, each in extents.items() if claim.checkpoint == first.manifest.checkpoint),
                default=look.start,
            )
            for record in look.foreign:
                is_older = record.writer[0] in ours and record.offset < edge and first.base.checkpoint > 0
                is_newer = has_moved and record.offset >= end
                if record.writer in known or is_older or is_newer:
                    continue
                plain = PlainRecord(record.key, record.value, record.headers)
                yield Found(topic, sinks[topic], None, Finding(FOREIGN, partition, record.offset, None, None, plain))
            if look.foreign_more and not has_moved:
                self._report.unjudged.append(
                    f"{look.foreign_more} more records in {topic}[{partition}] are of no checkpoint of this pipeline"
                )


def _is_weaker(sink: Sink[Any]) -> bool:
    return sink.delivery != EXACTLY_ONCE
