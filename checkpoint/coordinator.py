"""The coordinator: triggers checkpoints, collects acknowledgements, aborts late checkpoints, restarts failed jobs.

Events in, effects out; every event comes with the time. The states of the job and of a checkpoint follow two tables,
`JOB_TRANSITIONS` and `events.CHECKPOINT_TRANSITIONS`, which ARCHITECTURE.md draws; any other move raises
InvariantViolation.

Invariants: completed ids only grow; decisions come one by one, each after the previous checkpoint is finalized; a
checkpoint that is being decided is not aborted, and nothing is restarted meanwhile; undecided output is carried to the
next manifest while the attempt goes on, and a new attempt begins without it: its transactions are aborted.
A clean end comes only when the last checkpoint is finalized and no transaction of any attempt is open. With loops or
overtaking barriers, the input is read only once a checkpoint after the last record has found no in-flight records: the
last checkpoint is aligned, and would be late behind a backlog in every attempt. A stop waits for no loop.
A cancelled job ends without another checkpoint, like one that restarts and then has nothing to do: the checkpoint that
is being decided is finished, and undecided ones are aborted.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint import events
from exactlyonce.checkpoint.events import (
    Ack,
    CheckpointState,
    Effect,
    Event,
    Failed,
    PendingCheckpoint,
    Refuse,
    Subtask,
    Tick,
    Unresolved,
    Verdict,
)
from exactlyonce.checkpoint.records.manifest import (
    ABORTED_MAX,
    REASON_LENGTH_MAX,
    AbortedCheckpoint,
    Manifest,
    OrderLog,
    Precommit,
    StagedAck,
)
from exactlyonce.checkpoint.settings import CheckpointSettings, RestartStrategy
from exactlyonce.pipeline.errors import ExactlyOnceError, Fenced, Undetermined, require
from exactlyonce.pipeline.names import setting


class JobState(enum.Enum):
    RECOVERING = "recovering"
    DEPLOYING = "deploying"
    RUNNING = "running"
    ENDED = "ended"


JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.RECOVERING: frozenset({JobState.DEPLOYING, JobState.ENDED}),
    JobState.DEPLOYING: frozenset({JobState.RUNNING, JobState.RECOVERING, JobState.ENDED}),
    JobState.RUNNING: frozenset({JobState.RECOVERING, JobState.ENDED}),
    JobState.ENDED: frozenset(),
}


@dataclass
class UndecidedOutput:
    """Acknowledged output and order logs, also of aborted checkpoints, that no manifest holds yet."""

    precommits: list[tuple[Precommit, int]] = field(default_factory=list)
    """Each with the time at which its transaction began."""
    staged: list[StagedAck] = field(default_factory=list)
    order_logs: list[tuple[int, OrderLog]] = field(default_factory=list)
    """Each with its checkpoint."""

    def add(self, ack: Ack, now_ms: int) -> None:
        self.precommits += [(precommit, now_ms - precommit.open_ms) for precommit in ack.precommits]
        self.staged += ack.staged
        if ack.order_log is not None:
            self.order_logs.append((ack.checkpoint, ack.order_log))

    def assign(self, plan: PendingCheckpoint, now_ms: int) -> None:
        """Let the manifest of *plan* carry everything up to its checkpoint."""
        carried = [(p, begun_ms) for p, begun_ms in self.precommits if p.checkpoint <= plan.checkpoint]
        plan.precommits = [precommit for precommit, _ in carried]
        plan.ages_ms = {precommit.transactional_id: now_ms - begun_ms for precommit, begun_ms in carried}
        plan.staged = [staged for staged in self.staged if staged.committable.checkpoint <= plan.checkpoint]
        plan.order_logs = [log for checkpoint, log in self.order_logs if checkpoint <= plan.checkpoint]

    def completed(self, completed: int) -> None:
        """Drop the output that the manifest of checkpoint *completed* carries."""
        self.precommits = [(p, begun_ms) for p, begun_ms in self.precommits if p.checkpoint > completed]
        self.staged = [staged for staged in self.staged if staged.committable.checkpoint > completed]
        self.order_logs = [(checkpoint, log) for checkpoint, log in self.order_logs if checkpoint > completed]

    def transactions_max(self) -> int:
        """The largest number of undecided transactions of one sink subtask."""
        return max(Counter((p.sink, p.subtask) for p, _ in self.precommits).values(), default=0)


@dataclass
class Attempt:
    """The reports of one set of workers since their start: what a restart of the workers drops as a whole."""

    number: int = 0
    delay_ms: int = 0
    """The pause before its workers start."""
    ready_by_ms: int = 0
    """While the job deploys: when its workers count as failed."""
    in_flight: list[PendingCheckpoint] = field(default_factory=list)
    """Oldest first."""
    undecided: UndecidedOutput = field(default_factory=UndecidedOutput)
    producers: dict[Subtask, int] = field(default_factory=dict)
    """Producers that are ready, by sink subtask."""
    acked: dict[Subtask, int] = field(default_factory=dict)
    """The newest checkpoint that each subtask has acknowledged."""
    failed_in_row: int = 0
    """Late checkpoints since the last completed one."""
    full_workers: set[int] = field(default_factory=set)
    """Workers without room for their state on the disk."""
    held: bool = False
    """Whether sources are paused."""
    read_by: int | None = None
    """The newest checkpoint when every source had reached its target; None: not yet."""
    drained: bool = False
    """Whether nothing is left to read, and no record is in a loop or may be overtaken."""
    pending_failure: Failed | None = None
    """The gravest failure that waits for the outcome of a decision."""

    @property
    def deciding(self) -> PendingCheckpoint | None:
        """The checkpoint whose decision is under way."""
        return next((plan for plan in self.in_flight if plan.state is CheckpointState.DECIDING), None)

    @property
    def awaited(self) -> list[PendingCheckpoint]:
        """The checkpoints that some subtask has yet to acknowledge."""
        return [plan for plan in self.in_flight if plan.state is CheckpointState.TRIGGERED]

    def granted(self, sink: Subtask) -> None:
        self.producers[sink] = self.producers.get(sink, 0) + 1

    def lacking(self, sinks: frozenset[Subtask], needed: int) -> list[Subtask]:
        """The subtasks of *sinks* that have fewer producers ready than *needed*."""
        return sorted(sink for sink in sinks if self.producers.get(sink, 0) < needed)

    def acknowledged(self, subtask: Subtask, ack: Ack, now_ms: int) -> None:
        """Keep the output of *ack*, whatever becomes of its checkpoint."""
        require(ack.checkpoint > self.acked.get(subtask, 0), "acknowledgements of one subtask come in order")
        self.acked[subtask] = ack.checkpoint
        self.undecided.add(ack, now_ms)
        for precommit in ack.precommits:
            self.producers[precommit.sink, precommit.subtask] -= 1

    def postpone(self, failure: Failed) -> None:
        """Keep the gravest pending failure; on a tie, the first."""
        pending = self.pending_failure or failure
        self.pending_failure = max(pending, failure, key=lambda one: (one.error is not None, one.counts))


TRIES_MAX = 3
"""How often a savepoint is tried for a request."""
FIRST_MAX = 64
"""Ordinary checkpoints that go first, at most."""


class SavepointRequests:
    """The requests for savepoints to one incarnation: which of them the next checkpoint serves.

    A savepoint may take longer than the timeout, or kill a worker, where checkpoints do not. So after a failed
    savepoint an ordinary checkpoint goes first, or frequent requests would stop all progress; then the savepoint is
    tried again, `TRIES_MAX` times in all. After each request that is given up, twice as many ordinary checkpoints go
    first: else requests that never succeed would leave one interval of progress to every timeout.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, bool] = {}
        """Requests that no completed savepoint serves, and whether the job is to stop after it."""
        self._served: set[str] = set()
        self._tries: Counter[str] = Counter()
        """Failed savepoints by request."""
        self._from = 0
        """All savepoints wait until this checkpoint or a later one is complete."""
        self._going_first = 1
        """How many ordinary checkpoints go first after a failed savepoint."""

    def ask(self, request: str, *, stop: bool) -> None:
        """Take a request, which may be repeated."""
        if request not in self._served and self._tries[request] < TRIES_MAX:
            self._waiting.setdefault(request, stop)

    def is_served(self, request: str) -> bool:
        """Whether a completed savepoint serves *request*."""
        return request in self._served

    def due(self, completed: int, under_way: Collection[str]) -> tuple[str, ...]:
        """The requests that the next checkpoint is to serve, after *completed*, while others are *under_way*."""
        if completed < self._from:
            return ()
        return tuple(request for request in self._waiting if request not in under_way)

    def stops(self, completed: int) -> bool:
        """Whether the next checkpoint is a savepoint after which the job stops, or one is under way."""
        return completed >= self._from and any(self._waiting.values())

    def serve(self, requests: Collection[str]) -> bool:
        """A savepoint for *requests* is complete; returns whether the job is to stop after it."""
        self._served.update(requests)
        self._going_first = 1 if requests else self._going_first
        stops = any(self._waiting.get(request, False) for request in requests)
        for request in requests:
            self._waiting.pop(request, None)
        return stops

    def fail(self, requests: Collection[str], first: int) -> None:
        """A savepoint for *requests*, if there are any, has failed: *first* goes first, and perhaps later ones."""
        self._tries.update(requests)
        given_up = [request for request in requests if self._tries[request] >= TRIES_MAX]
        for request in given_up:
            self._waiting.pop(request, None)
        if given_up:
            self._going_first = min(FIRST_MAX, 2 * self._going_first)
        if requests:
            self._from = first + self._going_first - 1


NEVER_MS = 1 << 62
HOLD_AFTER_MS = 1_000
DRAINED_LOOK_INTERVAL_MS = 1_000
"""After the input is read: the longest pause before the next checkpoint looks for in-flight records."""
DECLINED_NOTE_INTERVAL_MS = 10_000
"""Between two notes while checkpoint after checkpoint is declined."""
MISSING_MAX = 3
"""The most subtasks that the reason of an abort names."""


@dataclass
class Ending:
    """Why the job is to end: a stop, a request to cancel, or a restart strategy that gives up."""

    stopping: bool = False
    cancelled: str = ""
    """The request that cancels the job."""
    gave_up: ExactlyOnceError | None = None
    is_whole: bool = False
    """Whether the newest completed checkpoint is the last one."""
    short: str = ""
    """Why a stop gets no last checkpoint."""

    @property
    def is_due(self) -> bool:
        """Whether no further attempt begins."""
        return self.stopping or self.gave_up is not None or bool(self.cancelled)

    def effect(self, manifest: Manifest | None, error: ExactlyOnceError | None) -> events.End:
        if self.cancelled and not isinstance(error, (Fenced, Undetermined)):
            return events.End(manifest, None, self.cancelled)
        return events.End(manifest, error, short="" if error or self.is_whole else self.short)


class Coordinator:
    """The pure core of one incarnation of a pipeline's coordinator. Feed it events; perform its effects in order."""

    def __init__(
        self, settings: CheckpointSettings, restart: RestartStrategy, subtasks: set[Subtask], sinks: set[Subtask],
        *, staging: bool = False, loops: bool = False,
    ) -> None:  # fmt: skip
        """*staging*: a decision may have to wait for a store. *loops*: the graph has loops."""
        self.settings = settings
        self.restart = restart
        self.subtasks = frozenset(subtasks)
        self.sinks = frozenset(sinks)
        self._staging = staging
        self._loops = loops
        self.state = JobState.RECOVERING
        self.attempt = Attempt()
        self.manifest: Manifest | None = None
        self._checkpoint_latest = 0
        self._next_trigger_ms = 0
        self._next_declined_note_ms = 0
        self.timeout_ms = settings.timeout_ms
        """The timeout of the next checkpoint. A late one doubles it; a completed one that took less than half ends
        that."""
        self._timeout_max_ms = settings.timeout_ms
        self._savepoints = SavepointRequests()
        self._ending = Ending()
        self._aborted: list[tuple[int, AbortedCheckpoint]] = []
        """Each with the time of its trigger, which `before_ms` counts from; no completed checkpoint tells of it yet."""

    @property
    def stopping(self) -> bool:
        """Whether the next checkpoint is the last: after a stop, or a savepoint that no ordinary one has to precede."""
        return self._ending.stopping or self._savepoints.stops(self._newest)

    @property
    def _newest(self) -> int:
        """The newest completed checkpoint; 0: none."""
        return self.manifest.checkpoint if self.manifest else 0

    @property
    def pinned(self) -> set[int]:
        """Completed checkpoints that are a base in flight, or may become one before the present decision concludes."""
        return {plan.base for plan in self.attempt.in_flight} | ({self._newest} if self.manifest else set())

    @property
    def wake_ms(self) -> int:
        """When the next `Tick` is due, if nothing else happens."""
        due = [plan.triggered_ms + plan.timeout_ms for plan in self.attempt.awaited]
        due += [self.attempt.ready_by_ms] if self.state is JobState.DEPLOYING else []
        return min([*due, self._next_trigger_ms] if self._may_trigger else due, default=NEVER_MS)

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take *event* at *now_ms* (monotonic) and return what must be done, in order."""
        if self.state is JobState.ENDED or (self.state is JobState.RECOVERING and isinstance(event, events.OfWorkers)):
            return []  # from workers that are being killed
        match event:
            case Tick():
                effects = self._unready(event, now_ms) or self._late(event, now_ms) or self._starved(event, now_ms)
                effects += self._hold(now_ms)
            case events.Recovered(manifest, transaction_timeout_ms):
                self._timeout_max_ms = self.settings.timeout_max_ms(transaction_timeout_ms)
                effects = self._recovered(manifest, now_ms)
            case events.Deployed():
                effects = self._deployed(now_ms)
            case events.ProducerGranted(sink, subtask):
                require((sink, subtask) in self.sinks, "producers are granted to sinks of this job")
                self.attempt.granted((sink, subtask))
                effects = []
            case events.Acknowledged(ack):
                effects = self._acknowledged(ack, now_ms)
            case events.Concluded(checkpoint, verdict):
                effects = self._concluded(checkpoint, verdict, now_ms)
            case Failed():
                effects = self._failed(event, now_ms)
            case events.SourcesFinished():
                self.attempt.read_by, self._next_trigger_ms = self._checkpoint_latest, now_ms
                self.attempt.drained = not (self._loops or self.settings.unaligned)
                effects = []
            case events.SavepointAsked(request, stop):
                effects = self._savepoint_asked(request, now_ms, stop=stop)
            case events.Room(worker, has_room):
                self.attempt.full_workers -= {worker}
                self.attempt.full_workers |= set() if has_room else {worker}
                effects = self._hold(now_ms) + self._stop_without_room(now_ms)
            case events.Stop():
                effects = self._stop(now_ms)
            case events.CancelAsked(request):
                effects = self._cancel(request, now_ms)
        return effects + self._trigger(now_ms)

    def _move(self, state: JobState) -> None:
        require(state in JOB_TRANSITIONS[self.state], f"a job moves from {self.state} to {state}")
        self.state = state

    # --- states of the job --------------------------------------------------------------------------------------

    def _recovered(self, manifest: Manifest, now_ms: int) -> list[Effect]:
        require(manifest.checkpoint >= self._newest, "completed checkpoint ids only grow")
        self.manifest = manifest
        self._ending.stopping |= self._savepoints.serve(manifest.requests)
        self._checkpoint_latest = max(self._checkpoint_latest, manifest.checkpoint)
        if self._ending.is_due:
            return self._end(self._ending.gave_up)
        self._move(JobState.DEPLOYING)
        self.attempt.ready_by_ms = now_ms + self.attempt.delay_ms + self.settings.deploy_timeout_ms
        return [events.Deploy(self.attempt.number, manifest)]

    def _deployed(self, now_ms: int) -> list[Effect]:
        self._move(JobState.RUNNING)
        at_once = self._ending.stopping or self._unserved
        self._next_trigger_ms = now_ms if at_once else now_ms + self.settings.interval_ms
        return []

    def _failed(self, failure: Failed, now_ms: int) -> list[Effect]:
        """Restart, or end. While a checkpoint is being decided the failure waits for the outcome."""
        if isinstance(failure.error, Fenced):
            return self._end(failure.error)
        if self.attempt.deciding is not None:
            self.attempt.postpone(failure)
            return []
        if self._ending.cancelled:
            return []  # the workers are being killed
        if failure.error is not None:
            return self._end(failure.error)
        return self._restart(failure.reason, now_ms) if failure.counts else self._recover(now_ms, failure.reason)

    def _restart(self, reason: str, now_ms: int, *, unfinished: bool = False) -> list[Effect]:
        if self.state is JobState.RECOVERING and not unfinished:  # a decision that concludes then is a defect: `_move`
            return []
        delay_ms = self.restart.failed(now_ms)
        if delay_ms is None:
            self._ending.gave_up = ExactlyOnceError(f"The job failed and its restart strategy gives up: {reason}")
            if not unfinished:  # else the restart finishes it, and ends then
                return self._end(self._ending.gave_up)
        return self._recover(now_ms, reason, delay_ms or 0)

    def _recover(self, now_ms: int, reason: str = "", delay_ms: int = 0) -> list[Effect]:
        """Replace the workers, whose transactions are aborted; after a stop, end instead of starting new ones."""
        if self._ending.stopping and self.state is JobState.RUNNING:
            self._ending.short = self._ending.short or reason
        self._abort([*self.attempt.in_flight], reason or "the run was stopped or cancelled", now_ms)
        self.attempt = Attempt(self.attempt.number + 1, delay_ms)
        self._move(JobState.RECOVERING)
        return [events.Restart(self.attempt.number, delay_ms, reason)]

    def _end(self, error: ExactlyOnceError | None) -> list[Effect]:
        self._move(JobState.ENDED)
        return [self._ending.effect(self.manifest, error)]

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    def _final(self) -> bool:
        return self.stopping or self.attempt.drained

    @property
    def _producers_needed(self) -> int:
        """At a barrier a sink flushes a transaction and goes on with the next producer; not after the last barrier."""
        return 1 if self._final else 2

    @property
    def _may_trigger(self) -> bool:
        """Whether only time keeps the next checkpoint from being triggered."""
        attempt = self.attempt
        if self.state is not JobState.RUNNING or attempt.pending_failure or self._ending.cancelled:
            return False
        if any(plan.final for plan in attempt.in_flight):
            return False
        if attempt.full_workers:  # they would decline it, and the other workers write for nothing
            return False
        # The last one comes alone: nothing else is written meanwhile, so that it may note its own block ends.
        if len(attempt.in_flight) >= (1 if self._final else self.settings.max_concurrent):
            return False
        # Each awaited checkpoint may use up one producer as well.
        return not attempt.lacking(self.sinks, len(attempt.awaited) + self._producers_needed)

    def _trigger(self, now_ms: int) -> list[Effect]:
        if now_ms < self._next_trigger_ms or not self._may_trigger:
            return []
        assert self.manifest is not None
        in_flight, base = self.attempt.in_flight, self.manifest.checkpoint
        self._checkpoint_latest += 1
        plan = PendingCheckpoint(
            checkpoint=self._checkpoint_latest, base=base, previous=in_flight[-1].checkpoint if in_flight else base,
            final=self._final, triggered_ms=now_ms, timeout_ms=self.timeout_ms, attempt=self.attempt.number,
            requests=self._unserved,
        )  # fmt: skip
        in_flight.append(plan)
        self._next_trigger_ms = now_ms + self.settings.interval_ms
        may_overtake = self.settings.unaligned and not plan.final and not plan.requests
        after_ms = self.settings.aligned_timeout_ms if may_overtake else None
        return [events.Trigger(plan.checkpoint, base, plan.final, bool(plan.requests), after_ms)]

    def _unready(self, tick: Tick, now_ms: int) -> list[Effect]:
        """Restart workers that do not become ready: a user's `open()` hangs, or the state takes too long to read."""
        if self.state is not JobState.DEPLOYING or now_ms < self.attempt.ready_by_ms:
            return []
        late = f"the workers were not ready within {self.settings.deploy_timeout_ms} ms{_because(tick.hanging)}"
        return self._failed(Failed(f"{late}. If they only need longer, raise {setting('deploy_timeout')}"), now_ms)

    def _stop(self, now_ms: int) -> list[Effect]:
        self._ending.stopping, self._next_trigger_ms = True, now_ms
        return self._recover(now_ms) if self.state is JobState.DEPLOYING else self._stop_without_room(now_ms)

    def _stop_without_room(self, now_ms: int) -> list[Effect]:
        """A stop does not wait for room on a disk: the next run continues after the newest checkpoint."""
        if not (self._ending.stopping and self.attempt.full_workers and self.state is JobState.RUNNING):
            return []
        self._ending.short = "a worker's disk is full"
        return self._failed(Failed("", counts=False), now_ms)

    def _cancel(self, request: str, now_ms: int) -> list[Effect]:
        """End as soon as nothing is being decided; undecided checkpoints are aborted."""
        if self._ending.cancelled:
            return []
        self._ending.cancelled = request
        return [] if self.attempt.deciding is not None or self.state is JobState.RECOVERING else self._recover(now_ms)

    def _savepoint_asked(self, request: str, now_ms: int, *, stop: bool) -> list[Effect]:
        """Trigger a savepoint at once, unless one for *request* is under way or an ordinary checkpoint goes first.

        If an older incarnation decided it, and died before it stopped, this one stops.
        """
        if stop and self._savepoints.is_served(request):
            return self._stop(now_ms)
        self._savepoints.ask(request, stop=stop)
        self._next_trigger_ms = now_ms if self._unserved else self._next_trigger_ms
        return []

    @property
    def _unserved(self) -> tuple[str, ...]:
        """The requests that the next checkpoint is to serve."""
        under_way = {request for plan in self.attempt.in_flight for request in plan.requests}
        return self._savepoints.due(self._newest, under_way)

    def _abort(self, plans: list[PendingCheckpoint], reason: str, now_ms: int, *, failed: bool = True) -> None:
        """Abort *plans*. *failed*: a savepoint among them has used up one of its tries."""
        for plan in plans:
            missing = _named(sorted(self.subtasks - plan.acks.keys())) if failed else ""
            plan.move(CheckpointState.ABORTED)
            self.attempt.in_flight.remove(plan)
            why = f"{reason[:REASON_LENGTH_MAX]}{f'; {missing} had not acknowledged it' if missing else ''}"
            aborted = AbortedCheckpoint(plan.checkpoint, 0, now_ms - plan.triggered_ms, why)
            self._aborted = [*self._aborted[1 - ABORTED_MAX :], (plan.triggered_ms, aborted)]
        if failed:
            requests = [request for plan in plans for request in plan.requests]
            self._savepoints.fail(requests, self._checkpoint_latest + 1)

    def _late(self, tick: Tick, now_ms: int) -> list[Effect]:
        """Abort the checkpoints that took too long.

        A late ordinary checkpoint is a failure; beyond `tolerable_failed` the job restarts. A late savepoint is none,
        unless the job ends with it, but its workers are replaced at once: what they still write for it would make the
        next checkpoints late. Whatever comes next has twice the time, for the same try would be late again.
        """
        late = [plan for plan in self.attempt.awaited if now_ms >= plan.triggered_ms + plan.timeout_ms]
        if not late:
            return []
        timeout_ms = max(plan.timeout_ms for plan in late)
        no_room = self._waits_for_room(tick)
        names = ", ".join(str(plan.checkpoint) for plan in late)
        why = _because("; ".join(filter(None, (tick.hanging, tick.slow))))
        reason = f"checkpoint {names} was not acknowledged within {timeout_ms} ms{why}"
        self._abort(late, reason, now_ms, failed=not no_room)
        self._next_trigger_ms = now_ms + self.settings.min_pause_ms
        self.timeout_ms = max(self.timeout_ms, min(2 * timeout_ms, self._timeout_max_ms))
        carried = "its output is carried by the next one"
        if no_room:
            return [events.Note(f"{reason}; aborted, {carried}, which waits for room on a worker's disk")]
        # Asked after the abort: a stop that only waits for its savepoint ends nothing now.
        savepoint, ends = any(plan.requests for plan in late), self._final and any(plan.final for plan in late)
        timeout = setting("checkpoint_timeout")
        longer = f". A savepoint holds all state, and overtakes nothing: if it needs longer, raise {timeout}"
        hint = longer if savepoint else ""
        hint += f". The next one may take {self.timeout_ms} ms" if self.timeout_ms > timeout_ms else ""
        failure = Failed(reason, counts=ends or not savepoint)
        self.attempt.failed_in_row += len(late)
        if failure.counts and self.attempt.failed_in_row <= self.settings.tolerable_failed:
            return [events.Note(f"{reason}; aborted, {carried}{hint}")]
        return [events.Note(f"{reason}; aborted{hint}"), *self._failed(failure, now_ms)]

    def _waits_for_room(self, tick: Tick) -> bool:
        """Whether a disk is full and no worker hangs: being late is no failure then."""
        return bool(self.attempt.full_workers) and not tick.hanging

    def _starved(self, tick: Tick, now_ms: int) -> list[Effect]:
        """Restart when no checkpoint can be triggered: a sink gets no producer ready, or a worker hangs."""
        late = now_ms >= self._next_trigger_ms + self.timeout_ms
        stuck = self.state is JobState.RUNNING and not self.attempt.in_flight and not self._may_trigger
        # Declined checkpoints have flushed so much that a sink has too few transactional ids for another one.
        spent = self.attempt.undecided.transactions_max() > self.settings.slots - self._producers_needed
        if not stuck or not (late or spent) or self._waits_for_room(tick):
            return []
        since = "after so many declined checkpoints" if spent else f"for {self.timeout_ms} ms"
        waiting = ", ".join(f"sink {sink} subtask {index}" for sink, index in self.attempt.lacking(self.sinks, 2))
        reason = f"no producer was ready {since} at {waiting}"
        if tick.hanging:
            reason = f"no checkpoint could be triggered for {self.timeout_ms} ms: {tick.hanging}"
        return self._failed(Failed(reason, counts=not spent), now_ms)

    def _acknowledged(self, ack: Ack, now_ms: int) -> list[Effect]:
        """Keep the precommits in any case; decide when every subtask has acknowledged."""
        subtask = (ack.task, ack.subtask)
        require(subtask in self.subtasks, "acknowledgements come from subtasks of this job")
        self.attempt.acknowledged(subtask, ack, now_ms)
        plan = next((plan for plan in self.attempt.in_flight if plan.checkpoint == ack.checkpoint), None)
        if plan is None:
            return []
        if ack.declined:
            return self._declined(plan, ack.declined, now_ms)
        plan.acks[subtask], plan.acked_ms[subtask] = ack, now_ms - plan.triggered_ms
        plan.final = plan.final and not ack.goes_on
        if plan.acks.keys() == self.subtasks:
            plan.move(CheckpointState.ACKNOWLEDGED)
        return self._decide(now_ms)

    def _declined(self, plan: PendingCheckpoint, why: str, now_ms: int) -> list[Effect]:
        """Abort a checkpoint that a subtask cannot take now. It is no failure: the job goes on, or waits, by itself."""
        self._abort([plan], f"declined: {why}", now_ms, failed=False)
        if now_ms < self._next_declined_note_ms:
            return []
        self._next_declined_note_ms = now_ms + DECLINED_NOTE_INTERVAL_MS
        return [events.Note(f"checkpoint {plan.checkpoint} was declined, and is aborted; nothing is lost. {why}")]

    def _decide(self, now_ms: int) -> list[Effect]:
        """Begin the decision of the oldest checkpoint in flight, if its turn has come."""
        in_flight = self.attempt.in_flight
        if not in_flight or in_flight[0].state is not CheckpointState.ACKNOWLEDGED:
            return []
        plan = in_flight[0]
        plan.previous, plan.deciding_since_ms = self._newest, now_ms
        plan.aborted = tuple(
            msgspec.structs.replace(aborted, before_ms=plan.triggered_ms - triggered_ms)
            for triggered_ms, aborted in self._aborted
        )
        self.attempt.undecided.assign(plan, now_ms)
        plan.move(CheckpointState.DECIDING)
        return [events.Decide(plan)]

    def _hold(self, now_ms: int) -> list[Effect]:
        """Pause sources while a decided checkpoint waits for a store, or a worker's disk is full.

        What is read meanwhile would only make the next checkpoint larger, or stay in that worker's memory.
        """
        hold_after_ms, deciding = max(self.settings.interval_ms, HOLD_AFTER_MS), self.attempt.deciding
        waits = self._staging and deciding is not None and now_ms - deciding.deciding_since_ms >= hold_after_ms
        held = waits or bool(self.attempt.full_workers)
        if held == self.attempt.held or self.state is not JobState.RUNNING:
            return []
        self.attempt.held = held
        return [events.Hold(held)]

    def _concluded(self, checkpoint: int, verdict: Verdict, now_ms: int) -> list[Effect]:
        plan = self.attempt.deciding
        require(plan is not None and plan.checkpoint == checkpoint, "decisions come one by one")
        assert plan is not None
        if isinstance(verdict, Unresolved):
            unknown = f"Whether checkpoint {checkpoint} completed could not be learnt from the broker."
            return self._end(Undetermined(f"{unknown} Nothing is lost: run the pipeline again, it reads what is true."))
        if isinstance(verdict, Refuse):
            self._abort([plan], verdict.reason, now_ms)
            self.attempt.postpone(Failed(verdict.reason))
            return self._after_decision(now_ms)
        plan.move(CheckpointState.COMPLETED)
        self.attempt.in_flight.remove(plan)
        self._completed(plan, verdict.manifest, now_ms)
        if not verdict.finalized:
            reason = f"checkpoint {checkpoint} is decided, but not known to be committed"
            return self._restart(reason, now_ms, unfinished=True)
        announce: list[Effect] = [events.AnnounceFinalized(checkpoint)]
        if plan.final:  # nothing was read after it: a worker that died since loses nothing
            failure = self.attempt.pending_failure
            return announce + self._end(failure.error if failure else None)
        return announce + (self._after_decision(now_ms) or self._decide(now_ms))

    def _completed(self, plan: PendingCheckpoint, manifest: Manifest, now_ms: int) -> None:
        require(manifest.checkpoint > self._newest, "completed checkpoint ids only grow")
        self.manifest, self._ending.is_whole = manifest, plan.final
        self._ending.stopping |= self._savepoints.serve(manifest.requests)
        told = {aborted.checkpoint for aborted in plan.aborted}
        self._aborted = [known for known in self._aborted if known[1].checkpoint not in told]
        attempt = self.attempt
        attempt.undecided.completed(plan.checkpoint)
        attempt.failed_in_row = 0
        self.timeout_ms = max(self.settings.timeout_ms, min(self.timeout_ms, 2 * max(plan.acked_ms.values())))
        paused_ms = now_ms + self.settings.min_pause_ms
        self._next_trigger_ms = paused_ms if self._unserved else max(self._next_trigger_ms, paused_ms)
        if attempt.read_by is not None and plan.checkpoint > attempt.read_by and not attempt.drained:
            attempt.drained = not manifest.channel_logs
            look_again_ms = max(paused_ms, now_ms + DRAINED_LOOK_INTERVAL_MS)
            self._next_trigger_ms = now_ms if attempt.drained else min(self._next_trigger_ms, look_again_ms)
        elif self._final and not plan.final:  # what is due at the end goes on
            self._next_trigger_ms = min(self._next_trigger_ms, max(paused_ms, now_ms + DRAINED_LOOK_INTERVAL_MS))
        self.restart.completed(now_ms)

    def _after_decision(self, now_ms: int) -> list[Effect]:
        """Handle the failure that waited for the decision, or end a cancelled job."""
        failure, self.attempt.pending_failure = self.attempt.pending_failure, None
        if self._ending.cancelled:
            return self._recover(now_ms)
        return self._failed(failure, now_ms) if failure else []


def _named(subtasks: Sequence[Subtask]) -> str:
    """*subtasks*, the first few by name.

    >>> _named([("totals", 0), ("totals", 3), ("out", 1), ("out", 2)])
    'totals[0], totals[3], out[1] and 1 more'
    """
    first = ", ".join(f"{task}[{subtask}]" for task, subtask in subtasks[:MISSING_MAX])
    return f"{first} and {len(subtasks) - MISSING_MAX:,} more" if len(subtasks) > MISSING_MAX else first


def _because(words: str) -> str:
    return f": {words}" if words else ""
