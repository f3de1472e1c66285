"""The building of one worker's subtasks: operators, tables, readers, writers and channels, made of the plan and wired.

Invariant: what is made here comes from the imported pipeline, the coordinator's `Start` and the worker's clients alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from exactlyonce.checkpoint.block_storage import AttemptBlocks
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import Readable, ReaderContext
from exactlyonce.engines import in_flight
from exactlyonce.engines import operators as ops
from exactlyonce.engines.activity import Activity
from exactlyonce.engines.backends import in_memory, state_backend
from exactlyonce.engines.batch_codec import BatchCodec, records_in
from exactlyonce.engines.blocks import BlockNames, StagedBlocks, whole_or_halt
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.channels import Channel, LocalChannel, SocketChannel
from exactlyonce.engines.local.clients import Clients
from exactlyonce.engines.local.inputs import ChannelInput, Input, RestoredChannel, RestoredInput, SourceInput
from exactlyonce.engines.local.loops import FeedbackInput, LoopChannel
from exactlyonce.engines.local.pace import ALIGNED, OVERTAKING
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.order_log import order_runs
from exactlyonce.engines.plan import FeedbackEdge, Plan, ShuffleEdge, Task, plan, share_of
from exactlyonce.engines.wiring import close_functions, declared, make_operator, table_of
from exactlyonce.pipeline.context import Context
from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.graph import Input as NodeInput
from exactlyonce.pipeline.graph import Kind, LogicalGraph, Node
from exactlyonce.pipeline.sink import naming
from exactlyonce.pipeline.wire import describe
from exactlyonce.sinks.writer import GrantedWriter, SinkWriter, Writable, WriterContext
from exactlyonce.state.backend import StateBackend, Table

Send = Callable[[msg.ToCoordinator], None]


@dataclass
class Built:
    """Everything that one worker runs."""

    blocks: AttemptBlocks
    activity: Activity
    subtasks: list[Subtask] = field(default_factory=list)
    """In the plan's order: those nearest to the sources first."""
    writers: list[SinkWriter] = field(default_factory=list)
    sockets: list[SocketChannel] = field(default_factory=list)
    outgoing: list[SocketChannel] = field(default_factory=list)
    """Those of them that this worker writes to."""
    functions: list[Any] = field(default_factory=list)
    """The user's functions, as they were made here."""
    notes: list[str] = field(default_factory=list)
    """What sinks and tables have to say since the last report."""
    backend: StateBackend = field(default_factory=in_memory)
    """Of all tables."""

    def close(self) -> None:
        """At a clean end: what the user's operators opened is closed."""
        close_functions(self.functions)
        for subtask in self.subtasks:
            for source in subtask.sources:
                source.reader.close()
        self.backend.close()

    def breathe(self) -> None:
        """Between two chunks of a batch that takes long: sinks and blocks go on; see `engines.operators`."""
        for writer in self.writers:
            writer.poll()
        self.blocks.poll()

    def granted(self, grant: msg.Granted) -> None:
        """The writer of a sink may write with a transactional id."""
        writer = next(writer for writer in self.writers if writer.sink == grant.sink)
        cast("GrantedWriter", writer).granted(grant.transactional_id, grant.producer_id, grant.epoch)


def build(start: msg.Start, graph: LogicalGraph, clients: Clients, send: Send, activity: Activity) -> Built:
    """Make a worker's part of *graph*, restore its state, open its channels; nothing is read or produced yet."""
    activity.phase(f"connecting to topic {start.topic.name}")
    built = Built(clients.block_writer(), activity)
    activity.breath = built.breathe
    builder = _Builder(start, send, plan(graph, start.parallelism), clients, built)
    for task in builder.plan.tasks:
        builder.task(task)
    for subtask in built.subtasks:
        for source in subtask.sources:
            source.reader.open()
    return built


class _Builder:
    def __init__(self, start: msg.Start, send: Send, plan: Plan, clients: Clients, built: Built) -> None:
        self.start, self.send, self.plan, self.clients, self.built = start, send, plan, clients, built
        loops = {each.id: describe(each.type) for each in plan.graph.loops}
        self.names = BlockNames(start.subtask, in_flight.said_of_records(loops))
        self.cautious = start.attempt > 0
        self.bounds = OVERTAKING if start.unaligned else ALIGNED
        self.reader = clients.block_reader()
        self.built.backend = state_backend(start.state, plan.graph, start.subtask, start.parallelism)
        self.operators: dict[str, Any] = {}
        now_s, graph = built.activity.now_s, self.plan.graph
        self.loops = {
            edge.name: LoopChannel(graph.node(edge.loop), graph.node(edge.producer), now_s)
            for edge in self.plan.feedback
        }
        """By edge."""
        self.channels = self._channels()
        with whole_or_halt(start.manifest):
            self.in_flight = in_flight.restored(
                start.manifest, plan.graph, start.subtask, start.parallelism, self.reader, start.skips
            )
        """What goes first, of all tasks."""
        for edge, loop in self.loops.items():
            frames = [each.frame for each in self.in_flight if each.edge == edge]
            loop.takes_over(sum(map(records_in, frames)), sum(map(len, frames)))

    def _channels(self) -> dict[tuple[str, str, int], Channel]:
        """By ("in" or "out", edge, other subtask)."""
        me = self.start.subtask
        found: dict[tuple[str, str, int], Channel] = {}
        for edge, i, j in self.plan.channels():
            if me not in (i, j):
                continue
            if i == j:
                found["in", edge, i] = found["out", edge, i] = self.loops.get(edge) or LocalChannel()
                continue
            side, other = ("out", j) if i == me else ("in", i)
            channel = SocketChannel(self.clients.pipe(f"{side}:{edge}:{i}:{j}"))
            found[side, edge, other] = channel
            self.built.sockets.append(channel)
            self.built.outgoing += [channel] if side == "out" else []
        return found

    def task(self, task: Task) -> None:
        """Make this worker's subtask of *task*."""
        inputs: list[Input] = []
        tables: list[Table[Any]] = []
        writers: list[SinkWriter] = []
        for node in task.nodes:
            self.operators[node.id] = operator = self._operator(node, tables, writers)
            if node.kind is Kind.SOURCE:
                inputs.append(self._source(node, operator))
            for read in node.inputs if node.kind is not Kind.FEEDBACK else ():
                inputs += self._connect(read, node, operator)
        feedback = self.plan.feedback
        inputs += [self._comes_round(edge) for edge in feedback if edge.loop in {node.id for node in task.loops}]
        fed = [self._feed(edge) for edge in feedback if edge.producer in {node.id for node in task.nodes}]
        outputs = [
            self.channels["out", edge.name, j] for edge in self.plan.out_of(task) for j in range(self.plan.parallelism)
        ]
        several = len(inputs) > 1 or any(isinstance(each, SourceInput) for each in inputs)
        self.built.subtasks.append(
            Subtask(
                name=task.name,
                index=self.start.subtask,
                inputs=inputs,
                tables=tables,
                sinks=writers,
                outputs=outputs,
                fed=fed,
                blocks=self.built.blocks,
                names=self.names,
                acknowledge=self.send,
                order=order_runs(task, self.plan.shuffles, several=several),
                monotonic_s=self.clients.monotonic_s,
                exactly_once=self.start.mode == EXACTLY_ONCE,
                incremental=self.start.incremental,
                restored=self._restored(task),
            )
        )
        self.built.writers += writers

    def _restored(self, task: Task) -> RestoredInput | None:
        """What was on its way to operators of *task*, at whatever parallelism."""
        ids = {node.id for node in task.nodes}
        edges = {
            ShuffleEdge(each.key_by, each.stateful).name: RestoredChannel(
                BatchCodec(self.plan.graph.type_of(NodeInput(each.key_by))), self.operators[each.stateful]
            )
            for each in self.plan.graph.shuffles
            if each.stateful in ids
        }
        for loop in task.loops:
            name = next(edge.name for edge in self.plan.feedback if edge.loop == loop.id)
            edges[name] = RestoredChannel(BatchCodec(loop.type), self.operators[loop.id])
        frames = deque(each for each in self.in_flight if each.edge in edges)
        if not frames:
            return None
        return RestoredInput(frames, edges, cautious=self.cautious, bounds=self.bounds, now_s=self.built.activity.now_s)

    def _connect(self, read: NodeInput, node: Node, operator: ops.Push) -> list[Input]:
        """Wire an edge: a call within the task, or channels from every subtask of the task before."""
        edge = self.plan.shuffle_into(node, read)
        if edge is None:
            ops.listeners(self.operators[read.node], read.output).append(operator)
            return []
        codec = BatchCodec(self.plan.graph.type_of(read))
        parallelism = self.plan.parallelism

        def send(subtask: int, batch: ops.Batch) -> None:
            self.channels["out", edge.name, subtask].send(codec.encode(batch), len(batch.records))

        self.operators[read.node].downstream.append(
            ops.Shuffle(edge.name, send, parallelism, self.plan.graph.max_parallelism)
        )
        return [
            ChannelInput(
                f"{edge.name}:{i}",
                self.channels["in", edge.name, i],
                codec,
                operator,
                siblings=parallelism,
                cautious=self.cautious,
                bounds=self.bounds,
                now_s=self.built.activity.now_s,
            )
            for i in range(parallelism)
        ]

    def _feed(self, edge: FeedbackEdge) -> LoopChannel:
        """Wire the end of a loop."""
        channel, codec = self.loops[edge.name], BatchCodec(self.plan.graph.node(edge.loop).type)

        def send(batch: ops.Batch) -> None:
            if batch.records:
                channel.send(codec.encode(batch), len(batch.records))

        ops.listeners(self.operators[edge.producer], edge.output).append(send)
        return channel

    def _comes_round(self, edge: FeedbackEdge) -> FeedbackInput:
        """The beginning of a loop."""
        return FeedbackInput(
            f"{edge.name}:{self.start.subtask}",
            self.loops[edge.name],
            BatchCodec(self.plan.graph.node(edge.loop).type),
            self.operators[edge.loop],
            cautious=self.cautious,
            now_s=self.built.activity.now_s,
        )

    def _operator(self, node: Node, tables: list[Table[Any]], writers: list[SinkWriter]) -> Any:
        if node.kind is Kind.SINK:
            return self._sink(node, writers)
        context = Context(node.id, self.start.subtask, self.start.parallelism)
        made = make_operator(node, context, self._table, self.built.activity)
        self.built.functions += made.functions
        tables += made.tables
        return made.operator

    def _table(self, node: Node) -> Table[Any]:
        """The operator's table, with what the manifest has of it."""
        start = self.start
        return table_of(
            node, self.plan.graph, start.parallelism, start.subtask, start.manifest, self.reader,
            drops_fields=start.drops_fields, backend=self.built.backend,
        )  # fmt: skip

    def _source(self, node: Node, operator: ops.Push) -> SourceInput:
        start, activity, source = self.start, self.built.activity, cast("Readable", node.source)
        mine = share_of(start.offsets[node.id], start.parallelism, start.subtask)
        topic_id = start.topic_ids[source.topic]
        before = [each for each in start.manifest.offsets if each.source == node.id]
        epochs = {each.partition: each.leader_epoch for each in before}
        context = ReaderContext(
            source=node.id,
            positions=[
                SourceOffset(node.id, source.topic, topic_id, partition, offset, epochs.get(partition, -1))
                for partition, offset in mine.items()
            ],
            topic_id=topic_id,
            targets=start.targets.get(node.id, {}),
            clients=self.clients,
        )
        reader = source.open_reader(context)
        return SourceInput(
            node.id,
            reader,
            source,
            operator,
            activity,
            before,
            cautious=self.cautious,
            bounds=self.bounds,
            now_s=activity.now_s,
            skips=start.skips,
        )

    def _sink(self, node: Node, writers: list[SinkWriter]) -> Any:
        start, activity = self.start, self.built.activity
        activity.phase(f"opening sink {node.id!r}")
        context = WriterContext(
            pipeline=self.plan.graph.pipeline_id,
            sink=node.id,
            subtask=start.subtask,
            incarnation=start.incarnation,
            attempt=start.attempt,
            type=self.plan.graph.type_of(node.inputs[0]),
            slots=start.slots,
            clients=self.clients,
            staging=StagedBlocks(self.built.blocks, self.names, node.id, start.subtask),
            prepared=lambda name: self.send(msg.Prepared(node.id, start.subtask, name)),
            note=self.built.notes.append,
        )
        with naming(node.id):
            opened = cast("Writable", node.sink).open_writer(context)
        writers.append(opened.writer)
        return ops.SinkOutput(
            node.id, opened.writer, opened.encoder, declared=declared(node, self.plan.graph), activity=activity
        )
