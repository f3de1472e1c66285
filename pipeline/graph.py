"""The logical graph: what the user wrote, as data. Nodes are in the order of writing, a topological one.

The input of a feedback node is a back edge, the only kind: it comes from behind the node. Without these edges the graph
has no cycle. It is built by `Pipeline.build()`, which has checked it, and is never changed. Every engine walks the same
graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import msgspec

from exactlyonce.pipeline import schema, wire
from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.sink import Sink
from exactlyonce.pipeline.source import Source
from exactlyonce.pipeline.versions import VersionedState


class Kind(str, Enum):
    """What a node does with a record; its function's shape is in brackets."""

    SOURCE = "source"
    MAP = "map"
    """(record) -> output"""
    FILTER = "filter"
    """(record) -> whether it goes on"""
    FLAT_MAP = "flat_map"
    """(record) -> iterable of outputs"""
    KEY_BY = "key_by"
    """(record) -> key; the record goes on unchanged"""
    STATEFUL_MAP = "stateful_map"
    """(state | None, record) -> (new state | None, output)"""
    STATEFUL_FLAT_MAP = "stateful_flat_map"
    """(state | None, record) -> (new state | None, iterable of outputs)"""
    REDUCE = "reduce"
    """(reduced, record) -> reduced; the first record of a key is its first state; every new state is an output"""
    PROCESS = "process"
    """(record, emit) -> None, where emit(value) or emit(value, output) gives an output"""
    PEEK = "peek"
    """(record) -> ignored; the record goes on unchanged"""
    UNION = "union"
    FEEDBACK = "feedback"
    """No function: the records that its back edge brings round go on unchanged"""
    SINK = "sink"


STATEFUL_KINDS = frozenset({Kind.STATEFUL_MAP, Kind.STATEFUL_FLAT_MAP, Kind.REDUCE})
SIDED_KINDS = frozenset({Kind.PROCESS, Kind.STATEFUL_MAP, Kind.STATEFUL_FLAT_MAP})
"""Those that may have side outputs; a function with state takes `emit` only if it has some."""


@dataclass(frozen=True)
class Input:
    """An output of a node: *output* names a side output, None is the main one."""

    node: str
    output: str | None = None


@dataclass(frozen=True)
class Node:
    """One thing that the user wrote."""

    id: str
    kind: Kind
    inputs: tuple[Input, ...] = ()
    fn: Callable[..., Any] | None = None
    factory: bool = False
    """Whether *fn* makes the function, on the worker; see `make`."""
    type: Any = UNKNOWN
    """Of the main output: a type, or UNKNOWN. Known wherever a shuffle, a snapshot or an encoding sink needs it."""
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """The type of each side output."""
    state_type: Any = None
    """Of the state of one key, without None, or its `AvroCodec`; None for nodes that keep none."""
    state_version: int = 1
    migrations: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """By version of the state, the function that makes one of the next version."""
    key_type: Any = None
    """Of KEY_BY, and of what keeps state by its keys: what the function says of them; else UNKNOWN. Keys travel as
    canonical bytes: it is for messages, and for what a checkpoint notes of its keys."""
    source: Source[Any] | None = None
    sink: Sink[Any] | None = None
    partitioned: bool = False
    """On KEY_BY: the user says that records of one key are in one partition of the source, so nothing is shuffled."""
    pause_ms: int = 0
    """On FEEDBACK: for how long what was fed rests before it comes round."""
    location: str = ""
    """File and line where the user wrote it."""

    @property
    def stateful(self) -> bool:
        """Whether it keeps state by key."""
        return self.kind in STATEFUL_KINDS

    @property
    def kept(self) -> VersionedState:
        """The type of the state of one key, in its present version."""
        return VersionedState(self.state_type, self.state_version, self.migrations, self.key_type)

    def make(self) -> Callable[..., Any]:
        """The function to call with records: a new instance for each call where the user passed a class.

        The caller opens it if it has `open(context)`, and closes it if it has `close()`.
        """
        function = self.fn() if self.factory and self.fn else self.fn
        if not callable(function):
            raise TypeError(f"{self.id} ({self.location}): its factory made {function!r}, which cannot be called")
        return function


@dataclass(frozen=True)
class KeyedEdge:
    """An edge along which records are sent to the subtask that owns their key's group."""

    key_by: str
    stateful: str


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
        """The type of records at this output."""
        node = self.node(origin.node)
        return node.type if origin.output is None else node.outputs[origin.output]

    def consumers(self, node_id: str, output: str | None = None) -> tuple[Node, ...]:
        """The nodes that read this output, once for each time they do."""
        origin = Input(node_id, output)
        return tuple(node for node in self.nodes for read in node.inputs if read == origin)

    @property
    def sources(self) -> tuple[Node, ...]:
        """Nodes that read from outside."""
        return tuple(node for node in self.nodes if node.kind is Kind.SOURCE)

    @property
    def sinks(self) -> tuple[Node, ...]:
        """Nodes that write to the outside."""
        return tuple(node for node in self.nodes if node.kind is Kind.SINK)

    @property
    def stateful(self) -> tuple[Node, ...]:
        """Nodes that keep state by key."""
        return tuple(node for node in self.nodes if node.stateful)

    @property
    def shuffles(self) -> tuple[KeyedEdge, ...]:
        """The edges that need a shuffle when the parallelism is above 1."""
        return tuple(
            KeyedEdge(key_by=read.node, stateful=node.id)
            for node in self.stateful
            for read in node.inputs
            if not self.node(read.node).partitioned
        )

    @property
    def loops(self) -> tuple[Node, ...]:
        """Feedback nodes: where what was fed comes round."""
        return tuple(node for node in self.nodes if node.kind is Kind.FEEDBACK)

    def above(self, *node_ids: str) -> set[str]:
        """All nodes whose records, or what becomes of them, come to one of these, round loops too."""
        found = set[str]()
        waiting = list(node_ids)
        while waiting:
            origins = {read.node for read in self.node(waiting.pop()).inputs} - found
            found |= origins
            waiting += origins
        return found

    @property
    def placing_sources(self) -> frozenset[str]:
        """The sources whose partitions say which subtask has the state of a key (`key_by(..., partitioned=True)`)."""
        above = self.above(*(node.id for node in self.nodes if node.partitioned))
        return frozenset(id for id in above if self.node(id).kind is Kind.SOURCE)

    def fingerprint(self) -> str:
        """SHA-256 in hex of what two processes must agree on. Code is not in it: a changed function keeps it."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        described = {
            "pipeline": self.pipeline_id,
            "max_parallelism": self.max_parallelism,
            "nodes": [self._describe(node) for node in self.nodes],
        }
        return hashlib.sha256(msgspec.json.encode(described, order="deterministic")).hexdigest()

    def _describe(self, node: Node) -> dict[str, Any]:
        described: dict[str, Any] = {
            "id": node.id,
            "kind": node.kind.value,
            "inputs": [[read.node, read.output] for read in node.inputs],
        }
        if node.kind is Kind.FEEDBACK:
            described["record"] = wire.describe(node.type)
        if node.kind is Kind.KEY_BY:
            described |= {"record": wire.describe(node.type), "partitioned": node.partitioned}
        if node.stateful:
            described["state"] = node.kept.layout
            described |= {"state_version": node.state_version} if node.state_version > 1 else {}
        if node.source:
            described["source"] = node.source.describe()
        if node.sink:
            described["sink"] = node.sink.describe(self.type_of(node.inputs[0]))
            if node.sink.delivery != EXACTLY_ONCE:
                described["delivery"] = node.sink.delivery
        return described

    def explain(self) -> str:
        """The graph as text, a node a line: its id, kind, what it reads, and its types.

        What comes through a shuffle has ``<=``, what comes round a loop ``<~``.
        """
        width = max((len(node.id) for node in self.nodes), default=0)
        return "\n".join([self.pipeline_id, *(f"  {self._line(node, width)}" for node in self.nodes)])

    def _line(self, node: Node, width: int) -> str:
        line = f"{node.id:<{width}}  {node.kind.value:<17} "
        line += ", ".join(f"{self._arrow(node, read)} {_written(read)}" for read in node.inputs)
        if node.source:
            line += f"{type(node.source).__name__} {node.source.topic or ''}".rstrip()
        if node.sink:
            line += f" {type(node.sink).__name__} {node.sink.shown}".rstrip()
        if node.sink and node.sink.delivery != EXACTLY_ONCE:
            line += f"  {node.sink.delivery}"
        if node.pause_ms:
            line += f"  after {node.pause_ms} ms"
        if node.state_type is not None:
            line += f"  state {node.kept.name}"
        return line if node.kind is Kind.SINK else f"{line}  : {schema.type_name(node.type)}"

    def _arrow(self, node: Node, read: Input) -> str:
        if node.kind is Kind.FEEDBACK:
            return "<~"
        return "<=" if KeyedEdge(read.node, node.id) in self.shuffles else "<-"


def _written(read: Input) -> str:
    return read.node if read.output is None else f"{read.node}.{read.output}"
