"""A user's pipeline in a simulation with at most one planned crash.

Invariants: two worlds with one seed and without a crash make the same requests, as long as the user's functions depend
on nothing but their arguments and state; a killed process makes no further request.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, cast

from confluent_kafka import Message

from exactlyonce.checkpoint.events import End
from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.pipeline.errors import BrokerUnavailable, GraphError, Undetermined
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.pipeline.stream import Pipeline
from exactlyonce.sinks.kafka.sink import KafkaSink, gives_partitions
from exactlyonce.testing.broker.interface import NoAnswer, Record
from exactlyonce.testing.broker.model import BrokerModel
from exactlyonce.testing.runs import InputRecord, OutputRecord, Run, Script, evenly
from exactlyonce.testing.scripted import CRASH
from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator
from exactlyonce.testing.simulation.world import Faults, Owner, Process, SimulatedWorld, Thread
from exactlyonce.testing.store import MemorySink, StoreModel

SETTINGS = CheckpointSettings(interval_ms=20, timeout_ms=1_000, tolerable_failed=1, restart_budget_ms=1_000)
TESTED = "tested"
"""The name that a function of a name is given."""
INTERVALS = 3
"""The input comes in so many parts: each once the last one is read, and a checkpoint has begun since."""
BLOCK_PARTITIONS = 2
STEPS_MAX = 200_000
"""A bound for runs that would never end."""
WRITES = {"init_transactions", "add_to_transaction", "produce", "end_txn"}
"""Requests that change something on the broker."""
NOTED = {
    "init_transactions": "it initialises a producer",
    "describe_transactions": "it looks at transactions",
    "describe_producers": "it counts the records of a transaction",
    "list_transactions": "it lists transactions",
    "topic_id": "it looks at a topic",
}
"""Requests, in words."""


@dataclass(frozen=True)
class Crash:
    """A process is killed at its own request *number* of all: before it is sent, or before its answer comes."""

    number: int
    before: bool


class CrashingWorld(SimulatedWorld):
    """Runs a pipeline on *scripts*, the inputs by topic, to their end."""

    def __init__(
        self,
        make: Callable[[], LogicalGraph],
        scripts: Mapping[str, Script],
        parallelism: int,
        crash: Crash | None = None,
        *,
        drains: bool = True,
    ) -> None:
        """*make* makes the pipeline anew for each process."""
        super().__init__(random.Random(0))
        self._make, self.drains = make, drains
        self.store = StoreModel()
        self.graph = self.graph_of_process()
        self.fingerprint = self.graph.fingerprint()
        self.settings = SETTINGS
        self.transaction_timeout_ms = SETTINGS.transaction_timeout_needed_ms
        self.plan = self.planned(parallelism)
        self.faults = Faults()
        self.broker = self.network = BrokerModel(self.clock)
        self.requests: list[tuple[str, bool]] = []
        """The operation of each request so far, and whether a worker made it."""
        self.crash = crash
        self.crashed = ""
        """What the planned crash has hit, in words."""
        self._scripts = {topic: list(script) for topic, script in scripts.items()}
        self._fed = dict.fromkeys(scripts, 0)
        self._taken = dict.fromkeys(scripts, 0)
        """By topic, the offset behind the last record that a source has taken."""
        self._fed_at_ms = dict.fromkeys(scripts, 0)
        """By topic, the time from which more may come."""
        self._running: Owner | None = None
        self._create_topics()

    def _create_topics(self) -> None:
        name = f"{self.graph.pipeline_id}.checkpoints"
        self.broker.create_topic(name, BLOCK_PARTITIONS, compact=True)
        self.topic = TopicInfo(name, self.broker.topic_id(name) or "", BLOCK_PARTITIONS, 1)
        for topic in self._scripts:
            self.broker.create_topic(topic)
        for topic, partitions in self.outputs.items():
            self.broker.create_topic(topic, partitions)
        self._producer = self.broker.init_transactions(None)

    def graph_of_process(self) -> LogicalGraph:
        return in_memory(self._make(), self.store)

    @cached_property
    def outputs(self) -> dict[str, int]:
        """The partition count by output topic."""
        sinks = [node.sink for node in self.graph.sinks if isinstance(node.sink, KafkaSink)]
        return {sink.topic: sink.create_partitions or 1 for sink in sinks}

    @property
    def output_partitions_by_sink(self) -> dict[str, int]:
        sinks = {node.id: cast("KafkaSink[Any]", node.sink) for node in self.graph.sinks if gives_partitions(node.sink)}
        return {id: self.partitions_of(sink.topic) for id, sink in sinks.items()}

    @property
    def targets(self) -> Mapping[str, Mapping[int, int]]:
        counts = {topic: sum(step is not CRASH for step in script) for topic, script in self._scripts.items()}
        return {node.id: {0: counts[cast("KafkaSource[Any]", node.source).place]} for node in self.graph.sources}

    def message(self, topic: str, partition: int, record: Record) -> Message:
        read: InputRecord = record.value
        return Message(
            topic=topic, partition=partition, offset=record.offset, key=read.key, value=read.value,
            headers=list(read.headers), timestamp=(1, read.timestamp_ms or read.time_ms), leader_epoch=0,
        )  # fmt: skip

    def consumed(self, messages: list[Message]) -> None:
        for message in messages:
            if message.error() is None:
                self._taken[str(message.topic())] = (message.offset() or 0) + 1

    # --- crashes ------------------------------------------------------------------------------------------------

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        owner = self._running
        if owner is not None and not owner.alive:
            raise NoAnswer("the process is dead")
        self.requests.append((operation, isinstance(owner, Process)))
        if self.crash is None or owner is None or len(self.requests) != self.crash.number:
            return super().ask(operation, *arguments, **options)
        if not self.crash.before:
            super().ask(operation, *arguments, **options)
        self.crashed = self._described(owner, operation, arguments)
        self._kill(owner)
        raise NoAnswer("the process is dead")

    def _described(self, owner: Owner, operation: str, arguments: tuple[Any, ...]) -> str:
        assert self.crash is not None
        at = "before this request is sent" if self.crash.before else "after this request, before its answer"
        read = ", ".join(f"{topic}: {count}" for topic, count in self._taken.items())
        return f"{_name(owner)} is killed when {_request(operation, arguments)}, {at} (records read: {read})"

    def _kill(self, owner: Owner) -> None:
        if isinstance(owner, Process):
            owner.fail("killed")
            return
        owner.kill_workers()
        owner.alive = False
        self.next_coordinator(0)

    def _take(self, thread: Thread) -> None:
        self._running = thread.owner
        try:
            super()._take(thread)
        finally:
            self._running = None

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end of the input; raises the error with which the pipeline ends, if any."""
        while not self.finished:
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise AssertionError(f"the pipeline does not come to the end of its input in {STEPS_MAX} steps")
            if self._begins:
                self.coordinator = SimulatedCoordinator(self)
            self._feed()
            self._step()
        self.clock.advance(1_000)  # the broker writes its markers

    def _feed(self) -> None:
        now_ms = self.clock.monotonic_ms()
        for topic, script in self._scripts.items():
            fed, count = self._fed[topic], -(-len(script) // INTERVALS)
            if fed == len(script) or self._taken[topic] < self.end_of(topic, 0) or now_ms < self._fed_at_ms[topic]:
                continue
            if script[fed] is CRASH:
                self._scripted_crash(topic)
                continue
            records = [*takewhile(lambda step: step is not CRASH, script[fed : fed + count])]
            self.broker.produce(None, self._producer.producer_id, 0, topic, 0, [(None, step) for step in records])
            self._fed[topic] += len(records)
            self._fed_at_ms[topic] = now_ms + 2 * SETTINGS.interval_ms

    def _scripted_crash(self, topic: str) -> None:
        workers = self.coordinator.workers if self.coordinator is not None else []
        if workers:
            del self._scripts[topic][self._fed[topic]]
            self.seen["scripted crash"] += 1
            workers[0].fail("killed")

    def ended(self, coordinator: SimulatedCoordinator, end: End) -> None:
        coordinator.kill_workers()
        coordinator.alive = False
        if end.error is None:
            self.finished = True
        elif isinstance(end.error, BrokerUnavailable | Undetermined):
            self.next_coordinator(0)
        else:
            raise end.error

    # --- its output ---------------------------------------------------------------------------------------------

    def visible(self, node: Node) -> list[OutputRecord]:
        """The records that readers of a sink see."""
        if isinstance(node.sink, KafkaSink):
            topic = node.sink.topic
            logs = [self.broker.fetch(topic, partition) for partition in range(self.partitions_of(topic))]
            return [(record.key, record.value) for log in logs for record in log.records]
        return [(None, row) for row in self.store.contents.rows.get((self.graph.pipeline_id, node.id), [])]


class MemoryRuns:
    """Runs of a pipeline on brokers in memory, as `BrokerRuns`."""

    def __init__(self, pipeline: Pipeline | Callable[..., Pipeline], parallelism: int, *, drains: bool = True) -> None:
        self._parallelism, self._drains = parallelism, drains
        self.scripts: Mapping[str, Script] = {}
        if isinstance(pipeline, Pipeline):
            graph = pipeline.build()
            self._make: Callable[[], LogicalGraph] = lambda: graph
        else:
            arguments = [TESTED for _ in inspect.signature(pipeline).parameters]
            self._make = lambda: pipeline(*arguments).build()
        self.graph = in_memory(self._make(), StoreModel())
        self._requests: list[tuple[str, bool]] = []
        """The requests of the last run without a crash; see `CrashingWorld`."""

    def run(self, crash: object) -> Run:
        assert crash is None or isinstance(crash, Crash)
        topics = {node.id: cast("KafkaSource[Any]", node.source).place for node in self.graph.sources}
        scripts = {topics[source]: script for source, script in self.scripts.items()}
        world = CrashingWorld(self._make, scripts, self._parallelism, crash, drains=self._drains)
        world.run()
        if crash is None:
            self._requests = world.requests
        return Run({node.id: world.visible(node) for node in world.graph.sinks}, world.crashed)

    def crashes(self, most: int | None) -> Iterator[Crash]:
        """Before and after each request that writes, and before each that a worker reads by.

        A coordinator runs no code of the user's and keeps nothing, so before it reads is as after its last write.
        """
        every = [
            Crash(number, before)
            for number, (operation, by_worker) in enumerate(self._requests, 1)
            for before in (True, False)
            if operation in WRITES or (by_worker and before)
        ]
        return evenly(every, most)


def in_memory(graph: LogicalGraph, store: StoreModel) -> LogicalGraph:
    """*graph* with the sinks of other stores than Kafka writing their records to *store*, which keeps a ledger, too.

    Raises `GraphError` if it cannot be run so.
    """
    return replace(graph, nodes=tuple(_in_memory(node, store) for node in graph.nodes))


def _in_memory(node: Node, store: StoreModel) -> Node:
    if node.sink is None:
        return node
    if node.sink.delivery != EXACTLY_ONCE:
        raise GraphError(f"sink {node.id!r} has delivery={node.sink.delivery!r}, which loses or doubles by choice")
    return node if isinstance(node.sink, KafkaSink) else replace(node, sink=MemorySink(node.id, store))


def _name(owner: Owner) -> str:
    return f"worker {owner.subtask}" if isinstance(owner, Process) else "the coordinator"


def _request(operation: str, arguments: tuple[Any, ...]) -> str:
    match operation:
        case "produce":
            *_, topic, partition, records = arguments
            return f"it produces {len(records)} records to {topic}[{partition}]"
        case "fetch":
            topic, partition, *offset = arguments
            return f"it reads {topic}[{partition}] from offset {offset[0] if offset else 0}"
        case "end_txn":
            return f"it {'commits' if arguments[3] else 'aborts'} transaction {arguments[0]}"
    return NOTED.get(operation, f"it asks {operation}")
