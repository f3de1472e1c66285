"""Worker processes: started, watched, killed and waited for; why they are late, and the output that they lost.

Invariants: workers are spawned, never forked. All workers of an attempt are dead before the next attempt starts one. A
worker dies with its coordinator, by the kernel's signal and by the end of its control channel. A wait ends once
*hurried* says so. An end is clean only if every worker that was ready has reported that everything is written: one that
failed, was killed or took too long has lost the rest. Only the newest message of a worker says where it is.
"""

from __future__ import annotations

import gc
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from exactlyonce.engines.local.messages import (
    AllWritten,
    Connection,
    Occupied,
    Progress,
    Ready,
    Shutdown,
    ToCoordinator,
    ToWorker,
    WorkerFailed,
)
from exactlyonce.engines.plan import Plan
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, OutputLost, made_from
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sink import AT_MOST_ONCE

T = TypeVar("T")
Hurried = Callable[[], bool]
Heard = Callable[[object], None]
"""Gets each message of a worker that was told to end."""
LOOK_INTERVAL_S = 0.05
"""The interval in which a wait looks at `Hurried`."""
OTHER_FILES = 100
"""The open files of a coordinator besides its workers', generously."""
EXIT_WAIT_S = 5.0
"""The time in which a worker that closed its control channel should end."""
HANGING_S = 1.0
"""A worker hangs after so long in one place, or in silence."""
NOTED_S = 10.0
"""The time in one place after which a note says so, once."""
SLOW_MS, SLOW_SHARE = 1.0, 0.5
"""An operator is slow if a record takes so long, and if it takes this share of its worker's time."""


@dataclass
class WorkerHandle:
    """One worker of the current attempt."""

    subtask: int
    connection: Connection
    process: subprocess.Popen[bytes] | None

    @property
    def pid(self) -> int | None:
        """Its process id; None: it is no process of its own."""
        return self.process.pid if self.process is not None else None

    def tell(self, message: ToWorker) -> None:
        """Send, or keep until it takes more."""
        self.connection.send(message)

    def exit_reason(self, hurried: Hurried) -> str:
        if self.process is None:
            return f"worker {self.subtask} ended"
        deadline = time.monotonic() + EXIT_WAIT_S
        while not _gone(self, LOOK_INTERVAL_S) and time.monotonic() < deadline and not hurried():
            pass
        code = self.process.returncode
        if code is None:
            return f"worker {self.subtask} (process {self.process.pid}) closed its control channel and does not end"
        if code < 0:
            return f"worker {self.subtask} (process {self.process.pid}) was killed by {signal.Signals(-code).name}"
        return f"worker {self.subtask} (process {self.process.pid}) ended with code {code}"


class Workers(ABC):
    """The workers of an attempt."""

    def __init__(self) -> None:
        self.alive: list[WorkerHandle] = []

    @abstractmethod
    def spawn(self, channel_sockets: list[list[socket.socket]]) -> None:
        """Start a worker for each list of sockets, which it inherits under the same numbers."""

    def finish(self, timeout_s: float, hurried: Hurried, heard: Heard) -> None:
        """Tell all to end, and wait until they have, *timeout_s* at most without progress: sinks may have to write, the
        user's operators to close. *heard* gets their last messages."""
        for worker in self.alive:
            worker.tell(Shutdown())
        deadline_s, ended = time.monotonic() + timeout_s, False
        while not ended and time.monotonic() < deadline_s and not hurried():
            ended = self._have_ended(LOOK_INTERVAL_S)
            for worker in self.alive:
                worker.connection.flush()
                for message in worker.connection.receive():
                    heard(message)
                    if isinstance(message, Progress):
                        deadline_s = time.monotonic() + timeout_s

    @abstractmethod
    def _have_ended(self, wait_s: float) -> bool:
        """Whether all have ended, after *wait_s* at most for one of them."""

    @abstractmethod
    def kill(self, hurried: Hurried) -> None:
        """SIGKILL to all, and wait until they are gone."""


def refuse_too_many(plan: Plan) -> None:
    """Raise ConfigError if the workers and their channels need more open files than a process may have."""
    between = sum(i != j for _, i, j in plan.channels())
    needed, allowed = 2 * (between + plan.parallelism) + OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if needed > allowed:
        raise ConfigError(
            f"parallelism {plan.parallelism} takes about {needed:,} open files, and a process may have {allowed:,}: "
            f"choose less, or allow more (`ulimit -n`)."
        )


class WorkerProcesses(Workers):
    """Workers as child processes in sessions of their own, so that Ctrl-C reaches the coordinator alone."""

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> None:
        for subtask, sockets in enumerate(channel_sockets):
            ours, theirs = socket.socketpair()
            inherited = [sock.fileno() for sock in (theirs, *sockets)]
            command = [sys.executable, "-m", "exactlyonce.engines.local.worker", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, start_new_session=True)
            theirs.close()
            self.alive.append(WorkerHandle(subtask, Connection(ours, ToCoordinator, waits=False), process))
        for inherited_socket in chain.from_iterable(channel_sockets):
            inherited_socket.close()

    def _have_ended(self, wait_s: float) -> bool:
        return all(_gone(worker, wait_s) for worker in self.alive)

    def kill(self, hurried: Hurried) -> None:
        for worker in self.alive:
            assert worker.process is not None
            worker.process.kill()
        for worker in self.alive:
            while not _gone(worker, LOOK_INTERVAL_S) and not hurried():
                pass  # the kernel cannot end it yet: its disk is away
            worker.connection.socket.close()
        self.alive = []


def _gone(worker: WorkerHandle, wait_s: float) -> bool:
    """Whether its process ends within *wait_s*."""
    assert worker.process is not None
    try:
        worker.process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


class InlineWorker(Workers):
    """The `Workers` of a run in one process: one on the main thread, for a debugger. It ends before another begins."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> None:
        ours, theirs = socket.socketpair()
        self._ended.clear()
        self.alive = [WorkerHandle(0, Connection(ours, ToCoordinator, waits=False), None)]
        self._connections.put(Connection(theirs, ToWorker, waits=True))

    def _have_ended(self, wait_s: float) -> bool:
        return not self.alive or self._ended.wait(wait_s)

    def kill(self, hurried: Hurried) -> None:
        """Nothing can be killed: the worker ends with its channel, or by the KeyboardInterrupt of a hurry."""
        for worker in self.alive:
            worker.connection.socket.close()
            while not self._ended.wait(LOOK_INTERVAL_S) and not hurried():
                pass
        self.alive = []

    def work_for(self, run: Callable[[], T]) -> T:
        """Call *run* on another thread, and be its worker on this one until it returns.

        The second request to stop raises KeyboardInterrupt, which gets this thread out of the user's code. *run* was
        told to end at once, too.
        """
        outcome = Future[T]()

        def body() -> None:
            try:
                outcome.set_result(run())
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                self._connections.put(None)

        thread = threading.Thread(target=body, name="coordinator", daemon=True)
        thread.start()
        with suppress(KeyboardInterrupt):
            from exactlyonce.engines.local.worker import serve  # a coordinator of processes does without

            while (connection := self._connections.get()) is not None:
                try:
                    serve(connection)
                finally:
                    connection.socket.close()
                    gc.collect()  # the worker's producers are not closed but dropped, and this process goes on
                    self._ended.set()
        self._ended.set()
        thread.join()
        return outcome.result()


@dataclass
class _Worker:
    heard_s: float
    ready: bool = False
    occupied: Occupied | None = None
    progress: Progress | None = None
    noted: set[str] = field(default_factory=set)


class WorkerWatchdog:
    """Hears of every start and message of the workers."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}

    def started(self, workers: int, now_s: float) -> None:
        self._workers = {subtask: _Worker(now_s) for subtask in range(workers)}

    def ready(self, subtask: int) -> None:
        self._workers[subtask].ready, self._workers[subtask].occupied = True, None

    def heard(self, subtask: int, message: object, now_s: float) -> str:
        """Hear any message of a worker. Returns a note for a person, or nothing."""
        worker = self._workers[subtask]
        worker.heard_s = now_s
        if isinstance(message, Progress):
            worker.progress, worker.occupied = message, None
        elif isinstance(message, Occupied):
            worker.occupied = message
            if message.occupied_s >= NOTED_S and message.place not in worker.noted:
                worker.noted.add(message.place)
                return f"{self._place(subtask, now_s)}: its checkpoints wait for it"
        return ""

    def hanging(self, now_s: float) -> str:
        """The workers that are not ready, hang, or are silent."""
        return "; ".join(
            self._place(subtask, now_s) for subtask, worker in self._workers.items()
            if not worker.ready or _silent_s(worker, now_s) >= HANGING_S
            or (worker.occupied and worker.occupied.occupied_s >= HANGING_S)
        )  # fmt: skip

    def slow(self) -> str:
        """The slow operators, and the reasons why sinks wait."""
        reports = [worker.progress for worker in self._workers.values() if worker.progress is not None]
        operators = (
            f"operator {report.busiest!r} takes {report.busiest_ms:,.0f} ms a record ({report.busiest_share:.0%} of "
            f"the time of worker {report.subtask})"
            for report in reports
            if report.busiest_ms >= SLOW_MS and report.busiest_share >= SLOW_SHARE
        )
        return "; ".join(chain(operators, *(report.held_up for report in reports)))

    def _place(self, subtask: int, now_s: float) -> str:
        worker = self._workers[subtask]
        silent_s = _silent_s(worker, now_s)
        if worker.occupied is None:
            ready = "" if worker.ready else " and is not ready"
            return f"worker {subtask} has said nothing for {silent_s:.0f} s{ready}"
        stopped = f", and has said nothing for {silent_s:.0f} s" if silent_s >= HANGING_S else ""
        return f"worker {subtask} has been in {worker.occupied.place} for {worker.occupied.occupied_s:.0f} s{stopped}"


def _silent_s(worker: _Worker, now_s: float) -> float:
    return now_s - worker.heard_s


class LastOutput:
    """The output of sinks that deliver at most once, written after the last checkpoint: is any of it lost?"""

    def __init__(self, graph: LogicalGraph) -> None:
        sinks = (node.id for node in graph.sinks if node.sink is not None and node.sink.delivery == AT_MOST_ONCE)
        self._waiting = sorted(sinks)
        """The sinks whose output waits for its checkpoint."""
        self._missing: dict[int, dict[str, int]] = {}
        """The last reported counts by sink, of each worker with unwritten output."""
        self._failure: WorkerFailed | None = None

    def heard(self, message: object) -> None:
        match message:
            case Ready(subtask):
                self._missing[subtask] = {}
            case Progress():
                self._missing[message.subtask] = message.unwritten
            case WorkerFailed(subtask, name):
                if subtask in self._missing:  # else it had written everything before it failed
                    self._missing[subtask] = message.unwritten
                if self._failure is None or (name and not self._failure.error):
                    self._failure = message
            case AllWritten(subtask):
                self._missing.pop(subtask, None)

    def error(self, checkpoint: int, redact: Callable[[str], str]) -> ExactlyOnceError | None:
        """The error with which the run ends after the last *checkpoint*, once all workers are gone; None: none."""
        name, why, facts = "", "a worker was killed, or did not end in time.", {}
        if self._failure is not None:
            name, why, facts = self._failure.error, redact(self._failure.message), self._failure.facts
        if not (self._waiting and self._missing):
            return made_from(name, why, facts) if name else None
        lost: Counter[str] = Counter()
        for unwritten in self._missing.values():
            lost.update(unwritten)
        counted = ", ".join(f"{count:,} of sink {sink!r}" for sink, count in sorted(lost.items()))
        text = (
            f"Output is lost: not all records that waited for the last checkpoint, {checkpoint}, were written after "
            f"it: {counted or 'nobody knows how many, of ' + ', '.join(map(repr, self._waiting))}. Their input counts "
            f"as done with, so that they do not come again, as delivery at_most_once has it. The reason: {why}"
        )
        return made_from(name, text, facts) if name else OutputLost(text)
