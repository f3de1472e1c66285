"""The subtasks of the simulated pipeline, of which it may get more or fewer between two incarnations."""

from __future__ import annotations

from topologies import Topology

from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.graph import LogicalGraph


class Scale:
    """One parallelism, and what follows from it."""

    def __init__(self, topology: Topology, graph: LogicalGraph, parallelism: int) -> None:
        self.parallelism = parallelism
        self.plan = plan(graph, parallelism)
        every = range(parallelism)
        self.subtasks = {(each.name, i) for each in self.plan.tasks for i in every}
        self.source_subtasks = {(each.name, i) for each in self.plan.tasks if each.sources for i in every}
        self.sink_subtasks = {(sink, i) for sink in topology.sinks for i in every}
        """Of the sinks that write in transactions."""
