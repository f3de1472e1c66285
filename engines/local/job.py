"""One incarnation of a coordinator: a loop that performs the effects of the pure core through its host.

Invariants: all of it runs on one thread, which waits only for a host that kills workers or lets them finish; the core
is fed here alone. The host that ships has processes and threads (`engines.local.host`); the simulator's has neither,
and runs this same job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec

from exactlyonce.checkpoint import events
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.coordinator import Coordinator, JobState
from exactlyonce.checkpoint.events import Decided, Verdict
from exactlyonce.checkpoint.leader import UNTOLD, UPKEEP_INTERVAL_S, Leader
from exactlyonce.checkpoint.records.manifest import Failure, Manifest
from exactlyonce.checkpoint.requests import Procedure, TransactionState, TxnState
from exactlyonce.checkpoint.settings import RestartStrategy
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import CANCEL, DELETE, SAVEPOINT, Asked
from exactlyonce.engines.external_checks.preflight import Offsets
from exactlyonce.engines.external_checks.stores import stages
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.pacing import LowestWatermarks
from exactlyonce.engines.local.reporting import Report
from exactlyonce.engines.local.workers import LastOutput, WorkerWatchdog
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.plan import Plan, share_of
from exactlyonce.pipeline.errors import (
    BEFORE_ANYTHING_RAN,
    EndedAtOnce,
    EndedEarly,
    ExactlyOnceError,
    Fenced,
    GraphError,
    StoppedShort,
    made_from,
)
from exactlyonce.pipeline.event_time import NO_FLOOR
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.names import setting

Then = Callable[[Any], None]
Failed = Callable[[ExactlyOnceError], None]
Heard = Callable[["HostedWorker", Any], None]
Lost = Callable[[str], None]

MAILBOX_INTERVAL_MS = 1_000
ABORT_MS = 3_000
BUSY_REST_S, REST_S = 0.05, 0.2
"""The longest rest of a host between two turns: while workers come and go, and while they run."""


class HostedWorker(Protocol):
    """A worker of the current attempt, as the host knows it."""

    @property
    def subtask(self) -> int: ...

    @property
    def pid(self) -> int | None:
        """The number of its process, if it has one."""

    def tell(self, message: msg.ToWorker, /) -> None: ...


class Host(Protocol):
    """Processes, threads, sockets, the clock and the leader's connections of one incarnation.

    A method with *failed* returns at once. Later, in a turn of the job, *then* gets the answer, or *failed* the error.
    Any other exception is a defect, and is raised in that turn.
    """

    @property
    def clock(self) -> Clock: ...

    @property
    def monotonic_s(self) -> Callable[[], float]:
        """Time that only grows, finer than the clock's."""

    @property
    def workers(self) -> Sequence[HostedWorker]:
        """The workers of the current attempt."""

    @property
    def added(self) -> Offsets:
        """The first offsets of partitions that no completed checkpoint has, by source and partition."""

    def open(self, then: Callable[[Leader], None], failed: Failed) -> None:
        """Begin and recover. Called first; all other calls come after *then*."""

    def lead(self, procedure: Procedure[Any], then: Then, failed: Failed) -> None:
        """Run a procedure of the leader. Procedures and decisions run one after the other."""

    def decide(self, plan: events.PendingCheckpoint, pinned: Iterable[int], then: Then, failed: Failed) -> None:
        """Run `Leader.decide` likewise, as soon as the last subtask has acknowledged."""

    def publish_offsets(self, failed: Failed) -> None:
        """Publish Sn of the newest manifest as group offsets, in turn with the procedures."""

    def describe(self, transactional_id: str, then: Callable[[TransactionState | None], None], failed: Failed) -> None:
        """The state of a freshly initialised transaction."""

    def look_at_mailbox(self, then: Callable[[Asked | None], None], failed: Failed) -> None:
        """The present request to this incarnation."""

    def arrived(self) -> Iterator[Callable[[], None]]:
        """The events since the last turn, to be called in order: messages, answers, posted actions."""

    def post(self, action: Callable[[], None]) -> None:
        """Have *action* called in a turn of the job. From any thread or a signal handler."""

    def start_workers(self, attempt: int, manifest: Manifest, heard: Heard, lost: Lost) -> None:
        """Start the workers of *attempt*, which restore *manifest*. *heard* gets each message of a worker, *lost* the
        reason why one has ended that was not killed."""

    def kill_workers(self) -> bool:
        """SIGKILL to all; True once they are gone, False where a hurry has cut the wait short."""

    def finish_workers(self, heard: Callable[[object], None]) -> None:
        """Tell all to end, wait until they have, and kill the rest. *heard* gets their last messages."""

    def hurry(self, why: EndedAtOnce) -> None:
        """Wait for nothing any more. From any thread or a signal handler."""


@dataclass
class AttemptWorkers:
    """The workers of an attempt, as far as known."""

    last_output: LastOutput
    watchdog: WorkerWatchdog = field(default_factory=WorkerWatchdog)
    ready: set[int] = field(default_factory=set)
    finished: set[tuple[str, int]] = field(default_factory=set)
    """The subtasks of sources that have reached their targets."""
    lowest_watermarks: LowestWatermarks = field(default_factory=LowestWatermarks)
    """Of sources that wait for each other."""


class Agenda:
    """Actions for later, one for each name."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, Callable[[], None]]] = {}

    def at(self, due_ms: int, name: str, action: Callable[[], None]) -> None:
        """Do *action* at *due_ms*, in place of an earlier one of that *name*."""
        self._due[name] = (due_ms, action)

    def drop(self, name: str) -> None:
        self._due.pop(name, None)

    def due(self, now_ms: int) -> Iterator[Callable[[], None]]:
        """Take the actions due by *now_ms* off the agenda."""
        for name, (due_ms, action) in [*self._due.items()]:
            if due_ms <= now_ms and name in self._due:
                del self._due[name]
                yield action


class Job:
    """One incarnation. A host calls `begin`, then `turn` until there is an `outcome`; `stop` and `end_at_once` may be
    called from a signal handler."""

    def __init__(self, plan: Plan, options: RunOptions, restart: RestartStrategy, host: Host, report: Report) -> None:
        """*restart* is the run's: it hears of failures and completed checkpoints in all incarnations."""
        self.plan, self.options, self.host, self.report = plan, options, host, report
        numbers = range(plan.parallelism)
        subtasks = {(task.name, i) for task in plan.tasks for i in numbers}
        sinks = {node.id for node in plan.graph.sinks if node.sink is not None and node.sink.transactional}
        self.core = Coordinator(
            options.checkpoint,
            restart,
            subtasks,
            {(sink, i) for sink in sinks for i in numbers},
            staging=stages(plan.graph),
            loops=bool(plan.graph.loops),
        )
        self.end: events.End | None = None
        """Set once all that is left is to conclude."""
        self.outcome: events.End | None = None
        """Set once it is over: `end`, with the error to report."""
        self._concluding = False
        self._stops_by_ms = 0
        """When it has to be over, once it was asked to stop; 0: it was not."""
        self._fails_by_ms = 0
        """When an end with an error no longer waits for the leader's last words; 0: there is nothing to wait for."""
        self._leader: Leader | None = None
        self._sources = {(task.name, i) for task in plan.tasks if task.sources for i in numbers}
        self._attempt = AttemptWorkers(LastOutput(plan.graph))
        self._agenda = Agenda()
        self._deploy_ms = 0
        """When the next deployment is due: after the pause that the restart strategy says, counted from the failure."""
        self._deleted: set[str] = set()
        """The requests to delete a savepoint that were taken up."""

    @property
    def leader(self) -> Leader:
        """The leader, once this incarnation has recovered."""
        assert self._leader is not None
        return self._leader

    @property
    def recovered(self) -> bool:
        """Whether this incarnation has fenced its predecessors and finished what they decided."""
        return self._leader is not None

    # --- the loop -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.host.open(self._opened, self._failed)

    def turn(self) -> None:
        """Handle what has come. Called again after `rest_s` at most, and as soon as anything comes."""
        for action in self.host.arrived():
            action()
        for action in self._agenda.due(self.host.clock.monotonic_ms()):
            if self.end is None:
                action()
        if self.end is None:
            now_s, watchdog = self.host.monotonic_s(), self._attempt.watchdog
            self._feed(events.Tick(watchdog.hanging(now_s), watchdog.slow()))
            self.report.live(self.core)
        if self.end is not None and not self._concluding:
            self._concluding = True
            self._conclude(self.end)
        if self._fails_by_ms and self.host.clock.monotonic_ms() >= self._fails_by_ms:
            self._failed_for(self.end.error if self.end is not None else None)

    @property
    def rest_s(self) -> float:
        """The longest wait before the next turn."""
        due_s = (self.core.wake_ms - self.host.clock.monotonic_ms()) / 1000
        return min(REST_S, due_s) if due_s > 0 and self.core.state is JobState.RUNNING else BUSY_REST_S

    def _lead(self, procedure: Procedure[Any], then: Then = lambda _: None) -> None:
        self.host.lead(procedure, then, self._failed)

    def _failed(self, error: ExactlyOnceError) -> None:
        self._end_with(events.End(None, error))

    def _feed(self, event: events.Event) -> None:
        if self.end is not None:  # nothing begins any more
            return
        for effect in self.core.handle(event, self.host.clock.monotonic_ms()):
            self._perform(effect)

    def _later(self, delay_ms: int, name: str, action: Callable[[], None]) -> None:
        self._agenda.at(self.host.clock.monotonic_ms() + delay_ms, name, action)

    # --- what people ask ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask for a clean stop, from any thread or a signal handler."""
        self.host.post(self._stop)

    def _stop(self) -> None:
        if not self.recovered:
            self._break_off(StoppedShort(BEFORE_ANYTHING_RAN))
        else:
            allowed_ms = self.options.checkpoint.stop_timeout_ms
            self._stops_by_ms = self.host.clock.monotonic_ms() + allowed_ms
            self._later(allowed_ms - _abort_ms(allowed_ms), "stop", self._stopped_too_late)
            self._feed(events.Stop())

    def _stopped_too_late(self) -> None:
        why = f"none was complete within {setting('stop_timeout')}, {self.options.checkpoint.stop_timeout_ms} ms"
        watchdog = self._attempt.watchdog
        reasons = filter(None, (why, watchdog.hanging(self.host.monotonic_s()), watchdog.slow()))
        self._failed(_stopped_short(self.core.manifest, "; ".join(reasons), self.core.attempt.deciding))

    def end_at_once(self) -> None:
        """End like a process that is killed, but in order; also while it is ending. From any thread, too."""
        why = EndedAtOnce(
            "Ended at once, as asked for. Nothing is lost: run it again, it takes up from the last completed "
            "checkpoint. Until then, or until they time out, transactions that were open hold back readers of the "
            "output."
        )
        self.host.hurry(why)
        self.host.post(lambda: self._break_off(why))

    def _break_off(self, why: EndedAtOnce) -> None:
        self.host.hurry(why)
        if self.end is None:
            self._failed(why)
        else:  # the wait for the leader's last record
            self._over(why)

    def _look_at_mailbox(self) -> None:
        self.host.look_at_mailbox(self._looked, self._failed)

    def _looked(self, asked: Asked | None) -> None:
        self._later(MAILBOX_INTERVAL_MS, "mailbox", self._look_at_mailbox)
        if asked is None or self.end is not None:
            return
        if asked.action == SAVEPOINT:
            self._feed(events.SavepointAsked(asked.id, asked.stop))
        elif asked.action == CANCEL:
            self._feed(events.CancelAsked(asked.id))
        elif asked.action == DELETE and asked.id not in self._deleted:
            self._deleted.add(asked.id)
            self._lead(
                self.leader.forget_savepoint(asked.checkpoint, tuple(self.core.pinned)),
                lambda _: self.report.note(f"savepoint {asked.checkpoint} is kept no longer, as asked for"),
            )

    # --- effects ------------------------------------------------------------------------------------------------

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Trigger(checkpoint, base, final, savepoint, overtakes_after_ms):
                self.report.triggered(checkpoint)
                drains = final and self.options.drain and self._attempt.finished == self._sources
                completes = final and not self.core.stopping
                for worker in self.host.workers:
                    added = {
                        source: tuple(share_of(offsets, self.plan.parallelism, worker.subtask).values())
                        for source, offsets in self.host.added.items()
                    }
                    worker.tell(
                        msg.Trigger(checkpoint, base, final, added, savepoint, overtakes_after_ms, drains, completes)
                    )
                hit("coordinator-triggered")
            case events.Decide(plan):
                self.host.decide(plan, tuple(self.core.pinned), partial(self._decided, plan), self._failed)
            case events.AnnounceFinalized(checkpoint):
                self._tell_all(msg.CheckpointFinalized(checkpoint))
                self.host.publish_offsets(self._failed)
            case events.Hold(held):
                self._tell_all(msg.Hold(held))
            case events.Restart():
                self._restart(effect)
            case events.Deploy():
                self._agenda.at(self._deploy_ms, "deploy", partial(self._deploy, effect))
            case events.End():
                self._end_with(effect)
            case events.Note(text):
                self.report.note(text)

    def _tell_all(self, message: msg.ToWorker) -> None:
        for worker in self.host.workers:
            worker.tell(message)

    def _opened(self, leader: Leader) -> None:
        self._leader = leader
        self._upkeep_later()
        self._later(0, "mailbox", self._look_at_mailbox)
        self._recovered(leader.manifest)

    def _recovered(self, manifest: Manifest) -> None:
        self._feed(events.Recovered(manifest, self.leader.config.transaction_timeout_ms))

    def _upkeep_later(self, _: None = None) -> None:
        """One at a time: while a broker is away no others queue up."""
        interval_ms = int(1000 * UPKEEP_INTERVAL_S)
        self._later(interval_ms, "upkeep", lambda: self._lead(self.leader.upkeep(), self._upkeep_later))

    def _restart(self, effect: events.Restart) -> None:
        if effect.reason:
            self.report.restarting(effect.reason, f"restarting from the last completed checkpoint: {effect.reason}")
        self._agenda.drop("deploy")
        self._attempt.last_output = LastOutput(self.plan.graph)
        self._deploy_ms = self.host.clock.monotonic_ms() + effect.delay_ms
        if self.host.kill_workers():
            begin = self.leader.begin_attempt(effect.attempt)
            self._lead(begin, self._recovered)

    def _deploy(self, effect: events.Deploy) -> None:
        self._attempt = AttemptWorkers(self._attempt.last_output)
        self._attempt.watchdog.started(self.plan.parallelism, self.host.monotonic_s())
        self.host.start_workers(effect.attempt, effect.manifest, self._heard, self._lost)
        self.report.deployed([worker.pid for worker in self.host.workers if worker.pid is not None])

    def _decided(self, plan: events.PendingCheckpoint, verdict: Verdict) -> None:
        if isinstance(verdict, Decided) and verdict.finalized:
            self.report.completed(plan, verdict, self.host.clock.monotonic_ms())
        self._feed(events.Concluded(plan.checkpoint, verdict))

    # --- workers ------------------------------------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        self._feed(events.Failed(reason))

    def _heard(self, worker: HostedWorker, message: Any) -> None:
        if text := self._attempt.watchdog.heard(worker.subtask, message, self.host.monotonic_s()):
            self.report.note(text)
        self._attempt.last_output.heard(message)
        match message:
            case msg.Ready(subtask, fingerprint, restore_ms):
                self._restored(subtask, fingerprint)
                self.report.step("restored", worker=subtask, restore_ms=restore_ms)
            case msg.Prepared(_, _, transactional_id):
                self.host.describe(transactional_id, partial(self._described, worker, message), self._failed)
            case msg.Acknowledge(ack):
                self.leader.acknowledged(ack)
                self._lead(self.leader.count_acknowledged())
                self.report.acknowledged(ack)
                self._feed(events.Acknowledged(ack))
            case msg.SourceFinished(task, subtask):
                self._attempt.finished.add((task, subtask))
                if self._attempt.finished == self._sources:
                    self._feed(events.SourcesFinished())
            case msg.Progress():
                self.report.progress(message)
                self._feed(events.Room(message.subtask, has_room=not message.full))
                self._pass_on_watermarks(message)
            case msg.WorkerFailed(_, name, error_text):
                text = self.options.client.redact(error_text)
                self._feed(events.Failed(text, made_from(name, text, message.facts) if name else None))

    def _pass_on_watermarks(self, progress: msg.Progress) -> None:
        """Tell the other workers how far sources are that wait for each other."""
        workers = {worker.subtask: worker for worker in self.host.workers}
        changes = self._attempt.lowest_watermarks.report(progress.subtask, progress.lowest_watermarks, workers)
        for subtask, lowest in changes.items():
            workers[subtask].tell(msg.Elsewhere(lowest))

    def _restored(self, subtask: int, fingerprint: str) -> None:
        if fingerprint != self.plan.graph.fingerprint():
            raise GraphError(
                "A worker imported another pipeline than the coordinator: the graph depends on something that differs "
                "between processes (time, random numbers, the environment). Make it the same on every import."
            )
        self._attempt.ready.add(subtask)
        self._attempt.watchdog.ready(subtask)
        if len(self._attempt.ready) == self.plan.parallelism:
            self._feed(events.Deployed())
            self.report.running(self.leader.manifest, self.leader.incarnation.incarnation)

    def _described(self, worker: HostedWorker, prepared: msg.Prepared, state: TransactionState | None) -> None:
        """The producer id and epoch were read between the producer's initialisation and its first record."""
        name = prepared.transactional_id
        if worker not in self.host.workers:
            return
        if state is None or state.state != TxnState.EMPTY:
            shown = state.state if state else "unknown"
            self._feed(events.Failed(f"transaction {name} is {shown} right after its initialisation"))
            return
        worker.tell(msg.Granted(prepared.sink, name, state.producer_id, state.epoch))
        self._feed(events.ProducerGranted(prepared.sink, prepared.subtask))

    # --- the end ------------------------------------------------------------------------------------------------

    def _end_with(self, end: events.End) -> None:
        self.end = self.end or end

    def _over(self, error: ExactlyOnceError | None) -> None:
        if self.outcome is None:
            assert self.end is not None
            self.outcome = msgspec.structs.replace(self.end, error=error)

    def _last_words(self, message: object) -> None:
        """A message of a worker that was told to end."""
        self._attempt.last_output.heard(message)
        match message:
            case msg.Progress():
                self.report.progress(message)
            case msg.WorkerFailed(subtask, _, text):
                self.report.note(f"worker {subtask} failed at its end, after the last checkpoint: {text}")

    def _conclude(self, end: events.End) -> None:
        if end.error is not None or end.manifest is None:
            self._fail(end.error)
            return
        manifest = end.manifest
        self.host.finish_workers(self._last_words)
        lost = self._attempt.last_output.error(manifest.checkpoint, self.options.client.redact)
        self.host.lead(
            self.leader.conclude(end.cancelled),
            lambda _: self._concluded(end, manifest, lost),
            lambda error: self._over(lost or error),  # no later run would report the loss
        )

    def _fail(self, error: ExactlyOnceError | None) -> None:
        """End with *error*, once the leader has noted it and aborted what nothing has decided: if it can, in time."""
        told = error is not None and self.recovered and not isinstance(error, UNTOLD)
        if error is None or not told or not self.host.kill_workers():
            self._over(error)
            return
        allowed_ms, now_ms = self.options.checkpoint.stop_timeout_ms, self.host.clock.monotonic_ms()
        self._fails_by_ms = self._stops_by_ms or now_ms + allowed_ms
        failed = Failure.of(error, self.options.client.redact)
        ended = partial(self._failed_for, error)

        def problem(why: ExactlyOnceError) -> None:
            if not isinstance(why, Fenced):
                self.report.note(f"transactions may be left open, which hold readers back until the next run: {why}")
            ended()

        self.host.lead(self.leader.fail(failed, self._fails_by_ms), ended, problem)

    def _failed_for(self, error: ExactlyOnceError | None, _: object = None) -> None:
        self._fails_by_ms = 0
        if isinstance(error, EndedAtOnce):  # then the time is over
            self.host.hurry(error)
        self._over(error)

    def _concluded(self, end: events.End, manifest: Manifest, lost: ExactlyOnceError | None) -> None:
        if end.cancelled:
            self.report.note("cancelled, as asked for: it has ended without a last checkpoint")
        self.report.ended(manifest)
        if self.options.until == "latest" and not self.options.drain and self.plan.graph.timed:
            for line in _silent(manifest):
                self.report.note(line)
        self._over(lost or self._falls_short(end, manifest))

    def _falls_short(self, end: events.End, manifest: Manifest) -> ExactlyOnceError | None:
        """The error of a clean end that came too early."""
        if end.short:
            return _stopped_short(manifest, end.short)
        if self.options.until == "latest" and manifest.channel_logs:
            return EndedEarly(_stopped_in_flight(manifest, loops=bool(self.plan.graph.loops)))
        if self.options.until == "latest" and self._attempt.finished != self._sources:
            return EndedEarly(
                "Ended, as asked for, before all was read that was there at the start. The end is clean, nothing is "
                "open or lost: run it again, it goes on from its last checkpoint."
            )
        return None


def _abort_ms(allowed_ms: int) -> int:
    """The part of the time for a stop that is left to abort open transactions, where no last checkpoint completes."""
    return min(ABORT_MS, allowed_ms // 10)


def _silent(manifest: Manifest) -> Iterator[str]:
    """A line for each source with partitions that have had no record, and so hold back those that had."""
    for source in sorted({offset.source for offset in manifest.offsets if offset.floor != NO_FLOOR}):
        silent = [
            f"{offset.topic}[{offset.partition}]"
            for offset in manifest.offsets
            if offset.source == source and offset.floor == NO_FLOOR
        ]
        if silent:
            yield (
                f"source {source!r}: no record has come from {', '.join(silent)}, so its watermark has not begun, and "
                f"what waits for it stays in the state: a longer run goes on once idle= of the source is over, unless "
                f"that is None, and a run with --drain at its end"
            )


def _stopped_short(newest: Manifest | None, why: str, deciding: events.PendingCheckpoint | None = None) -> StoppedShort:
    """*deciding*: the checkpoint that was being committed."""
    begins = f"checkpoint {newest.checkpoint}" if newest is not None and newest.checkpoint else "the beginning"
    left = f", or from checkpoint {deciding.checkpoint}, whose commit it takes up" if deciding is not None else ""
    why = why.removesuffix(".")
    return StoppedShort(
        f"Stopped, as asked for, without a last checkpoint: {why}. Nothing is lost: the next run goes on from {begins}"
        f"{left}."
    )


def _stopped_in_flight(manifest: Manifest, *, loops: bool) -> str:
    """Without *loops*, *manifest* is an older checkpoint, whose barriers had overtaken records."""
    where = "went round loops" if loops else "were on their way between operators"
    return (
        f"Stopped, as asked for, while {manifest.records_in_flight} records {where}. They are part of the last "
        f"checkpoint, and nothing is open or lost: run it again, it goes on with them."
    )
