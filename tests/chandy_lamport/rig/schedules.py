"""Graphs and schedules as hypothesis draws them, and a network that lives through one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chandy_lamport.algorithm import ChandyLamport
from chandy_lamport.cuts import Violation
from hypothesis import strategies as st
from network import Discipline, Graph, Link, Network

PAY, TAKE, OVERTAKE, INITIATE = "pay", "take", "overtake", "initiate"


class Schedule(NamedTuple):
    graph: Graph
    initiations: dict[int, list[int]]
    """The snapshots that each process initiates."""
    steps: list[tuple[str, int]]
    """The kinds of steps, and for each an index among the possible ones, modulo their number."""

    @property
    def snapshots(self) -> set[int]:
        return {snapshot for snapshots in self.initiations.values() for snapshot in snapshots}


def _linked(processes: int, pairs: list[tuple[int, int]]) -> Graph:
    return Graph(processes, tuple(Link(*pair, number) for number, pair in enumerate(pairs)))


def _pairs(processes: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    process = st.integers(0, processes - 1)
    return st.lists(st.tuples(process, process), max_size=2 * processes)


def _trees(draw: st.DrawFn, processes: int) -> list[tuple[int, int]]:
    """Edges that connect each process with an earlier one."""
    return [(draw(st.integers(0, process - 1)), process) for process in range(1, processes)]


@st.composite
def any_graph(draw: st.DrawFn) -> Graph:
    """A connected multigraph with loops, in which not always each process reaches each other one."""
    processes = draw(st.sampled_from(range(1, 6)))
    turned = [(b, a) if draw(st.booleans()) else (a, b) for a, b in _trees(draw, processes)]
    return _linked(processes, turned + draw(_pairs(processes)))


@st.composite
def pipeline(draw: st.DrawFn, *, cyclic: bool = False) -> Graph:
    """A connected multigraph without cycles, with one source or several; *cyclic*: with back edges, each in a loop."""
    processes = draw(st.sampled_from(range(2, 6)))
    rank = draw(st.permutations(range(processes)))
    pairs = [(a, b) for a, b in _trees(draw, processes) + draw(_pairs(processes)) if a != b]
    forward = _linked(processes, [(a, b) if rank[a] < rank[b] else (b, a) for a, b in pairs])
    if not cyclic:
        return forward
    backward = [(a, b) for a, b in draw(_pairs(processes)) if a in forward.reached(b)]
    feedback = tuple(Link(a, b, len(pairs) + number) for number, (a, b) in enumerate(backward))
    return forward._replace(links=forward.links + feedback, feedback=frozenset(feedback))


def _sources(graph: Graph) -> set[int]:
    return set(range(graph.processes)) - {link.receiver for link in graph.links if link not in graph.feedback}


@st.composite
def schedules(
    draw: st.DrawFn,
    graphs: st.SearchStrategy[Graph],
    *,
    by_sources: bool = False,
    by_all: bool = False,
    overtaking: bool = False,
) -> Schedule:
    """*by_sources*: the sources initiate every snapshot, in one order; *by_all*: every process does; else any process.

    A process that the initiators would not reach initiates the snapshot as well.
    """
    graph = draw(graphs)
    initiations: dict[int, list[int]] = {process: [] for process in range(graph.processes)}
    for snapshot in range(1, draw(st.integers(1, 3)) + 1):
        everybody = st.just(set(range(graph.processes))) if by_all else st.sets(st.integers(0, graph.processes - 1))
        some = _sources(graph) if by_sources else draw(everybody)
        for process in [*sorted(some), *range(graph.processes)]:
            reached = set[int]().union(*(graph.reached(each) for each in initiations if snapshot in initiations[each]))
            if process in some or process not in reached:
                in_order = by_sources or by_all
                place = snapshot if in_order else draw(st.integers(0, len(initiations[process])))
                initiations[process].insert(place, snapshot)
    kinds = [PAY, PAY, TAKE, TAKE, INITIATE] + [OVERTAKE, OVERTAKE] * overtaking
    steps = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 11)), min_size=20, max_size=60))
    return Schedule(graph, initiations, steps)


Make = Callable[[Graph], Network]


def lived_through(schedule: Schedule, make: Make = Network) -> Network:
    network = make(schedule.graph)
    waiting = {process: list(snapshots) for process, snapshots in schedule.initiations.items()}
    for kind, pick in schedule.steps:
        match kind:
            case "pay" if links := schedule.graph.links:
                network.pay(links[pick % len(links)], 1 + pick)
            case "take" if links := tuple(network.takeable):
                network.take(links[pick % len(links)])
            case "overtake" if links := tuple(network.takeable):
                network.overtake(links[pick % len(links)])
            case "initiate" if processes := [process for process in waiting if waiting[process]]:
                process = processes[pick % len(processes)]
                network.initiate(process, waiting[process].pop(0))
    for process, snapshots in waiting.items():
        for snapshot in snapshots:
            network.initiate(process, snapshot)
    network.drain()
    return network


def under(discipline: type[Discipline], algorithm: type[ChandyLamport] = ChandyLamport) -> Make:
    return lambda graph: Network(graph, discipline, algorithm)


def violations(schedule: Schedule, network: Network) -> list[Violation]:
    return [each for snapshot in schedule.snapshots for each in network.history.violations(network.cut(snapshot))]
