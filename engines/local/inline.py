"""`--inline`: coordinator and worker in one process, the worker on the main thread, where a debugger expects it.

Invariant: there is one worker at most, and it has ended before another begins.
"""

from __future__ import annotations

import gc
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from exactlyonce.engines.local.messages import Connection, Shutdown, ToCoordinator, ToWorker
from exactlyonce.engines.local.worker import serve
from exactlyonce.engines.local.workers import LOOK_INTERVAL_S, Heard, Hurried, WorkerHandle, hear_out

T = TypeVar("T")


class InlineWorker:
    """The `Workers` of a run in one process."""

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
