"""A unit of bounded work: one subtask of one task, from the beginning of its inputs to their end, in any process.

Invariants: it reads exactly the given ranges and files; its files and blocks carry the attempt's label or a fresh key,
so that two attempts never meet; it opens no transaction; its work counts only once the driver has the receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from exactlyonce.checkpoint.block_storage import BlockStorage
from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import partitioner
from exactlyonce.connectors.source import RangeContext, Readable, SplitReader
from exactlyonce.engines.blocks import in_memory
from exactlyonce.engines.bounded.unit.comparison import ComparableRows
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.messages import Reading, Receipt, Stage, Unit, WorkPlace
from exactlyonce.engines.bounded.unit.ordering import (
    BatchTime,
    ChannelLane,
    Lane,
    PartitionLane,
    ReaderInTurn,
    SourceWatermarks,
    take_along,
    take_by_time,
)
from exactlyonce.engines.bounded.unit.outgoing import ByPartition, Distribution, LanesByKey, Sending, Staging
from exactlyonce.engines.bounded.unit.staging import Frames, FrameWriter, StagedFiles, ranges_in
from exactlyonce.engines.plan import FeedbackEdge, Plan, ShuffleEdge, Task, plan
from exactlyonce.engines.runtime.assembler import Assembler, RestoredEdge, TaskOperators, close_function, sink_output
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Push
from exactlyonce.engines.runtime.cut import WorkerBlocks, finish
from exactlyonce.engines.runtime.faults import Notes, place_of
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.operators import BatchOperator, Shuffle
from exactlyonce.engines.runtime.order_log import order_runs
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.engines.runtime.watermarks import Port
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.dead_letters import DEAD_LETTERS
from exactlyonce.pipeline.errors import GraphError, InvariantViolation, text_of, users_errors
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import Node
from exactlyonce.pipeline.loading import load_reference
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.kafka.writer import KafkaProducers
from exactlyonce.sinks.writer import SinkEncoder, WaitingWriter, WritesToTopic

QUEUE_KILOBYTES = 65_536
QUEUE_KILOBYTES_MIN = 4_096
"""The records that the client may fetch ahead, of all partitions of a unit, and of one at least."""
WAIT_S = 0.05
BLOCKS_TIMEOUT_S = 120.0

_encode = msgspec.msgpack.Encoder().encode
_place_decoder = msgspec.msgpack.Decoder(WorkPlace)
_stage_decoder = msgspec.msgpack.Decoder(Stage)
_unit_decoder = msgspec.msgpack.Decoder(Unit)


def run_unit(place: bytes, attempt_label: str) -> bytes:
    """Run the unit at an encoded `WorkPlace`; return the encoded `Receipt`. No two attempts have the same label."""
    return _encode(_run(_place_decoder.decode(place), attempt_label))


def _run(place: WorkPlace, label: str) -> Receipt:
    began_ms = SystemClock().now_ms()
    with closing(StagedFiles()) as files:
        of_stage, of_unit = place.parts
        stage = KEPT.stage(of_stage, lambda: _stage_decoder.decode(files.message(of_stage)))
        unit = _unit_decoder.decode(files.message(of_unit))
        spec = stage.spec
        graph = load_reference(spec.reference).build()
        if graph.fingerprint() != stage.fingerprint:
            raise GraphError(
                "A unit imported another pipeline than the driver: the executors have another version of its module, "
                "or the graph depends on something that differs between processes (time, random numbers, the "
                "environment)."
            )
        physical = plan(graph, spec.parallelism)
        task = next(task for task in physical.tasks if task.name == unit.task)
        kept = KEPT.storage(place.client, spec.topic, spec.storage, stage.state)
        with kept as storage, KEPT.collector.collecting_rarely():
            blocks = WorkerBlocks(storage.begin(spec.incarnation, spec.attempt)) if stage.write_state else None
            assembly = Assembly(
                stage, unit, place.client, plan=physical, task=task, label=label, files=files, storage=storage,
                blocks=blocks,
            )  # fmt: skip
            return _run_task(assembly, began_ms)


def _run_task(assembly: Assembly, began_ms: int) -> Receipt:
    try:
        several = len(assembly.lanes) > 1 or bool(assembly.partitions)
        assembly.operators.order = order_runs(assembly.task, assembly.plan.shuffles, several=several)
        _take(assembly)
        sent = tuple(file for sending in assembly.sendings for file in sending.close())
        outputs = tuple(file for staging in assembly.stagings for file in staging.close())
        ack = _acknowledgement(assembly)
    finally:
        notes = assembly.close()
    hit("unit-computed")
    return Receipt(
        ack=ack,
        sent=sent,
        outputs=outputs,
        records=sum(lane.records for lane in assembly.partitions),
        skipped=tuple(skipped for decoder in assembly.decoders for skipped in decoder.skipped.values()),
        began_ms=began_ms,
        ended_ms=SystemClock().now_ms(),
        label=assembly.label,
        notes=tuple(notes),
        in_turn=any(distribution.keyless for distribution in assembly.distributions),
    )


def _take(assembly: Assembly) -> None:
    """Push all input through the operators, which note the order.

    A replay needs an order log where its input can be taken in several orders. Older versions wrote none for one lane.
    """
    unit, operators, lanes, sources = assembly.unit, assembly.operators, assembly.lanes, assembly.sources
    along_log = bool(unit.order or unit.left or (unit.order is not None and assembly.plan.graph.has_event_time))
    if not along_log and unit.order is not None and operators.order is not None:
        along_log = operators.order.batches or sum(lane.time_ms() is not None for lane in lanes) > 1
    if along_log:
        take_along(lanes, sources, unit.order or (), operators, unit.left)
    else:
        take_by_time(lanes, sources, operators, assembly.clock)
    operators.answers.require_taken()


def _acknowledgement(assembly: Assembly) -> Ack:
    unit, stage, blocks = assembly.unit, assembly.stage, assembly.blocks
    ends = {(lane.name, lane.partition): lane.decoder.noted(lane.reader.position()) for lane in assembly.partitions}
    offsets = tuple(ends[reading.source, reading.partition] for reading in unit.readings)
    if blocks is None:
        return Ack(unit.task, unit.subtask, stage.checkpoint, offsets)
    operators, attempt = assembly.operators, blocks.attempt
    cut = operators.cut(stage.checkpoint, stage.spec.manifest.checkpoint, offsets, whole=not stage.spec.incremental)

    def wait() -> None:
        attempt.wait(BLOCKS_TIMEOUT_S)
        for writer in operators.sinks:
            writer.poll(WAIT_S)

    return finish(cut.acknowledge(operators.blocks(blocks, stage.checkpoint)), wait)


class Assembly:
    """One subtask of one task, ready to run, and its `TaskIO`.

    *files* reads what was sent; *storage* has the state of the base. *blocks* takes the staged output of sinks; None:
    the unit recomputes. *label* is the attempt's.
    """

    def __init__(
        self,
        stage: Stage,
        unit: Unit,
        client: dict[str, str],
        *,
        plan: Plan,
        task: Task,
        label: str,
        files: StagedFiles,
        storage: BlockStorage,
        blocks: WorkerBlocks | None,
    ) -> None:
        self.stage, self.unit, self.plan, self.task, self.label = stage, unit, plan, task, label
        self.blocks = blocks
        self.operators = TaskOperators(task.name, unit.subtask)
        if unit.order is not None:
            self.operators.answers.replay(unit.order)
        self.clock = BatchTime()
        self.partitions: list[PartitionLane] = []
        self.sources: dict[str, SourceWatermarks] = {}
        """Those with event time."""
        self.channels: dict[str, ChannelLane] = {}
        self.sendings: list[Sending] = []
        self.stagings: list[Staging] = []
        self.distributions: list[ByPartition] = []
        self.decoders: list[SourceDecoder] = []
        self._sent = _sent_to(unit, stage, files, {edge.name for edge in plan.into(task)})
        self._config = ClientConfig(client)
        self._notes = Notes()
        self._producers = ThreadPoolExecutor(1, "producers")
        self._staying = set[ReaderInTurn]()
        self._assembler = Assembler(plan, stage.spec, unit.subtask, storage, in_memory(), notes=self._notes)
        try:
            self._assembler.assemble(task, self, self.operators)
        except BaseException:
            self.close()
            raise

    @property
    def lanes(self) -> list[Lane]:
        return [*self.partitions, *self.channels.values()]

    def close(self) -> list[str]:
        """Close sinks, readers and the user's operators; return notes for a person.

        An exception of the user's `close()` comes after all work, and is only noted.
        """
        for writer in self.operators.sinks:
            writer.abandon()
        self._producers.shutdown(wait=False)
        for lane in self.partitions:
            lane.reader.close()
        return [*self._notes.take_lines(), *self._close_operators()]

    def _close_operators(self) -> Iterator[str]:
        for operator, function in self.operators.functions:
            try:
                close_function(function)
            except users_errors() as error:
                raised = f"{type(error).__name__}: {text_of(error)}{place_of(error)}"
                yield f"close() of operator {operator!r} raised {raised}, after all its work: nothing is lost"

    # --- ends ----------------------------------------------------------------------------------------------------

    def read(self, node: Node, head: BatchOperator) -> None:
        source, unit, stage = cast("Readable", node.source), self.unit, self.stage
        base = [] if unit.split else [noted for noted in stage.spec.manifest.offsets if noted.source == node.id]
        letters = self.operators.dead_letters.get(node.id)
        decoder = SourceDecoder(
            node.id, source, before=base, skips=stage.spec.skips, dead_letters=letters, rules=stage.rules
        )
        self.decoders.append(decoder)
        kilobytes = max(QUEUE_KILOBYTES_MIN, QUEUE_KILOBYTES // max(1, len(unit.readings)))

        def opening(reading: Reading) -> Callable[[SourceOffset], SplitReader]:
            end, to_end = reading.end, reading.to_end
            return lambda start: source.open_range(
                RangeContext(start=start, end=end, to_end=to_end, client=client, kilobytes=kilobytes)
            )

        client = {"group.id": self.plan.graph.pipeline_id, **self._config.settings}
        known = {(noted.partition, noted.offset): noted for noted in base}
        times = decoder.times
        if times is not None:
            self.sources[node.id] = SourceWatermarks(node.id, times, head)
        for reading in unit.readings:
            if reading.source == node.id:
                noted = known.get((reading.partition, reading.start))
                start = noted or SourceOffset(
                    node.id, reading.topic, reading.topic_id, reading.partition, reading.start
                )
                reader = ReaderInTurn(start, opening(reading), self._staying)
                lane = PartitionLane(node.id, reading.partition, reader, decoder, head)
                self.partitions.append(lane)
                found_at_end = unit.order is not None and noted is None and not reading.length
                if times is not None and not found_at_end:
                    times.found(reading.partition)
                    self.sources[node.id].lanes.append(lane)

    def receive(self, edge: ShuffleEdge, codec: BatchCodec, push: Push, ports: Sequence[Port]) -> None:
        for sender in range(self.plan.parallelism):
            name = f"{edge.name}:{sender}"
            port = ports[sender] if ports else None
            self.channels[name] = ChannelLane(name, self._sent.get((edge.name, sender), []), codec, push, port=port)

    def restore(self, frames: Sequence[InFlightFrame], edges: Mapping[str, RestoredEdge]) -> None:
        for frame in frames:  # at another parallelism the base had other channels
            edge = edges[frame.edge]
            lane = self.channels.setdefault(frame.channel, ChannelLane(frame.channel, [], edge.codec, edge.push))
            lane.before.append(frame.frame)

    def touched_groups(self, node: Node) -> Collection[int] | None:
        """The groups in any frame; None where keys arise here instead of being sent."""
        edges = {edge.name for edge in self.plan.shuffles if edge.consumer == node.id}
        if len(edges) < len(node.inputs) or self._assembler.in_flight:
            return None
        sent = (frames for (edge, _), files in self._sent.items() if edge in edges for frames in files)
        return {group for frames in sent for group in frames.entry.groups}

    def send(self, edge: ShuffleEdge, codec: BatchCodec) -> Shuffle:
        receivers, groups = self.plan.parallelism, self.plan.graph.max_parallelism
        writer = self._file(self.stage.files, f"channel-{edge.name}", receivers)
        exact = self.unit.order is not None
        sending = Sending(
            edge.name, self.unit.subtask, groups, codec, writer, self.clock, exact=exact, to_all=edge.to_all
        )
        self.sendings.append(sending)
        return sending.shuffle

    def feed(self, edge: FeedbackEdge, codec: BatchCodec) -> Push:
        raise InvariantViolation("bounded work refuses loops")

    def come_round(self, edge: FeedbackEdge, codec: BatchCodec, push: Push) -> None:
        raise InvariantViolation("bounded work refuses loops")

    def write(self, node: Node) -> Push:
        sink, graph, partitions = node.sink, self.plan.graph, self.stage.spec.output_partitions.get(node.id)
        type_ = graph.type_of(node.inputs[0])
        letters = self.operators.dead_letters.get(node.id)
        assert sink is not None
        if self.stage.without_output and node.inputs[0].output != DEAD_LETTERS:
            return _Nowhere(node.id)
        if lanes := self.stage.lanes:
            if sink.topic is not None:
                encoder = cast("WritesToTopic", sink).encoder(type_, partitions)
                return self._stage_output(node, encoder, lanes, LanesByKey(lanes))
            if (stored := sink.stored_rows(type_)) is not None:
                return self._stage_output(node, ComparableRows(stored), lanes, LanesByKey(lanes, rows=True))
            return _Nowhere(node.id)
        if sink.transactional:
            distribution: Distribution | None = None
            receivers = 1
            if self.stage.by_partition:
                receivers = self.stage.spec.output_partitions[node.id]
                partition_of = partitioner(self.stage.spec.partitioners[node.id])
                distribution = ByPartition(partition_of, receivers, self.unit.subtask)
                self.distributions.append(distribution)
            encoder = cast("WritesToTopic", sink).encoder(type_, partitions)
            return self._stage_output(node, encoder, receivers, distribution)
        if self.blocks is None:
            return self._stage_output(node, _Records(), 1, None) if self.stage.store_rows else _Nowhere(node.id)
        clients = _Clients(self._config, self._producers)
        opened = self._assembler.open_sink(node, self.operators, clients=clients, blocks=self.blocks)
        waiting = WaitingWriter(opened.writer, partial(self.blocks.attempt.poll, WAIT_S))
        return sink_output(node, graph, waiting.write, opened.encoder, dead_letters=letters)

    def _stage_output(
        self, node: Node, encoder: SinkEncoder, receivers: int, distribution: Distribution | None
    ) -> Push:
        """Stage the output of sink *node*, which *distribution* has over so many *receivers*."""
        file = self._file(self.stage.outputs or self.stage.files, f"output-{node.id}", receivers)
        staging = Staging(node.id, self.unit.subtask, file, distribution, origins=self.stage.origins)
        self.stagings.append(staging)
        letters = self.operators.dead_letters.get(node.id)
        staging.output = sink_output(node, self.plan.graph, staging.write, encoder, dead_letters=letters)
        return staging.output

    def _file(self, files: str, name: str, receivers: int) -> FrameWriter:
        """A file of this attempt among *files*. No id has a "+", so names are unique."""
        name = f"{name}-{self.unit.subtask}".replace(">", "+")
        return FrameWriter(f"{files}{name}.{self.label}", receivers)


def _sent_to(
    unit: Unit, stage: Stage, files: StagedFiles, edges: Collection[str]
) -> dict[tuple[str, int], list[Frames]]:
    """The frames that were sent to *unit*, by edge and sender, in order: each split of a sender has a file."""
    places = zip(stage.sent, ranges_in((sent.file.location for sent in stage.sent), unit.slots), strict=True)
    received = [(sent, place) for sent, place in places if place is not None and sent.edge in edges]
    found: dict[tuple[str, int], list[Frames]] = {}
    for (sent, _), frames in zip(received, files.merged([place for _, place in received]), strict=True):
        found.setdefault((sent.edge, sent.sender), []).append(frames)
    return found


@dataclass(frozen=True)
class _Clients:
    """The clients of a sink that needs no transaction."""

    config: ClientConfig
    executor: ThreadPoolExecutor
    clock: SystemClock = field(default_factory=SystemClock)

    def producers(self, topic: str, partitioner: str | None) -> KafkaProducers:
        return KafkaProducers(topic, self.config.confluent(), 0, self.executor, partitioner=partitioner)


class _Records:
    """The encoder of records for a sink of a store, whose output is only looked at."""

    def encode(self, records: Sequence[Any]) -> Outputs:
        """Each record in msgpack."""
        return Outputs([_encode(record) for record in records], None, None)


class _Nowhere(BatchOperator):
    """A sink that writes nothing: its output is another application's, or it is recomputed and only shows."""

    def __call__(self, batch: Batch) -> None:
        pass
