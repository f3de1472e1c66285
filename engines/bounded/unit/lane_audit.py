"""The audit of a lane: its outputs, computed again, against the visible records. A unit of an audit.

Invariants: a lane is compared by digests, and record by record, in memory, only where these differ or the client has
distributed records at random; what may be wrong without a fault of the pipeline is no finding, and is named; a finding
is believed only if the log still has all records afterwards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.partitioning import Partitioner, partitioner
from exactlyonce.connectors.kafka.visible import VisibleRecord, scan, visible_record, visible_runs
from exactlyonce.engines.bounded.unit.digests import NOTHING, Digest, RecordDigest
from exactlyonce.engines.bounded.unit.findings import (
    Expected,
    Finding,
    PlainRecord,
    Seen,
    compare,
    compare_at_random,
)
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.lanes import RecomputedOutput, batches_of, flat
from exactlyonce.engines.bounded.unit.staging import OutputBatch, OutputFile, StagedFile, StagedFiles
from exactlyonce.engines.bounded.unit.visible_lanes import SeenLane, SinkLane, lost_since, readers_config
from exactlyonce.pipeline.dead_letters import compared
from exactlyonce.pipeline.errors import TopicError


class LaneAudit(msgspec.Struct, frozen=True, kw_only=True):
    """A lane to be audited. It is staged, so it has no settings of the client."""

    pipeline: str
    owner: SinkLane
    topic: str
    by_partition: bool
    """Whether the lane is a partition."""
    partitioner: str
    """The partitioner of its outputs."""
    placed: bool
    """Whether the sink chooses the partitions of its outputs."""
    timed: bool
    """Whether times are compared."""
    partitions: tuple[int, ...]
    """The partition counts that the topic may have had when the lane was written, the checkpoint's first."""
    outputs: StagedFile
    """A message with the `OutputFile` of each subtask, in order."""
    seen: tuple[SeenLane, ...]
    """By partition."""
    removed: frozenset[int]
    """Partitions that have lost records of it."""
    shown: int
    """The most findings to return."""

    @property
    def name(self) -> str:
        """The lane, for people: its partition is named elsewhere."""
        return lane_name(self.owner, by_partition=self.by_partition)


class LanePlace(msgspec.Struct, frozen=True, tag="lane"):
    """A `LaneAudit` by its place in a staged file."""

    client: dict[str, str]
    file: StagedFile
    receiver: int


class AuditedLane(msgspec.Struct, frozen=True):
    findings: tuple[Finding, ...]
    """The first ones, by place."""
    more: dict[str, int]
    """The number of the others, by kind."""
    unjudged: tuple[str, ...]
    """Sentences on what was not compared."""


_encode = msgspec.msgpack.Encoder().encode
_place_decoder = msgspec.msgpack.Decoder(LanePlace)
_lane_decoder = msgspec.msgpack.Decoder(LaneAudit)
_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])


def audit_lane(place: bytes, attempt_label: str) -> bytes:
    """Audit the lane at an encoded `LanePlace`; return the encoded `AuditedLane`."""
    work = _place_decoder.decode(place)
    with closing(StagedFiles()) as files:
        lane = _lane_decoder.decode(files.message(work.file, work.receiver))
        outputs = _outputs_decoder.decode(files.message(lane.outputs, 0))
    with KEPT.collector.collecting_rarely():
        return _encode(_audited(ClientConfig(work.client), lane, outputs))


def _audited(client: ClientConfig, lane: LaneAudit, outputs: Sequence[OutputFile]) -> AuditedLane:
    """The audit of *lane*, without partitions that have lost records since they were read first."""
    try:
        answer = _Audit(client, lane, outputs).audited()
    except (RangeGone, TopicError):
        if not (lost := _lost(client, lane)):
            raise
    else:
        if not answer.findings or not (lost := _lost(client, lane)):
            return answer
    left = msgspec.structs.replace(lane, removed=lane.removed | set(lost))
    answer = _audited(client, left, outputs)
    return msgspec.structs.replace(answer, unjudged=(*lost.values(), *answer.unjudged))


def _lost(client: ClientConfig, lane: LaneAudit) -> dict[int, str]:
    """The partitions that have lost records of *lane*, each with a sentence on that."""
    lost = {}
    for seen in lane.seen:
        if seen.partition in lane.removed or not seen.writers:
            continue
        place = lane.topic, seen.partition
        subject = f"{lane.topic}[{seen.partition}]: records of {lane.name} were not compared"
        try:
            if lost_since(client, lane.pipeline, place, seen.start, seen.writers):
                lost[seen.partition] = f"{subject}: retention or compaction has removed some during the audit"
        except TopicError as error:
            lost[seen.partition] = f"{subject}: {error}"
    return lost


def lane_name(owner: SinkLane, *, by_partition: bool) -> str:
    """A lane, for people: its partition is named elsewhere."""
    checkpoint, sink, lane = owner
    return f"checkpoint {checkpoint}, sink {sink}" + ("" if by_partition else f" subtask {lane}")


class _Audit:
    def __init__(self, client: ClientConfig, lane: LaneAudit, outputs: Sequence[OutputFile]) -> None:
        self._client, self._lane, self._outputs = client, lane, outputs
        self._partition_of: Partitioner = partitioner(lane.partitioner)
        self._seen = {seen.partition: seen for seen in lane.seen}
        self._unjudged: list[str] = []

    def audited(self) -> AuditedLane:
        findings = sorted(self._findings(), key=lambda finding: (finding.partition or 0, finding.offset or 0))
        shown = self._lane.shown
        more = Counter(finding.kind for finding in findings[shown:])
        return AuditedLane(tuple(findings[:shown]), dict(more), tuple(self._unjudged))

    def _findings(self) -> Iterator[Finding]:
        lane = self._lane
        digests, at_random = self._digests()
        seen = {partition: of_lane.digest for partition, of_lane in self._seen.items()}
        differing = [
            partition
            for partition in sorted({*digests, *seen})
            if not self._same(digests.get(partition, NOTHING), seen.get(partition, NOTHING))
        ]
        grown = self._seen_wherever() if differing else None
        if grown is not None:
            differing = []
            keyed = [self._expected(output) for output in self._flat() if self._place(output) is not None]
            if lane.removed:
                self._unjudged.append(
                    f"{len(keyed)} records of {lane.name}: {lane.topic} has got partitions, and some of them have lost "
                    f"records"
                )
            else:
                yield from compare_at_random(keyed, grown)
        for partition in differing:
            if partition not in lane.removed:
                own = [self._expected(output) for output in self._flat() if self._place(output) == partition]
                yield from compare(own, self._read(partition, at_random=False), partition)
        if lane.removed and at_random:
            self._unjudged.append(
                f"{at_random} records without a key of {lane.name}, which may have been in partitions that have lost "
                f"theirs"
            )
        elif not lane.removed and (at_random or any(of_lane.at_random for of_lane in self._seen.values())):
            unplaced = [self._expected(output) for output in self._flat() if self._place(output) is None]
            loose = {
                partition: self._read(partition, at_random=True)
                for partition, of_lane in self._seen.items()
                if of_lane.at_random
            }
            yield from compare_at_random(unplaced, loose)

    # --- the expected outputs

    def _batches(self, *, origins: bool) -> Iterator[OutputBatch]:
        lane = self._lane
        return batches_of(self._outputs, lane.owner[2], by_partition=lane.by_partition, origins=origins)

    def _flat(self) -> Iterator[RecomputedOutput]:
        return flat(self._batches(origins=True))

    def _place(self, output: RecomputedOutput) -> int | None:
        return output.place(self._partition_of, self._lane.partitions[0])

    def _expected(self, output: RecomputedOutput) -> Expected:
        return Expected(self._plain(output), output.origin)

    def _digests(self) -> tuple[dict[int, Digest], int]:
        """The digests of the outputs by partition, and the number of outputs that may be in any."""
        digests: defaultdict[int, RecordDigest] = defaultdict(RecordDigest)
        at_random = 0
        for batch in self._batches(origins=False):
            for partition, share in self._shares(batch):
                if partition is None:
                    at_random += len(share.values)
                    continue
                headers = share.headers
                digests[partition].add(
                    share.values,
                    share.keys,
                    [compared(of_record) for of_record in headers] if headers and any(headers) else None,
                    share.timestamps if self._lane.timed else None,
                )
        return {partition: digest.digest() for partition, digest in digests.items()}, at_random

    def _shares(self, batch: OutputBatch) -> Iterator[tuple[int | None, OutputBatch]]:
        if self._lane.by_partition:
            yield self._lane.owner[2], batch
            return
        places: Sequence[int | None] = batch.partitions or [
            self._partition_of(key, self._lane.partitions[0]) for key in batch.keys or [None] * len(batch.values)
        ]
        numbers: defaultdict[int | None, list[int]] = defaultdict(list)
        for number, place in enumerate(places):
            numbers[place].append(number)
        for place, own in numbers.items():
            yield place, batch.share(own)

    def _same(self, expected: Digest, seen: Digest) -> bool:
        return expected.contents == seen.contents and (not self._lane.timed or expected.times == seen.times)

    # --- the visible records

    def _read(self, partition: int, *, at_random: bool) -> list[Seen]:
        """The visible records of the lane in a partition, again: those at random, or the others."""
        lane, seen = self._lane, self._seen.get(partition)
        if seen is None or not seen.writers:
            return []
        may_be_at_random = not lane.by_partition and not lane.placed
        with closing(Log(self._client, group=lane.pipeline)) as log:
            scanned = scan(log, lane.topic, partition, seen.start, seen.writers)
        config = readers_config(self._client, lane.pipeline)
        records = (
            visible_record(message, writer)
            for writer, messages in visible_runs(config, lane.topic, partition, seen.start, seen.end, scanned)
            if writer in seen.writers
            for message in messages
        )
        return [
            Seen(self._plain(record), record.offset)
            for record in records
            if at_random == (may_be_at_random and self._partition_of(record.key, 1) is None)
        ]

    def _plain(self, record: VisibleRecord | RecomputedOutput) -> PlainRecord:
        """The compared part of *record*."""
        time_ms = record.timestamp_ms if self._lane.timed else None
        return PlainRecord(record.key, record.value, compared(record.headers or ()), time_ms)

    def _seen_wherever(self) -> dict[int, list[Seen]] | None:
        """The keyed records of a lane by partition, if its topic has got partitions.

        Each record must be where one of the topic's partition counts puts it: the count that its producer knew is
        unknown. None if the count is known, if the sink chooses partitions itself, or if a record is elsewhere.
        """
        lane = self._lane
        if lane.placed or lane.by_partition or len(lane.partitions) == 1:
            return None
        seen = {partition: self._read(partition, at_random=False) for partition in self._seen}
        fits = all(
            partition in {self._partition_of(record.key, count) for count in lane.partitions}
            for partition, records in seen.items()
            for record, _ in records
        )
        return seen if fits else None
