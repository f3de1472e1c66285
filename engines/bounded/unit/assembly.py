"""The assembly of a unit: the operators of a task, wired to what is read and to the files that it writes.

Invariant: it runs the operators that a local worker runs, made by the same functions; only the ends differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from exactlyonce.checkpoint.block_storage import AttemptBlocks
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.source import RangeContext, Readable, SplitReader
from exactlyonce.engines import in_flight
from exactlyonce.engines import operators as ops
from exactlyonce.engines.backends import in_memory
from exactlyonce.engines.batch_codec import BatchCodec
from exactlyonce.engines.blocks import BlockNames, StagedBlocks, block_storage, whole_or_halt
from exactlyonce.engines.bounded.unit.messages import Unit
from exactlyonce.engines.bounded.unit.ordering import BatchTime, ChannelLane, Lane, PartitionLane
from exactlyonce.engines.bounded.unit.outgoing import Sending, Staging
from exactlyonce.engines.bounded.unit.staging import FrameWriter, StagedFile
from exactlyonce.engines.bounded.unit.turns import ReaderInTurn
from exactlyonce.engines.plan import Plan, ShuffleEdge, Task
from exactlyonce.engines.source_decoder import SourceDecoder
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.engines.wiring import close_functions, declared, make_operator, table_of
from exactlyonce.pipeline.context import Context
from exactlyonce.pipeline.errors import USERS_ERRORS, InvariantViolation, text_of
from exactlyonce.pipeline.graph import Input, Kind, Node
from exactlyonce.pipeline.sink import naming
from exactlyonce.sinks.kafka.producers import KafkaProducers
from exactlyonce.sinks.writer import SinkWriter, Writable, WriterContext, WritesToTopic
from exactlyonce.state.backend import Table

QUEUE_KILOBYTES = 65_536
QUEUE_KILOBYTES_MIN = 4_096
"""What the client may fetch ahead, of all partitions that a unit reads, and of one at least."""
WAIT_S = 0.05


@dataclass
class Assembly:
    """One subtask of one task, ready to run."""

    clock: BatchTime
    lanes: list[Lane] = field(default_factory=list)
    tables: list[Table[Any]] = field(default_factory=list)
    sendings: list[Sending] = field(default_factory=list)
    stagings: list[Staging] = field(default_factory=list)
    writers: list[SinkWriter] = field(default_factory=list)
    """Of the sinks that set their output aside in blocks, write it at once, or show it."""
    decoders: list[SourceDecoder] = field(default_factory=list)
    functions: list[tuple[str, Any]] = field(default_factory=list)
    """The user's, each with the id of its operator."""
    producers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "producers"))
    """Makes the producers of sinks that write at once."""

    @property
    def partitions(self) -> list[PartitionLane]:
        """Those of the lanes that read a topic."""
        return [lane for lane in self.lanes if isinstance(lane, PartitionLane)]

    def close(self) -> list[str]:
        """Let go of what the sinks, the readers and the user's operators hold; what a person should know of it.

        What the user's `close()` raises comes after all work, and is no error of it.
        """
        for writer in self.writers:
            writer.abandon()
        self.producers.shutdown(wait=False)
        for lane in self.partitions:
            lane.reader.close()
        return [note for operator, function in self.functions for note in _closed(operator, function)]


def _closed(operator: str, function: Any) -> Iterator[str]:
    try:
        close_functions([function])
    except USERS_ERRORS as error:
        raised = f"{type(error).__name__}: {text_of(error)}{ops.place_of(error)}"
        yield f"close() of operator {operator!r} raised {raised}, after all its work: nothing is lost"


def assemble(
    unit: Unit, plan: Plan, task: Task, label: str, blocks: AttemptBlocks | None, names: BlockNames
) -> Assembly:
    """Make all that *unit* needs; its state is restored, nothing is read yet.

    *blocks* writes what it sets aside; None: it computes again what is there already. Where something cannot be made,
    what was made before it is closed.
    """
    assembler = _Assembler(unit, plan, label, blocks, names)
    try:
        for node in task.nodes:
            assembler.add(node)
    except BaseException:
        assembler.made.close()
        raise
    return assembler.made


class _Assembler:
    def __init__(self, unit: Unit, plan: Plan, label: str, blocks: AttemptBlocks | None, names: BlockNames) -> None:
        self.unit, self.plan, self.label = unit, plan, label
        self.blocks_written, self.names = blocks, names
        self.config = ClientConfig(unit.client)
        self.made = Assembly(BatchTime())
        self.blocks = block_storage(self.config, unit.topic, unit.storage)
        self.operators: dict[str, Any] = {}
        self.staying = set[ReaderInTurn]()
        with whole_or_halt(unit.base):
            self.before = in_flight.restored(
                unit.base, plan.graph, unit.subtask, unit.parallelism, self.blocks, unit.skips
            )
        """What was on its way at the base, of all tasks."""

    def add(self, node: Node) -> None:
        """Make the operator of *node*, and wire what it reads."""
        if node.kind is Kind.SINK:
            self._sink(node)
        else:
            made = make_operator(node, Context(node.id, self.unit.subtask, self.unit.parallelism), self._table)
            self.made.functions += ((node.id, function) for function in made.functions)
            self.made.tables += made.tables
            self.operators[node.id] = made.operator
        if node.kind is Kind.SOURCE:
            self._read(node)
        for read in node.inputs:
            self._connect(read, node)
        for edge in self.plan.shuffles:
            if edge.producer == node.id:
                self._send(edge, node)

    def _read(self, node: Node) -> None:
        source, unit = cast("Readable", node.source), self.unit
        base = [noted for noted in unit.base.offsets if noted.source == node.id]
        decoder = SourceDecoder(node.id, source, _unsaid, base, skips=unit.skips)  # the receipt names what it skips
        self.made.decoders.append(decoder)
        kilobytes = max(QUEUE_KILOBYTES_MIN, QUEUE_KILOBYTES // max(1, len(self.unit.readings)))

        def opening(end: int) -> Callable[[SourceOffset], SplitReader]:
            return lambda start: source.open_range(
                RangeContext(start=start, end=end, client=client, kilobytes=kilobytes)
            )

        client = {"group.id": self.plan.graph.pipeline_id, **unit.client}
        known = {(noted.partition, noted.offset): noted.leader_epoch for noted in base}
        for each in unit.readings:
            if each.source == node.id:
                epoch = known.get((each.partition, each.start), -1)
                topic_id = unit.topic_ids[each.topic]
                start = SourceOffset(node.id, each.topic, topic_id, each.partition, each.start, epoch)
                reader = ReaderInTurn(start, opening(each.end), self.staying)
                self.made.lanes.append(PartitionLane(node.id, each.partition, reader, decoder, self.operators[node.id]))

    def _connect(self, read: Input, node: Node) -> None:
        """Wire an edge: a call within the task, or the files of every subtask of the task before."""
        codec, files = BatchCodec(self.plan.graph.type_of(read)), dict[str, StagedFile | None]()
        edge = self.plan.shuffle_into(node, read)
        if edge is None:
            listeners = ops.listeners(self.operators[read.node], read.output)
            listeners += self._pushes(node)
        else:
            files = {f"{edge.name}:{sender}": None for sender in range(self.plan.parallelism)}
            files.update((f"{edge.name}:{f.sender}", f.file) for f in self.unit.channels if f.edge == edge.name)
        before: dict[str, list[bytes]] = {}
        for each in self.before:  # at another parallelism the base had other channels
            if each.edge == ShuffleEdge(read.node, node.id).name:
                before.setdefault(each.channel, []).append(each.frame)
        for name in dict.fromkeys((*files, *before)):
            lane = ChannelLane(name, files.get(name), codec, self.operators[node.id], before.get(name, ()))
            self.made.lanes.append(lane)

    def _pushes(self, node: Node) -> Iterable[ops.Push]:
        operator = self.operators[node.id]
        if self.unit.origins and isinstance(operator, ops.SinkOutput):
            assert isinstance(operator.writer, Staging)
            return [operator.writer.note, operator]
        return [operator]

    def _send(self, edge: ShuffleEdge, node: Node) -> None:
        codec = BatchCodec(self.plan.graph.type_of(Input(node.id)))
        writers = [self._file(f"channel-{edge.name}-{{}}-{receiver}") for receiver in range(self.plan.parallelism)]
        sending = Sending(
            edge.name, self.unit.subtask, self.plan.graph.max_parallelism, codec, writers, self.made.clock
        )
        self.made.sendings.append(sending)
        self.operators[node.id].downstream.append(sending)

    def _sink(self, node: Node) -> None:
        sink = node.sink
        assert sink is not None
        if not sink.transactional:
            self.operators[node.id] = _nothing if self.blocks_written is None else self._staged(node)
            return
        staging = Staging(node.id, self.unit.subtask, self._file(f"output-{node.id}-{{}}"), origins=self.unit.origins)
        self.made.stagings.append(staging)
        encoder = cast("WritesToTopic", sink).encoder(self.plan.graph.type_of(node.inputs[0]))
        self.operators[node.id] = ops.SinkOutput(node.id, staging, encoder, declared=declared(node, self.plan.graph))

    def _staged(self, node: Node) -> ops.SinkOutput:
        """What a sink sets aside, writes or shows is new: the unit computes nothing again."""
        assert self.blocks_written is not None
        unit, type_ = self.unit, self.plan.graph.type_of(node.inputs[0])
        context = WriterContext(
            pipeline=self.plan.graph.pipeline_id,
            sink=node.id,
            subtask=unit.subtask,
            incarnation=unit.incarnation,
            attempt=unit.attempt,
            type=type_,
            slots=0,
            clients=_Clients(self.config, self.made.producers),
            staging=StagedBlocks(self.blocks_written, self.names, node.id, unit.subtask),
            prepared=_refuse,
            note=_refuse,
        )
        with naming(node.id):
            opened = cast("Writable", node.sink).open_writer(context)
        self.made.writers.append(opened.writer)
        writer = _Waiting(opened.writer, self.blocks_written)
        return ops.SinkOutput(node.id, writer, opened.encoder, declared=declared(node, self.plan.graph))

    def _file(self, name: str) -> FrameWriter:
        """A file of this attempt; the braces in *name* are the subtask's place. No id has a "+", so that the files of
        two edges never have one name."""
        name = name.format(self.unit.subtask).replace(">", "+")
        return FrameWriter(Path(self.unit.folder, f"{name}.{self.label}"))

    def _table(self, node: Node) -> Table[Any]:
        """Restored as far as what the unit is sent touches it; a key that is not sent cannot be known beforehand."""
        unit = self.unit
        edges = {edge.name for edge in self.plan.shuffles if edge.consumer == node.id}
        touched = {group for file in unit.channels if file.edge in edges for group in file.groups}
        known = len(edges) == len(node.inputs) and not self.before
        return table_of(
            node, self.plan.graph, unit.parallelism, unit.subtask, unit.base, self.blocks,
            touched=touched if known else None, drops_fields=unit.drops_fields, backend=in_memory(),
        )  # fmt: skip


@dataclass(frozen=True)
class _Waiting:
    """A writer whose writes wait until it has room."""

    writer: SinkWriter
    blocks: AttemptBlocks

    def write(self, outputs: Any) -> None:
        self.writer.write(outputs)
        self.writer.poll()
        while not self.writer.room:
            self.blocks.poll(WAIT_S)
            self.writer.poll()


@dataclass(frozen=True)
class _Clients:
    """Of a sink that needs no transaction."""

    config: ClientConfig
    executor: ThreadPoolExecutor
    clock: SystemClock = field(default_factory=SystemClock)

    def producers(self, topic: str) -> KafkaProducers:
        return KafkaProducers(topic, self.config.confluent(), 0, self.executor)


def _refuse(said: str) -> None:
    raise InvariantViolation(f"a unit opens no transaction, and gives up no record: {said}")


def _unsaid(line: str) -> None:
    """Whoever is told where a unit runs: nobody reads the stderr of an executor."""


def _nothing(batch: ops.Batch) -> None:
    """What a sink that only shows does when an interval is computed again."""
