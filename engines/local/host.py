"""The host of a job on this machine: worker processes, a thread for each lane, sockets, and the leader's connections.

Invariants: workers are spawned by the thread that runs the job (they die with it), and that thread alone reads from
them; the leader is made, used and let go on its lanes. Whoever waits here looks, many times a second, whether it is
told to hurry.
"""

from __future__ import annotations

import queue
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.succession import Succession
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.job import Failed, Heard, Job, Lane, Lost, Then
from exactlyonce.engines.local.reporting import Report
from exactlyonce.engines.local.workers import LOOK_INTERVAL_S, WorkerHandle, Workers
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import Plan
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import EndedAtOnce, ExactlyOnceError
from exactlyonce.pipeline.loading import Reference

FINISH_TIMEOUT_S = 30.0
"""How long workers may take to close the user's operators at a clean end, or to go on with what they still write."""


class LocalHost:
    """A `Host`, for one job; `run` drives it."""

    def __init__(
        self,
        plan: Plan,
        reference: Reference,
        options: RunOptions,
        workers: Workers,
        report: Report,
        succession: Succession,
    ) -> None:
        """*succession* is the run's: `run` raises `AnotherLeads` where it says so."""
        self.clock = SystemClock()
        self.monotonic_s = time.monotonic
        self._plan, self._reference, self._options = plan, reference, options
        self._workers, self._report, self._succession = workers, report, succession
        self._leader: PipelineConnections | None = None
        self._lanes = {lane: ThreadPoolExecutor(1, lane.value) for lane in Lane}
        self._called: set[Future[Any]] = set()
        """Calls on these threads that are not done."""
        self._wake = _Wake()
        self._selected: list[selectors.SelectorKey] = []
        self._hurry: EndedAtOnce | None = None
        """Set once nothing is waited for any more."""

    def run(self, job: Job) -> Manifest | None:
        """Live until the end; the last manifest of a clean end, or the error that ended it is raised."""
        try:
            job.begin()
            while job.outcome is None:
                self._rest(job.rest_s)
                job.turn()
            return job.result()
        finally:
            self.kill_workers()
            try:
                self._leave_leader()
            finally:
                self._wake.close()
                self._report.close()

    def _rest(self, rest_s: float) -> None:
        for worker in self._workers.alive:
            worker.connection.flush()
        self._selected = [key for key, _ in self._wake.selector.select(rest_s)]

    def arrived(self) -> Iterator[Callable[[], None]]:
        watched = self._wake.selector.get_map()
        for key in self._selected:
            if any(other is key for other in watched.values()):  # an earlier one may have ended it
                yield key.data
        while not self._wake.posted.empty():
            yield self._wake.posted.get()

    def post(self, action: Callable[[], None]) -> None:
        self._wake.post(action)

    # --- the leader ---------------------------------------------------------------------------------------------

    def open(self) -> PipelineConnections:
        """Runs on the broker's lane, as all that is told here comes from it."""

        def step(step: str, checkpoint: int, **fields: Any) -> None:
            self.post(lambda: self._report.step(step, checkpoint=checkpoint, **fields))

        def note(text: str) -> None:
            self.post(lambda: self._report.note(text))

        self._leader = leader = PipelineConnections(
            self._plan, self._options, note, step, self._reference, succession=self._succession
        )
        leader.recover()
        self.post(lambda: self._report.recovered(leader.manifest, leader.leader.incarnation.incarnation))
        return leader

    def ask(self, lane: Lane, call: Callable[[], Any], then: Then, failed: Failed) -> None:
        future = self._lanes[lane].submit(call)
        self._called.add(future)
        future.add_done_callback(partial(self._done, then, failed))

    def _done(self, then: Then, failed: Failed, future: Future[Any]) -> None:
        """Runs on the lane's thread."""
        self._called.discard(future)
        if not future.cancelled():
            self.post(lambda: self._answered(then, failed, future))

    def _answered(self, then: Then, failed: Failed, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, ExactlyOnceError):
            failed(error)
        else:
            then(future.result())

    def _leave_leader(self) -> None:
        """Wait for what the leader is being asked, and let go of all connections, each on the lane that used it."""
        for future in tuple(self._called):
            future.cancel()
        closing = [executor.submit(self._close, lane) for lane, executor in self._lanes.items()]
        self._called.update(closing)
        for executor in self._lanes.values():
            executor.shutdown(wait=False)
        while wait(set(self._called), LOOK_INTERVAL_S).not_done:
            if self._hurry is not None:
                raise self._hurry
        for executor in self._lanes.values():
            executor.shutdown()
        for closed in closing:
            closed.result()

    def _close(self, lane: Lane) -> None:
        """Runs on the lane's thread, last."""
        if (leader := self._leader) is not None:
            closing = {Lane.BROKER: leader.close, Lane.PRODUCERS: leader.close_producers}
            closing.get(lane, leader.close_mailbox)()

    # --- workers ------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        return self._workers.alive

    def start_workers(self, attempt: int, manifest: Manifest, heard: Heard, lost: Lost) -> None:
        assert self._leader is not None
        sockets, names = self._channel_sockets()
        for worker in self._workers.spawn(sockets):
            receive = partial(self._receive, worker, heard, lost)
            self._wake.selector.register(worker.connection, selectors.EVENT_READ, receive)
            start = self._leader.start_message(worker.subtask, attempt, manifest)
            worker.connection.send(msg.Start(**start, reference=self._reference, channels=names[worker.subtask]))

    def _channel_sockets(self) -> tuple[list[list[socket.socket]], list[dict[str, int]]]:
        """Per subtask, the sockets that it inherits, and their numbers by channel name."""
        sockets: list[list[socket.socket]] = [[] for _ in range(self._plan.parallelism)]
        names: list[dict[str, int]] = [{} for _ in range(self._plan.parallelism)]
        for edge, i, j in self._plan.channels():
            if i != j:
                writer, reader = socket.socketpair()
                sockets[i].append(writer)
                sockets[j].append(reader)
                names[i][f"out:{edge}:{i}:{j}"] = writer.fileno()
                names[j][f"in:{edge}:{i}:{j}"] = reader.fileno()
        return sockets, names

    def _receive(self, worker: WorkerHandle, heard: Heard, lost: Lost) -> None:
        for message in worker.connection.receive():
            heard(worker, message)
        if worker.connection.closed and worker in self._workers.alive:
            self._wake.selector.unregister(worker.connection)
            lost(worker.exit_reason(self._hurried))

    def finish_workers(self, heard: Callable[[object], None]) -> None:
        self._unwatch()
        self._workers.finish(FINISH_TIMEOUT_S, self._hurried, heard)
        self._workers.kill(self._hurried)

    def kill_workers(self) -> bool:
        self._unwatch()
        self._workers.kill(self._hurried)
        return not self._hurried()

    def _unwatch(self) -> None:
        for worker in self._workers.alive:
            with suppress(KeyError, ValueError):  # then its end was noticed before
                self._wake.selector.unregister(worker.connection)

    def hurry(self, why: EndedAtOnce) -> None:
        self._hurry = self._hurry or why

    def _hurried(self) -> bool:
        return self._hurry is not None


class _Wake:
    """The wait of the job's thread, which ends as soon as any other thread posts something."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.selector = selectors.DefaultSelector()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._read.setblocking(False)
        self.selector.register(self._read, selectors.EVENT_READ, self._woken)

    def post(self, action: Callable[[], None]) -> None:
        """From any thread or a signal handler."""
        self.posted.put(action)
        with suppress(OSError):  # then the loop is awake, or over
            self._write.send(b"!")

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        self.selector.close()
        self._read.close()
        self._write.close()
