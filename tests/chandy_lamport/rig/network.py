"""A network of processes that move money over FIFO channels while snapshots are taken.

The shipped algorithm decides about every message and marker; the network carries that out and notes it in the checker's
history. The barrier modes differ only in their discipline: when a process takes a marker off a channel.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple, Protocol

from chandy_lamport.algorithm import (
    ChandyLamport,
    Complete,
    Initiate,
    MarkerReceived,
    MessageReceived,
    RecordState,
    SendMarker,
    SnapshotEvent,
)
from chandy_lamport.cuts import CausalHistory, Cut

from exactlyonce.checkpoint.alignment import Alignment

MONEY_EACH = 100


class Link(NamedTuple):
    """A channel of a graph; *number* tells parallel ones apart."""

    sender: int
    receiver: int
    number: int

    def __str__(self) -> str:
        return f"{self.sender}->{self.receiver}#{self.number}"


class Graph(NamedTuple):
    """A directed multigraph, which may have loops from a process to itself."""

    processes: int
    links: tuple[Link, ...]
    feedback: frozenset[Link] = frozenset()
    """The back edges, where the graph is a pipeline with cycles: without them it has none."""

    def reached(self, start: int) -> set[int]:
        found, new = {start}, [start]
        while new:
            here = new.pop()
            for link in self.links:
                if link.sender == here and link.receiver not in found:
                    found.add(link.receiver)
                    new.append(link.receiver)
        return found


class Payment(NamedTuple):
    number: int
    amount: int

    def __str__(self) -> str:
        return f"{self.number}"


class Marker(NamedTuple):
    snapshot: int


class Discipline(Protocol):
    """The markers that a process takes when one comes, and the inputs from which it takes nothing meanwhile."""

    def __init__(self, inputs: Iterable[Link], feedback: frozenset[Link]) -> None: ...
    def is_held(self, link: Link) -> bool: ...
    def marker(self, link: Link, snapshot: int) -> Iterable[Link]:
        """The inputs whose marker of *snapshot* is taken now."""

    def initiated(self, snapshot: int) -> Iterable[Link]:
        """The inputs whose marker of *snapshot* has come, and is taken now that the process initiates it."""


class AtOnce:
    """Every marker is taken as it comes: Chandy-Lamport as it was published, and unaligned barriers."""

    def __init__(self, inputs: Iterable[Link], feedback: frozenset[Link]) -> None:
        pass

    def is_held(self, link: Link) -> bool:
        return False

    def marker(self, link: Link, snapshot: int) -> Iterable[Link]:
        return [link]

    def initiated(self, snapshot: int) -> Iterable[Link]:
        return []


class Aligned:
    """The shipped `Alignment` decides; of feedback every marker is taken as it comes."""

    exactly_once = True

    def __init__(self, inputs: Iterable[Link], feedback: frozenset[Link]) -> None:
        self._ordinary = [link for link in inputs if link not in feedback]
        self._alignment = Alignment(self._ordinary, exactly_once=self.exactly_once) if self._ordinary else None

    def is_held(self, link: Link) -> bool:
        return self._alignment is not None and link in self._ordinary and self._alignment.is_held(link)

    def marker(self, link: Link, snapshot: int) -> Iterable[Link]:
        if self._alignment is None or link not in self._ordinary:
            return [link]
        return self._ordinary if self._alignment.barrier(link, snapshot) else []

    def initiated(self, snapshot: int) -> Iterable[Link]:
        return []


class AtLeastOnce(Aligned):
    exactly_once = False


class Overtaking(Aligned):
    """The shipped `Alignment` decides, and who initiates waits no longer: the engine's unaligned barriers."""

    def __init__(self, inputs: Iterable[Link], feedback: frozenset[Link]) -> None:
        super().__init__(inputs, feedback)
        self._feedback = [link for link in inputs if link in feedback]
        if self._alignment is not None:
            self._alignment = Alignment(self._ordinary, feedback=self._feedback)

    def is_held(self, link: Link) -> bool:
        return self._alignment is not None and self._alignment.is_held(link)

    def marker(self, link: Link, snapshot: int) -> Iterable[Link]:
        if self._alignment is None:
            return [link]
        if self._alignment.barrier(link, snapshot):
            return self._come(snapshot)
        return [link] if snapshot <= self._alignment.checkpoint_latest else []

    def initiated(self, snapshot: int) -> Iterable[Link]:
        if self._alignment is None or snapshot <= self._alignment.checkpoint_latest:
            return []
        self._alignment.overtake(snapshot)
        return self._come(snapshot)

    def _come(self, snapshot: int) -> list[Link]:
        assert self._alignment is not None
        return [link for link in (*self._ordinary, *self._feedback) if link not in self._alignment.owing(snapshot)]


class Network:
    def __init__(
        self,
        graph: Graph,
        discipline: Callable[[Iterable[Link], frozenset[Link]], Discipline] = AtOnce,
        algorithm: type[ChandyLamport] = ChandyLamport,
    ) -> None:
        self.graph = graph
        self.queues: dict[Link, deque[Payment | Marker]] = {link: deque() for link in graph.links}
        self.money = dict.fromkeys(range(graph.processes), MONEY_EACH)
        self.history = CausalHistory(self.money, {link: (link.sender, link.receiver) for link in graph.links})
        self.states: dict[int, dict[int, int]] = defaultdict(dict)
        """The money that each process recorded, by snapshot and process."""
        self.positions: dict[int, dict[int, int]] = defaultdict(dict)
        self.in_flight: dict[int, dict[Any, tuple[Payment, ...]]] = defaultdict(dict)
        self.complete: dict[int, set[int]] = defaultdict(set)
        """The processes whose part is complete, by snapshot."""
        self.payments = 0
        self.processes = {}
        self.disciplines = {}
        for process in self.money:
            inputs = [link for link in graph.links if link.receiver == process]
            outputs = [link for link in graph.links if link.sender == process]
            self.processes[process] = algorithm(inputs, outputs)
            self.disciplines[process] = discipline(inputs, graph.feedback)

    @property
    def takeable(self) -> list[Link]:
        return [link for link, queue in self.queues.items() if queue and not self._held(link)]

    def pay(self, link: Link, amount: int) -> None:
        self.payments += 1
        payment = Payment(self.payments, amount)
        self.money[link.sender] -= amount
        self.history.sent(link, payment)
        self.queues[link].append(payment)

    def initiate(self, process: int, snapshot: int) -> None:
        come = self.disciplines[process].initiated(snapshot)
        self.handle(process, Initiate(snapshot))
        for each in come:
            self.handle(process, MarkerReceived(each, snapshot))

    def take(self, link: Link) -> None:
        item = self.queues[link].popleft()
        if isinstance(item, Marker):
            self.take_marker(link, item.snapshot, ())
        else:
            self.handle(link.receiver, MessageReceived(link, item))
            self.history.received(link, item)
            self.money[link.receiver] += item.amount

    def overtake(self, link: Link) -> None:
        """The first marker of the channel gets ahead of what lies before it, and names it."""
        queue = self.queues[link]
        place = next((place for place, item in enumerate(queue) if isinstance(item, Marker)), None)
        if place is not None:
            marker = queue[place]
            assert isinstance(marker, Marker)
            del queue[place]
            passed = tuple(item for item in islice(queue, place) if isinstance(item, Payment))
            self.take_marker(link, marker.snapshot, passed)

    def take_marker(self, link: Link, snapshot: int, overtaken: tuple[Payment, ...]) -> None:
        for each in self.disciplines[link.receiver].marker(link, snapshot):
            self.handle(link.receiver, MarkerReceived(each, snapshot, overtaken))

    def send_marker(self, link: Link, snapshot: int) -> None:
        self.queues[link].append(Marker(snapshot))

    def handle(self, process: int, event: SnapshotEvent) -> None:
        for action in self.processes[process].handle(event):
            match action:
                case RecordState(snapshot):
                    self.states[snapshot][process] = self.money[process]
                    self.positions[snapshot][process] = self.history.position(process)
                case SendMarker(snapshot, link):
                    assert isinstance(link, Link)
                    self.send_marker(link, snapshot)
                case Complete(snapshot, channels):
                    self.in_flight[snapshot].update(channels)
                    self.complete[snapshot].add(process)

    def drain(self) -> None:
        while takeable := self.takeable:
            for link in takeable:
                if self.queues[link] and not self._held(link):
                    self.take(link)

    def cut(self, snapshot: int) -> Cut:
        return Cut(self.positions[snapshot], self.in_flight[snapshot])

    def recorded_money(self, snapshot: int) -> int:
        flying = (payment.amount for payments in self.in_flight[snapshot].values() for payment in payments)
        return sum(self.states[snapshot].values()) + sum(flying)

    def _held(self, link: Link) -> bool:
        return self.disciplines[link.receiver].is_held(link)
