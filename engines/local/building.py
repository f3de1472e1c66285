"""The builder of a worker: it makes and wires the operators, tables, readers, writers and channels of its subtasks.

Invariant: all of them follow from the imported pipeline, the coordinator's `Start` and the worker's `Clients`, by which
it reaches Kafka, its peers and the time. A worker with other clients, as in a simulation, runs the same code.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from exactlyonce.checkpoint.block_storage import AttemptBlocks, Blocks
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.reader import Consumers, exact_consumer
from exactlyonce.connectors.source import Readable, ReaderContext
from exactlyonce.engines.blocks import block_storage, state_backend
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.channels import Channel, LocalChannel, LoopChannel, Pipe, SocketChannel
from exactlyonce.engines.local.inputs import (
    ALIGNED,
    BATCH_RECORDS_MAX,
    OVERTAKING,
    ChannelInput,
    FeedbackInput,
    PacedInput,
    RestoredInput,
    Slices,
    SourceInput,
    slice_pace,
)
from exactlyonce.engines.local.messages import Start
from exactlyonce.engines.local.pacing import Group, SourcePacing
from exactlyonce.engines.local.task import Snapshots, Subtask
from exactlyonce.engines.options import ROCKSDB
from exactlyonce.engines.plan import FeedbackEdge, Plan, ShuffleEdge, Task, plan, share_of
from exactlyonce.engines.runtime import operators as ops
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.assembler import Assembler, RestoredEdge, TaskOperators, sink_output
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Push, records_in
from exactlyonce.engines.runtime.cut import WorkerBlocks
from exactlyonce.engines.runtime.faults import Notes
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.order_log import order_runs
from exactlyonce.engines.runtime.source_decoder import SourceDecoder, SourceTimes
from exactlyonce.engines.runtime.timed_operators import TimedOperator
from exactlyonce.engines.runtime.watermarks import Port, Watermark
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.pipeline.records import wire_schema
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.sinks.kafka.writer import KafkaProducers, KafkaWriter, Producers
from exactlyonce.sinks.writer import SinkWriter
from exactlyonce.state.backend import StateBackend


class Clients(Protocol):
    """The clients of one worker."""

    @property
    def clock(self) -> Clock: ...

    @property
    def monotonic_s(self) -> Callable[[], float]:
        """Time that only grows, finer than the clock's."""

    @property
    def processing_s(self) -> Callable[[], float]:
        """See `Clock.processing_s`."""

    def block_writer(self) -> AttemptBlocks:
        """The writer of this attempt's blocks."""

    def block_reader(self) -> Blocks: ...

    def consumers(self, topic: str, client: ClientConfig | None = None) -> Consumers:
        """The consumers of a source's subtask that reads *topic*; *client*: see `connectors.source.ReadsTopic`."""

    def producers(self, topic: str, partitioner: str | None) -> Producers:
        """The producers of a sink's subtask that writes to *topic*; *partitioner*: see `WriterContext`."""

    def pipe(self, name: str) -> Pipe:
        """This worker's end of the channel that `Start` calls *name*."""


class KafkaClients:
    """The `Clients` of a worker process."""

    def __init__(self, start: Start, pipeline: str) -> None:
        self.clock = SystemClock()
        self.monotonic_s, self.processing_s = time.monotonic, self.clock.processing_s
        self._start, self._pipeline = start, pipeline
        self._config = ClientConfig(start.client)
        lazily = start.state.backend == ROCKSDB  # it reads blocks now and then
        self._blocks = block_storage(self._config, start.spec.topic, start.spec.storage, stays_connected=lazily)
        self._executor = ThreadPoolExecutor(1, "producers")
        """Makes and drops the producers of all sinks, one after the other."""

    def block_writer(self) -> AttemptBlocks:
        return self._blocks.begin(self._start.spec.incarnation, self._start.spec.attempt)

    def block_reader(self) -> Blocks:
        return self._blocks

    def consumers(self, topic: str, client: ClientConfig | None = None) -> Consumers:
        return Consumers((client or self._config).confluent({"group.id": self._pipeline}), exact_consumer)

    def producers(self, topic: str, partitioner: str | None) -> Producers:
        config, timeout_ms = self._config.confluent(), self._start.transaction_timeout_ms
        return KafkaProducers(topic, config, timeout_ms, self._executor, partitioner=partitioner)

    def pipe(self, name: str) -> socket.socket:
        pipe = socket.socket(fileno=self._start.channels[name])
        pipe.setblocking(False)
        return pipe


Send = Callable[[msg.ToCoordinator], None]
ASKS_ALONE_AFTER = 2
"""After so many restarts without a completed checkpoint, `enrich` asks about each record alone, and `map_batches` names
the record of an outage."""
MAPPED_MIN = 64
"""The records of a slice with `map_batches`, if so many are there: a call of a model costs nearly as much with one."""


@dataclass
class WorkerParts:
    """The subtasks of one worker, with everything that they run on."""

    blocks: WorkerBlocks
    activity: Activity
    backend: StateBackend
    """The backend of all tables."""
    subtasks: list[Subtask] = field(default_factory=list)
    """In the plan's order: upstream subtasks first."""
    sources: list[SourceInput] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    """The sources that are read in step, by the first of them."""
    writers: list[SinkWriter] = field(default_factory=list)
    sockets: list[SocketChannel] = field(default_factory=list)
    outgoing: list[SocketChannel] = field(default_factory=list)
    """The sockets that this worker writes to."""
    notes: Notes = field(default_factory=Notes)
    """Notes of sources, sinks and tables since the last report."""

    def close(self) -> None:
        """Close operators, readers and tables at a clean end."""
        for subtask in self.subtasks:
            subtask.operators.close()
        for source in self.sources:
            source.reader.close()
        self.backend.close()

    @property
    def unwritten(self) -> dict[str, int]:
        """See `messages.Progress`."""
        counts: dict[str, int] = {}
        for writer in self.writers:
            if writer.unwritten:
                counts[writer.sink] = counts.get(writer.sink, 0) + writer.unwritten
        return counts

    @property
    def timed(self) -> list[TimedOperator[Any]]:
        return [operator for subtask in self.subtasks for operator in subtask.operators.timed]

    @property
    def watermarks(self) -> dict[str, msg.WatermarkOf]:
        """See `messages.Progress`."""
        of_sources = {source.name: source.watermark for source in self.sources if source.watermark is not None}
        return of_sources | {each.id: msg.WatermarkOf(each.watermark, each.idle) for each in self.timed}

    def breathe(self) -> None:
        """Let sinks and blocks go on between two chunks of a slow batch; see `engines.runtime.operators`."""
        for writer in self.writers:
            writer.poll()
        self.blocks.attempt.poll()

    def granted(self, grant: msg.Granted) -> None:
        """The writer of a sink may write with a transactional id."""
        writer = next(writer for writer in self.writers if writer.sink == grant.sink)
        cast("KafkaWriter", writer).granted(grant.transactional_id, grant.producer_id, grant.epoch)


def build(start: msg.Start, graph: LogicalGraph, clients: Clients, send: Send, activity: Activity) -> WorkerParts:
    """Build a worker's subtasks of *graph*, restore their state, open their channels; nothing is read or written."""
    activity.phase(f"connecting to topic {start.spec.topic.name}")
    schemas = {loop.id: wire_schema(loop.type) for loop in graph.loops}
    backend = state_backend(start.state, graph, start.subtask, start.spec.parallelism)
    parts = WorkerParts(WorkerBlocks(clients.block_writer(), schemas), activity, backend)
    activity.breath = parts.breathe
    builder = _Builder(start, send, plan(graph, start.spec.parallelism), clients, parts)
    for task in builder.plan.tasks:
        builder.task(task)
    for source in parts.sources:
        source.reader.open()
    return parts


class _Builder:
    """Builds the subtasks of one worker: the `TaskIO` of one task at a time."""

    def __init__(self, start: msg.Start, send: Send, plan: Plan, clients: Clients, parts: WorkerParts) -> None:
        self.start, self.send_message, self.plan, self.clients, self.parts = start, send, plan, clients, parts
        self.cautious = start.spec.attempt > 0
        written = start.spec.manifest.attempt if start.spec.manifest.incarnation == start.spec.incarnation else 0
        self.fruitless = start.spec.attempt - written
        """The restarts of this incarnation since the last completed checkpoint."""
        self.bounds = OVERTAKING if start.settings.unaligned else ALIGNED
        self.processing_s = clients.processing_s
        self.assembler = Assembler(
            plan, start.spec, start.subtask, clients.block_reader(), parts.backend, parts.activity, parts.notes
        )
        graph = plan.graph
        self.loops = {
            edge.name: LoopChannel(graph.node(edge.loop), graph.node(edge.producer), parts.activity.now_s)
            for edge in plan.feedback
        }
        """The loops by edge."""
        for name, loop in self.loops.items():
            frames = [restored.frame for restored in self.assembler.in_flight if restored.edge == name]
            loop.takes_over(sum(map(records_in, frames)), sum(map(len, frames)))
        self.channels = self._channels()
        self.operators: TaskOperators
        self.inputs: list[PacedInput]
        self.outputs: list[Channel]
        self.fed: list[LoopChannel]
        self.restored: RestoredInput | None
        self.least: int
        """`Pace.least` of the task."""

    def _channels(self) -> dict[tuple[str, str, int], Channel]:
        """The channels by ("in" or "out", edge, other subtask)."""
        me = self.start.subtask
        channels: dict[tuple[str, str, int], Channel] = {}
        for edge, i, j in self.plan.channels():
            if me not in (i, j):
                continue
            if i == j:
                channels["in", edge, i] = channels["out", edge, i] = self.loops.get(edge) or LocalChannel()
                continue
            side, other = ("out", j) if i == me else ("in", i)
            channel = SocketChannel(self.clients.pipe(f"{side}:{edge}:{i}:{j}"))
            channels[side, edge, other] = channel
            self.parts.sockets.append(channel)
            self.parts.outgoing += [channel] if side == "out" else []
        return channels

    def task(self, task: Task) -> None:
        self.operators = operators = TaskOperators(task.name, self.start.subtask)
        operators.answers.asks_alone = self.fruitless >= ASKS_ALONE_AFTER
        operators.answers.repeats_for_s = self.start.settings.timeout_ms / 1000 / 3
        self.inputs, self.outputs, self.fed, self.restored = [], [], [], None
        called = [node.calls.in_flight for node in task.nodes if node.calls is not None]
        called += [min(MAPPED_MIN, node.batch_calls.max_rows) for node in task.nodes if node.batch_calls is not None]
        self.least = min(max(called, default=1), BATCH_RECORDS_MAX)
        self.assembler.assemble(task, self, operators)
        # a source may get another partition at any barrier
        several = len(self.inputs) > 1 or any(isinstance(source, SourceInput) for source in self.inputs)
        several = several or bool(operators.timed)  # it takes turns with its firings
        operators.order = order_runs(task, self.plan.shuffles, several=several)
        self.parts.subtasks.append(
            Subtask(
                operators=operators,
                inputs=self.inputs,
                outputs=self.outputs,
                fed=self.fed,
                snapshots=Snapshots(operators, self.parts.blocks, self.send_message, self.processing_s),
                monotonic_s=self.clients.monotonic_s,
                processing_s=self.processing_s,
                now_ms=self.clients.clock.now_ms,
                exactly_once=self.start.settings.mode == EXACTLY_ONCE,
                firing_slices=partial(self._firing_slices, self.least),
                least=self.least,
                incremental=self.start.spec.incremental,
                restored=self.restored,
            )
        )
        self.parts.writers += operators.sinks

    def _firing_slices(self, least: int) -> Slices:
        return Slices(slice_pace(bounds=self.bounds, least=least), self.processing_s)

    # --- ends ----------------------------------------------------------------------------------------------------

    def restore(self, frames: Sequence[InFlightFrame], edges: Mapping[str, RestoredEdge]) -> None:
        self.restored = RestoredInput(
            deque(frames), edges, cautious=self.cautious, bounds=self.bounds, least=self.least, now_s=self.processing_s
        )

    def touched_groups(self, node: Node) -> None:
        """All groups are read: any key may come."""

    def receive(self, edge: ShuffleEdge, codec: BatchCodec, push: Push, ports: Sequence[Port]) -> None:
        parallelism = self.plan.parallelism
        for sender in range(parallelism):
            self.inputs.append(
                ChannelInput(
                    f"{edge.name}:{sender}",
                    self.channels["in", edge.name, sender],
                    codec,
                    push,
                    siblings=parallelism,
                    overtaken=not edge.to_all,
                    port=ports[sender] if ports else None,
                    cautious=self.cautious,
                    bounds=self.bounds,
                    least=self.least,
                    now_s=self.processing_s,
                )
            )

    def send(self, edge: ShuffleEdge, codec: BatchCodec) -> ops.Shuffle:
        channels = [self.channels["out", edge.name, receiver] for receiver in range(self.plan.parallelism)]
        self.outputs += channels

        def send(receiver: int, batch: Batch) -> None:
            channels[receiver].send(codec.encode(batch), len(batch.records))

        def tell(watermark: Watermark) -> None:
            for channel in channels:
                channel.send_signal(watermark)

        shuffle = ops.ToAll if edge.to_all else ops.Shuffle
        return shuffle(edge.name, send, self.plan.parallelism, self.plan.graph.max_parallelism, tell=tell)

    def come_round(self, edge: FeedbackEdge, codec: BatchCodec, push: Push) -> None:
        name = f"{edge.name}:{self.start.subtask}"
        self.inputs.append(
            FeedbackInput(
                name,
                self.loops[edge.name],
                codec,
                push,
                cautious=self.cautious,
                least=self.least,
                now_s=self.processing_s,
            )
        )

    def feed(self, edge: FeedbackEdge, codec: BatchCodec) -> Push:
        channel = self.loops[edge.name]
        self.fed.append(channel)

        def send(batch: Batch) -> None:
            if batch.records:
                channel.send(codec.encode(batch), len(batch.records))

        return send

    def read(self, node: Node, head: ops.BatchOperator) -> None:
        start, source = self.start, cast("Readable", node.source)
        mine = share_of(start.offsets[node.id], start.spec.parallelism, start.subtask)
        before = [offset for offset in start.spec.manifest.offsets if offset.source == node.id]
        letters = self.operators.dead_letters.get(node.id)
        notes = self.parts.notes
        decoder = SourceDecoder(node.id, source, notes, before, skips=start.spec.skips, dead_letters=letters)
        pacing = None if decoder.times is None else self._pacing(node, decoder.times)
        # it costs something, and operators that hold no records, as windows, need it less
        divides = any(after.timed is not None and after.timed.holds_records for after in self.plan.graph.after(node))
        context = ReaderContext(
            source=node.id,
            positions=[*mine.values()],
            targets=start.targets.get(node.id),
            clients=self.clients,
            divide=pacing.divide if pacing is not None and divides else None,
        )
        slices = Slices(slice_pace(cautious=self.cautious, bounds=self.bounds, least=self.least), self.processing_s)
        reader, activity = source.open_reader(context), self.parts.activity
        read = SourceInput(node.id, reader, decoder, head, activity, slices, head, pacing=pacing)
        self.inputs.append(read)
        self.parts.sources.append(read)

    def _pacing(self, node: Node, times: SourceTimes) -> SourcePacing:
        """The pacing of source *node*, within its group."""
        group = self.parts.groups.setdefault(self.plan.graph.time_groups[node.id], Group())
        pacing = SourcePacing(times, times.max_drift_ms, self.parts.activity.now_s, group)
        group.members.append(pacing)
        return pacing

    def write(self, node: Node) -> Push:
        start, activity = self.start, self.parts.activity
        activity.phase(f"opening sink {node.id!r}")
        opened = self.assembler.open_sink(
            node,
            self.operators,
            clients=self.clients,
            blocks=self.parts.blocks,
            slots=start.settings.slots,
            prepared=lambda name: self.send_message(msg.Prepared(node.id, start.subtask, name)),
            note=self.parts.notes.add,
        )
        letters = self.operators.dead_letters.get(node.id)
        return sink_output(node, self.plan.graph, opened.writer.write, opened.encoder, activity, letters)
