"""A worker process: it hosts one subtask of every task, in one loop on one thread.

Invariants: it does only what the coordinator asks for, and ends with it. A failing worker reports its error and ends;
the coordinator decides what follows. Downstream subtasks go first, so that in-flight records drain before more are
read.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol

from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.building import Clients, KafkaClients, WorkerParts, build
from exactlyonce.engines.local.channels import PeerGone
from exactlyonce.engines.local.inputs import GATHER_S, SourceTrigger, snapshot_budget_s
from exactlyonce.engines.processes import collecting_rarely
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.faults import place_of
from exactlyonce.engines.runtime.watermarks import Barrier
from exactlyonce.pipeline.errors import ExactlyOnceError, class_name, is_fatal, sendable, text_of
from exactlyonce.pipeline.event_time import END_OF_TIME
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import load_reference

IDLE_WAIT_S = 0.02
BUSY_WAIT_S = 0.002
PROGRESS_INTERVAL_S = 0.25
COSTS_INTERVAL_S = 10.0
"""The interval over which the costs of operators are summed up."""
WATCH_INTERVAL_S = 1.0
"""The interval of the watch, and the time that a turn may take before it is reported."""
PEER_GONE_WAIT_S = 30.0
"""The wait for `Shutdown` once another worker is gone. Without a shutdown, the coordinator kills this one."""
_PR_SET_PDEATHSIG = 1


class Control(Protocol):
    """A worker's end of its control channel; see `messages.Connection`."""

    closed: bool

    def send(self, message: msg.ToCoordinator, /) -> None: ...
    def receive(self, timeout_s: float | None = 0.0, /) -> Iterable[object]: ...
    def fileno(self) -> int: ...


class ProgressReport:
    """A worker's `Progress`: the figures since it started, some of them since the last report."""

    def __init__(self, subtask: int, clients: Clients, activity: Activity) -> None:
        self._subtask, self._clients, self._activity = subtask, clients, activity
        self.due_s = 0.0
        now_s = clients.monotonic_s()
        self._costs_due_s = now_s + COSTS_INTERVAL_S
        self._batch_s = now_s
        self._longest_gap_s = 0.0
        self._first_record_ms = 0
        self._records_in = 0
        self._full = set[str]()
        """The operators that wait for disk space."""

    def note_gap(self, parts: WorkerParts) -> None:
        """Note the time between two batches while there was input."""
        records_in = sum(source.records for source in parts.sources)
        now_s = self._clients.monotonic_s()
        if records_in != self._records_in:
            if self._first_record_ms:
                self._longest_gap_s = max(self._longest_gap_s, now_s - self._batch_s)
            self._first_record_ms = self._first_record_ms or self._clients.clock.now_ms()
            self._records_in, self._batch_s = records_in, now_s

    def take(self, parts: WorkerParts) -> msg.Progress:
        """The figures now. Notes and the longest gap begin anew."""
        now_s = self._clients.monotonic_s()
        self.due_s = now_s + PROGRESS_INTERVAL_S
        self._note_full(parts)
        busiest, busiest_ms, busiest_share = self._activity.costliest() or ("", 0.0, 0.0)
        if now_s >= self._costs_due_s:
            self._costs_due_s = now_s + COSTS_INTERVAL_S
            self._activity.forget()
        waiting = (*(source.reader.waiting for source in parts.sources), parts.blocks.attempt.waiting)
        notes, repeated = parts.notes.take()
        progress = msg.Progress(
            subtask=self._subtask,
            records_in=sum(source.records for source in parts.sources),
            records_out=sum(writer.records for writer in parts.writers),
            skipped=sum(source.decoder.skipped_count for source in parts.sources),
            longest_gap_ms=self._longest_gap_s * 1000,
            open_transactions=sum(writer.open_transactions for writer in parts.writers),
            first_record_ms=self._first_record_ms,
            lags={
                source.name: [(*place, lag) for place, lag in source.reader.lags().items()] for source in parts.sources
            },
            logs={source.name: list(logs) for source in parts.sources if (logs := source.reader.logs())},
            going_round=sum(task.going_round for task in parts.subtasks),
            waiting=list(filter(None, waiting)),
            notes=notes,
            repeated=repeated,
            full=sorted(self._full),
            held_up=[writer.held_up for writer in parts.writers if writer.held_up],
            unwritten=parts.unwritten,
            operators={name: (took_s, self._activity.records[name]) for name, took_s in self._activity.seconds.items()},
            watermarks=parts.watermarks,
            lowest_watermarks={
                name: lowest_ms for name, group in parts.groups.items() if (lowest_ms := group.lowest_ms) < END_OF_TIME
            },
            late={operator.id: operator.late for operator in parts.timed if operator.late},
            busiest=busiest,
            busiest_ms=busiest_ms,
            busiest_share=busiest_share,
        )
        self._longest_gap_s = 0.0
        return progress

    def _note_full(self, parts: WorkerParts) -> None:
        """Note when a table begins to wait for disk space, and when it goes on."""
        for table in (table for task in parts.subtasks for table in task.operators.tables):
            if bool(table.full) != (table.operator in self._full):
                self._full ^= {table.operator}
                place = f"worker {self._subtask}, operator {table.operator!r}"
                parts.notes.add(f"{place}: paused, {table.full}" if table.full else f"{place}: goes on")


class Worker:
    """The loop. `run` calls `turn` until the coordinator says `Shutdown` or is gone."""

    def __init__(self, connection: Control, start: msg.Start, clients: Clients, activity: Activity) -> None:
        self.connection = connection
        self.start = start
        self.clients = clients
        self.activity = activity
        self.parts: WorkerParts
        self._progress = ProgressReport(start.subtask, clients, activity)
        self._finished = set[str]()
        """The tasks whose sources were reported as finished."""
        self._running = True
        self._held = False
        """Whether the coordinator lets nothing but barriers be read."""
        self._gone: PeerGone | None = None
        """The loss of another worker. After it, nothing is done but to wait for `Shutdown`."""
        self._gone_by_s = 0.0
        """The end of that wait."""

    def open(self, graph: LogicalGraph) -> None:
        """Restore the state, open readers and channels. The caller tells the coordinator that the worker is ready."""
        self.parts = build(self.start, graph, self.clients, self._send, self.activity)

    @property
    def running(self) -> bool:
        """Whether `turn` is due again."""
        return self._running and not self.connection.closed

    def run(self) -> None:
        """Run until `Shutdown` or the end of the control channel."""
        while self.running:
            if not self.turn():
                self._rest()
        self.close()

    def turn(self) -> bool:
        """Obey messages, work on everything once, report progress; True if anything moved. It waits for nothing."""
        self.activity.turn()
        for message in self.connection.receive():
            self._obey(message)
        if self._gone is not None:
            if self.running and self.clients.monotonic_s() >= self._gone_by_s:
                raise self._gone
            return False
        try:
            moved = self._work()
        except PeerGone as gone:  # that worker may have obeyed a `Shutdown` that comes to this one, too
            self._gone, self._gone_by_s = gone, self.clients.monotonic_s() + PEER_GONE_WAIT_S
            return False
        if self.clients.monotonic_s() >= self._progress.due_s:
            self._report()
        return moved

    def close(self) -> None:
        """At a clean end, write what waited for the last checkpoint, and close what was opened."""
        if not self._running:
            self.activity.phase("writing what waited for the last checkpoint")
            while self.parts.unwritten and not self.connection.closed:
                self._write_on()
            self.connection.send(msg.AllWritten(self.start.subtask))
            self.activity.phase("closing its operators")
            self.parts.close()

    def _write_on(self) -> None:
        """Progress keeps the coordinator waiting."""
        self.activity.turn()
        for writer in self.parts.writers:
            writer.poll(BUSY_WAIT_S)
        if not self.parts.unwritten or self.clients.monotonic_s() >= self._progress.due_s:
            self._report()

    def _send(self, message: msg.ToCoordinator) -> None:
        """Send *message*, and before an acknowledgement the figures that belong to it."""
        if isinstance(message, msg.Acknowledge):
            self._report()
        self.connection.send(message)

    def _report(self) -> None:
        self.connection.send(self._progress.take(self.parts))

    def _work(self) -> bool:
        """Work on everything once; True if anything moved."""
        parts, moved = self.parts, False
        for task in parts.subtasks:
            moved = task.overtake() or moved
        hurried = any(task.snapshots.capturing for task in parts.subtasks)
        full = any(task.full for task in parts.subtasks)
        for source in parts.sources:
            source.held = self._held or full
        for channel in parts.sockets:
            moved = channel.flush() or channel.fill() or moved
        for channel in parts.outgoing:
            channel.hear()
        began_s = self.clients.processing_s()
        for task in reversed(parts.subtasks):
            moved = task.step(hurried=hurried) or moved
        budget_s = snapshot_budget_s(self.clients.processing_s() - began_s)
        self.activity.phase("flushing its sinks")
        for writer in parts.writers:
            moved = writer.poll() or moved
        parts.blocks.attempt.poll()
        self.activity.phase("writing its state")
        for task in parts.subtasks:
            fetching, name = task.fetching, task.operators.task
            moved = task.advance(budget_s) or moved
            if fetching and not task.fetching and not task.full:
                parts.notes.add(f"worker {self.start.subtask}: the state of {name!r} is read whole")
            if name not in self._finished and task.sources and all(s.reader.finished for s in task.sources):
                self._finished.add(name)
                self.connection.send(msg.SourceFinished(name, self.start.subtask))
        self._progress.note_gap(parts)
        return moved

    def _obey(self, message: Any) -> None:
        match message:
            case msg.Trigger():
                self._trigger(message)
            case msg.Granted():
                self.parts.granted(message)
            case msg.CheckpointFinalized(checkpoint):
                hit("worker-finalized")
                for writer in self.parts.writers:
                    writer.finalized(checkpoint)
                for source in self.parts.sources:
                    source.finalized(checkpoint)
                for task in self.parts.subtasks:
                    task.operators.answers.asks_alone = False
            case msg.Hold(held):
                self._held = held
            case msg.Elsewhere(lowest):
                for name, lowest_ms in lowest.items():
                    self.parts.groups[name].hear(lowest_ms, self.activity.now_s())
            case msg.Shutdown():
                self._running = False

    def _trigger(self, trigger: msg.Trigger) -> None:
        frame = Barrier(trigger.checkpoint, trigger.base, trigger.savepoint)
        after_ms = trigger.overtakes_after_ms
        for source in self.parts.sources:
            mine = trigger.added.get(source.name, ())
            source.triggers.append(SourceTrigger(frame, trigger.final, mine, trigger.drains))
        overtakes_s = None if after_ms is None else self.clients.monotonic_s() + after_ms / 1000
        for task in self.parts.subtasks:
            task.triggered(frame, overtakes_s, final=trigger.final, completes=trigger.completes)

    def _rest(self) -> None:
        """Wait for the coordinator or a channel, or until all else is due."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        for channel in () if self._gone else self.parts.sockets:
            wanted = (select.POLLIN if channel.hungry else 0) | (select.POLLOUT if channel.unsent else 0)
            waiting.register(channel, wanted)
        waiting.poll(1000 * self._rest_s())

    def _rest_s(self) -> float:
        """The longest wait: clients do not say when they are through with something."""
        parts = self.parts
        if parts.blocks.pending or any(task.snapshots.busy or not task.room for task in parts.subtasks):
            return BUSY_WAIT_S
        if not any(writer.open_transactions or writer.unwritten for writer in parts.writers):
            return IDLE_WAIT_S
        now_s = parts.activity.now_s()
        return min((source.due_s - now_s for source in parts.sources if source.due_s > now_s), default=GATHER_S)


class LoopWatch:
    """Reports, from a thread of its own, what the loop is in while it does not come round; a context.

    It only reads two attributes of `Activity`, and sends over the connection, which any thread may do.
    """

    def __init__(self, subtask: int, activity: Activity, connection: msg.Connection) -> None:
        self._subtask, self._activity, self._connection = subtask, activity, connection
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(WATCH_INTERVAL_S):
            now = self._activity.now_s()
            if now - self._activity.turned_s > WATCH_INTERVAL_S:
                place = self._activity.current
                self._connection.send(msg.Occupied(self._subtask, str(place), now - place.since_s))


def serve(connection: msg.Connection) -> None:
    """Run a worker from `Load` to its end. A failure is reported and ends it."""
    load = _next_message(connection)
    if not isinstance(load, msg.Load):
        return
    unwritten: dict[str, int] = {}
    try:
        activity = Activity()
        with LoopWatch(load.subtask, activity, connection):
            activity.phase("importing the pipeline")
            graph = load_reference(load.reference).build()
        start = _next_message(connection)
        if not isinstance(start, msg.Start):
            return
        began_s = time.monotonic()
        activity = Activity()
        with LoopWatch(load.subtask, activity, connection):
            worker = Worker(connection, start, KafkaClients(start, graph.pipeline_id), activity)
            worker.open(graph)
            activity.phase("its start")
            with collecting_rarely():
                hit("worker-restored")
                elapsed_ms = int((time.monotonic() - began_s) * 1000)
                connection.send(msg.Ready(start.subtask, graph.fingerprint(), elapsed_ms))
                try:
                    worker.run()
                finally:
                    unwritten = worker.parts.unwritten
                    for writer in worker.parts.writers:
                        writer.abandon()
    except ExactlyOnceError as error:
        name = class_name(error) if is_fatal(error) else ""
        connection.send(msg.WorkerFailed(load.subtask, name, sendable(str(error)), unwritten, {**error.facts}))
    except Exception as error:  # unforeseen: the restart says why, the traceback where
        text = f"{type(error).__name__}: {text_of(error)}{place_of(error)}"
        connection.send(msg.WorkerFailed(load.subtask, "", text, unwritten))
        raise


def _next_message(connection: msg.Connection) -> object:
    """The next message, however long it takes; None: the coordinator is gone."""
    while not connection.closed:
        for message in connection.receive(None):  # it may come in pieces
            return message
    return None


def main() -> None:
    """Entry point of the process: the control channel's descriptor and the coordinator's process id are arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # systemd sends SIGTERM to all processes of a service, but the coordinator ends its workers. It is no SIG_IGN, which
    # programs started by the user's code would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return
    connection = msg.Connection(socket.socket(fileno=int(sys.argv[1])), msg.ToWorker, waits=True)
    serve(connection)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
