"""The host of a job on this machine: worker processes, sockets, the leader's connections, and a thread for each lane.

Invariants: the job's thread spawns the workers, which die with it, and it alone reads from them. Those of the first
attempt import the pipeline during the recovery. Decisions, sweeps and repairs share a lane, so that they never overlap;
looks at new producers and at the mailbox hold up none of them. Each lane closes the connections that it used. Every
wait looks for a hurry many times a second.
"""

from __future__ import annotations

import enum
import queue
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.checkpoint.events import Decided, PendingCheckpoint, Verdict
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.requests import Procedure, TransactionState
from exactlyonce.checkpoint.succession import Succession
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import Asked, Mailbox
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.trace import as_fields
from exactlyonce.engines.connections import C
from exactlyonce.engines.external_checks.preflight import Offsets
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.job import Failed, Heard, Job, Lost, Then
from exactlyonce.engines.local.reporting import Report
from exactlyonce.engines.local.workers import LOOK_INTERVAL_S, WorkerHandle, Workers
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import Plan
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, EndedAtOnce, ExactlyOnceError, UserError
from exactlyonce.pipeline.loading import Reference

FINISH_TIMEOUT_S = 30.0
"""The time that workers have at a clean end to close the user's operators, or to write more of what waits."""

LASTS_S = 10.0
"""A fault that may pass is noted if it has lasted for so long: a fresh broker has them for some seconds."""


class HostLane(enum.Enum):
    """Calls of one lane are made one after the other, whatever the other lanes do."""

    BROKER = "broker"
    """All that writes: decisions, sweeps, repairs."""
    PRODUCERS = "producers"
    """Looks at new producers of sinks."""
    MAILBOX = "mailbox"
    """Looks at the mailbox."""


class _HostLanes:
    """A thread for each lane, with the connections that it makes, uses and closes. *post* is `LocalHost.post`."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._executors = {lane: ThreadPoolExecutor(1, lane.value) for lane in HostLane}
        self._connections = {lane: ExitStack() for lane in HostLane}
        self._pending: set[Future[Any]] = set()

    def keep(self, lane: HostLane, connection: C) -> C:
        """*connection*, which `close` closes on its lane."""
        return self._connections[lane].enter_context(closing(connection))

    def ask(self, lane: HostLane, call: Callable[[], Any], then: Then, failed: Failed) -> None:
        """Make *call* on *lane*, and post its answer to *then*, or its error to *failed*."""
        future = self._executors[lane].submit(call)
        self._pending.add(future)
        future.add_done_callback(partial(self._done, then, failed))

    def _done(self, then: Then, failed: Failed, future: Future[Any]) -> None:
        """Runs on the lane's thread."""
        self._pending.discard(future)
        if not future.cancelled():
            self._post(lambda: self._answered(then, failed, future))

    def _answered(self, then: Then, failed: Failed, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, ExactlyOnceError):
            failed(error)
        else:
            then(future.result())

    def close(self, hurry: Callable[[], EndedAtOnce | None]) -> None:
        """Wait for calls under way, and close all connections. Raises what *hurry* returns as soon as it is set."""
        for future in tuple(self._pending):
            future.cancel()
        closings = [executor.submit(self._connections[lane].close) for lane, executor in self._executors.items()]
        self._pending.update(closings)
        for executor in self._executors.values():
            executor.shutdown(wait=False)
        while wait(set(self._pending), LOOK_INTERVAL_S).not_done:
            if (why := hurry()) is not None:
                raise why
        for executor in self._executors.values():
            executor.shutdown()
        for closed in closings:
            closed.result()


class RepeatedFault:
    """A fault that comes again and again: it is news once. If it may pass, it has to last for `LASTS_S` before.

    >>> fault, away = RepeatedFault(), BrokerUnavailable("It starts.")
    >>> [fault.is_news(away, now_s) for now_s in (3.0, 12.9, 13.0, 14.0)]
    [False, False, True, False]
    >>> RepeatedFault().is_news(UserError("No right."), 3.0)
    True
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._noted = False

    def is_news(self, error: UserError, now_s: float) -> bool:
        """Whether *error* is to be noted now, in seconds of a monotonic clock."""
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        if self._noted or (isinstance(error, BrokerUnavailable) and now_s < since_s + LASTS_S):
            return False
        self._noted = True
        return True


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
        """*succession* is the run's: `run` raises `AnotherLeads` while it says to wait."""
        self.clock = SystemClock()
        self.monotonic_s = time.monotonic
        self._plan, self._reference, self._options = plan, reference, options
        self._workers, self._report, self._succession = workers, report, succession
        self._wake = _Wake()
        self._lanes = _HostLanes(self._wake.post)
        self._connections: PipelineConnections
        self._producers: Transactions | None = None
        self._mailbox: Mailbox | None = None
        self._unread = RepeatedFault()
        """The fault of looks at the mailbox."""
        self._selected: list[selectors.SelectorKey] = []
        self._hurry: EndedAtOnce | None = None
        """Why nothing is waited for any more; None: everything is."""
        self._spawned: list[dict[str, int]] | None = None
        """The channels of each subtask, of workers that are spawned and not started; None: there are none."""

    def run(self, job: Job) -> Manifest | None:
        """Run *job* to its end. Returns the last manifest of a clean end; raises the error that ended it."""
        try:
            self._spawned = self._spawn_workers()
            job.begin()
            while (outcome := job.outcome) is None:
                self._rest(job.rest_s)
                job.turn()
            if outcome.error is not None:
                raise outcome.error
            return outcome.manifest
        finally:
            self.kill_workers()
            try:
                self._lanes.close(lambda: self._hurry)
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
            if any(other is key for other in watched.values()):  # an earlier action may have ended it
                yield key.data
        while not self._wake.posted.empty():
            yield self._wake.posted.get()

    def post(self, action: Callable[[], None]) -> None:
        self._wake.post(action)

    # --- the leader ---------------------------------------------------------------------------------------------

    def open(self, then: Callable[[Leader], None], failed: Failed) -> None:
        self._lanes.ask(HostLane.BROKER, self._recover, then, failed)

    def _recover(self) -> Leader:
        self._connections = PipelineConnections(
            self._plan, self._options, self._note, self._step, self._reference, succession=self._succession,
            asks=lambda store: self.post(lambda: self._report.step("asks", whom=store)),
        )  # fmt: skip
        self._lanes.keep(HostLane.BROKER, self._connections)
        manifest, leader = self._connections.recover(), self._connections.leader
        self.post(lambda: self._report.recovered(manifest, leader.incarnation.incarnation))
        return leader

    def _note(self, text: str) -> None:
        self.post(lambda: self._report.note(text))

    def _step(self, step: str, checkpoint: int, **fields: Any) -> None:
        self.post(lambda: self._report.step(step, checkpoint=checkpoint, **fields))

    def lead(self, procedure: Procedure[Any], then: Then, failed: Failed) -> None:
        self._lanes.ask(HostLane.BROKER, partial(self._connections.drive, procedure), then, failed)

    def decide(self, plan: PendingCheckpoint, pinned: Iterable[int], then: Then, failed: Failed) -> None:
        self._lanes.ask(HostLane.BROKER, partial(self._decide, plan, pinned, self.monotonic_s()), then, failed)

    def _decide(self, plan: PendingCheckpoint, pinned: Iterable[int], acknowledged_s: float) -> Verdict:
        """The verdict on *plan*. Reports the requests that it took; without output, it is visible once decided."""
        connections = self._connections
        verdict = connections.drive(connections.leader.decide(plan, pinned))
        if isinstance(verdict, Decided) and verdict.finalized:
            finalized_s = self.monotonic_s()
            visible_s = max(connections.performer.visible_s, acknowledged_s)
            for name, begin_s, end_s in (("visible", acknowledged_s, visible_s), ("finalized", visible_s, finalized_s)):
                fields = as_fields(connections.trace.between(begin_s, end_s), begin_s, end_s)
                self._step(f"requests until {name}", plan.checkpoint, **fields)
        return verdict

    def publish_offsets(self, failed: Failed) -> None:
        self._lanes.ask(HostLane.BROKER, self._connections.publish_offsets, lambda _: None, failed)

    def describe(self, transactional_id: str, then: Callable[[TransactionState | None], None], failed: Failed) -> None:
        self._lanes.ask(HostLane.PRODUCERS, partial(self._describe, transactional_id), then, failed)

    def _describe(self, transactional_id: str) -> TransactionState | None:
        if self._producers is None:
            client, places = self._options.client, self._connections.places
            producers = Transactions(client, timeout_ms=APPEND_TIMEOUT_MS, places=places)
            self._producers = self._lanes.keep(HostLane.PRODUCERS, producers)
        return self._producers.describe([transactional_id])[transactional_id]

    def look_at_mailbox(self, then: Callable[[Asked | None], None], failed: Failed) -> None:
        self._lanes.ask(HostLane.MAILBOX, self._look_at_mailbox, then, failed)

    def _look_at_mailbox(self) -> Asked | None:
        if self._mailbox is None:
            mailbox = Mailbox(self._options.client.confluent(), self._connections.pipeline)
            self._mailbox = self._lanes.keep(HostLane.MAILBOX, mailbox)
        try:
            request = self._mailbox.look()
        except UserError as error:
            if self._unread.is_news(error, self.monotonic_s()):
                away = isinstance(error, BrokerUnavailable)
                self._note(f"a broker is away: {error}" if away else f"the mailbox cannot be read: {error}")
            return None
        self._unread = RepeatedFault()
        incarnation = self._connections.leader.incarnation.incarnation
        return request if request is not None and request.incarnation == incarnation else None

    # --- workers ------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        return self._workers.alive

    def start_workers(self, attempt: int, manifest: Manifest, heard: Heard, lost: Lost) -> None:
        channels, self._spawned = self._spawned or self._spawn_workers(), None
        for worker in self._workers.alive:
            receive = partial(self._receive, worker, heard, lost)
            self._wake.selector.register(worker.connection, selectors.EVENT_READ, receive)
            worker.tell(self._start_message(worker.subtask, attempt, manifest, channels[worker.subtask]))

    def _spawn_workers(self) -> list[dict[str, int]]:
        """Spawn all workers, and have them import the pipeline. Returns the file descriptors of each one's channels."""
        sockets, channels = self._channel_sockets()
        self._workers.spawn(sockets)
        for worker in self._workers.alive:
            worker.tell(msg.Load(worker.subtask, self._reference))
        return channels

    def _start_message(self, subtask: int, attempt: int, manifest: Manifest, channels: dict[str, int]) -> msg.Start:
        connections, options = self._connections, self._options
        return msg.Start(
            spec=connections.task_spec(attempt, manifest),
            subtask=subtask,
            client=dict(options.client.settings),
            offsets=connections.pipeline_topics.offsets,
            targets=connections.pipeline_topics.inputs.targets,
            settings=options.checkpoint,
            state=options.state,
            transaction_timeout_ms=connections.transaction_timeout_ms,
            channels=channels,
        )

    @property
    def added(self) -> Offsets:
        return self._connections.pipeline_topics.added

    def _channel_sockets(self) -> tuple[list[list[socket.socket]], list[dict[str, int]]]:
        """The sockets that each subtask inherits, and their file descriptors by channel name."""
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
            with suppress(KeyError, ValueError):  # its end was noticed before
                self._wake.selector.unregister(worker.connection)

    def hurry(self, why: EndedAtOnce) -> None:
        self._hurry = self._hurry or why

    def _hurried(self) -> bool:
        return self._hurry is not None


class _Wake:
    """The wait of the job's thread. It ends as soon as any other thread posts an action."""

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
        with suppress(OSError):  # the loop is awake, or over
            self._write.send(b"!")

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        self.selector.close()
        self._read.close()
        self._write.close()
