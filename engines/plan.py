"""The plan: the logical graph as tasks that run fused, and shuffles that distribute records by key group.

A task is a connected piece of the graph over forward edges. With parallelism 1 there is no shuffle, so that every
connected pipeline is one task. A back edge is a channel at any parallelism, from each subtask to the one of its number,
and orders no tasks. Pure: the same graph and parallelism give the same plan in every process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.graph import Input, Kind, LogicalGraph, Node

LOOP_MARK = ">"
"""Begins the name of a loop's edge, and of no other."""


@dataclass(frozen=True)
class ShuffleEdge:
    """Records of the `key_by` *producer* are distributed to the subtasks of *consumer*."""

    producer: str
    consumer: str

    @property
    def name(self) -> str:
        return f"{self.producer}>{self.consumer}"


@dataclass(frozen=True)
class FeedbackEdge:
    """What *producer* puts out comes round at the feedback node *loop*, subtask by subtask."""

    producer: str
    output: str | None
    loop: str

    @property
    def name(self) -> str:
        """The loop's alone: who feeds it may change while records go round."""
        return f"{LOOP_MARK}{self.loop}"


def feedback_edges(graph: LogicalGraph) -> list[FeedbackEdge]:
    """The back edges of *graph*."""
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
    """Tasks, those nearest to the sources first, and the shuffles between them."""

    graph: LogicalGraph
    parallelism: int
    tasks: tuple[Task, ...]
    shuffles: tuple[ShuffleEdge, ...]

    @property
    def feedback(self) -> list[FeedbackEdge]:
        """Its back edges."""
        return feedback_edges(self.graph)

    def into(self, task: Task) -> list[ShuffleEdge]:
        """Shuffles that end in *task*."""
        ids = {node.id for node in task.nodes}
        return [edge for edge in self.shuffles if edge.consumer in ids]

    def out_of(self, task: Task) -> list[ShuffleEdge]:
        """Shuffles that begin in *task*."""
        ids = {node.id for node in task.nodes}
        return [edge for edge in self.shuffles if edge.producer in ids]

    def shuffle_into(self, node: Node, read: Input) -> ShuffleEdge | None:
        """The shuffle by which *node* gets *read*; None: it is called."""
        return next((each for each in self.shuffles if (each.producer, each.consumer) == (read.node, node.id)), None)

    def channels(self) -> list[tuple[str, int, int]]:
        """(edge, from subtask, to subtask) of every channel, in one order for all processes."""
        subtasks = range(self.parallelism)
        shuffled = [(edge.name, i, j) for edge in self.shuffles for i in subtasks for j in subtasks]
        return shuffled + [(edge.name, i, i) for edge in self.feedback for i in subtasks]


def share_of(offsets: Mapping[int, int], parallelism: int, subtask: int) -> dict[int, int]:
    """Of *offsets* by partition, those of the partitions that *subtask* of a source reads.

    >>> share_of({0: 10, 1: 11, 2: 12}, 2, 0)
    {0: 10, 2: 12}
    """
    return {partition: offset for partition, offset in offsets.items() if partition % parallelism == subtask}


def rejoins(task: Task, shuffles: Iterable[ShuffleEdge]) -> bool:
    """Whether streams that part within *task* meet again in it.

    An operator hands a whole batch to one branch and then to the next. Where these meet, the order of their records
    depends on what was in the batch, so that a replay must have the same batches.
    """
    ids = {node.id for node in task.nodes}
    cut = {(edge.producer, edge.consumer) for edge in shuffles}
    cut |= {(read.node, loop.id) for loop in task.loops for read in loop.inputs}
    ways: dict[str, Counter[str]] = {}
    for node in task.nodes:
        ways[node.id] = Counter([node.id])
        for each in node.inputs:
            if each.node in ids and (each.node, node.id) not in cut:
                ways[node.id] += ways[each.node]
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
    shuffles = [ShuffleEdge(each.key_by, each.stateful) for each in graph.shuffles if parallelism > 1]
    cut = {(edge.producer, edge.consumer) for edge in shuffles}
    cut |= {(edge.producer, edge.loop) for edge in feedback_edges(graph)}
    leader = {node.id: node.id for node in graph.nodes}

    def find(node: str) -> str:
        while leader[node] != node:
            node = leader[node]
        return node

    order = {node.id: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for each in node.inputs:
            if (each.node, node.id) not in cut:
                first, second = sorted((find(each.node), find(node.id)), key=order.__getitem__)
                leader[second] = first
    members: dict[str, list[Node]] = {}
    for node in graph.nodes:
        members.setdefault(find(node.id), []).append(node)
    tasks = [Task(name, tuple(nodes)) for name, nodes in members.items()]
    _refuse_cycles(tasks, shuffles)
    _refuse_loops_alone(tasks, shuffles)
    return Plan(graph, parallelism, _sorted(tasks, shuffles), tuple(shuffles))


def _refuse_cycles(tasks: list[Task], shuffles: list[ShuffleEdge]) -> None:
    """Raise GraphError where a task would wait for its own barrier: streams before and behind a shuffle meet in it."""
    owner, depths = _owners(tasks), _depths(tasks, shuffles)
    for edge in shuffles:
        if depths[owner[edge.consumer]] <= depths[owner[edge.producer]]:
            raise GraphError(
                f"The records of {edge.producer!r} are distributed by key to {edge.consumer!r}, and what comes of them "
                f"is united with a stream from before that. With a parallelism above 1 there would be no order in "
                f"which barriers can pass. Run it with parallelism 1; or write one of the two streams to a topic, and "
                f"read it from there in another pipeline."
            )


def _refuse_loops_alone(tasks: list[Task], shuffles: list[ShuffleEdge]) -> None:
    """Raise GraphError where a task would have no input whose barrier it can wait for."""
    shuffled = {edge.consumer for edge in shuffles}
    for task in tasks:
        if task.loops and not task.sources and not shuffled & {node.id for node in task.nodes}:
            raise GraphError(
                f"What comes round loop {task.loops[0].id!r} is distributed by key before it meets another stream. "
                f"With a parallelism above 1 no barrier would come to it. Run it with parallelism 1; or unite the loop "
                f"with the stream that it begins in, by .union(...), before .key_by(...)."
            )


def _owners(tasks: list[Task]) -> dict[str, str]:
    """By node, its task."""
    return {node.id: task.name for task in tasks for node in task.nodes}


def _depths(tasks: list[Task], shuffles: list[ShuffleEdge]) -> dict[str, int]:
    """By task, over how many shuffles the longest way to it goes; where there is a cycle, it contradicts itself."""
    owner, depths = _owners(tasks), {task.name: 0 for task in tasks}
    for _ in tasks:
        for edge in shuffles:
            depths[owner[edge.consumer]] = max(depths[owner[edge.consumer]], depths[owner[edge.producer]] + 1)
    return depths


def _sorted(tasks: list[Task], shuffles: list[ShuffleEdge]) -> tuple[Task, ...]:
    """Upstream tasks first."""
    depths = _depths(tasks, shuffles)
    return tuple(sorted(tasks, key=lambda task: depths[task.name]))
