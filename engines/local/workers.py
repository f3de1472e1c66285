"""Worker processes: started, watched, killed and waited for; and whether they wrote all before they ended.

Invariants: workers are spawned, never forked; none of an attempt is alive when the next attempt's first is started; a
worker dies with its coordinator (by the kernel's signal and by the end of its control channel). Whoever waits here for
a worker is given *hurried*, and waits no longer once it says so. An end is clean only if every worker that was ready
has said that it has written all that waited: one that failed, was killed or took too long has lost what it had not.
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
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from exactlyonce.engines.local.messages import (
    AllWritten,
    Connection,
    Progress,
    Ready,
    Shutdown,
    ToCoordinator,
    ToWorker,
    WorkerFailed,
)
from exactlyonce.engines.local.worker import serve
from exactlyonce.engines.plan import Plan
from exactlyonce.pipeline.delivery import AT_MOST_ONCE
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, OutputLost, made_from
from exactlyonce.pipeline.graph import LogicalGraph

T = TypeVar("T")
Hurried = Callable[[], bool]
Heard = Callable[[object], None]
"""Given each message of a worker that was told to end."""
LOOK_INTERVAL_S = 0.05
"""How often somebody who waits looks whether it is in a hurry."""
OTHER_FILES = 100
"""Files that a coordinator has open beside what its workers take, generously."""
EXIT_WAIT_S = 5.0
"""How long a worker that closed its control channel may take to end, and to have an exit code."""


@dataclass
class WorkerHandle:
    """One worker of the current attempt."""

    subtask: int
    connection: Connection
    process: subprocess.Popen[bytes] | None

    @property
    def pid(self) -> int | None:
        """The number of its process; None: it is no process of its own."""
        return self.process.pid if self.process is not None else None

    def tell(self, message: ToWorker) -> None:
        """Send, or keep for later what it does not take now."""
        self.connection.send(message)

    def exit_reason(self, hurried: Hurried) -> str:
        """How it ended, for the log."""
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


class Workers(Protocol):
    """How the workers of an attempt come and go."""

    alive: list[WorkerHandle]

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> list[WorkerHandle]:
        """Start a worker for each list of sockets, which it inherits under the same numbers."""

    def finish(self, timeout_s: float, hurried: Hurried, heard: Heard) -> None:
        """Tell all to end, and wait until they have; no longer than *timeout_s* without a word of progress: sinks may
        have something to write, and the user's operators something to close. *heard* gets their last words."""

    def kill(self, hurried: Hurried) -> None:
        """SIGKILL to all, and wait until they are gone."""


def refuse_too_many(plan: Plan) -> None:
    """Raise ConfigError if so many workers, and channels between them, are more than a process may have open."""
    between = sum(i != j for _, i, j in plan.channels())
    needed, allowed = 2 * (between + plan.parallelism) + OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if needed > allowed:
        raise ConfigError(
            f"parallelism {plan.parallelism} takes about {needed:,} open files, and a process may have {allowed:,}: "
            f"choose less, or allow more (`ulimit -n`)."
        )


def hear_out(workers: Iterable[WorkerHandle], heard: Heard) -> bool:
    """Hand over what workers that are to end have said since; whether one has told of progress."""
    progress = False
    for worker in workers:
        worker.connection.flush()
        for message in worker.connection.receive():
            heard(message)
            progress = progress or isinstance(message, Progress)
    return progress


class WorkerProcesses:
    """Workers as child processes in sessions of their own, so that Ctrl-C reaches the coordinator alone."""

    def __init__(self) -> None:
        self.alive: list[WorkerHandle] = []

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> list[WorkerHandle]:
        for subtask, sockets in enumerate(channel_sockets):
            ours, theirs = socket.socketpair()
            inherited = [theirs.fileno(), *(each.fileno() for each in sockets)]
            command = [sys.executable, "-m", "exactlyonce.engines.local.worker", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, start_new_session=True)
            theirs.close()
            self.alive.append(WorkerHandle(subtask, Connection(ours, ToCoordinator, waits=False), process))
        for sockets in channel_sockets:
            for each in sockets:
                each.close()
        return self.alive

    def finish(self, timeout_s: float, hurried: Hurried, heard: Heard) -> None:
        deadline, left = time.monotonic() + timeout_s, self.alive
        for worker in self.alive:
            worker.connection.send(Shutdown())
        while left and time.monotonic() < deadline and not hurried():
            left = [worker for worker in left if not _gone(worker, LOOK_INTERVAL_S)]
            if hear_out(self.alive, heard):
                deadline = time.monotonic() + timeout_s

    def kill(self, hurried: Hurried) -> None:
        for worker in self.alive:
            assert worker.process is not None
            worker.process.kill()
        for worker in self.alive:
            while not _gone(worker, LOOK_INTERVAL_S) and not hurried():
                pass  # the kernel does not let it go yet: its disk is away
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


class InlineWorker:
    """The `Workers` of a run in one process: one, on the main thread, where a debugger expects it. It has ended before
    another begins."""

    def __init__(self) -> None:
        self.alive: list[WorkerHandle] = []
        self._connections: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> list[WorkerHandle]:
        ours, theirs = socket.socketpair()
        self._ended.clear()
        self.alive = [WorkerHandle(0, Connection(ours, ToCoordinator, waits=False), None)]
        self._connections.put(Connection(theirs, ToWorker, waits=True))
        return self.alive

    def finish(self, timeout_s: float, hurried: Hurried, heard: Heard) -> None:
        deadline = time.monotonic() + timeout_s
        for worker in self.alive:
            worker.connection.send(Shutdown())
        ended = False
        while not ended and time.monotonic() < deadline and not hurried():
            ended = self._ended.wait(LOOK_INTERVAL_S)
            if hear_out(self.alive, heard):
                deadline = time.monotonic() + timeout_s

    def kill(self, hurried: Hurried) -> None:
        """There is nothing to kill: the worker ends when its channel does, or by the KeyboardInterrupt of a hurry."""
        for worker in self.alive:
            worker.connection.socket.close()
            while not self._ended.wait(LOOK_INTERVAL_S) and not hurried():
                pass
        self.alive = []

    def work_for(self, run: Callable[[], T]) -> T:
        """Call *run* on another thread, and be its worker on this one until it returns.

        A KeyboardInterrupt, which a second request to stop raises, gets this thread out of the user's code, wherever it
        is; *run*, which has been told to end at once, then does so.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                results.append(run())
            except BaseException as error:
                errors.append(error)
            finally:
                self._connections.put(None)

        thread = threading.Thread(target=body, name="coordinator", daemon=True)
        thread.start()
        with suppress(KeyboardInterrupt):
            while (connection := self._connections.get()) is not None:
                try:
                    serve(connection)
                finally:
                    connection.socket.close()
                    gc.collect()  # the worker's producers are not closed but dropped, and this process goes on
                    self._ended.set()
        self._ended.set()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


class LastOutput:
    """The output that the workers of one attempt write only behind the last checkpoint, of sinks that deliver at most
    once: whether it all is."""

    def __init__(self, graph: LogicalGraph) -> None:
        sinks = (node.id for node in graph.sinks if node.sink is not None and node.sink.delivery == AT_MOST_ONCE)
        self._waiting = sorted(sinks)
        """The sinks whose output waits for its checkpoint."""
        self._missing: dict[int, dict[str, int]] = {}
        """By worker that has not written all: what waits, by sink, as it was last said."""
        self._failure: WorkerFailed | None = None

    def heard(self, message: object) -> None:
        """Any message of a worker."""
        match message:
            case Ready(subtask):
                self._missing[subtask] = {}
            case Progress():
                self._missing[message.subtask] = message.unwritten
            case WorkerFailed(subtask, name):
                if subtask in self._missing:  # else it had written all, and failed behind that
                    self._missing[subtask] = message.unwritten
                if self._failure is None or (name and not self._failure.error):
                    self._failure = message
            case AllWritten(subtask):
                self._missing.pop(subtask, None)

    def error(self, checkpoint: int, redact: Callable[[str], str]) -> ExactlyOnceError | None:
        """What the run is to end with behind the last *checkpoint*, once all workers are gone; None: all is well."""
        name, why, facts = "", "a worker was killed, or did not end in time.", {}
        if self._failure is not None:
            name, why, facts = self._failure.error, redact(self._failure.message), self._failure.facts
        if not (self._waiting and self._missing):
            return made_from(name, why, facts) if name else None
        lost: Counter[str] = Counter()
        for unwritten in self._missing.values():
            lost.update(unwritten)
        counted = ", ".join(f"{count:,} of sink {sink!r}" for sink, count in sorted(lost.items()))
        said = (
            f"Output is lost: not all records that waited for the last checkpoint, {checkpoint}, were written behind "
            f"it: {counted or 'nobody knows how many, of ' + ', '.join(map(repr, self._waiting))}. Their input counts "
            f"as done with, so that they do not come again, as delivery at_most_once has it. The reason: {why}"
        )
        return made_from(name, said, facts) if name else OutputLost(said)
