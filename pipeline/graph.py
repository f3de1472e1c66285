"""The logical graph: the user's pipeline as data. Nodes are in the order of writing, a topological one.

The input of a feedback node is a back edge, the only kind; without these edges the graph has no cycle.
`Pipeline.build()` checks the graph, which never changes. Every engine walks the same graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import msgspec

from exactlyonce.pipeline import shape
from exactlyonce.pipeline.aggregates import Accumulator
from exactlyonce.pipeline.dead_letters import DEAD_LETTERS, DeadLetter, DeadLetterLimits, DeadLetterTarget
from exactlyonce.pipeline.durations import written_duration
from exactlyonce.pipeline.enrich import Calls
from exactlyonce.pipeline.extras import SINKS, SOURCES, announcement
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.joins import Lookup
from exactlyonce.pipeline.map_batches import BatchCalls
from exactlyonce.pipeline.records import wire_schema
from exactlyonce.pipeline.sink import EXACTLY_ONCE, Sink
from exactlyonce.pipeline.source import Source
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.versions import VersionedState


class Kind(str, Enum):
    """The kinds of nodes, with the shapes of their functions."""

    SOURCE = "source"
    MAP = "map"
    """(record) -> output"""
    FILTER = "filter"
    """(record) -> whether to keep it"""
    FLAT_MAP = "flat_map"
    """(record) -> iterable of outputs"""
    KEY_BY = "key_by"
    """(record) -> key; the record is unchanged"""
    STATEFUL_MAP = "stateful_map"
    """(state | None, record) -> (new state | None, output)"""
    STATEFUL_FLAT_MAP = "stateful_flat_map"
    """(state | None, record) -> (new state | None, iterable of outputs)"""
    REDUCE = "reduce"
    """(reduced, record) -> reduced; the first record of a key is its first state; every new state is an output"""
    SPLIT = "split"
    """(record, emit) -> None, where emit(value) or emit(value, output) gives an output"""
    WINDOW = "window"
    """Its accumulator takes the records of each window; what comes out is `Windowed`, or what a function makes of it:
    (windowed) -> iterable of outputs"""
    JOIN = "join"
    """No function: its first input is the left side, its second the right; what comes out is `Joined`"""
    AS_OF = "as_of"
    """Likewise, with versions on the right side"""
    LOOKUP = "lookup"
    """Likewise, by arrival"""
    JOIN_TABLE = "join_table"
    """A step of the join of two tables; see `pipeline.foreign_keys`. The function of the first is (row) -> foreign key
    or None, the others have none"""
    BROADCAST = "broadcast"
    """No function: keeps the rows of a table, and sends each change to all subtasks of its reader"""
    WITH_BROADCAST = "with_broadcast"
    """(record, rows) -> output; its first input is the records, its second the rows of a `BROADCAST`"""
    KEYED_PROCESS = "keyed_process"
    """A handler with state and timers; see `pipeline.timers.Handler`"""
    CO_PROCESS = "co_process"
    """A handler of two inputs; see `pipeline.timers.CoHandler`"""
    BATCHES = "batches"
    """Its own handler, which gathers the records of a key in lists"""
    IN_ORDER = "in_order"
    """No function: passes on the records of a key by time"""
    DEDUPLICATE = "deduplicate"
    """No function: passes on the first record of a key, and others only after a time"""
    MAP_BATCHES = "map_batches"
    """(Arrow batch of records) -> Arrow batch of outputs"""
    ENRICH = "enrich"
    """async (list of records) -> list of answers; what comes out is `Enriched`"""
    PEEK = "peek"
    """(record) -> ignored; the record is unchanged"""
    WITH_TIME = "with_time"
    """(record) -> its new event time; the record is unchanged"""
    PART = "part"
    """No function: passes on the records of one member of a source that several share"""
    UNION = "union"
    FEEDBACK = "feedback"
    """No function: passes on the records of its back edge"""
    SINK = "sink"


JOINS = frozenset({Kind.JOIN, Kind.AS_OF, Kind.LOOKUP})
SIDED_KINDS = frozenset(
    {
        Kind.SPLIT,
        Kind.STATEFUL_MAP,
        Kind.STATEFUL_FLAT_MAP,
        Kind.WINDOW,
        Kind.JOIN,
        Kind.AS_OF,
        Kind.KEYED_PROCESS,
        Kind.CO_PROCESS,
        Kind.IN_ORDER,
        Kind.DEDUPLICATE,
    }
)
"""The kinds with side outputs; a function with state takes `emit` only if it has some."""


@dataclass(frozen=True)
class Input:
    """An output of a node: *output* names a side output or `DEAD_LETTERS`, None is the main one."""

    node: str
    output: str | None = None


@dataclass(frozen=True)
class Node:
    """One operator, source or sink."""

    id: str
    kind: Kind
    inputs: tuple[Input, ...] = ()
    fn: Callable[..., Any] | None = None
    factory: bool = False
    """Whether *fn* makes the function, on the worker; see `make`."""
    type: Any = UNKNOWN
    """The type of the main output, or UNKNOWN. Known if a shuffle, a snapshot or an encoding sink needs it."""
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """The type of each side output."""
    late: str | None = None
    """The side output that gets late records."""
    late_right: str | None = None
    """The side output that gets late records of the second input."""
    state_type: Any = None
    """The type of the state of one key, without None; None for nodes without state."""
    state_version: int = 1
    migrations: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """The function by version of the state that migrates it to the next version."""
    key_type: Any = None
    """The annotated type of keys, of KEY_BY and of the operators on it, or UNKNOWN: for messages and checkpoints. Keys
    travel as canonical bytes."""
    timed: Timed | None = None
    """How it keeps its state by time, or else in slots, in a timed table; None: it has no such state. The engine makes
    the operator by the class of it."""
    accumulator: Accumulator | None = None
    """On WINDOW."""
    lookup: Lookup | None = None
    """On LOOKUP."""
    calls: Calls | None = None
    """On ENRICH."""
    batch_calls: BatchCalls | None = None
    """On MAP_BATCHES."""
    source: Source[Any] | None = None
    sink: Sink[Any] | None = None
    partitioned: bool = False
    """On KEY_BY: records of one key are in one partition of the source, so nothing is shuffled."""
    partitioner: str | None = None
    """The partitioner by which they are there; None: the default one."""
    pause_ms: int = 0
    """On FEEDBACK: the pause of a record before it comes round."""
    disorder_ms: int = 0
    """On WITH_TIME: how far the new time of a record may lie before its old one."""
    dead_letters: DeadLetterTarget | None = None
    """The target of records that it cannot process; None: such a record stops the job."""
    location: str = ""
    """The file and line of the user's code."""

    @property
    def stateful(self) -> bool:
        return self.state_type is not None

    @property
    def timing(self) -> tuple[Input, ...]:
        """The inputs whose watermarks count: not the table of a lookup or `with_broadcast`, which goes by arrival."""
        by_arrival = self.lookup is not None or self.kind is Kind.WITH_BROADCAST
        return self.inputs[:1] if by_arrival else self.inputs

    @property
    def kept(self) -> VersionedState:
        """The type of the state of one key, in its present version."""
        kept = VersionedState(self.state_type, self.state_version, self.migrations, self.key_type)
        return kept if self.timed is None else replace(kept, declared=self.timed.state_of)

    @property
    def meaning(self) -> str | None:
        """What its timed states stand for, with sizes in ms, and their aggregates. None: its state is not timed."""
        if self.timed is None:
            return None
        of = {"of": self.accumulator.name} if self.accumulator is not None and self.accumulator.name else {}
        return " ".join(f"{name}={value}" for name, value in (self.timed.describe() | of).items())

    def make(self) -> Callable[..., Any]:
        """The function to call with records: a new instance if the user passed a class.

        The caller opens it if it has `open(context)`, and closes it if it has `close()`.
        """
        function = self.fn() if self.factory and self.fn else self.fn
        named = getattr(function, "on_record", getattr(function, "on_left", function))
        if function is None or not callable(named):
            raise TypeError(f"{self.id} ({self.location}): its factory made {function!r}, which cannot be called")
        return function


@dataclass(frozen=True)
class KeyedEdge:
    """An edge that sends records to the subtask of their key's group."""

    key_by: str
    stateful: str
    port: int = 0
    """The place of the edge among the inputs of *stateful*: 1 for the right side of a join."""


@dataclass(frozen=True)
class LogicalGraph:
    """A checked pipeline."""

    pipeline_id: str
    max_parallelism: int
    nodes: tuple[Node, ...]

    def node(self, node_id: str) -> Node:
        """The node of this id; raises KeyError."""
        return self._by_id[node_id]

    @cached_property
    def _by_id(self) -> dict[str, Node]:
        return {node.id: node for node in self.nodes}

    def type_of(self, origin: Input) -> Any:
        node = self.node(origin.node)
        if origin.output == DEAD_LETTERS:
            return DeadLetter
        return node.type if origin.output is None else node.outputs.get(origin.output, UNKNOWN)

    @property
    def dead_letter_limits(self) -> dict[str, DeadLetterLimits]:
        """The limits by the id of the sink that dead letters go to."""
        return {
            sink.id: target.limits
            for sink in self.sinks
            if sink.inputs[0].output == DEAD_LETTERS
            and (target := self.node(sink.inputs[0].node).dead_letters) is not None
        }

    def consumers(self, node_id: str, output: str | None = None) -> tuple[Node, ...]:
        """The nodes that read this output, once for each input."""
        origin = Input(node_id, output)
        return tuple(node for node in self.nodes for read in node.inputs if read == origin)

    @property
    def sources(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is Kind.SOURCE)

    @property
    def timed(self) -> tuple[Node, ...]:
        """The nodes that keep state by time."""
        return tuple(node for node in self.nodes if node.timed is not None and node.timed.goes_by_time)

    @property
    def has_event_time(self) -> bool:
        """Whether the records of any source have event times."""
        return any(node.source is not None and node.source.event_time is not None for node in self.sources)

    @property
    def sinks(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is Kind.SINK)

    @property
    def stateful(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.stateful)

    @property
    def shuffles(self) -> tuple[KeyedEdge, ...]:
        """The edges that need a shuffle when the parallelism is above 1."""
        return tuple(
            KeyedEdge(key_by=read.node, stateful=node.id, port=port)
            for node in self.stateful
            for port, read in enumerate(node.inputs)
            if not self.node(read.node).partitioned
        )

    @property
    def broadcasts(self) -> tuple[Node, ...]:
        """The nodes whose second input goes to all of their subtasks."""
        return tuple(node for node in self.nodes if node.kind is Kind.WITH_BROADCAST)

    @property
    def loops(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is Kind.FEEDBACK)

    def after(self, node: Node) -> list[Node]:
        """All nodes downstream of the main output of *node*."""
        after: dict[str, Node] = {}
        waiting = [*self.consumers(node.id)]
        while waiting:
            other = waiting.pop()
            if other.id not in after:
                after[other.id] = other
                waiting += [reader for reader in self.nodes if any(read.node == other.id for read in reader.inputs)]
        return [*after.values()]

    def above(self, *node_ids: str, timing: bool = False) -> set[str]:
        """All nodes upstream of these, also along loops; *timing*: those whose watermarks reach them."""
        above = set[str]()
        waiting = list(node_ids)
        while waiting:
            node = self.node(waiting.pop())
            origins = {read.node for read in (node.timing if timing else node.inputs)} - above
            above |= origins
            waiting += origins
        return above

    @cached_property
    def time_groups(self) -> dict[str, str]:
        """The group of each source, named by its first source: sources that reach one timed operator."""
        groups = {node.id: node.id for node in self.sources}
        for node in self.timed:
            met = {groups[source] for source in self.above(node.id, timing=True) & groups.keys()}
            first_met = next((source for source in groups if source in met), "")
            groups = {source: first_met if group in met else group for source, group in groups.items()}
        return groups

    @property
    def placing_sources(self) -> frozenset[str]:
        """The sources whose partitions determine the subtask of a key (`key_by(..., partitioned=True)`)."""
        above = self.above(*(node.id for node in self.nodes if node.partitioned))
        return frozenset(id for id in above if self.node(id).kind is Kind.SOURCE)

    def fingerprint(self) -> str:
        """The SHA-256, in hex, of all that two processes must agree on, without the code of functions."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.describe(), order="deterministic")).hexdigest()

    def describe(self) -> dict[str, Any]:
        """All that two processes must agree on, as JSON values: nodes with their inputs, types, topics and tables."""
        return {
            "pipeline": self.pipeline_id,
            "max_parallelism": self.max_parallelism,
            "nodes": [self._describe(node) for node in self.nodes],
        }

    def _describe(self, node: Node) -> dict[str, Any]:
        described: dict[str, Any] = {
            "id": node.id,
            "kind": "process" if node.kind is Kind.SPLIT else node.kind.value,  # its name in checkpoints
            "inputs": [[read.node, read.output] for read in node.inputs],
        }
        if node.kind is Kind.FEEDBACK:
            described["record"] = wire_schema(node.type)
        if node.kind is Kind.WITH_TIME:
            described["disorder"] = node.disorder_ms
        if node.kind is Kind.KEY_BY:
            described |= {"record": wire_schema(node.type), "partitioned": node.partitioned}
            described |= {"partitioner": node.partitioner} if node.partitioner is not None else {}
        if node.stateful:
            described["state"] = node.kept.layout
            described |= {"timed": node.timed.describe()} if node.timed is not None else {}
            described |= {"lookup": node.lookup.describe()} if node.lookup is not None else {}
            described |= {"state_version": node.state_version} if node.state_version > 1 else {}
        if node.calls is not None:
            described["answer"] = wire_schema(node.calls.answer)
        if node.source:
            described["source"] = node.source.describe()
        if node.sink:
            described["sink"] = node.sink.describe(self.type_of(node.inputs[0]))
            if node.sink.delivery != EXACTLY_ONCE:
                described["delivery"] = node.sink.delivery
        return described

    def explain(self) -> str:
        """The graph as text, a node a line: its id, kind, what it reads, and its types.

        Input through a shuffle has ``<=``, input that all subtasks get ``<*``, input of a loop ``<~``.
        """
        width = max((len(node.id) for node in self.nodes), default=0)
        return "\n".join([self.pipeline_id, *(f"  {self._line(node, width)}" for node in self.nodes)])

    def _line(self, node: Node, width: int) -> str:
        line = f"{node.id:<{width}}  {node.kind.value:<17} "
        line += ", ".join(f"{self._arrow(node, port)} {_written(read)}" for port, read in enumerate(node.inputs))
        if node.source:
            described = _described(SOURCES, type(node.source), node.source.shown)
            line += f" {described}" if node.inputs else described
        if node.sink:
            line += f" {_described(SINKS, type(node.sink), node.sink.shown)}"
        if node.sink and node.sink.delivery != EXACTLY_ONCE:
            line += f"  {node.sink.delivery}"
        if node.pause_ms:
            line += f"  after {node.pause_ms} ms"
        if node.kind is Kind.WITH_TIME:
            line += f"  disorder {written_duration(node.disorder_ms)}"
        if node.timed is not None:
            line += f"  {node.timed}"
        if node.lookup is not None:
            line += f"  {node.lookup}"
        if node.calls is not None:
            line += f"  {node.calls}"
        if node.batch_calls is not None:
            line += f"  {node.batch_calls}"
        if node.state_type is not None:
            line += f"  state {node.kept.name}"
        return line if node.kind is Kind.SINK else f"{line}  : {shape.type_name(node.type)}"

    def _arrow(self, node: Node, port: int) -> str:
        if node.kind is Kind.FEEDBACK:
            return "<~"
        if node.kind is Kind.WITH_BROADCAST and port:
            return "<*"
        return "<=" if KeyedEdge(node.inputs[port].node, node.id, port) in self.shuffles else "<-"


def _described(group: str, type_: type, shown: str) -> str:
    """A source or sink: its class, what it reads or writes, and the package it is from, if that is another."""
    name = announcement(group, type_)
    return f"{type_.__name__} {shown}".rstrip() + (f"  ({name})" if name else "")


def _written(read: Input) -> str:
    return read.node if read.output is None else f"{read.node}.{read.output}"
