"""One incarnation of a coordinator: performs the effects of the pure core with real workers and a real broker.

Invariants: the core is fed by one thread; decisions, sweeps and repairs run on one other thread, one after the other,
so that they never overlap; what only looks, at new producers and at what people ask, has a thread each, and holds up
none of them; workers are spawned by the main thread (they die with it). The main thread waits for nothing without
looking, many times a second, whether it is told to end at once.
"""

from __future__ import annotations

import queue
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from exactlyonce.checkpoint import events
from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.decision import Decided, Unresolved
from exactlyonce.checkpoint.leader import UPKEEP_INTERVAL_S
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.restart import RestartStrategy
from exactlyonce.checkpoint.states import JobState
from exactlyonce.checkpoint.succession import Succession
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import CANCEL, DELETE, SAVEPOINT, Asked
from exactlyonce.engines.leader import PipelineLeader
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.reporting import Report, Reporter
from exactlyonce.engines.local.whereabouts import Whereabouts
from exactlyonce.engines.local.workers import LOOK_INTERVAL_S, LastOutput, WorkerHandle, Workers
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.plan import Plan
from exactlyonce.engines.surroundings.stores import stages
from exactlyonce.pipeline.errors import (
    EndedAtOnce,
    EndedEarly,
    ExactlyOnceError,
    GraphError,
    StoppedShort,
    made_from,
)
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.names import setting

NEVER_S = float("inf")
LOOK_FOR_REQUESTS_S = 1.0
FINISH_TIMEOUT_S = 30.0
"""How long workers may take to close the user's operators at a clean end, or to go on with what they still write."""


def _monotonic_ms() -> int:
    return int(time.monotonic() * 1000)


class Job:
    """One incarnation. `run` returns when it is over; `stop` and `end_at_once` may be called from a signal handler."""

    def __init__(
        self,
        plan: Plan,
        reference: dict[str, object],
        options: RunOptions,
        workers: Workers,
        reporter: Reporter,
        restart: RestartStrategy,
        succession: Succession,
    ) -> None:
        """*restart* is the run's: it is told of failures and completed checkpoints of all its incarnations. So is
        *succession*: `run` raises `AnotherLeads` where it says so."""
        self.plan = plan
        self.reference = reference
        self.options = options
        self.succession = succession
        self.workers = workers
        self.report = Report(plan.graph.pipeline_id, reporter, options.client.redact)
        subtasks = {(task.name, i) for task in plan.tasks for i in range(plan.parallelism)}
        sinks = {(n.id, i) for t in plan.tasks for n in t.sinks if _transactional(n) for i in range(plan.parallelism)}
        self.core = Coordinator(
            options.checkpoint, restart, subtasks, sinks, staging=stages(plan.graph), loops=bool(plan.graph.loops)
        )
        self.leader: PipelineLeader | None = None
        self._sources = {(t.name, i) for t in plan.tasks if t.sources for i in range(plan.parallelism)}
        self._finished: set[tuple[str, int]] = set()
        self._ready: set[int] = set()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._wake_read.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._broker = ThreadPoolExecutor(1, "broker")
        self._producers = ThreadPoolExecutor(1, "producers")
        """Looks at new producers of sinks, beside whatever the broker thread does."""
        self._mailbox = ThreadPoolExecutor(1, "mailbox")
        """Looks for what people ask, likewise."""
        self._called: set[Future[Any]] = set()
        """Calls on these threads that are not done."""
        self._whereabouts = Whereabouts()
        self._broken_off: EndedAtOnce | None = None
        """Set once nothing is waited for any more."""
        self._stop_by_s = NEVER_S
        self._deploy_at: tuple[float, events.Deploy] | None = None
        self._delay_s = 0.0
        """Before the next deployment: what the restart strategy says."""
        self._deleted: set[str] = set()
        """The requests to delete a savepoint that were taken up."""
        self._upkeep_at = time.monotonic() + UPKEEP_INTERVAL_S
        self._look_at = NEVER_S
        """When to look for requests again."""
        self._end: events.End | None = None
        self._last_output = LastOutput(plan.graph)
        self.recovered = False
        """Whether this incarnation got as far as fencing its predecessors."""

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> Manifest | None:
        """Live until the end; the last manifest of a clean end, or the error that ended it is raised."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        try:
            self._on_broker(self._open, self._opened)
            while self._end is None:
                self._turn()
            return self._conclude(self._end)
        finally:
            self._unwatch()
            self.workers.kill(self._hurried)
            try:
                self._leave_broker()
            finally:
                self._selector.close()
                self._wake_read.close()
                self._wake_write.close()
                self.report.close()

    def stop(self) -> None:
        """Ask for a clean stop, from any thread or a signal handler."""
        self._post(self._stop)

    def _stop(self) -> None:
        if not self.recovered:
            self._break_off(StoppedShort("Stopped, as asked for, before anything ran. Nothing is lost."))
        else:
            self._stop_by_s = time.monotonic() + self.options.checkpoint.stop_timeout_ms / 1000
            self._feed(events.Stop())

    def _stopped_too_late(self) -> StoppedShort:
        why = f"none was complete within {setting('stop_timeout')}, {self.options.checkpoint.stop_timeout_ms} ms"
        waits = filter(None, (self._whereabouts.hanging(time.monotonic()), self._whereabouts.slow()))
        return _stopped_short(self.core.manifest, "; ".join((why, *waits)), self.core.deciding)

    def end_at_once(self) -> None:
        """End like a process that is killed, but in order; also while it is ending. Likewise from anywhere."""
        why = self._broken_off = self._broken_off or _ended_at_once()
        self._post(lambda: self._break_off(why))

    def _hurried(self) -> bool:
        return self._broken_off is not None

    def _break_off(self, why: EndedAtOnce) -> None:
        self._broken_off = self._broken_off or why
        if self._end is None:
            self._end = events.End(None, self._broken_off)

    def _leave_broker(self) -> None:
        """Wait for what is being asked of the broker, and let go of all connections to it."""
        for future in tuple(self._called):
            future.cancel()
        owned = {self._broker: self._close, self._producers: self._close_producers, self._mailbox: self._close_mailbox}
        closing = [executor.submit(close) for executor, close in owned.items()]
        self._called.update(closing)
        for executor in owned:
            executor.shutdown(wait=False)
        self._wait()
        for executor in owned:
            executor.shutdown()
        for each in closing:
            each.result()

    def _close(self) -> None:
        """Runs on the broker thread, last."""
        if self.leader is not None:
            self.leader.close()

    def _close_producers(self) -> None:
        """Runs on the producers' thread, last."""
        if self.leader is not None:
            self.leader.close_producers()

    def _close_mailbox(self) -> None:
        """Runs on the mailbox's thread, last."""
        if self.leader is not None:
            self.leader.close_mailbox()

    def _wait(self) -> None:
        """Until these threads have nothing to do."""
        while wait(set(self._called), LOOK_INTERVAL_S).not_done:
            if self._broken_off is not None:
                raise self._broken_off

    def _turn(self) -> None:
        for worker in self.workers.alive:
            worker.connection.flush()
        due_s = (self.core.wake_ms - _monotonic_ms()) / 1000
        timeout_s = min(0.2, due_s) if due_s > 0 and self.core.state is JobState.RUNNING else 0.05
        for key, _ in self._selector.select(timeout_s):
            if any(each is key for each in self._selector.get_map().values()):  # an earlier one may have ended it
                key.data()
        while not self._events.empty():
            self._events.get()()
        if self._deploy_at is not None and time.monotonic() >= self._deploy_at[0]:
            deploy, self._deploy_at = self._deploy_at[1], None
            self._deploy(deploy)
        if time.monotonic() >= self._upkeep_at and self.leader is not None and self._end is None:
            self._upkeep_at = NEVER_S  # while a broker is away one waits for it, and no more
            self._on_broker(self.leader.upkeep, self._kept_up)
        if time.monotonic() >= self._look_at and self.leader is not None and self._end is None:
            self._look_at = NEVER_S
            self._on(self._mailbox, self.leader.look_for_requests, self._looked)
        if time.monotonic() >= self._stop_by_s and self._end is None:
            self._break_off(self._stopped_too_late())
            return
        self._feed(events.Tick(self._whereabouts.hanging(time.monotonic()), self._whereabouts.slow()))
        self.report.live(self.core)

    def _looked(self, asked: Asked | None) -> None:
        self._look_at = time.monotonic() + LOOK_FOR_REQUESTS_S
        if asked is None or self._end is not None:
            return
        if asked.action == SAVEPOINT:
            self._feed(events.SavepointAsked(asked.id, asked.stop))
        elif asked.action == CANCEL:
            self._feed(events.CancelAsked(asked.id))
        elif asked.action == DELETE and asked.id not in self._deleted:
            assert self.leader is not None
            self._deleted.add(asked.id)
            leader, pinned = self.leader, tuple(self.core.pinned)
            self._on_broker(
                lambda: leader.forget_savepoint(asked.checkpoint, pinned),
                lambda _: self.report.note(f"savepoint {asked.checkpoint} is kept no longer, as asked for"),
            )

    def _kept_up(self, _: None) -> None:
        self._upkeep_at = time.monotonic() + UPKEEP_INTERVAL_S

    def _post(self, action: Callable[[], None]) -> None:
        self._events.put(action)
        with suppress(OSError):  # then the loop is awake, or over
            self._wake_write.send(b"!")

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _on_broker(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run *call* on the broker thread, then *then* with its result on the main thread."""
        self._on(self._broker, call, then)

    def _on(self, executor: ThreadPoolExecutor, call: Callable[[], Any], then: Callable[[Any], None]) -> None:

        def done(future: Future[Any]) -> None:
            self._called.discard(future)
            if not future.cancelled():
                self._post(lambda: self._finished_call(future, then))

        future = executor.submit(call)
        self._called.add(future)
        future.add_done_callback(done)

    def _finished_call(self, future: Future[Any], then: Callable[[Any], None]) -> None:
        error = future.exception()
        if error is None:
            then(future.result())
        elif self._end is None:
            self._end = events.End(None, _known(error))

    def _feed(self, event: events.Event) -> None:
        for effect in self.core.handle(event, _monotonic_ms()):
            self._perform(effect)

    # --- effects ------------------------------------------------------------------------------------------------

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Trigger(checkpoint, base, final, savepoint, overtakes_after_ms):
                assert self.leader is not None
                self.report.triggered(checkpoint)
                for worker in self.workers.alive:
                    added = self.leader.added_for(worker.subtask)
                    trigger = msg.Trigger(checkpoint, base, final, added, savepoint, overtakes_after_ms)
                    worker.connection.send(trigger)
                hit("coordinator-triggered")
            case events.Decide(plan):
                assert self.leader is not None
                leader, pinned = self.leader, tuple(self.core.pinned)
                now_s = time.monotonic()
                self._on_broker(
                    lambda: leader.decide(plan, pinned, now_s), lambda verdict: self._decided(plan, verdict)
                )
            case events.AnnounceFinalized(checkpoint):
                for worker in self.workers.alive:
                    worker.connection.send(msg.CheckpointFinalized(checkpoint))
                assert self.leader is not None
                self._on_broker(self.leader.publish_offsets, lambda _: None)
            case events.Hold(held):
                for worker in self.workers.alive:
                    worker.connection.send(msg.Hold(held))
            case events.Restart():
                self._restart(effect)
            case events.Deploy():
                self._deploy_at = (time.monotonic() + self._delay_s, effect)
            case events.End():
                self._end = effect
            case events.Note(text):
                self.report.note(text)

    def _open(self) -> PipelineLeader:
        """Runs on the broker thread."""
        self.leader = leader = PipelineLeader(
            self.plan, self.options, self._note, self._step, self.reference, succession=self.succession
        )
        leader.recover()
        return leader

    def _note(self, text: str) -> None:
        """From the broker thread."""
        self._post(lambda: self.report.note(text))

    def _step(self, step: str, checkpoint: int, **fields: Any) -> None:
        """From the broker thread."""
        self._post(lambda: self.report.step(step, checkpoint=checkpoint, **fields))

    def _opened(self, leader: PipelineLeader) -> None:
        self.recovered, self._look_at = True, 0.0
        self.report.recovered(leader.manifest, leader.incarnation)
        self._feed(events.Recovered(leader.manifest))

    def _restart(self, effect: events.Restart) -> None:
        if effect.reason:
            self.report.note(f"restarting from the last completed checkpoint: {effect.reason}")
        self._unwatch()
        self._deploy_at, self._last_output = None, LastOutput(self.plan.graph)
        self.workers.kill(self._hurried)
        if self._broken_off is not None:
            return
        self._delay_s = effect.delay_ms / 1000
        assert self.leader is not None
        leader = self.leader
        self._on_broker(
            lambda: leader.begin_attempt(effect.attempt),
            lambda manifest: self._feed(events.Recovered(manifest)),
        )

    def _deploy(self, effect: events.Deploy) -> None:
        if self._end is not None:
            return
        assert self.leader is not None
        self._ready, self._finished = set(), set()
        self._whereabouts.started(self.plan.parallelism, time.monotonic())
        sockets, names = self._channel_sockets()
        for worker in self.workers.spawn(sockets):
            self._selector.register(worker.connection, selectors.EVENT_READ, lambda worker=worker: self._heard(worker))
            start = self.leader.start_message(worker.subtask, effect.attempt, effect.manifest)
            worker.connection.send(msg.Start(**start, reference=self.reference, channels=names[worker.subtask]))
        self.report.deployed(self.workers.alive)

    def _channel_sockets(self) -> tuple[list[list[socket.socket]], list[dict[str, int]]]:
        """Per subtask, the sockets that it inherits, and their numbers by channel name."""
        sockets: list[list[socket.socket]] = [[] for _ in range(self.plan.parallelism)]
        names: list[dict[str, int]] = [{} for _ in range(self.plan.parallelism)]
        for edge, i, j in self.plan.channels():
            if i != j:
                writer, reader = socket.socketpair()
                sockets[i].append(writer)
                sockets[j].append(reader)
                names[i][f"out:{edge}:{i}:{j}"] = writer.fileno()
                names[j][f"in:{edge}:{i}:{j}"] = reader.fileno()
        return sockets, names

    def _decided(self, plan: events.PendingCheckpoint, verdict: Decided | Refuse | Unresolved) -> None:
        if isinstance(verdict, Decided) and verdict.finalized:
            self.report.completed(plan, verdict.manifest, _monotonic_ms())
        self._feed(events.Concluded(plan.checkpoint, verdict))

    # --- workers ------------------------------------------------------------------------------------------------

    def _unwatch(self) -> None:
        for worker in self.workers.alive:
            with suppress(KeyError, ValueError):  # then its end was noticed before
                self._selector.unregister(worker.connection)

    def _heard(self, worker: WorkerHandle) -> None:
        for message in worker.connection.receive():
            if text := self._whereabouts.heard(worker.subtask, message, time.monotonic()):
                self.report.note(text)
            self._last_output.heard(message)
            self._message(worker, message)
        if worker.connection.closed and worker in self.workers.alive:
            self._selector.unregister(worker.connection)
            self._feed(events.Failed(worker.exit_reason(self._hurried)))

    def _message(self, worker: WorkerHandle, message: object) -> None:
        assert self.leader is not None
        match message:
            case msg.Ready(subtask, fingerprint, restore_ms):
                self._restored(subtask, fingerprint)
                self.report.restored(subtask, restore_ms)
            case msg.Prepared(sink, subtask, transactional_id):
                leader = self.leader
                self._on(
                    self._producers,
                    lambda: leader.describe(transactional_id),
                    lambda state: self._granted(worker, sink, subtask, transactional_id, state),
                )
            case msg.Acknowledge(ack):
                self.leader.acknowledged(ack)
                self._on_broker(self.leader.count_acknowledged, lambda _: None)
                self.report.acknowledged(message)
                self._feed(events.Acknowledged(ack))
            case msg.SourceFinished(task, subtask):
                self._finished.add((task, subtask))
                if self._finished == self._sources:
                    self._feed(events.SourcesFinished())
            case msg.Progress():
                self.report.progress(message)
                self._feed(events.Room(message.subtask, found=not message.full))
            case msg.WorkerFailed(_, name, said):
                text = self.options.client.redact(said)
                self._feed(events.Failed(text, made_from(name, text, message.facts) if name else None))

    def _restored(self, subtask: int, fingerprint: str) -> None:
        if fingerprint != self.plan.graph.fingerprint():
            raise GraphError(
                "A worker imported another pipeline than the coordinator: the graph depends on something that differs "
                "between processes (time, random numbers, the environment). Make it the same on every import."
            )
        self._ready.add(subtask)
        self._whereabouts.ready(subtask)
        if len(self._ready) == self.plan.parallelism:
            self._feed(events.Deployed())

    def _granted(self, worker: WorkerHandle, sink: str, subtask: int, transactional_id: str, state: Any) -> None:
        """Producer id and epoch are read between the producer's initialisation and its first record."""
        if worker not in self.workers.alive:
            return
        if state is None or state.state != "Empty":
            found = state.state if state else "unknown"
            self._feed(events.Failed(f"transaction {transactional_id} is {found} right after its initialisation"))
            return
        worker.connection.send(msg.Granted(sink, transactional_id, state.producer_id, state.epoch))
        self._feed(events.ProducerGranted(sink, subtask))

    # --- the end ------------------------------------------------------------------------------------------------

    def _last_words(self, message: object) -> None:
        """Of a worker that was told to end."""
        self._last_output.heard(message)
        match message:
            case msg.Progress():
                self.report.progress(message)
            case msg.WorkerFailed(subtask, _, said):
                self.report.note(f"worker {subtask} failed at its end, after the last checkpoint: {said}")

    def _conclude(self, end: events.End) -> Manifest | None:
        if end.error is not None:
            raise end.error
        self._unwatch()
        self.workers.finish(FINISH_TIMEOUT_S, self._hurried, self._last_words)
        self.workers.kill(self._hurried)
        checkpoint = end.manifest.checkpoint if end.manifest is not None else 0
        lost = self._last_output.error(checkpoint, self.options.client.redact)
        try:
            self._conclude_leader(end)
        except ExactlyOnceError:
            if lost is None:
                raise
            raise lost from None  # whoever runs again after it would hear nothing of the loss
        if end.cancelled:
            self.report.note("cancelled, as asked for: it has ended without a last checkpoint")
        self.report.ended(end.manifest)
        if lost is not None:
            raise lost
        if end.short:
            raise _stopped_short(end.manifest, end.short)
        if self.options.until == "latest" and end.manifest is not None and end.manifest.channel_logs:
            raise EndedEarly(_stopped_on_the_way(end.manifest, loops=bool(self.plan.graph.loops)))
        if self.options.until == "latest" and self._finished != self._sources:
            raise EndedEarly(
                "Ended, as asked for, before all was read that was there at the start. The end is clean, nothing is "
                "open or lost: run it again, it goes on from its last checkpoint."
            )
        return end.manifest

    def _conclude_leader(self, end: events.End) -> None:
        if self.leader is not None and end.manifest is not None:
            concluding = self._broker.submit(self.leader.conclude, end.cancelled)
            self._called.add(concluding)
            self._wait()
            concluding.result()


def _ended_at_once() -> EndedAtOnce:
    return EndedAtOnce(
        "Ended at once, as asked for. Nothing is lost: run it again, it takes up from the last completed checkpoint. "
        "Until then, or until they time out, transactions that were open hold back readers of the output."
    )


def _stopped_short(
    newest: Manifest | None, why: str, deciding: events.PendingCheckpoint | None = None
) -> StoppedShort:
    """*deciding*: the checkpoint that was being committed."""
    begins = f"checkpoint {newest.checkpoint}" if newest is not None and newest.checkpoint else "the beginning"
    left = f", or from checkpoint {deciding.checkpoint}, whose commit it takes up" if deciding is not None else ""
    return StoppedShort(
        f"Stopped, as asked for, without a last checkpoint: {why}. Nothing is lost: the next run goes on from {begins}"
        f"{left}."
    )


def _stopped_on_the_way(manifest: Manifest, *, loops: bool) -> str:
    """The text for a stop whose last checkpoint has records on their way: where there are no *loops* it is an older
    one, whose barriers had overtaken them."""
    where = "went round loops" if loops else "were on their way between operators"
    return (
        f"Stopped, as asked for, while {manifest.records_in_flight} records {where}. They are part of the last "
        f"checkpoint, and nothing is open or lost: run it again, it goes on with them."
    )


def _transactional(node: Any) -> bool:
    """Whether the sink writes in transactions."""
    return bool(node.sink.transactional)


def _known(error: BaseException) -> ExactlyOnceError:
    """*error* if it is one of ours; else it is a defect and is raised as it is."""
    if isinstance(error, ExactlyOnceError):
        return error
    raise error
