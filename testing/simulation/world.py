"""The world of a simulation: threads that take their steps one by one, a clock, and a broker in memory.

Invariant: nothing runs but in `step`, and all choices come from `rng`, so that a seed gives one history. A subclass
says which pipeline runs, what goes wrong and when it is over.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from confluent_kafka import Message

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.events import End
from exactlyonce.checkpoint.records.manifest import Manifest, TopicInfo
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.engines.external_checks.preflight import Offsets
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.options import StateSettings
from exactlyonce.engines.plan import Plan, TaskSpec, plan
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.testing.broker.interface import Error, NoAnswer, Record, TransactionalBroker
from exactlyonce.testing.broker.model import BrokerModel
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.simulation.clients import RETRY_PAUSE_MS, Owner, Steps
from exactlyonce.testing.simulation.processes import Asserted, Attempt, Process

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator
    from exactlyonce.testing.simulation.faults import Faults, Load, OutsideBlocks

ANSWERED_WITHIN_MS = 5_000
SERVICES_TIMEOUT_MS = 1_000_000_000
"""The timeout of checkpoints as workers know it: a service that is away is asked for as long as it takes."""


class Thread:
    __slots__ = ("owner", "steps", "wake_ms")

    def __init__(self, owner: Owner, steps: Steps) -> None:
        self.owner, self.steps, self.wake_ms = owner, steps, 0


class SimulatedWorld:
    """A subclass sets the attributes without a value here before its first step."""

    asserted: type[AssertionError] = Asserted
    """The error when the shipped code's own checks fail."""
    broker: BrokerModel
    network: TransactionalBroker
    """The broker, as clients reach it."""
    faults: Faults
    graph: LogicalGraph
    fingerprint: str
    plan: Plan
    settings: CheckpointSettings
    transaction_timeout_ms: int
    topic: TopicInfo
    """The checkpoint topic."""
    outside: OutsideBlocks | None = None
    load: Load | None = None
    drains: bool = False
    """Whether windows close at the end."""
    fires_slowly: bool = False
    """Whether each result of a firing takes so long that others have a turn after it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.clock = SimulatedClock()
        self.seen: Counter[str] = Counter()
        """How often each kind of event has happened."""
        self.trace: deque[str] = deque(maxlen=400)
        self.steps = 0
        self.finished = False
        self.coordinator: SimulatedCoordinator | None = None
        """The newest; None while there is none."""
        self._next_coordinator_ms = 0
        self._threads: list[Thread] = []
        self._plans: dict[int, Plan] = {}

    # --- what a subclass decides --------------------------------------------------------------------------------

    @property
    def chaos(self) -> bool:
        """Whether anything may go wrong by chance."""
        return False

    @property
    def store_timeout_ms(self) -> int:
        return 0

    @property
    def targets(self) -> Mapping[str, Mapping[int, int]]:
        """The offset by source and partition at which a run ends."""
        raise NotImplementedError

    def ended(self, coordinator: SimulatedCoordinator, end: End) -> None:
        """The job of *coordinator* has come to its end."""
        raise NotImplementedError

    def graph_of_process(self) -> LogicalGraph:
        """The pipeline as a worker process has imported it."""
        return self.graph

    def state_settings(self, attempt: Attempt) -> StateSettings:
        return StateSettings()

    def decision_log(self, append_timeout_ms: int) -> DecisionLog:
        """The decision log as a process sees it."""
        return DecisionLog(self.graph.pipeline_id, self.topic, self.clock, append_timeout_ms)

    def message(self, topic: str, partition: int, record: Record) -> Message:
        """*record* as a consumer gets it."""
        return Message(
            topic=topic, partition=partition, offset=record.offset, key=record.key, value=record.value,
            timestamp=(1, 0), leader_epoch=0,
        )  # fmt: skip

    def consumed(self, messages: list[Message]) -> None:
        """A source takes these, some of which are errors and ends of partitions."""

    def is_cleaned(self, place: tuple[str, int, int]) -> bool:
        """Whether compaction has removed the aborted record at this topic, partition and offset."""
        return False

    def deadline_ms(self) -> int:
        """The time until which a coordinator waits for an answer; it asks once in any case."""
        return self.clock.monotonic_ms() + ANSWERED_WITHIN_MS

    # --- for coordinators and workers ---------------------------------------------------------------------------

    def planned(self, parallelism: int) -> Plan:
        if parallelism not in self._plans:
            self._plans[parallelism] = plan(self.graph, parallelism)
        return self._plans[parallelism]

    def spawn(self, owner: Owner, steps: Steps) -> Thread:
        thread = Thread(owner, steps)
        self._threads.append(thread)
        return thread

    def note(self, text: str) -> None:
        self.trace.append(f"{self.clock.monotonic_ms():>7} {text}")

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """One request to the broker; raises `NoAnswer`."""
        return getattr(self.network, operation)(*arguments, **options)

    def until_answered(
        self, operation: str, *arguments: Any, again: tuple[Error, ...] = (), **options: Any
    ) -> Generator[int | None, None, Any]:
        while True:
            yield None
            try:
                answer = self.ask(operation, *arguments, **options)
            except NoAnswer:
                pass
            else:
                if getattr(answer, "error", None) not in again:
                    return answer
            yield self.clock.monotonic_ms() + RETRY_PAUSE_MS

    def partitions_of(self, topic: str) -> int:
        found = self.broker._topics.get(topic)
        return len(found.logs) if found else 0

    def end_of(self, topic: str, partition: int) -> int:
        """The end offset of the partition; -1: there is none."""
        found = self.broker._topics.get(topic)
        return found.logs[partition].end_offset if found and partition < len(found.logs) else -1

    def start_workers(
        self,
        coordinator: SimulatedCoordinator,
        incarnation: int,
        number: int,
        manifest: Manifest,
        offsets: Offsets,
    ) -> list[Process]:
        attempt = Attempt(coordinator.plan, incarnation, number, manifest, offsets)
        processes = [Process(self, coordinator, attempt, i) for i in range(coordinator.plan.parallelism)]
        attempt.connect(self, processes)
        if self.load:
            self.load.begins(attempt)
        return processes

    def start_message(self, attempt: Attempt, index: int) -> msg.Start:
        targets = {
            source: {partition: ends[partition] for partition in attempt.offsets[source]}
            for source, ends in self.targets.items()
        }
        spec = TaskSpec(
            reference={}, parallelism=attempt.plan.parallelism, incarnation=attempt.incarnation,
            attempt=attempt.number, manifest=attempt.manifest, topic=self.topic, storage=self.settings.storage,
            incremental=self.settings.incremental, output_partitions=self.output_partitions_by_sink,
        )  # fmt: skip
        return msg.Start(
            spec=spec, subtask=index, client={}, offsets=attempt.offsets, targets=targets,
            settings=msgspec.structs.replace(self.settings, timeout_ms=SERVICES_TIMEOUT_MS),
            state=self.state_settings(attempt), channels={}, transaction_timeout_ms=self.transaction_timeout_ms,
        )  # fmt: skip

    @property
    def output_partitions_by_sink(self) -> dict[str, int]:
        """The partition counts of the topics that sinks with ``partition=`` write to."""
        return {}

    # --- history ------------------------------------------------------------------------------------------------

    def next_coordinator(self, delay_ms: int) -> None:
        self.coordinator, self._next_coordinator_ms = None, self.clock.monotonic_ms() + delay_ms

    def is_newest(self, coordinator: SimulatedCoordinator) -> bool:
        """Whether no later coordinator has taken over from it."""
        return coordinator is self.coordinator

    @property
    def _begins(self) -> bool:
        """Whether the next coordinator is due."""
        due = self.clock.monotonic_ms() >= self._next_coordinator_ms
        return self.coordinator is None and not self.finished and due

    def _step(self) -> None:
        """One step of one thread that is due; or time passes until one is."""
        now_ms = self.clock.monotonic_ms()
        due = [
            each
            for each in self._threads
            if each.wake_ms <= now_ms and (owner := each.owner).paused_until_ms <= now_ms and owner.alive
        ]
        if not due:
            self._threads = [each for each in self._threads if each.owner.alive]
            wakes = [max(each.wake_ms, each.owner.paused_until_ms) for each in self._threads]
            if self.coordinator is None and not self.finished:
                wakes.append(self._next_coordinator_ms)
            self.clock.advance(max(1, min(wakes, default=0) - now_ms))
            return
        draw = self.rng.random
        thread = due[int(draw() * len(due))]
        self._take(thread)
        if draw() < (0.3 if self.chaos else 0.1):
            self.clock.advance(1)

    def _take(self, thread: Thread) -> None:
        """The next step of *thread*."""
        try:
            thread.wake_ms = next(thread.steps) or 0
        except StopIteration:
            self._threads.remove(thread)
