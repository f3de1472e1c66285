"""Worker processes: started, watched, killed and waited for.

Invariants: workers are spawned, never forked; none of an attempt is alive when the next attempt's first is started; a
worker dies with its coordinator (by the kernel's signal and by the end of its control channel).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from exactlyonce.engines.local.messages import Connection, Shutdown, ToCoordinator


@dataclass
class Worker:
    """One worker of the current attempt."""

    subtask: int
    connection: Connection
    process: subprocess.Popen[bytes] | None

    def obituary(self) -> str:
        """How it ended, for the log."""
        if self.process is None:
            return f"worker {self.subtask} ended"
        code = self.process.wait()
        if code < 0:
            return f"worker {self.subtask} (process {self.process.pid}) was killed by {signal.Signals(-code).name}"
        return f"worker {self.subtask} (process {self.process.pid}) ended with code {code}"


class Workers(Protocol):
    """How the workers of an attempt come and go."""

    alive: list[Worker]

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> list[Worker]:
        """Start a worker for each list of sockets, which it inherits under the same numbers."""

    def finish(self, timeout_s: float) -> None:
        """Tell all to end, and wait a while until they have: the user's operators may have something to close."""

    def kill(self) -> None:
        """SIGKILL to all, and wait until they are gone."""


class WorkerProcesses:
    """Workers as child processes in sessions of their own, so that Ctrl-C reaches the coordinator alone."""

    def __init__(self) -> None:
        self.alive: list[Worker] = []

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> list[Worker]:
        for subtask, sockets in enumerate(channel_sockets):
            ours, theirs = socket.socketpair()
            inherited = [theirs.fileno(), *(each.fileno() for each in sockets)]
            command = [sys.executable, "-m", "exactlyonce.engines.local.worker", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, start_new_session=True)
            theirs.close()
            self.alive.append(Worker(subtask, Connection(ours, ToCoordinator), process))
        for sockets in channel_sockets:
            for each in sockets:
                each.close()
        return self.alive

    def finish(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for worker in self.alive:
            worker.connection.send(Shutdown())
        for worker in self.alive:
            assert worker.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        for worker in self.alive:
            assert worker.process is not None
            worker.process.kill()
        for worker in self.alive:
            assert worker.process is not None
            worker.process.wait()
            worker.connection.socket.close()
        self.alive = []
