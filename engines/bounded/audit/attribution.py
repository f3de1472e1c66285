"""The attribution of visible records to checkpoints, by the writers that the decision log names.

Invariants: the header of a batch identifies its writer, its contents never do; a repair, of several the newest, stands
in for its transaction in all its partitions; every transaction that any record of the log names is known. A lane (the
records of one sink subtask in one partition, or of all where a partition is one transaction) is kept as a digest, so
that only differing lanes need memory.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import LOSS_ACCEPTED, Manifest
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.partitioning import partitioner
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.visible import Scan, VisibleRecord, Writer, scan, visible
from exactlyonce.engines.bounded.audit.compare import PlainRecord, Seen
from exactlyonce.engines.bounded.replay.recompute import RecomputedOutput
from exactlyonce.pipeline.dead_letters import compared
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks.kafka.sink import gives_partitions, gives_times

FOREIGN_SHOWN = 100
"""Foreign records kept of a partition; more are counted."""
Place = tuple[str, int]
"""Topic and partition."""
SinkLane = tuple[int, str, int]
"""Checkpoint, sink, and lane: see `Recomputed`."""


class Claim(NamedTuple):
    """A transaction of a checkpoint in one partition."""

    checkpoint: int
    """The checkpoint whose manifest names it."""
    sink: str
    subtask: int
    place: Place
    producer_id: int
    epoch: int
    first_offset: int
    records: int
    given_up: bool
    """Whether its loss was accepted by the user."""
    by_partition: bool
    """Whether its lane is the partition, of which the checkpoint's outputs are all in this transaction."""

    @property
    def writer(self) -> Writer:
        return self.producer_id, self.epoch

    @property
    def owner(self) -> SinkLane:
        """The lane whose output it is."""
        return self.checkpoint, self.sink, self.place[1] if self.by_partition else self.subtask


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


def new_digests() -> defaultdict[int, hashlib.blake2b]:
    """Digests of records in order, by partition: equal sequences have equal ones, others, as far as is known, not."""
    return defaultdict(partial(hashlib.blake2b, digest_size=16))


def add_to(digest: hashlib.blake2b, record: PlainRecord) -> None:
    """Add the next record to *digest*."""
    parts: list[bytes | None] = [record.key, record.value]
    for name, value in record.headers:
        parts += [name.encode(), value]
    if record.timestamp_ms is not None:
        parts.append(b"%d" % record.timestamp_ms)
    lengths = ",".join("-" if part is None else str(len(part)) for part in parts)
    digest.update(lengths.encode() + b";" + b"".join(part or b"" for part in parts))


def lane_name(owner: SinkLane, *, by_partition: bool) -> str:
    """A lane, for people: its partition is named elsewhere."""
    checkpoint, sink, lane = owner
    return f"checkpoint {checkpoint}, sink {sink}" + ("" if by_partition else f" subtask {lane}")


@dataclass
class LaneRecords:
    """The visible records of one lane at one checkpoint, by partition."""

    digests: defaultdict[int, hashlib.blake2b] = field(default_factory=new_digests)
    at_random: defaultdict[int, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    """Records without a key, which the client distributes at random."""
    removed: set[int] = field(default_factory=set)
    """Partitions that have lost records."""


@dataclass
class ScannedPartition:
    """The batches of one partition, and its records of no known writer."""

    claims: dict[Writer, Claim]
    """The claims whose records are all there."""
    scanned: Scan
    start: int
    end: int
    foreign: list[VisibleRecord] = field(default_factory=list)
    foreign_more: int = 0


class VisibleRecords:
    """The visible records that the checkpoints of a pipeline claim."""

    def __init__(self, client: ClientConfig, graph: LogicalGraph, history: History, unjudged: list[str]) -> None:
        """*unjudged* takes a sentence on each thing that cannot be compared."""
        self._client, self._graph, self._history, self._unjudged = client, graph, history, unjudged
        self._reading = ClientConfig({"group.id": graph.pipeline_id, **client.settings})
        """Readers ask for a group; the user may use the pipeline's."""
        self.partition_of = partitioner(client.settings)
        self._timed = {node.id for node in graph.sinks if gives_times(node.sink)}
        """The sinks whose outputs have a time of their own in the log."""
        self.placed = {node.id for node in graph.sinks if gives_partitions(node.sink)}
        """The sinks that choose the partitions of their outputs."""
        self.partitions: dict[Place, ScannedPartition] = {}
        self.lanes: defaultdict[SinkLane, LaneRecords] = defaultdict(LaneRecords)
        self.count = 0

    def read(self, manifests: Sequence[Manifest]) -> None:
        """Read every partition of which *manifests*, oldest first, claim records."""
        claims: defaultdict[Place, list[Claim]] = defaultdict(list)
        for manifest in manifests:
            for claim in claims_of(self._history, manifest):
                claims[claim.place].append(claim)
        to_end = bool(manifests) and manifests[-1] is self._history.latest
        known = known_writers([self._history])
        log, topics = Log(self._client, group=self._graph.pipeline_id), Topics(self._client)
        try:
            scans = {}
            for (topic, partition), own in sorted(claims.items()):
                start = max(min(claim.first_offset for claim in own), topics.start_offsets(topic)[partition])
                wanted = None if to_end else {claim.writer: claim.records for claim in own}
                scans[topic, partition] = start, scan(log, topic, partition, start, wanted)
            self._leave_out_times({topic for (topic, _), (_, scanned) in scans.items() if scanned.timed_by_broker})
            for place, (start, scanned) in scans.items():
                stable_end = topics.end_offsets(place[0], committed=True)[place[1]]
                complete = {claim.writer: claim for claim in claims[place] if self._is_complete(claim, scanned)}
                self.partitions[place] = ScannedPartition(complete, scanned, start, min(stable_end, scanned.end))
                self._attribute(place, self.partitions[place], known)
        finally:
            log.close()
            topics.close()

    def _leave_out_times(self, topics: set[str]) -> None:
        """Do not compare times in *topics*, where the broker has replaced them."""
        for node in self._graph.sinks:
            if node.id in self._timed and node.sink is not None and node.sink.topic in topics:
                self._timed.discard(node.id)
                self._unjudged.append(
                    f"the times of the records of sink {node.id}: topic {node.sink.topic} has records with the time of "
                    f"their append (message.timestamp.type=LogAppendTime), and not that of timestamp="
                )

    def _is_complete(self, claim: Claim, scanned: Scan) -> bool:
        in_log = scanned.counts[claim.writer]
        if in_log == claim.records:
            return True
        topic, partition = claim.place
        self.lanes[claim.owner].removed.add(partition)
        why = "its loss was accepted" if claim.given_up else "retention or compaction has removed the others"
        self._unjudged.append(
            f"{topic}[{partition}] holds {in_log} of {claim.records} records of "
            f"{lane_name(claim.owner, by_partition=claim.by_partition)}: {why}"
        )
        return False

    def _attribute(self, place: Place, partition: ScannedPartition, known: set[Writer]) -> None:
        for record in visible(self._reading, *place, partition.start, partition.end, partition.scanned):
            claim = partition.claims.get(record.writer)
            if claim is not None:
                self.count += 1
                plain, lane = self.plain(record, claim.sink), self.lanes[claim.owner]
                if self.is_at_random(record.key, claim):
                    lane.at_random[place[1]].append(Seen(plain, record.offset))
                else:
                    add_to(lane.digests[place[1]], plain)
            elif record.writer not in known and len(partition.foreign) < FOREIGN_SHOWN:
                partition.foreign.append(record)
            elif record.writer not in known:
                partition.foreign_more += 1

    def is_at_random(self, key: bytes | None, claim: Claim) -> bool:
        """Whether the client has distributed records of *claim* with this key at random."""
        return not claim.by_partition and claim.sink not in self.placed and self.partition_of(key, 1) is None

    def plain(self, record: VisibleRecord | RecomputedOutput, sink: str) -> PlainRecord:
        """The compared part of *record*, of *sink*."""
        time_ms = record.timestamp_ms if sink in self._timed else None
        return PlainRecord(record.key, record.value, compared(record.headers or ()), time_ms)

    def read_again(self, owner: SinkLane, place: Place) -> list[Seen]:
        """The records of a lane in one partition, of which only the digest was kept."""
        partition = self.partitions.get(place)
        if partition is None:
            return []
        own = {writer: claim for writer, claim in partition.claims.items() if claim.owner == owner}
        extents = [partition.scanned.extents[writer] for writer in own]
        if not extents:
            return []
        start = min(extent.start for extent in extents)
        end = min(partition.end, max(extent.stop for extent in extents))
        return [
            Seen(self.plain(record, owner[1]), record.offset)
            for record in visible(self._reading, *place, start, end, partition.scanned)
            if record.writer in own and not self.is_at_random(record.key, own[record.writer])
        ]
