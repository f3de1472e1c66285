"""The world of a simulation: threads that take their steps one by one, a clock, and a broker in memory.

Invariant: nothing runs but in `step`, and all choices come from `rng`, so that a seed gives one history. A subclass
says which pipeline runs, what goes wrong and when it is over. `Faults`, `Load` and `OutsideBlocks` are the seams to all
that can go wrong; nothing does by itself.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
from confluent_kafka import Message

from exactlyonce.checkpoint.block_storage import AttemptBlocks
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.events import End
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, TopicInfo
from exactlyonce.checkpoint.requests import FindReferences
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.engines.external_checks.preflight import Offsets
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.inputs import Pace, Slices
from exactlyonce.engines.local.worker import Worker
from exactlyonce.engines.options import StateSettings
from exactlyonce.engines.plan import Plan, TaskSpec, plan
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.pipeline.errors import ExactlyOnceError, InvariantViolation, class_name, is_fatal
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.testing.broker.interface import Error, NoAnswer, Record, TransactionalBroker
from exactlyonce.testing.broker.model import BrokerModel
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.simulation.clients import PIPE_BYTES, RETRY_PAUSE_MS, Awaited, Pipe, SimulatedClients, Steps

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator

ANSWERED_WITHIN_MS = 5_000
SERVICES_TIMEOUT_MS = 1_000_000_000
"""The timeout of checkpoints as workers know it: a service that is away is asked for as long as it takes."""
IDLE_MS = 60
"""A loop with nothing to do comes round so often; it is woken when there is."""
IDLE_UNDER_LOAD_MS = 10
"""Records of a source take time to gather, as with the one that ships."""

Owner: TypeAlias = "Process | SimulatedCoordinator"
"""A process of the simulation, which may be paused or killed."""


class Faults:
    """No faults."""

    last_chance = 0.0
    """The chance that a killed process's request in flight still arrives."""

    def before_request(self, coordinator: SimulatedCoordinator) -> None:
        """Called before each request of a procedure."""

    def unread(self, request: FindReferences) -> bool:
        """Whether the references of an older checkpoint cannot be read now."""
        return False

    def on_delivery(self) -> bool:
        """Whether a client loses a batch without a word."""
        return False

    def fails_delivery(self) -> bool:
        """Whether a client gives a batch up and reports it."""
        return False

    def shuffled(self, numbers: Iterable[int]) -> list[int]:
        """The order in which concurrent requests go out."""
        return [*numbers]

    def after_end(self) -> None:
        """Called after each answered EndTxn."""

    def before_commit(self, coordinator: SimulatedCoordinator) -> None:
        """Called before rows are committed to a store."""


class Load(Protocol):
    """Costs of records."""

    def begins(self, attempt: Attempt) -> None:
        """The workers of *attempt* begin."""

    def begins_turn(self, process: Process) -> None:
        """The loop of *process* begins a turn."""

    def muted_ms(self, worker: int, batch: list[tuple[Any, Any]]) -> int:
        """How long the broker lets *worker* wait before it takes *batch*."""

    def leaves(self, step: str, attempt: Attempt) -> None:
        """The broker has taken a record for topic *step*."""


class OutsideBlocks(Protocol):
    """Blocks outside of the checkpoint topic."""

    @property
    def not_known(self) -> dict[int, set[int]]:
        """By incarnation, the checkpoints whose references it could not read."""

    def until_answered(self, asked: Callable[[], Any]) -> Steps:
        """Ask until the storage answers."""

    def block(self, ref: BlockRef) -> Block:
        """The block; `DamagedBlock` if it is gone."""

    def scanned(self, ends: tuple[int, ...]) -> Steps:
        """A `Scanned` of all blocks."""

    def let_go(self, coordinator: SimulatedCoordinator, refs: list[BlockRef]) -> None:
        """Remove them in the background."""

    def writer(self, process: Process) -> AttemptBlocks:
        """The writer of one process."""


class Thread:
    __slots__ = ("owner", "steps", "wake_ms")

    def __init__(self, owner: Owner, steps: Steps) -> None:
        self.owner, self.steps, self.wake_ms = owner, steps, 0


class Asserted(AssertionError):
    """The shipped code has ended itself by an error that no fault explains."""

    trace: tuple[str, ...] = ()
    """The events before it."""


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


class Sending(Protocol):
    """A client of a process that sends requests."""

    @property
    def transactional_id(self) -> str | None: ...

    @property
    def queued(self) -> int:
        """The number of unsent records."""

    def last_request(self) -> None:
        """The process was killed while a request was in flight, which arrives now."""


class Attempt:
    def __init__(self, plan: Plan, incarnation: int, number: int, manifest: Manifest, offsets: Offsets) -> None:
        self.plan, self.incarnation, self.number = plan, incarnation, number
        self.manifest, self.offsets = manifest, offsets
        self.pipes: dict[tuple[int, str], Pipe] = {}

    def connect(self, world: SimulatedWorld, processes: list[Process]) -> None:
        size = world.rng.choice(PIPE_BYTES)
        for edge, i, j in self.plan.channels():
            if i != j:
                writer, reader = Pipe(processes[i], size), Pipe(processes[j], size)
                writer.peer, reader.peer = reader, writer
                self.pipes[i, f"out:{edge}:{i}:{j}"] = writer
                self.pipes[j, f"in:{edge}:{i}:{j}"] = reader


class Control:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.closed = False
        self.inbox: deque[object] = deque()

    def send(self, message: msg.ToCoordinator, /) -> None:
        """Figures are for people: they only take time."""
        if not isinstance(message, msg.Progress):
            self.process.coordinator.hear(self.process, message)

    def receive(self, timeout_s: float | None = 0.0, /) -> Iterable[object]:
        while self.inbox:
            yield self.inbox.popleft()

    def fileno(self) -> int:
        return -1


class Process:
    """A worker process: the shipped `Worker` and all that it builds, over simulated clients.

    It can be paused or killed between any two turns of its loop or requests of its clients; sent messages arrive, those
    in flight may.
    """

    def __init__(
        self, world: SimulatedWorld, coordinator: SimulatedCoordinator, attempt: Attempt, subtask: int
    ) -> None:
        self.world, self.coordinator, self.attempt, self.subtask = world, coordinator, attempt, subtask
        self.pid: int | None = None
        self.alive, self.paused_until_ms = True, 0
        self.busy_ms = 0
        """The cost of the records of the current turn."""
        self._busy_until_ms = 0
        """Until what the records of the last one cost is over."""
        self.is_gone = False
        """Whether its ends of channels are closed."""
        self.transaction_timeout_ms = world.transaction_timeout_ms
        self.control = Control(self)
        self.producers: list[Sending] = []
        self.worker: Worker | None = None
        self._jobs: deque[Steps] = deque()
        self._executing = False
        self._asleep = world.spawn(self, self._main())

    # --- its threads --------------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        try:
            yield from self._live()
        except InvariantViolation as error:
            raise self.world.asserted(
                f"worker {self.subtask}: a rule that the code asserts does not hold: {error}"
            ) from error
        except ExactlyOnceError as error:
            name = class_name(error) if is_fatal(error) else ""
            self.control.send(msg.WorkerFailed(self.subtask, name, str(error), {}, {**error.facts}))
            self.kill()

    def _live(self) -> Steps:
        yield None  # its channels are laid
        clients = SimulatedClients(self)
        start = self.world.start_message(self.attempt, self.subtask)
        worker = Worker(self.control, start, clients, Activity(clients.monotonic_s))
        while True:
            try:
                worker.open(self.world.graph_of_process())
                break
            except Awaited as wanted:
                refs = wanted.refs
            yield from clients.blocks.get(self.world, refs)
        for subtask in worker.parts.subtasks if self.world.fires_slowly else ():
            subtask.firing_slices = lambda: Slices(Pace(1.0, size=1, most=1), count().__next__)
        self.worker, clients.blocks.at_once = worker, self.world
        self.world.seen["restored records on their way"] += any(each.restored for each in worker.parts.subtasks)
        self.control.send(msg.Ready(self.subtask, self.world.fingerprint, 0))
        while worker.running:
            yield self._turned(worker)
        worker.close()
        self.is_gone = True

    def _turned(self, worker: Worker) -> int | None:
        """A turn of its loop; when the next is due."""
        load, now_ms = self.world.load, self.world.clock.monotonic_ms()
        if load:
            load.begins_turn(self)
        moved, self._busy_until_ms = worker.turn(), 0
        if self.busy_ms:
            self._busy_until_ms, self.busy_ms = now_ms + self.busy_ms, 0
            return self._busy_until_ms
        return None if moved else now_ms + (IDLE_UNDER_LOAD_MS if load else IDLE_MS)

    def execute(self, job: Steps) -> None:
        self._jobs.append(job)
        if not self._executing:
            self._executing = True
            self.world.spawn(self, self._execute())

    def _execute(self) -> Steps:
        while self._jobs:
            yield from self._jobs.popleft()
        self._executing = False

    def wake(self) -> None:
        self._asleep.wake_ms = self._busy_until_ms

    # --- what its coordinator says ------------------------------------------------------------------------------

    def tell(self, message: msg.ToWorker) -> None:
        self.control.inbox.append(message)
        self.wake()

    def fail(self, reason: str) -> None:
        self.coordinator.lose(self, f"worker {self.subtask}: {reason}")
        self.kill()

    def kill(self) -> None:
        """SIGKILL. Requests under way to the broker may still arrive."""
        if not self.alive:
            return
        self.alive, self.is_gone = False, True
        for pipe in self.attempt.pipes.values():
            if pipe.process is self:
                pipe.peer.process.wake()
        for producer in self.producers:
            if self.world.chaos and self.world.rng.random() < self.world.faults.last_chance:
                self.world.clock.call_after(self.world.rng.randint(0, 300), producer.last_request)
