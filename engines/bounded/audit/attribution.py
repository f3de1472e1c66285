"""The attribution of visible records to checkpoints, by the writers that the decision log names.

Invariants: a repair, of several the newest, stands in for its transaction in all its partitions; every transaction that
any record of the log names is known; a lane is judged in the partitions that hold all that was written for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import LOSS_ACCEPTED, Committable, Manifest
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import partitioner_in
from exactlyonce.connectors.kafka.visible import Writer
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.bounded.unit.lane_audit import lane_name
from exactlyonce.engines.bounded.unit.staging import stage_messages
from exactlyonce.engines.bounded.unit.visible_lanes import (
    COMMON,
    AuditedOutput,
    Claim,
    ClaimedPartition,
    PartitionPlace,
    Place,
    SeenLane,
    SinkLane,
    VisiblePartition,
)
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sizes import counted
from exactlyonce.sinks.kafka.sink import gives_partitions, gives_times

_encode = msgspec.msgpack.Encoder().encode
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
        file = stage_messages(f"{files}partitions", [common, *partitions])
        settings = client.as_text
        work = [_encode(PartitionPlace(settings, file, number)) for number, _ in enumerate(partitions, COMMON + 1)]
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
