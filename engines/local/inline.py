"""`--inline`: coordinator and worker in one process, the worker on the main thread, where a debugger expects it.

Invariant: there is one worker at most, and it has ended before another begins.
"""

from __future__ import annotations

import gc
import queue
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from exactlyonce.engines.local.messages import Connection, Shutdown, ToCoordinator, ToWorker
from exactlyonce.engines.local.worker import serve
from exactlyonce.engines.local.workers import Worker

T = TypeVar("T")


class InlineWorker:
    """The `Workers` of a run in one process."""

    def __init__(self) -> None:
        self.alive: list[Worker] = []
        self._connections: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def spawn(self, channel_sockets: list[list[socket.socket]]) -> list[Worker]:
        ours, theirs = socket.socketpair()
        self._ended.clear()
        self.alive = [Worker(0, Connection(ours, ToCoordinator), None)]
        self._connections.put(Connection(theirs, ToWorker))
        return self.alive

    def finish(self, timeout_s: float) -> None:
        for worker in self.alive:
            worker.connection.send(Shutdown())
        self._ended.wait(timeout_s)

    def kill(self) -> None:
        """There is nothing to kill: the worker ends when its channel does."""
        for worker in self.alive:
            worker.connection.socket.close()
            self._ended.wait()
        self.alive = []

    def host(self, run: Callable[[], T]) -> T:
        """Call *run* on another thread, and be its worker on this one until it returns."""
        results: list[T] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                results.append(run())
            except BaseException as error:
                errors.append(error)
            finally:
                self._connections.put(None)

        thread = threading.Thread(target=body, name="coordinator")
        thread.start()
        while (connection := self._connections.get()) is not None:
            try:
                serve(connection)
            finally:
                connection.socket.close()
                gc.collect()  # the worker's producers are not closed but dropped, and this process lives on
                self._ended.set()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]
