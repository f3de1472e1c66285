"""The assembler makes, restores and wires the operators of one subtask of a task. Every engine uses it.

Invariant: a task has the same operators in every engine, in the same order, wired alike. Engines differ only in the
`TaskIO`: where records come from and go to.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, Protocol, cast

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot, SourceOffset
from exactlyonce.connectors.kafka.partitioning import DEFAULT
from exactlyonce.connectors.source import Readable
from exactlyonce.engines.plan import FeedbackEdge, Plan, ShuffleEdge, Task, TaskSpec
from exactlyonce.engines.processes import not_collecting
from exactlyonce.engines.runtime import (
    broadcast_operators,
    expiry,
    foreign_key_operators,
    in_flight,
    join_operators,
    ordering,
    timer_operators,
    window_operators,
)
from exactlyonce.engines.runtime import operators as ops
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Push
from exactlyonce.engines.runtime.cut import (
    Cut,
    InFlightCapture,
    StagedBlocks,
    SubtaskBlocks,
    WorkerBlocks,
    whole_or_halt,
)
from exactlyonce.engines.runtime.enriching import Enricher, Service
from exactlyonce.engines.runtime.faults import DeadLetterOutput, Notes, place_of
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.order_log import AnswerCodec, Answers, OrderRuns
from exactlyonce.engines.runtime.timed_operators import KeyReader, TimedOperator, TimedParts
from exactlyonce.engines.runtime.watermarks import MergedPorts, Port, Unheard, Watermark
from exactlyonce.pipeline.dead_letters import DEAD_LETTERS, DeadLetter
from exactlyonce.pipeline.errors import (
    ExactlyOnceError,
    GraphError,
    InvariantViolation,
    text_of,
    users_errors,
)
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.foreign_keys import CANONICAL_KEYS
from exactlyonce.pipeline.functions import Context
from exactlyonce.pipeline.graph import Input, Kind, LogicalGraph, Node
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.lossy import in_utc
from exactlyonce.pipeline.records import key_before
from exactlyonce.pipeline.sink import naming
from exactlyonce.pipeline.timed import Timed
from exactlyonce.sinks.writer import Opened, SinkEncoder, SinkWriter, Writable, WriterClients, WriterContext, opens_none
from exactlyonce.state.backend import CheckpointedState, KeyedState, StateBackend, Table, TimedTable
from exactlyonce.state.key_groups import common_groups, group_range
from exactlyonce.state.state_type import StateType

_OF_FUNCTION: dict[Kind, Callable[[str, Callable[..., Any]], ops.BatchOperator]] = {
    Kind.MAP: ops.Map, Kind.PEEK: ops.Peek, Kind.FILTER: ops.Filter, Kind.FLAT_MAP: ops.FlatMap,
}  # fmt: skip
"""The operators of nothing but the user's function."""
_OF_TIMED: dict[type[Timed], type[TimedOperator[Any]]] = {
    **window_operators.OPERATORS, **join_operators.OPERATORS, **timer_operators.OPERATORS, **ordering.OPERATORS,
    **expiry.OPERATORS, **foreign_key_operators.OPERATORS,
}  # fmt: skip
"""The operators with timed state, by what says how they keep it."""

FIRED_TOGETHER = 2_000
"""About how many results make a batch in a task in which batches matter. Its value is part of every order log: it never
changes."""


class RestoredEdge(NamedTuple):
    """The reader of restored in-flight records of one edge."""

    codec: BatchCodec
    push: Push


class TaskIO(Protocol):
    """The sources, channels and sinks that the operators of one subtask are wired to."""

    def read(self, node: Node, head: ops.BatchOperator) -> None:
        """Give *head* the records and the watermarks of source *node*."""

    def receive(self, edge: ShuffleEdge, codec: BatchCodec, push: Push, ports: Sequence[Port]) -> None:
        """Give *push* the records that upstream subtasks send over *edge*, and the watermarks of each its own of
        *ports*, which are empty in a graph without event time."""

    def send(self, edge: ShuffleEdge, codec: BatchCodec) -> ops.Shuffle:
        """Sends records over *edge*. Encodes them before it returns: another branch may then change them in place."""

    def come_round(self, edge: FeedbackEdge, codec: BatchCodec, push: Push) -> None:
        """Give *push* the records that come round a loop."""

    def feed(self, edge: FeedbackEdge, codec: BatchCodec) -> Push:
        """Sends records round a loop; encodes likewise."""

    def write(self, node: Node) -> Push:
        """Writes the records of sink *node*."""

    def restore(self, frames: Sequence[InFlightFrame], edges: Mapping[str, RestoredEdge]) -> None:
        """Read in-flight *frames*, in their order, before anything else of their channels."""

    def touched_groups(self, node: Node) -> Collection[int] | None:
        """The key groups whose state *node* may read; None: all that the subtask owns."""


class TaskInput(Protocol):
    """An ordered input of a subtask: some splits of a source, a channel, or restored records."""

    @property
    def name(self) -> str: ...
    @property
    def port(self) -> Port | None: ...
    @property
    def push(self) -> Push: ...

    def note(self, order: OrderRuns) -> None:
        """Note the batch handed out last in *order*."""


@dataclass
class TaskOperators:
    """The operators of one subtask, with everything that a cut holds."""

    task: str
    subtask: int
    by_id: dict[str, Any] = field(default_factory=dict)
    """The receiver of the records of each node."""
    tables: list[KeyedState] = field(default_factory=list)
    dead_letters: dict[str, DeadLetterOutput] = field(default_factory=dict)
    """The dead letters of each node that has some."""
    functions: list[tuple[str, Any]] = field(default_factory=list)
    """The id of each operator with its user function."""
    sinks: list[SinkWriter] = field(default_factory=list)
    firings: list[TimedOperator[Any]] = field(default_factory=list)
    """The operators with results that are due, in order. Others get a turn only after `interrupt`."""
    timed: list[TimedOperator[Any]] = field(default_factory=list)
    clocked: list[TimedOperator[Any]] = field(default_factory=list)
    """The operators that go by the clock, too."""
    order: OrderRuns | None = None
    """None if only one order is possible; see `order_runs`."""
    answers: Answers = field(default_factory=Answers)
    """The answers of services."""
    _now_ms: int = field(default=0, init=False)
    """The time by the clock at the last look."""
    _told_ms: int = field(default=0, init=False)
    """The time that `clocked` know."""

    def take(self, source: TaskInput, batch: Batch) -> None:
        self.interrupt()
        self.tell_time(self._now_ms)
        if self.order is not None:
            source.note(self.order)
            self.order.end_batch()
        source.push(batch)

    def look_at_clock(self, now_ms: int) -> None:
        """It is *now_ms*, in ms since 1970: what is due by the clock is in `firings` then.

        Operators are told the time only then, or with the next input, so that the order log is short.
        """
        self._now_ms = max(self._now_ms, now_ms)
        firing = {id(operator) for operator in self.firings}
        if any(id(operator) not in firing and operator.rings(self._now_ms) for operator in self.clocked):
            self.interrupt()
            self.tell_time(self._now_ms)

    def tell_time(self, now_ms: int) -> None:
        """Tell the operators that go by the clock the time, in ms since 1970, which never falls."""
        if not self.clocked or now_ms <= self._told_ms:
            return
        self._told_ms = now_ms
        if self.order is not None:
            self.order.clock(now_ms)
        for operator in self.clocked:
            operator.tell_time(now_ms)

    def advance(self, source: str, port: Port | None, watermark: Watermark) -> None:
        """Take *watermark* of the input *source*; results that it makes due are in `firings` then."""
        self.interrupt()
        self.tell_time(self._now_ms)
        if self.order is not None:
            self.order.watermark(source, watermark)
        assert port is not None, "the assembler has given one to every input with watermarks"
        port.advance(watermark.value, idle=watermark.idle)

    def interrupt(self) -> None:
        """Others get a turn: note how far the firing under way is, and that what is due is not out."""
        if not self.firings:
            return
        operator = self.firings[0]
        operator.begin()
        operator.interrupt()
        if self.order is not None:
            self.order.interrupted(operator.id)

    @property
    def whole(self) -> bool:
        """Whether others may get a turn; see `TimedOperator.whole`."""
        return not self.firings or self.firings[0].whole

    def fire(self, most: int, room: int) -> int:
        """Let the first operator that has something due give results in one batch, see `TimedOperator.fire`. Once all
        is out, pass its watermark on. Returns how much of what was due was taken."""
        operator = self.firings[0]
        taken = operator.fire(most, room)
        if self.order is not None:
            self.order.gave(operator.id, taken)
        self._end_firing(operator)
        return taken

    def _end_firing(self, operator: TimedOperator[Any]) -> None:
        """Pass the watermark of *operator* on, if nothing else is due."""
        if operator.fires:
            hit("timed-firing")
            return
        hit("timed-fired")
        if self.order is not None:
            self.order.over(operator.id)
        del self.firings[0]
        operator.passes_on(Watermark(operator.watermark, operator.idle))
        operator.take_next()

    def fire_all(self) -> None:
        """Let all operators that have something due give all results. Nobody had a turn, so no order log has it."""
        while self.firings:
            self._fire_whole()

    def _fire_whole(self) -> None:
        operator = self.firings[0]
        operator.fire(sys.maxsize, FIRED_TOGETHER)
        self._end_firing(operator)

    def begin_within(self, due: Mapping[str, Sequence[Watermark]]) -> None:
        """An interval begins with results of these operators due, see `TimedOperator.due`; the times of the inputs
        come next, then `begun`."""
        if self.order is not None:
            self.order.begins_within(due)
        self.firings += [self.by_id[name] for name in due]
        for name, (_, *rest) in due.items():
            self.by_id[name].begin_within(*rest)
        for name, (passed_on, *_) in due.items():
            if passed_on.value != NO_WATERMARK:
                self.by_id[name].passes_on(passed_on)

    def begun(self, due: Collection[str]) -> None:
        """The times of an interval that began within a firing are known: operators with nothing due pass theirs on."""
        if self.order is not None:
            self.order.begun()
        held = [operator for operator in self.firings if operator.id in due]
        while len(self.firings) > len(held):
            place = next(place for place, operator in enumerate(self.firings) if operator.id not in due)
            self.firings.insert(0, self.firings.pop(place))
            self._fire_whole()

    def fire_along(self, name: str, count: int, *, over: bool) -> bool:
        """Let operator *name* give what an earlier run has noted as *count*, and be *over* then or not; those before it
        give all. Returns whether that is what it has."""
        while self.firings and self.firings[0].id != name:
            self._fire_whole()
        if not self.firings:
            return False
        operator = self.firings[0]
        taken = self.fire(count, sys.maxsize) if count else 0
        if not over:
            self.interrupt()
            return taken == count and operator.fires
        return taken == count and operator.fires and not self.fire(1, sys.maxsize)

    def cut(
        self,
        checkpoint: int,
        base: int,
        offsets: tuple[SourceOffset, ...],
        *,
        whole: bool,
        exact: bool = True,
        left: Sequence[InFlightFrame] = (),
        captures: Sequence[InFlightCapture] = (),
        goes_on: bool = False,
    ) -> Cut:
        """The cut at barrier *checkpoint*, in constant time; the sinks get the barrier.

        *whole*: tables are written whole, not only their changes since *base*. *exact*: the records since the last cut
        are exactly those between two barriers. *goes_on*: see `Ack.goes_on`.
        """
        self.interrupt()
        order, answers = None, self.answers.cut()
        if self.order is not None and not (self.order.empty and not answers and exact):
            due = {operator.id: operator.due for operator in self.firings}
            order = self.order.cut(exact=exact, answers=answers, due=due)
        for operator in self.by_id.values():
            operator.settle()
        tables = [table.freeze(checkpoint, base, whole=whole) for table in self.tables]
        for sink in self.sinks:
            sink.barrier(checkpoint)
        left_out = tuple(operator.left_out for operator in self.timed)
        return Cut(tables, order, offsets, self.sinks, left, captures, left_out, goes_on)

    def close(self) -> None:
        """Close what the user's operators opened."""
        for _, function in self.functions:
            close_function(function)

    def blocks(self, worker: WorkerBlocks, checkpoint: int) -> SubtaskBlocks:
        """Writes the cut at *checkpoint*."""
        return SubtaskBlocks(worker, checkpoint, self.task, self.subtask)


def placed_by_partition(graph: LogicalGraph, manifest: Manifest) -> list[OperatorSnapshot]:
    """The states in *manifest* whose keys are placed by the source's partitions."""
    nodes = {node.id for node in graph.stateful if any(graph.node(read.node).partitioned for read in node.inputs)}
    return [snapshot for snapshot in manifest.operators if snapshot.operator in nodes]


def refuse_to_distribute(graph: LogicalGraph, manifest: Manifest, parallelism: int) -> None:
    """Raise `GraphError` if a state that is placed by partitions has another parallelism in *manifest*."""
    for snapshot in placed_by_partition(graph, manifest):
        if snapshot.parallelism != parallelism:
            raise GraphError(
                f"Operator {snapshot.operator!r} is keyed by the source's partitions (key_by(..., partitioned=True)), "
                f"so its state cannot be distributed anew: run it with parallelism {snapshot.parallelism}, as before."
            )


def key_places(
    graph: LogicalGraph, node: Node, manifest: Manifest, parallelism: int, subtask: int
) -> ops.KeyPlaces | None:
    """The keys of *node*, a KEY_BY, that the partitions of its sources place in *subtask*; None: key groups place them,
    or all are in one subtask. Raises GraphError for sources of unequal partitions, or that *manifest* lacks."""
    if not node.partitioned or parallelism == 1:
        return None
    counts = Counter(offset.source for offset in manifest.offsets)
    sources = sorted(source.id for source in graph.sources if source.id in graph.above(node.id))
    if new := [source for source in sources if source not in counts]:
        raise GraphError(
            f"{node.id!r} has partitioned=, and source {new[0]!r} is new since checkpoint {manifest.checkpoint}, which "
            f"does not say how many partitions place its keys. Leave partitioned= out and begin from a savepoint; or "
            f"begin anew, with `exactlyonce reset`."
        )
    if len({counts[source] for source in sources}) > 1:
        raise GraphError(
            f"{node.id!r} has partitioned=, and its sources {', '.join(sources)} have "
            f"{', '.join(str(counts[source]) for source in sources)} partitions: a key has its state in one subtask "
            f"only if all have as many. Leave partitioned= out, so that records are shuffled."
        )
    return ops.KeyPlaces(node.partitioner or DEFAULT, counts[sources[0]], parallelism, subtask)


@dataclass
class Assembler:
    """Makes the operators of one subtask of each task of *plan*, as *spec* says."""

    plan: Plan
    spec: TaskSpec
    subtask: int
    blocks: Blocks
    """Reads the blocks of the manifest."""
    backend: StateBackend
    activity: Activity = field(default_factory=Activity)
    notes: Notes = field(default_factory=Notes)
    """Gets dead letters, and late records that no output gets."""

    @property
    def manifest(self) -> Manifest:
        """The checkpoint of the state that they begin with."""
        return self.spec.manifest

    @cached_property
    def in_flight(self) -> list[InFlightFrame]:
        """The in-flight records that this subtask takes first, of all tasks, in their order."""
        with whole_or_halt(self.manifest):
            return in_flight.restored(
                self.manifest, self.plan.graph, self.subtask, self.plan.parallelism, self.blocks, self.spec.skips
            )

    def assemble(self, task: Task, io: TaskIO, operators: TaskOperators) -> None:
        """Add the operators of *task* to *operators*, wired to *io*. If this raises, those made before are there."""
        graph, ids = self.plan.graph, {node.id for node in task.nodes}
        for node in task.nodes:
            if node.dead_letters is not None:
                kind = node.kind.value if node.kind in (Kind.SOURCE, Kind.SINK) else "operator"
                inputs = inputs_at_hand(graph, node)
                operators.dead_letters[node.id] = DeadLetterOutput(graph.pipeline_id, node.id, kind, self.notes, inputs)
            operators.by_id[node.id] = push = self._operator(node, io, operators)
            if node.kind is Kind.SOURCE:
                io.read(node, push)
            ports = self._ports(node, push)
            for port, read in enumerate(node.inputs if node.kind is not Kind.FEEDBACK else ()):
                edge = self.plan.shuffle_into(node, port)
                receiver = ops.receiver(push, port)
                if read.output == DEAD_LETTERS:
                    operators.dead_letters[read.node].listeners.append(receiver)
                elif edge is None:
                    ops.listeners(operators.by_id[read.node], read.output).append(receiver)
                    operators.by_id[read.node].ports += islice(ports, 1)
                else:
                    shares = islice(ports, self.plan.parallelism)
                    io.receive(edge, BatchCodec(graph.type_of(read)), receiver, [*shares])
        for edge in self.plan.out_of(task):
            sent = io.send(edge, BatchCodec(graph.type_of(Input(edge.producer))))
            operators.by_id[edge.producer].downstream.append(sent)
            operators.by_id[edge.producer].ports += [sent] if graph.has_event_time else []
        for back in self.plan.feedback:
            type_ = graph.node(back.loop).type
            if back.loop in ids:
                io.come_round(back, BatchCodec(type_), operators.by_id[back.loop])
            if back.producer in ids:
                ops.listeners(operators.by_id[back.producer], back.output).append(io.feed(back, BatchCodec(type_)))
        self._restore(ids, io, operators)

    def _ports(self, node: Node, operator: Any) -> Iterator[Port]:
        """The ports of *node*, one for each subtask or operator that it gets watermarks from, in order."""
        if not self.plan.graph.has_event_time or node.kind in (Kind.SINK, Kind.FEEDBACK):
            return iter(())
        edges = [self.plan.shuffle_into(node, port) for port in range(len(node.timing))]
        count = sum(1 if edge is None else self.plan.parallelism for edge in edges)
        merged = MergedPorts(operator)
        heard = iter((operator,)) if count == 1 else (merged.add() for _ in range(count))
        return chain(heard, repeat(Unheard()))

    def _operator(self, node: Node, io: TaskIO, operators: TaskOperators) -> Any:
        if node.kind is Kind.SINK:
            return io.write(node)
        if node.kind is Kind.SOURCE and node.outputs:
            sides: dict[str, list[Push]] = {name: [] for name in node.outputs}
            only, *others = sides.values()
            return ops.Parts(node.id, sides=sides) if others else ops.Pass(node.id, downstream=only, sides=sides)
        if node.kind in (Kind.SOURCE, Kind.PART, Kind.UNION, Kind.FEEDBACK):
            return ops.Pass(node.id)
        asks_nobody = node.calls is not None and operators.answers.replayed is not None
        function = None if node.fn is None or asks_nobody else self._function(node, operators)
        operator: ops.BatchOperator
        if node.calls is not None:
            operator = Enricher(node.id, function, node.calls, AnswerCodec(node.calls.answer), operators.answers)
        elif node.batch_calls is not None:
            operator = self._batch_mapper(node, function, operators.answers)
        elif node.timed is not None:
            operator = self._timed(node, node.timed, function, operators)
        elif node.lookup is not None:
            operator = join_operators.LookupJoiner.made(node, node.lookup, self._table(node, io, operators))
        elif node.kind is Kind.BROADCAST:
            operator = broadcast_operators.Broadcaster(node.id, self._table(node, io, operators))
        elif node.kind is Kind.WITH_BROADCAST:
            operator = self._with_broadcast(node, cast("Any", function))
        elif node.stateful:
            operator = self._stateful(node, cast("Any", function), io, operators)
        elif node.kind is Kind.KEY_BY and node.fn in CANONICAL_KEYS:
            operator = ops.KeyByCanonical(node.id, cast("Any", node.fn))
        elif node.kind is Kind.KEY_BY and node.fn is key_before:
            operator = ops.KeyBefore(node.id, None if node.type is UNKNOWN else in_utc(node.type))
        elif node.kind is Kind.KEY_BY:
            apart = node.partitioned or node.type is UNKNOWN
            places = key_places(self.plan.graph, node, self.manifest, self.plan.parallelism, self.subtask)
            operator = ops.KeyBy(node.id, cast("Any", function), None if apart else in_utc(node.type), places)
        else:
            operator = _stateless(node, cast("Any", function))
        operator.sides = {name: [] for name in node.outputs}
        operator.activity, operator.dead_letters = self.activity, operators.dead_letters.get(node.id)
        return operator

    def _function(self, node: Node, operators: TaskOperators) -> Any:
        self.activity.phase(f"the making of operator {node.id!r}")
        function: Any = node.make()
        if node.calls is not None:
            function = Service(function)
        if hasattr(function, "open"):
            self.activity.phase(f"open() of operator {node.id!r}")
            _open(node, function, Context(node.id, self.subtask, self.plan.parallelism))
        operators.functions.append((node.id, function))
        return function

    def _batch_mapper(self, node: Node, function: Any, answers: Answers) -> ops.BatchOperator:
        from exactlyonce.engines.runtime.batch_mapper import BatchMapper  # needs pyarrow

        return BatchMapper.made(node, function, self.plan.graph.type_of(node.inputs[0]), answers)

    def _stateful(self, node: Node, function: Any, io: TaskIO, operators: TaskOperators) -> ops.Stateful:
        table = self._table(node, io, operators)
        flat, reduces = node.kind is Kind.STATEFUL_FLAT_MAP, node.kind is Kind.REDUCE
        operator = ops.Stateful(node.id, function, table, flat, reduces)
        if node.dead_letters is not None:
            state_type = StateType[Any](node.id, node.kept)
            operator.clone = state_type.clone if state_type.mutable else None
        return operator

    def _with_broadcast(self, node: Node, function: Any) -> broadcast_operators.WithBroadcast:
        """With all rows of the checkpoint, whichever subtask keeps them."""
        keeper = self.plan.graph.node(node.inputs[1].node)
        operator = broadcast_operators.WithBroadcast(
            node.id, function, KeyReader(node.id, keeper.key_type), self.notes, self.subtask == 0
        )
        self.activity.phase(f"restoring the rows of operator {node.id!r}")
        groups = range(self.plan.graph.max_parallelism)
        with not_collecting(), whole_or_halt(self.manifest):
            operator.restore(self._stored(keeper, groups).entries())
        return operator

    def _table(self, node: Node, io: TaskIO, operators: TaskOperators) -> Table[Any]:
        self.activity.phase(f"restoring the state of operator {node.id!r}")
        with not_collecting():
            table = self.table(node, io.touched_groups(node))
        operators.tables.append(table)
        return table

    def _timed(self, node: Node, timed: Timed, function: Any, operators: TaskOperators) -> TimedOperator[Any]:
        self.activity.phase(f"restoring the state of operator {node.id!r}")
        with not_collecting():
            table = self.timed_table(node, by_key=timed.by_key)
        operators.tables.append(table)
        operator = _OF_TIMED[type(timed)].made(
            TimedParts(
                node=node,
                table=table,
                groups=self._groups(node),
                max_parallelism=self.plan.graph.max_parallelism,
                function=function,
                has_times=self.plan.graph.has_event_time,
            )
        )
        operator.firings, operator.notes = operators.firings, self.notes
        above = self.plan.graph.above(node.id)
        if anew := [other.id for other in self.plan.graph.nodes if other.kind is Kind.WITH_TIME and other.id in above]:
            operator.timed_by = f"with_time {anew[-1]!r}"
        operator.late_output, operator.late_right_output = node.late, node.late_right
        operators.timed.append(operator)
        operators.clocked += [operator] if timed.has_clock else []
        return operator

    def table(self, node: Node, touched: Collection[int] | None = None) -> Table[Any]:
        """The table of stateful *node* at the manifest.

        With *touched*, only the state of these key groups is read; the state of the others is carried over.
        """
        with whole_or_halt(self.manifest):
            return self._stored(node).table(self.backend, touched)

    def timed_table(self, node: Node, *, by_key: bool = False) -> TimedTable[Any]:
        """The timed table of *node* at the manifest; *by_key*: with `TimedTable.slots_of`."""
        with whole_or_halt(self.manifest):
            return self._stored(node).timed_table(self.backend, meaning=node.meaning or "", by_key=by_key)

    def _stored(self, node: Node, groups: range | None = None) -> CheckpointedState:
        """The state of *node* at the manifest, of *groups*; None: of those of this subtask."""
        graph, groups = self.plan.graph, self._groups(node) if groups is None else groups
        snapshot = next((known for known in self.manifest.operators if known.operator == node.id), None)
        if self._is_placed_by_partition(node):
            refuse_to_distribute(graph, self.manifest, self.plan.parallelism)
            if snapshot is not None:
                snapshot = OperatorSnapshot(node.id, 1, snapshot.state_bytes, (snapshot.index[self.subtask],))

        def read(refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, bytes]]:
            return ((ref, block.body) for ref, block in self.blocks.fetch(refs))

        return CheckpointedState(
            operator=node.id,
            type=replace(node.kept, drops_fields=self.spec.drops_fields),
            groups=groups,
            max_parallelism=graph.max_parallelism,
            checkpoint=self.manifest.checkpoint,
            indexes=[body for _, body in read(_indexes(snapshot, groups, graph.max_parallelism))],
            fetch=read,
        )

    def _groups(self, node: Node) -> range:
        """The key groups whose state *node* has in this subtask."""
        if self._is_placed_by_partition(node):
            return range(self.plan.graph.max_parallelism)
        return group_range(self.subtask, self.plan.parallelism, self.plan.graph.max_parallelism)

    def _is_placed_by_partition(self, node: Node) -> bool:
        return any(self.plan.graph.node(read.node).partitioned for read in node.inputs)

    def open_sink(
        self,
        node: Node,
        operators: TaskOperators,
        clients: WriterClients,
        blocks: WorkerBlocks,
        slots: int = 0,
        prepared: Callable[[str], None] = opens_none,
        note: Callable[[str], None] = opens_none,
    ) -> Opened:
        """Open the writer of sink *node*, one of *operators*; see `WriterContext`. *blocks* take what it stages."""
        context = WriterContext(
            pipeline=self.plan.graph.pipeline_id,
            sink=node.id,
            subtask=self.subtask,
            incarnation=self.spec.incarnation,
            attempt=self.spec.attempt,
            type=self.plan.graph.type_of(node.inputs[0]),
            clients=clients,
            staging=StagedBlocks(blocks, node.id, self.subtask),
            partitions=self.spec.output_partitions.get(node.id),
            partitioner=self.spec.partitioners.get(node.id),
            slots=slots,
            prepared=prepared,
            note=note,
        )
        with naming(node.id):
            opened = cast("Writable", node.sink).open_writer(context)
        operators.sinks.append(opened.writer)
        return opened

    def _restore(self, ids: Collection[str], io: TaskIO, operators: TaskOperators) -> None:
        """Hand over in-flight records of edges into the task, at whatever parallelism they were sent."""
        if not self.in_flight:
            return
        graph = self.plan.graph
        edges = {
            ShuffleEdge.of(edge).name: RestoredEdge(
                BatchCodec(graph.type_of(Input(edge.key_by))), ops.receiver(operators.by_id[edge.stateful], edge.port)
            )
            for edge in graph.shuffles
            if edge.stateful in ids
        }
        for back in self.plan.feedback:
            if back.loop in ids:
                edges[back.name] = RestoredEdge(BatchCodec(graph.node(back.loop).type), operators.by_id[back.loop])
        if frames := [frame for frame in self.in_flight if frame.edge in edges]:
            io.restore(frames, edges)


def _indexes(snapshot: OperatorSnapshot | None, groups: range, max_parallelism: int) -> list[BlockRef]:
    """The indexes of the earlier subtasks that had any of *groups*."""
    if snapshot is None:
        return []
    owned = [group_range(subtask, snapshot.parallelism, max_parallelism) for subtask in range(snapshot.parallelism)]
    parts = zip(owned, snapshot.index, strict=True)
    return [ref for before, refs in parts if common_groups(before, groups) for ref in refs]


def inputs_at_hand(graph: LogicalGraph, node: Node) -> dict[str, Callable[[Any], DeadLetter]]:
    """By place, as a topic, what makes a letter of an input record of *node*; empty behind state or a loop.

    Such a record is in a state already, or its bytes are elsewhere. A shuffle that a run at this parallelism does not
    need counts, too, so that letters are the same at any.
    """
    above = graph.above(node.id, timing=True)  # the rows of `with_broadcast` are not its records
    upto = {node.id} | above
    shuffled = {edge.stateful for edge in graph.shuffles} | {loop.id for loop in graph.loops}
    if above & {each.id for each in graph.stateful} or upto & shuffled:
        return {}
    sources = [cast("Readable", source.source) for source in graph.sources if source.id in upto]
    return {source.place: source.decoder().letter for source in sources}


def close_function(function: Any) -> None:
    """Call the user's `close`, if there is one."""
    if hasattr(function, "close"):
        function.close()


def sink_output(
    node: Node,
    graph: LogicalGraph,
    write: Callable[[Any], None],
    encoder: SinkEncoder,
    activity: Activity | None = None,
    dead_letters: DeadLetterOutput | None = None,
) -> ops.SinkOutput:
    """The operator that encodes the records of sink *node* for *write*."""
    type_, producer = graph.type_of(node.inputs[0]), graph.node(node.inputs[0].node)
    while producer.kind in (Kind.PART, Kind.FILTER, Kind.PEEK, Kind.WITH_TIME):
        producer = graph.node(producer.inputs[0].node)
    known = type_ is not UNKNOWN and producer.kind is not Kind.SOURCE  # a source's records were decoded as their type
    known = known and node.inputs[0].output != DEAD_LETTERS
    declared = ops.Declared(producer.id, type_) if known else None
    activity = activity or Activity()
    return ops.SinkOutput(node.id, write, encoder, declared=declared, activity=activity, dead_letters=dead_letters)


class OpenFailed(ExactlyOnceError):
    """A resource of an operator could not be opened. The job restarts: it may be there later. Nothing is lost."""


def _open(node: Node, function: Any, context: Context) -> None:
    try:
        function.open(context)
    except ExactlyOnceError:
        raise
    except users_errors() as error:
        raise OpenFailed(
            f"open() of operator {node.id!r} raised {type(error).__name__}: {text_of(error)}{place_of(error)}. "
            f"No record is read before it succeeds: provide what it opens where the workers run, or correct it."
        ) from error


def _stateless(node: Node, function: Callable[..., Any]) -> ops.BatchOperator:
    if node.kind in _OF_FUNCTION:
        return _OF_FUNCTION[node.kind](node.id, function)
    if node.kind is Kind.SPLIT:
        return ops.Split(node.id, function)
    if node.kind is Kind.WITH_TIME:
        return ops.WithTime(node.id, function, node.disorder_ms)
    raise InvariantViolation(f"no operator for {node.kind}")
