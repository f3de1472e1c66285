"""A worker process: hosts one subtask of every task, in one loop on one thread.

Invariants: it does nothing that the coordinator did not ask for, and ends with it; a failure is its last words and then
its end: the coordinator decides what follows. Stages nearest to the sinks go first, so that what is in flight drains
before more is read.
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

from exactlyonce.engines.collector import collecting_rarely
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.building import Built, build
from exactlyonce.engines.local.channels import PeerGone
from exactlyonce.engines.local.clients import Clients, KafkaClients
from exactlyonce.engines.local.inputs import SourceInput, SourceTrigger
from exactlyonce.engines.local.pace import GATHER_S, snapshot_budget_s
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.operators import place_of
from exactlyonce.engines.runtime.signals import Barrier
from exactlyonce.pipeline.errors import ExactlyOnceError, class_name, is_fatal, sendable, text_of
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import load_reference

IDLE_WAIT_S = 0.02
BUSY_WAIT_S = 0.002
PROGRESS_INTERVAL_S = 0.25
COSTS_INTERVAL_S = 10.0
"""Over how long what operators cost is summed up."""
WATCH_INTERVAL_S = 1.0
"""How often the watch looks, and how long a turn may take before it tells."""
PEER_GONE_WAIT_S = 30.0
"""A slow coordinator sends a worker its `Shutdown` so long after the first one; where there is none it kills all."""
_PR_SET_PDEATHSIG = 1


class Control(Protocol):
    """A worker's end of its control channel; see `messages.Connection`."""

    closed: bool

    def send(self, message: msg.ToCoordinator, /) -> None: ...
    def receive(self, timeout_s: float | None = 0.0, /) -> Iterable[object]: ...
    def fileno(self) -> int: ...


class Worker:
    """The loop. `run` returns when the coordinator says so or is gone; it is `turn`, again and again."""

    def __init__(self, connection: Control, start: msg.Start, clients: Clients, activity: Activity) -> None:
        self.connection = connection
        self.start = start
        self.clients = clients
        self.activity = activity
        self.built: Built
        self._sources: list[SourceInput] = []
        self._reported: set[str] = set()
        self._progress_at = 0.0
        self._costs_at = clients.monotonic_s() + COSTS_INTERVAL_S
        self._batch_at = clients.monotonic_s()
        self._longest_gap_s = 0.0
        self._first_record_ms = 0
        self._records_seen = 0
        self._running = True
        self._held = False
        """Whether the coordinator lets nothing but barriers be read."""
        self._full = set[str]()
        """The operators that wait for room."""
        self._gone: PeerGone | None = None
        """Why nothing more is done, but for the coordinator's last words: another worker is gone."""
        self._gone_by_s = 0.0
        """When these should have come."""

    def open(self, graph: LogicalGraph) -> None:
        """Restore the state, open readers and channels. The coordinator is told that it is ready by the caller."""
        self.built = build(self.start, graph, self.clients, self._send, self.activity)
        self._sources = [source for task in self.built.subtasks for source in task.sources]

    @property
    def running(self) -> bool:
        """Whether `turn` is due again."""
        return self._running and not self.connection.closed

    def run(self) -> None:
        """Until `Shutdown` or the end of the control channel."""
        while self.running:
            if not self.turn():
                self._rest()
        self.close()

    def turn(self) -> bool:
        """Obey, do one round of the work, tell how it stands; True if anything moved. It waits for nothing."""
        self.activity.turn()
        for message in self.connection.receive():
            self._obey(message)
        if self._gone is not None:
            self._wait_for_the_end(self._gone)
            return False
        try:
            moved = self._work()
        except PeerGone as gone:  # it may have obeyed a `Shutdown` that is on its way to this one too
            self._gone, self._gone_by_s = gone, self.clients.monotonic_s() + PEER_GONE_WAIT_S
            return False
        now = self.clients.monotonic_s()
        if now >= self._progress_at:
            self._report(now)
        return moved

    def close(self) -> None:
        """At a clean end: what may only be written now is written, what was opened is closed."""
        if not self._running:
            self.activity.phase("writing what waited for the last checkpoint")
            while any(writer.unwritten for writer in self.built.writers) and not self.connection.closed:
                self._write_on()
            self.connection.send(msg.AllWritten(self.start.subtask))
            self.activity.phase("closing its operators")
            self.built.close()

    def _write_on(self) -> None:
        """The coordinator waits for as long as it is told of progress."""
        self.activity.turn()
        for writer in self.built.writers:
            writer.poll(BUSY_WAIT_S)
        written = not any(writer.unwritten for writer in self.built.writers)
        if written or self.clients.monotonic_s() >= self._progress_at:
            self._report(self.clients.monotonic_s())

    @property
    def unwritten(self) -> dict[str, int]:
        """See `messages.Progress`."""
        found: dict[str, int] = {}
        for writer in self.built.writers:
            if writer.unwritten:
                found[writer.sink] = found.get(writer.sink, 0) + writer.unwritten
        return found

    def _send(self, message: msg.ToCoordinator) -> None:
        """An acknowledgement comes after the figures that belong to it."""
        if isinstance(message, msg.Acknowledge):
            self._report(self.clients.monotonic_s())
        self.connection.send(message)

    def _wait_for_the_end(self, gone: PeerGone) -> None:
        if self.running and self.clients.monotonic_s() >= self._gone_by_s:
            raise gone

    def _work(self) -> bool:
        """One round over everything; True if anything moved."""
        built, moved = self.built, False
        for task in built.subtasks:
            moved = task.overtake() or moved
        hurried = any(task.overtaken for task in built.subtasks)
        full = any(task.full for task in built.subtasks)
        for source in self._sources:
            source.held = self._held or full
        for channel in built.sockets:
            moved = channel.flush() or channel.fill() or moved
        for channel in built.outgoing:
            channel.hear()
        began_s = self.clients.monotonic_s()
        for task in reversed(built.subtasks):
            task.hurried = hurried
            moved = task.step() or moved
        budget_s = snapshot_budget_s(self.clients.monotonic_s() - began_s)
        self.activity.phase("flushing its sinks")
        for writer in built.writers:
            moved = writer.poll() or moved
        built.blocks.attempt.poll()
        self.activity.phase("writing its state")
        for task in built.subtasks:
            fetching = task.fetching
            moved = task.advance(budget_s) or moved
            if fetching and not task.fetching and not task.full:  # `_full` is as it was last reported
                built.notes.append(f"worker {self.start.subtask}: the state of {task.name!r} is read whole")
            if task.name not in self._reported and task.sources and all(s.finished for s in task.sources):
                self._reported.add(task.name)
                self.connection.send(msg.SourceFinished(task.name, self.start.subtask))
        self._note_gap()
        return moved

    def _note_gap(self) -> None:
        """The longest time between two batches while there was input."""
        seen = sum(source.records for source in self._sources)
        now = self.clients.monotonic_s()
        if seen != self._records_seen:
            if self._first_record_ms:
                self._longest_gap_s = max(self._longest_gap_s, now - self._batch_at)
            self._first_record_ms = self._first_record_ms or self.clients.clock.now_ms()
            self._records_seen, self._batch_at = seen, now

    def _obey(self, message: Any) -> None:
        match message:
            case msg.Trigger():
                self._trigger(message)
            case msg.Granted():
                self.built.granted(message)
            case msg.CheckpointFinalized(checkpoint):
                hit("worker-finalized")
                for writer in self.built.writers:
                    writer.finalized(checkpoint)
            case msg.Hold(held):
                self._held = held
            case msg.Shutdown():
                self._running = False

    def _trigger(self, trigger: msg.Trigger) -> None:
        frame = Barrier(trigger.checkpoint, trigger.base, trigger.savepoint)
        after_ms = trigger.overtakes_after_ms
        for source in self._sources:
            mine = trigger.added.get(source.name, {})
            source.triggers.append(SourceTrigger(frame, trigger.final, mine))
        overtakes_s = None if after_ms is None else self.clients.monotonic_s() + after_ms / 1000
        for task in self.built.subtasks:
            task.triggered(frame, overtakes_s, final=trigger.final)

    def _rest(self) -> None:
        """Nothing to do: wait for the coordinator or a channel, or until it is time to look at all else again."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        for channel in () if self._gone else self.built.sockets:
            wanted = (select.POLLIN if channel.hungry else 0) | (select.POLLOUT if channel.unsent else 0)
            waiting.register(channel, wanted)
        waiting.poll(1000 * self._rest_s())

    def _rest_s(self) -> float:
        """How long nothing else need be looked at: clients do not say when they are through with something."""
        built = self.built
        if built.blocks.pending or any(task.busy or not task.room for task in built.subtasks):
            return BUSY_WAIT_S
        if not any(writer.open_transactions or writer.unwritten for writer in built.writers):
            return IDLE_WAIT_S
        now_s = built.activity.now_s()
        return min((each.due_s - now_s for each in self._sources if each.due_s > now_s), default=GATHER_S)

    def _note_full(self) -> None:
        """Say of each table when it begins to wait for room, and when it goes on."""
        for task in self.built.subtasks:
            for table in task.tables:
                if bool(table.full) != (table.operator in self._full):
                    self._full ^= {table.operator}
                    place = f"worker {self.start.subtask}, operator {table.operator!r}"
                    self.built.notes.append(f"{place}: paused, {table.full}" if table.full else f"{place}: goes on")

    def _report(self, now: float) -> None:
        self._note_full()
        self._progress_at = now + PROGRESS_INTERVAL_S
        busiest, busiest_ms, busiest_share = self.activity.costliest() or ("", 0.0, 0.0)
        if now >= self._costs_at:
            self._costs_at = now + COSTS_INTERVAL_S
            self.activity.forget()
        self.connection.send(
            msg.Progress(
                subtask=self.start.subtask,
                records_in=sum(source.records for source in self._sources),
                records_out=sum(writer.records for writer in self.built.writers),
                skipped=sum(source.skipped for source in self._sources),
                longest_gap_ms=self._longest_gap_s * 1000,
                open_transactions=sum(writer.open_transactions for writer in self.built.writers),
                first_record_ms=self._first_record_ms,
                lag=sum(source.reader.lag() for source in self._sources),
                going_round=sum(task.going_round for task in self.built.subtasks),
                waiting=list(
                    filter(None, (*(s.reader.waiting for s in self._sources), self.built.blocks.attempt.waiting))
                ),
                notes=[note for source in self._sources for note in source.notes] + self.built.notes,
                full=sorted(self._full),
                held_up=[writer.held_up for writer in self.built.writers if writer.held_up],
                unwritten=self.unwritten,
                busiest=busiest,
                busiest_ms=busiest_ms,
                busiest_share=busiest_share,
            )
        )
        for source in self._sources:
            source.notes.clear()
        self.built.notes.clear()
        self._longest_gap_s = 0.0


class Watch:
    """Tells from a thread of its own what the loop is in while it does not come round; a context.

    It touches nothing of the worker's: it reads two attributes of `Activity` and sends over the connection, which any
    thread may do.
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
    """What a worker does, from `Start` to its end; its failure is reported and ends it."""
    start = None
    while start is None and not connection.closed:
        start = next(iter(connection.receive(None)), None)  # it may come in pieces
    if not isinstance(start, msg.Start):
        return
    began, activity = time.monotonic(), Activity()
    unwritten: dict[str, int] = {}
    try:
        with Watch(start.subtask, activity, connection):
            activity.phase("importing the pipeline")
            graph = load_reference(start.reference).build()
            worker = Worker(connection, start, KafkaClients(start, graph.pipeline_id), activity)
            worker.open(graph)
            activity.phase("its start")
            with collecting_rarely():
                hit("worker-restored")
                elapsed_ms = int((time.monotonic() - began) * 1000)
                connection.send(msg.Ready(start.subtask, graph.fingerprint(), elapsed_ms))
                try:
                    worker.run()
                finally:
                    unwritten = worker.unwritten
                    for writer in worker.built.writers:
                        writer.abandon()
    except ExactlyOnceError as error:
        name = class_name(error) if is_fatal(error) else ""
        connection.send(msg.WorkerFailed(start.subtask, name, sendable(str(error)), unwritten, {**error.facts}))
    except Exception as error:  # nobody has foreseen it: the restart is to say why, and the traceback where
        said = f"{type(error).__name__}: {text_of(error)}{place_of(error)}"
        connection.send(msg.WorkerFailed(start.subtask, "", said, unwritten))
        raise


def _nothing(*_: Any) -> None:
    """A signal that systemd sends to all processes of a service. The coordinator ends its workers, when it is time."""


def main() -> None:
    """Entry point of the process: the control channel's descriptor and the coordinator's process id are arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _nothing)  # programs that the user's code starts would inherit SIG_IGN
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return
    connection = msg.Connection(socket.socket(fileno=int(sys.argv[1])), msg.ToWorker, waits=True)
    serve(connection)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
