"""A worker process of the simulator: the shipped `Worker` and all that it builds, over simulated clients.

It can be paused or killed between any two turns of its loop or requests of its clients; sent messages arrive, those in
flight may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Protocol

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.external_checks.preflight import Offsets
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.inputs import Slices
from exactlyonce.engines.local.pace import Pace
from exactlyonce.engines.local.worker import Worker
from exactlyonce.engines.plan import Plan
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.pipeline.errors import ExactlyOnceError, InvariantViolation, class_name, is_fatal
from exactlyonce.testing.simulation.clients import PIPE_BYTES, Awaited, Pipe, SimulatedClients, Steps

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator
    from exactlyonce.testing.simulation.world import SimulatedWorld

IDLE_MS = 60
"""A loop with nothing to do comes round so often; it is woken when there is."""
IDLE_UNDER_LOAD_MS = 10
"""Records of a source take time to gather, as with the one that ships."""


class Asserted(AssertionError):
    """The shipped code has ended itself by an error that no fault explains."""

    trace: tuple[str, ...] = ()
    """The events before it."""


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
    def __init__(
        self, world: SimulatedWorld, coordinator: SimulatedCoordinator, attempt: Attempt, subtask: int
    ) -> None:
        self.world, self.coordinator, self.attempt, self.subtask = world, coordinator, attempt, subtask
        self.pid: int | None = None
        self.alive, self.paused_until_ms = True, 0
        self.busy_ms = 0
        """The cost of the records of the current turn."""
        self._busy_until_ms = 0
        """Until what those of the last one cost is over."""
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
