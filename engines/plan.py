"""The plan: the logical graph as tasks that run fused, and shuffles that distribute records by key group.

A task is a piece of the graph connected by forward edges. With parallelism 1 there is no shuffle: a connected pipeline
is one task. A back edge is a channel at any parallelism, between subtasks of one number, and orders no tasks. Pure: the
same graph and parallelism give the same plan in every process. `TaskSpec` is what each of these is told besides it,
whatever its engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import Manifest, RecordPlace, TopicInfo
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.graph import KeyedEdge, Kind, LogicalGraph, Node

T = TypeVar("T")

LOOP_MARK = ">"
"""The first character of the name of every loop's edge, and of no other edge."""


@dataclass(frozen=True)
class ShuffleEdge:
    """A shuffle of the records of *producer* to the subtasks of *consumer*: by key, or each to all of them."""

    producer: str
    consumer: str
    port: int = 0
    """The input of *consumer* that gets them; see `KeyedEdge.port`."""
    to_all: bool = field(default=False, compare=False)
    """Whether each record goes to all subtasks. No barrier overtakes such records."""

    @staticmethod
    def of(edge: KeyedEdge) -> ShuffleEdge:
        return ShuffleEdge(edge.key_by, edge.stateful, edge.port)

    @property
    def name(self) -> str:
        """A join of a stream with itself has two edges with the same ends."""
        return f"{self.producer}>{self.consumer}" + (f">{self.port}" if self.port else "")


@dataclass(frozen=True)
class FeedbackEdge:
    """A back edge, subtask by subtask: *output* of *producer* comes round at the feedback node *loop*."""

    producer: str
    output: str | None
    loop: str

    @property
    def name(self) -> str:
        """The loop's name alone: its producer may change while records go round."""
        return f"{LOOP_MARK}{self.loop}"


def feedback_edges(graph: LogicalGraph) -> list[FeedbackEdge]:
    return [FeedbackEdge(read.node, read.output, loop.id) for loop in graph.loops for read in loop.inputs]


@dataclass(frozen=True)
class Task:
    """Operators that run fused, in topological order; named after the first of them."""

    name: str
    nodes: tuple[Node, ...]

    @property
    def sources(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is Kind.SOURCE)

    @property
    def sinks(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is Kind.SINK)

    @property
    def loops(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is Kind.FEEDBACK)


@dataclass(frozen=True)
class Plan:
    """Tasks, upstream first, and the shuffles between them."""

    graph: LogicalGraph
    parallelism: int
    tasks: tuple[Task, ...]
    shuffles: tuple[ShuffleEdge, ...]

    @property
    def feedback(self) -> list[FeedbackEdge]:
        return feedback_edges(self.graph)

    def into(self, task: Task) -> list[ShuffleEdge]:
        ids = {node.id for node in task.nodes}
        return [edge for edge in self.shuffles if edge.consumer in ids]

    def out_of(self, task: Task) -> list[ShuffleEdge]:
        ids = {node.id for node in task.nodes}
        return [edge for edge in self.shuffles if edge.producer in ids]

    def shuffle_into(self, node: Node, port: int) -> ShuffleEdge | None:
        """The shuffle by which *node* gets its input number *port*; None: both are fused."""
        edge = ShuffleEdge(node.inputs[port].node, node.id, port)
        return next((shuffle for shuffle in self.shuffles if shuffle == edge), None)

    def channels(self) -> list[tuple[str, int, int]]:
        """(edge, from subtask, to subtask) of every channel, in the same order in all processes."""
        subtasks = range(self.parallelism)
        shuffled = [(edge.name, i, j) for edge in self.shuffles for i in subtasks for j in subtasks]
        return shuffled + [(edge.name, i, i) for edge in self.feedback for i in subtasks]


def share_of(offsets: Mapping[int, T], parallelism: int, subtask: int) -> dict[int, T]:
    """The part of *offsets*, by split, that *subtask* of a source reads.

    >>> share_of({0: 10, 1: 11, 2: 12}, 2, 0)
    {0: 10, 2: 12}
    """
    return {partition: offset for partition, offset in offsets.items() if partition % parallelism == subtask}


def rejoins(task: Task, shuffles: Iterable[ShuffleEdge]) -> bool:
    """Whether streams that part within *task* meet again in it.

    An operator hands a whole batch to one branch, then to the next. Where branches meet, the order of records depends
    on the batches, so a replay must have the same ones.
    """
    ids = {node.id for node in task.nodes}
    cut = {(edge.producer, edge.consumer) for edge in shuffles}
    cut |= {(read.node, loop.id) for loop in task.loops for read in loop.inputs}
    ways: dict[str, Counter[str]] = {}
    for node in task.nodes:
        ways[node.id] = Counter([node.id])
        for read in node.inputs:
            if read.node in ids and (read.node, node.id) not in cut:
                ways[node.id] += ways[read.node]
    return any(count > 1 for counter in ways.values() for count in counter.values())


def plan(graph: LogicalGraph, parallelism: int) -> Plan:
    """The tasks of *graph* at *parallelism*.

    Raises GraphError where barriers could not pass, ConfigError where state cannot be spread so far.
    """
    if graph.shuffles and parallelism > graph.max_parallelism:
        raise ConfigError(
            f"parallelism is {parallelism}, but the state of this pipeline can be spread over {graph.max_parallelism} "
            f"subtasks at most, as its max_parallelism says: choose no more than that."
        )
    shuffles = [ShuffleEdge.of(edge) for edge in graph.shuffles if parallelism > 1]
    if parallelism > 1:
        shuffles += [ShuffleEdge(node.inputs[1].node, node.id, 1, to_all=True) for node in graph.broadcasts]
    cut = {(edge.producer, edge.consumer) for edge in shuffles}
    cut |= {(edge.producer, edge.loop) for edge in feedback_edges(graph)}
    leader = {node.id: node.id for node in graph.nodes}

    def find(node: str) -> str:
        while leader[node] != node:
            node = leader[node]
        return node

    order = {node.id: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for read in node.inputs:
            if (read.node, node.id) not in cut:
                first, second = sorted((find(read.node), find(node.id)), key=order.__getitem__)
                leader[second] = first
    owner = {node.id: find(node.id) for node in graph.nodes}
    names = dict.fromkeys(owner.values())
    tasks = [Task(name, tuple(node for node in graph.nodes if owner[node.id] == name)) for name in names]
    depths = _depths(tasks, shuffles, owner)
    _refuse_cycles(shuffles, owner, depths)
    _refuse_loops_alone(tasks, shuffles)
    upstream_first = tuple(sorted(tasks, key=lambda task: depths[task.name]))
    return Plan(graph, parallelism, upstream_first, tuple(shuffles))


def _depths(tasks: list[Task], shuffles: list[ShuffleEdge], owner: Mapping[str, str]) -> dict[str, int]:
    """The number of shuffles on the longest path to each task; inconsistent if there is a cycle. *owner*: the task of
    each node."""
    depths = {task.name: 0 for task in tasks}
    for _ in tasks:
        for edge in shuffles:
            depths[owner[edge.consumer]] = max(depths[owner[edge.consumer]], depths[owner[edge.producer]] + 1)
    return depths


def _refuse_cycles(shuffles: list[ShuffleEdge], owner: Mapping[str, str], depths: Mapping[str, int]) -> None:
    """Raise GraphError if streams before and after a shuffle meet in a task: it would wait for its own barrier."""
    for edge in shuffles:
        if depths[owner[edge.consumer]] <= depths[owner[edge.producer]]:
            raise GraphError(
                f"The records of {edge.producer!r} are distributed by key to {edge.consumer!r}, and what comes of them "
                f"is united with a stream from before that. With a parallelism above 1 there would be no order in "
                f"which barriers can pass. Run it with parallelism 1; or write one of the two streams to a topic, and "
                f"read it from there in another pipeline."
            )


def _refuse_loops_alone(tasks: list[Task], shuffles: list[ShuffleEdge]) -> None:
    """Raise GraphError if a task would have no input whose barrier it can wait for."""
    shuffled = {edge.consumer for edge in shuffles}
    for task in tasks:
        if task.loops and not task.sources and not shuffled & {node.id for node in task.nodes}:
            raise GraphError(
                f"What comes round loop {task.loops[0].id!r} is distributed by key before it meets another stream. "
                f"With a parallelism above 1 no barrier would come to it. Run it with parallelism 1; or unite the loop "
                f"with the stream that it begins in, by .union(...), before .key_by(...)."
            )


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of a pipeline from one checkpoint on. It has no settings of the client: these may be secrets."""

    reference: dict[str, object]
    """How the pipeline is imported; see `pipeline.loading`."""
    parallelism: int
    incarnation: int
    attempt: int
    manifest: Manifest
    """The checkpoint of the state that they begin with."""
    topic: TopicInfo
    """The checkpoint topic."""
    storage: str = ""
    """The storage of blocks; see `Manifest.storage`."""
    drops_fields: bool = False
    """`VersionedState.drops_fields`, of all states."""
    skips: tuple[RecordPlace, ...] = ()
    """The input records to leave out."""
    incremental: bool = True
    """`CheckpointSettings.incremental`."""
    output_partitions: dict[str, int] = msgspec.field(default_factory=dict)
    """The number of partitions of each sink's topic, by sink."""
    partitioners: dict[str, str] = msgspec.field(default_factory=dict)
    """The partitioner of each of these sinks."""
