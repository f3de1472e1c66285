"""The audit of a lane: its outputs, computed again, against the visible records. A unit of an audit.

Invariants: a lane is compared by digests, and record by record, in memory, only where these differ or the client has
distributed records at random; what may be wrong without a fault of the pipeline is no finding, and is named; a finding
is believed only if the log still has all records afterwards. Equal sequences give no finding; every expected record
that is not seen, and every seen one that is not expected, is in exactly one finding; a record seen as often as
expected, but elsewhere, is reordered, and the fewest such records are named. Records that are equal to the last byte
are not told apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

import msgspec

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.partitioning import Partitioner, partitioner
from exactlyonce.connectors.kafka.visible import VisibleRecord, scan, visible_record, visible_runs
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.messages import WorkPlace
from exactlyonce.engines.bounded.unit.staging import (
    OutputBatch,
    OutputFile,
    RecomputedOutput,
    StagedFiles,
    StagedRange,
    batches_of,
    flat,
)
from exactlyonce.engines.bounded.unit.visible_lanes import (
    NOTHING,
    Digest,
    RecordDigest,
    SeenLane,
    SinkLane,
    lost_since,
    readers_config,
)
from exactlyonce.pipeline.dead_letters import compared
from exactlyonce.pipeline.errors import TopicError

Headers = tuple[tuple[str, bytes | None], ...]
Likeness = Callable[["PlainRecord", int], object]
"""A function of a record and its gap between anchors."""
Origin = tuple[str, int, int]
"""Topic, partition and offset of an input record."""
GAP_PAIRS_MAX = 4_000_000
"""With more pairs between two matching records, equal records among them are not aligned."""

SHOWN_BYTES_MAX = 200

MISSING, DOUBLED, CHANGED, REORDERED, FOREIGN = KINDS = ("missing", "doubled", "changed", "reordered", "foreign")


class PlainRecord(NamedTuple):
    """The compared part of a record."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None
    """None: not compared, because the sink's outputs have the time of their writing."""

    def __str__(self) -> str:
        """Key, value, headers and time, for people; long bytes are cut."""
        headers = f" headers {[*self.headers]!r}" if self.headers else ""
        time = "" if self.timestamp_ms is None else f" timestamp {self.timestamp_ms}"
        return f"key {_shown(self.key)} value {_shown(self.value)}{headers}{time}"


def _shown(data: bytes | None) -> str:
    text = repr(data)
    return text if data is None or len(text) <= SHOWN_BYTES_MAX else f"{text[:SHOWN_BYTES_MAX]}..."


class Expected(NamedTuple):
    """A record that the input gives."""

    record: PlainRecord
    origin: Origin | None


class Seen(NamedTuple):
    """A record that readers see."""

    record: PlainRecord
    offset: int


@dataclass(frozen=True)
class Finding:
    kind: str
    partition: int | None
    """None for a missing record that the client distributes at random."""
    offset: int | None
    """The offset of the seen record; for a missing one, of the record seen before it, if any."""
    origin: Origin | None
    """The input record; None for a foreign one."""
    expected: PlainRecord | None
    seen: PlainRecord | None


def compare(expected: Sequence[Expected], seen: Sequence[Seen], partition: int) -> list[Finding]:
    """The findings in one partition."""
    left, right = [record for record, _ in expected], [record for record, _ in seen]
    if left == right:
        return []
    anchors = list(_aligned(left, right))
    matched_left, matched_right = {i for i, _ in anchors}, {j for _, j in anchors}
    missing = [i for i in range(len(left)) if i not in matched_left]
    surplus = [j for j in range(len(right)) if j not in matched_right]
    finder = _Finder(expected, [(partition, record) for record in seen], anchors, partition)
    return finder.findings(missing, surplus)


def compare_at_random(expected: Sequence[Expected], seen: Mapping[int, Sequence[Seen]]) -> list[Finding]:
    """The findings among records that the client distributes at random to the partitions of *seen*.

    Within a partition their order counts, except of records that occur more than once.
    """
    places: defaultdict[PlainRecord, deque[int]] = defaultdict(deque)
    for i, (record, _) in enumerate(expected):
        places[record].append(i)
    unique = {record for record, indexes in places.items() if len(indexes) == 1}
    flat: list[tuple[int, Seen]] = []
    missing, surplus = set(range(len(expected))), set[int]()
    for partition, lane in sorted(seen.items()):
        pairs: list[tuple[int, int]] = []
        repeated: list[tuple[int, int]] = []
        for record_seen in lane:
            record = record_seen.record
            flat.append((partition, record_seen))
            if not places[record]:
                surplus.add(len(flat) - 1)
            else:
                (pairs if record in unique else repeated).append((places[record].popleft(), len(flat) - 1))
        in_order = _increasing(pairs)
        missing.difference_update(i for i, _ in [*in_order, *repeated])
        surplus.update({j for _, j in pairs} - {j for _, j in in_order})
    return _Finder(expected, flat, [], None).findings(missing, surplus)


class _Finder:
    """Makes findings of the records beside the anchors. Places are in *expected* and *seen*."""

    def __init__(
        self,
        expected: Sequence[Expected],
        seen: Sequence[tuple[int, Seen]],
        anchors: Sequence[tuple[int, int]],
        partition: int | None,
    ) -> None:
        self._expected, self._seen, self._anchors, self._partition = expected, seen, anchors, partition

    def findings(self, missing: Iterable[int], surplus: Iterable[int]) -> list[Finding]:
        """Pair reordered records, then doubled and changed ones; the rest is missing or foreign."""
        missing, surplus = sorted(missing), sorted(surplus)
        findings = [
            self._finding(REORDERED, i, j) for i, j in self._pairs(missing, surplus, lambda record, gap: record)
        ]
        origins: dict[PlainRecord, int] = {record: i for i, (record, _) in enumerate(self._expected)}
        for j in [j for j in surplus if self._seen[j][1].record in origins]:
            surplus.remove(j)
            findings.append(self._finding(DOUBLED, origins[self._seen[j][1].record], j))
        likenesses: list[Likeness] = [lambda record, gap: (gap, record.key), lambda record, gap: gap]
        for likeness in likenesses:
            findings += [self._finding(CHANGED, i, j) for i, j in self._pairs(missing, surplus, likeness)]
        findings += [self._finding(MISSING, i, None) for i in missing]
        findings += [self._finding(FOREIGN, None, j) for j in surplus]
        return sorted(findings, key=lambda finding: (finding.partition or 0, finding.offset or 0, finding.kind))

    def _pairs(self, missing: list[int], surplus: list[int], likeness: Likeness) -> list[tuple[int, int]]:
        """Take out of both lists, in order, the records that agree in *likeness*."""
        waiting: defaultdict[object, deque[int]] = defaultdict(deque)
        for i in missing:
            waiting[likeness(self._expected[i].record, self._gap_of(i, 0))].append(i)
        pairs = []
        for j in surplus:
            queue = waiting[likeness(self._seen[j][1].record, self._gap_of(j, 1))]
            if queue:
                pairs.append((queue.popleft(), j))
        paired_missing, paired_surplus = {i for i, _ in pairs}, {j for _, j in pairs}
        missing[:] = [i for i in missing if i not in paired_missing]
        surplus[:] = [j for j in surplus if j not in paired_surplus]
        return pairs

    def _gap_of(self, place: int, side: int) -> int:
        """The number of the gap between anchors in which *place* lies."""
        return bisect_left(self._anchors, place, key=lambda anchor: anchor[side])

    def _finding(self, kind: str, i: int | None, j: int | None) -> Finding:
        expected = None if i is None else self._expected[i]
        partition, seen = (self._partition, None) if j is None else self._seen[j]
        offset = self._offset_before(i) if seen is None else seen.offset
        record, origin = (None, None) if expected is None else (expected.record, expected.origin)
        return Finding(kind, partition, offset, origin, record, None if seen is None else seen.record)

    def _offset_before(self, i: int | None) -> int | None:
        """The offset of the last matching record before place *i* of the expected ones."""
        gap = 0 if i is None else self._gap_of(i, 0)
        return self._seen[self._anchors[gap - 1][1]][1].offset if gap else None


def _aligned(left: Sequence[PlainRecord], right: Sequence[PlainRecord]) -> Iterator[tuple[int, int]]:
    """Places of equal records in the same order on both sides: many, if not provably the most."""
    first, (end_i, end_j) = 0, (len(left), len(right))
    while first < min(end_i, end_j) and left[first] == right[first]:
        yield first, first
        first += 1
    while min(end_i, end_j) > first and left[end_i - 1] == right[end_j - 1]:
        end_i, end_j = end_i - 1, end_j - 1
    last_i = last_j = first
    for i, j in [*_increasing(_unique_in_both(left, right, first, end_i, end_j)), (end_i, end_j)]:
        yield from _in_gap(left, right, (last_i, i), (last_j, j))
        if i < end_i:
            yield i, j
        last_i, last_j = i + 1, j + 1
    yield from zip(range(end_i, len(left)), range(end_j, len(right)), strict=True)


def _unique_in_both(
    left: Sequence[PlainRecord], right: Sequence[PlainRecord], first: int, end_i: int, end_j: int
) -> list[tuple[int, int]]:
    """The places on both sides of records that occur once on each, by the left one."""
    once = [
        {record for record, count in Counter(side).items() if count == 1}
        for side in (left[first:end_i], right[first:end_j])
    ]
    places = {right[j]: j for j in range(first, end_j)}
    return [(i, places[left[i]]) for i in range(first, end_i) if left[i] in once[0] and left[i] in once[1]]


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """A longest part of *pairs* that grows on both sides.

    >>> _increasing([(0, 1), (1, 0), (2, 2)])
    [(1, 0), (2, 2)]
    """
    ordered = sorted(pairs)
    tails: list[int] = []  # the least second number that a chain of each length can end with
    ends: list[int] = []
    before: list[int | None] = []
    for place, (_, j) in enumerate(ordered):
        at = bisect_left(tails, j)
        before.append(ends[at - 1] if at else None)
        if at == len(tails):
            tails.append(j)
            ends.append(place)
        else:
            tails[at], ends[at] = j, place
    chain, at_place = [], ends[-1] if ends else None
    while at_place is not None:
        chain.append(ordered[at_place])
        at_place = before[at_place]
    return chain[::-1]


def _in_gap(
    left: Sequence[PlainRecord], right: Sequence[PlainRecord], range_i: tuple[int, int], range_j: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Equal records between two anchors, unless these are too far apart."""
    (i, end_i), (j, end_j) = range_i, range_j
    if i >= end_i or j >= end_j or (end_i - i) * (end_j - j) > GAP_PAIRS_MAX:
        return
    matcher = SequenceMatcher(None, left[i:end_i], right[j:end_j], autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from ((i + block.a + k, j + block.b + k) for k in range(block.size))


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
    outputs: StagedRange
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


class AuditedLane(msgspec.Struct, frozen=True):
    findings: tuple[Finding, ...]
    """The first ones, by place."""
    more: dict[str, int]
    """The number of the others, by kind."""
    unjudged: tuple[str, ...]
    """Sentences on what was not compared."""


_encode = msgspec.msgpack.Encoder().encode
_place_decoder = msgspec.msgpack.Decoder(WorkPlace)
_lane_decoder = msgspec.msgpack.Decoder(LaneAudit)
_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])


def audit_lane(place: bytes, attempt_label: str) -> bytes:
    """Audit the lane at an encoded `WorkPlace`; return the encoded `AuditedLane`."""
    work = _place_decoder.decode(place)
    with closing(StagedFiles()) as files:
        lane = _lane_decoder.decode(files.message(work.parts[0]))
        outputs = _outputs_decoder.decode(files.message(lane.outputs))
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
