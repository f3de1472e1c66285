"""The repair of lost records by a simulated coordinator: copied from the output log, or computed again by a replay.

A replay has only the base's blocks, the input between the two Sn, and the order logs, as a real one. Operators, tables,
lanes and their order are shipped code; only the files between two stages and the start of units are stand-ins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from confluent_kafka import Message
from topologies import topic_of

from exactlyonce.checkpoint.records.manifest import Committable, Manifest, Written, shares
from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.engines.bounded.unit import ordering
from exactlyonce.engines.plan import FeedbackEdge, Plan, ShuffleEdge, TaskSpec
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime import operators as ops
from exactlyonce.engines.runtime.assembler import Assembler, RestoredEdge, TaskOperators, sink_output
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Push
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.order_log import order_runs
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.engines.runtime.watermarks import Port, Watermark
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.pipeline.graph import Node
from exactlyonce.sinks.kafka.sink import KafkaSink, Outputs
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.testing.broker.interface import Error, Isolation
from exactlyonce.testing.simulation.clients import Awaited, FetchedBlocks, Steps, output_partition

if TYPE_CHECKING:
    from coordinator import SimulatedCoordinator
    from world import World

Records = list[tuple[bytes | None, bytes | None]]
Ranges = dict[tuple[str, int], list[Message]]
"""The records between the two Sn, by source and partition."""


def copied(coordinator: SimulatedCoordinator, lost: Committable, name: str) -> Steps:
    found: dict[tuple[str, int], Records] = {}
    for each in lost.written:
        place = (each.topic, each.partition)
        log = yield from coordinator.world.until_answered(
            "fetch", *place, each.first_offset, Isolation.READ_UNCOMMITTED
        )
        ours = (lost.producer_id, lost.epoch)
        found[place] = [(r.key, r.value) for r in log.records if (r.producer_id, r.epoch) == ours][: each.count]
        if len(found[place]) != each.count:
            return f"{each.topic}[{each.partition}] holds {len(found[place])} of {each.count} records"
    coordinator.world.seen["copy"] += 1
    return (yield from _produced(coordinator, lost, name, found))


def replayed(coordinator: SimulatedCoordinator, manifest: Manifest, lost: Committable, name: str) -> Steps:
    world, base = coordinator.world, coordinator.log.history.manifests[manifest.previous]
    ranges = yield from _ranges(world, base, manifest)
    logs = yield from _logs(coordinator, manifest)
    left = {}
    for log in manifest.channel_logs:
        bodies = []
        for ref in (yield from coordinator.blocks_of(log)):
            bodies.append((yield from coordinator.block(ref)))
        left[log.task, log.subtask] = in_flight.records_by_channel(in_flight.decode(bodies))
    blocks = FetchedBlocks()
    while True:
        spec = TaskSpec(
            reference={}, parallelism=manifest.parallelism, incarnation=1, attempt=0, manifest=base, topic=world.topic
        )
        replay = Replay(world.planned(manifest.parallelism), spec, ranges, logs, blocks, left)
        try:
            replay.run()
            break
        except Awaited as wanted:
            refs = wanted.refs
        yield from blocks.get(world, refs)
    records = replay.outputs[lost.sink, lost.subtask]
    share = shares(manifest.committables)[lost.transactional_id]
    found: dict[tuple[str, int], Records] = {place: [] for place in lost.counts}
    for key, value in records[share.start : share.stop]:
        place = (lost.sink, output_partition(key, world.output_partitions))
        if place in found:
            found[place].append((key, value))
    counts = {place: len(each) for place, each in found.items()}
    if counts != dict(lost.counts):
        return f"a replay gives {counts}, not {lost.counts}"
    world.seen["replay"] += 1
    world.seen["replay behind records on their way"] += bool(base.channel_logs)
    world.seen["replay up to records on their way"] += bool(manifest.channel_logs)
    world.seen["replay of a part"] += len(records) != len(share)
    return (yield from _produced(coordinator, lost, name, found))


def _ranges(world: World, base: Manifest, manifest: Manifest) -> Generator[int | None, None, Ranges]:
    begins = {(each.source, each.partition): each.offset for each in base.offsets}
    found: Ranges = {}
    for each in manifest.offsets:
        begin = begins.get((each.source, each.partition), 0)
        topic = topic_of(each.source)
        log = yield from world.until_answered("fetch", topic, each.partition, begin, Isolation.READ_COMMITTED)
        found[each.source, each.partition] = [
            Message(topic=topic, partition=each.partition, offset=r.offset, value=r.value, timestamp=(1, 0))
            for r in log.records
            if r.offset < each.offset
        ]
    return found


def _logs(
    coordinator: SimulatedCoordinator, manifest: Manifest
) -> Generator[int | None, None, dict[tuple[str, int], list[bytes]]]:
    """The order logs of the interval by task and subtask, those of aborted checkpoints too."""
    found: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
    for log in manifest.order_logs:
        for ref in log.blocks:
            found[log.task, log.subtask].append((yield from coordinator.block(ref)))
    return found


class _Range:
    """The reader of a lane: what is left of a range."""

    leader_epoch = -1

    def __init__(self, messages: list[Message]) -> None:
        self._messages = list(messages)

    def read(self, count: int) -> list[Message]:
        taken, self._messages = self._messages[:count], self._messages[count:]
        return taken


class _Sent(NamedTuple):
    """The file of a channel."""

    items: list[bytes | Watermark]

    def timed(self) -> Iterator[tuple[int, Watermark | Callable[[], bytes]]]:
        for item in self.items:
            yield 0, item if isinstance(item, Watermark) else partial(bytes, item)


@dataclass
class _Collected:
    records: Records

    def write(self, outputs: Outputs) -> None:
        keys = outputs.keys if outputs.keys is not None else [None] * len(outputs.values)
        self.records += zip(keys, outputs.values, strict=True)


@dataclass
class Replay:
    plan: Plan
    spec: TaskSpec
    ranges: Ranges
    logs: dict[tuple[str, int], list[bytes]]
    blocks: FetchedBlocks
    left: dict[tuple[str, int], dict[str, int]]
    """The in-flight records at the end, by task and subtask, and channel."""
    outputs: defaultdict[tuple[str, int], Records] = field(default_factory=lambda: defaultdict(list))
    """Outputs by sink and subtask."""
    frames: defaultdict[tuple[str, int, int], list[bytes | Watermark]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Frames and watermarks by edge, sender and receiver."""

    def run(self) -> None:
        for task in self.plan.tasks:
            for subtask in range(self.plan.parallelism):
                ends = ReplayEnds(self, subtask)
                assembler = Assembler(self.plan, self.spec, subtask, self.blocks, HashMapBackend())
                operators = TaskOperators(task.name, subtask)
                assembler.assemble(task, ends, operators)
                lanes, sources = ends.lanes, ends.sources
                operators.order = order_runs(task, self.plan.shuffles, several=len(lanes) > 1)
                logs, left = self.logs.get((task.name, subtask), []), self.left.get((task.name, subtask), {})
                if logs or left or self.plan.graph.has_event_time:
                    ordering.take_along(lanes, sources, logs, operators, left)
                else:
                    ordering.take_by_time(lanes, sources, operators, ordering.BatchTime())


@dataclass
class ReplayEnds:
    """The inputs and outputs of a replay's subtask."""

    replay: Replay
    subtask: int
    partitions: list[ordering.Lane] = field(default_factory=list)
    channels: dict[str, ordering.ChannelLane] = field(default_factory=dict)
    sources: dict[str, ordering.SourceWatermarks] = field(default_factory=dict)

    @property
    def lanes(self) -> list[ordering.Lane]:
        return [*self.partitions, *self.channels.values()]

    def read(self, node: Node, head: ops.BatchOperator) -> None:
        assert isinstance(node.source, KafkaSource)
        known = [noted for noted in self.replay.spec.manifest.offsets if noted.source == node.id]
        decoder = SourceDecoder(node.id, node.source, before=known)
        if decoder.times is not None:
            self.sources[node.id] = ordering.SourceWatermarks(node.id, decoder.times, head)
        for (source, partition), messages in self.replay.ranges.items():
            if source == node.id and partition % self.replay.plan.parallelism == self.subtask:
                reader: Any = _Range(messages)
                self.partitions.append(ordering.PartitionLane(source, partition, reader, decoder, head))
                if decoder.times is not None and (messages or partition in {noted.partition for noted in known}):
                    decoder.times.found(partition)

    def receive(self, edge: ShuffleEdge, codec: BatchCodec, push: Push, ports: Sequence[Port]) -> None:
        for sender in range(self.replay.plan.parallelism):
            name = f"{edge.name}:{sender}"
            sent = self.replay.frames[edge.name, sender, self.subtask]
            port = ports[sender] if ports else None
            files: Any = _Sent(sent)
            self.channels[name] = ordering.ChannelLane(name, [files], codec, push, port=port)

    def restore(self, frames: Sequence[InFlightFrame], edges: Mapping[str, RestoredEdge]) -> None:
        for frame in frames:
            edge = edges[frame.edge]
            lane = ordering.ChannelLane(frame.channel, [], edge.codec, edge.push)
            self.channels.setdefault(frame.channel, lane).before.append(frame.frame)

    def send(self, edge: ShuffleEdge, codec: BatchCodec) -> ops.Shuffle:
        def send(receiver: int, batch: Batch) -> None:
            self.replay.frames[edge.name, self.subtask, receiver].append(codec.encode(batch))

        def tell(watermark: Watermark) -> None:
            for receiver in range(parallelism):
                self.replay.frames[edge.name, self.subtask, receiver].append(watermark)

        parallelism, max_parallelism = self.replay.plan.parallelism, self.replay.plan.graph.max_parallelism
        shuffle = ops.ToAll if edge.to_all else ops.Shuffle
        return shuffle(edge.name, send, parallelism, max_parallelism, tell=tell)

    def write(self, node: Node) -> Push:
        if not isinstance(node.sink, KafkaSink):
            return _ignored
        graph = self.replay.plan.graph
        encoder = node.sink.encoder(graph.type_of(node.inputs[0]))
        return sink_output(node, graph, _Collected(self.replay.outputs[node.id, self.subtask]).write, encoder)

    def touched_groups(self, node: Node) -> None:
        """All."""

    def come_round(self, edge: FeedbackEdge, codec: BatchCodec, push: Push) -> None:
        raise AssertionError("loops are not replayed")

    def feed(self, edge: FeedbackEdge, codec: BatchCodec) -> Push:
        raise AssertionError("loops are not replayed")


def _ignored(batch: Batch) -> None:
    """Output that a sink has staged is not lost with a transaction."""


def _produced(
    coordinator: SimulatedCoordinator, lost: Committable, name: str, found: dict[tuple[str, int], Records]
) -> Steps:
    world = coordinator.world
    answer = yield from world.until_answered(
        "init_transactions", name, world.transaction_timeout_ms, again=(Error.CONCURRENT_TRANSACTIONS,)
    )
    written = []
    for place, records in found.items():
        world.faults.before_request(coordinator)
        yield None
        produced = yield from world.until_answered(
            "produce", name, answer.producer_id, answer.epoch, *place, records, sequence=0
        )
        if produced.error is not Error.NONE:
            raise BrokerUnavailable(f"the repair was refused: {produced.error.name}")
        written.append(Written(*place, produced.first_offset, len(records)))
    producer = {"transactional_id": name, "producer_id": answer.producer_id, "epoch": answer.epoch}
    return msgspec.structs.replace(lost, **producer, written=tuple(written))
