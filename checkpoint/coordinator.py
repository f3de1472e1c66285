"""The coordinator: triggers checkpoints, gathers acknowledgements, aborts what is late, restarts what fails.

Events in, effects out; every event comes with the time. The states of the job and of a checkpoint are the two tables in
`checkpoint.states`; whatever is not in them raises InvariantViolation.

Invariants: completed ids only grow; decisions come one by one, each after the previous checkpoint is finalized; a
checkpoint that is being decided is not aborted, and nothing is restarted meanwhile; the precommits, order logs and what
was staged of an aborted checkpoint are carried to the next manifest while the job goes on, and dropped (to be aborted)
when it restarts.
A clean end comes only when the last checkpoint is finalized and no transaction of any attempt is open. Where records go
round, or barriers overtake them, all is read only once a barrier behind the last record has found nothing on its way:
the last one overtakes nothing, and would be late behind a backlog in attempt after attempt. A stop waits for no loop.
A cancelled job ends without another checkpoint, like one that restarts and then has nothing to do: what is being
decided is seen to its end, and what is not decided is aborted.
"""

from __future__ import annotations

from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.decision import Decided, Unresolved
from exactlyonce.checkpoint.events import (
    Ack,
    Acknowledged,
    AnnounceFinalized,
    CancelAsked,
    Concluded,
    Decide,
    Deploy,
    Deployed,
    Effect,
    End,
    Event,
    Failed,
    Hold,
    Note,
    OfWorkers,
    PendingCheckpoint,
    ProducerGranted,
    Recovered,
    Restart,
    Room,
    SavepointAsked,
    SourcesFinished,
    Stop,
    Subtask,
    Tick,
    Trigger,
)
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import Manifest, OrderLog, StagedAck
from exactlyonce.checkpoint.restart import RestartStrategy
from exactlyonce.checkpoint.savepoint_requests import SavepointRequests
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.states import JOB_TRANSITIONS, CheckpointState, JobState
from exactlyonce.pipeline.errors import ExactlyOnceError, Fenced, Undetermined, require
from exactlyonce.pipeline.names import setting

NEVER_MS = 1 << 62
HOLD_AFTER_MS = 1_000
DRAINED_LOOK_INTERVAL_MS = 1_000
"""How soon, where all is read, the next checkpoint looks whether anything is still on its way, if it is not due."""
DECLINED_NOTE_INTERVAL_MS = 10_000
"""How often it is said, while checkpoint after checkpoint is declined."""


class Coordinator:
    """The pure core of one incarnation of a pipeline's coordinator. Feed it events; perform its effects in order."""

    def __init__(
        self, settings: CheckpointSettings, restart: RestartStrategy, subtasks: set[Subtask], sinks: set[Subtask],
        *, staging: bool = False, loops: bool = False,
    ) -> None:  # fmt: skip
        """*staging*: a decision may have to wait for a store. *loops*: records may go round."""
        self.settings = settings
        self.restart = restart
        self.subtasks = frozenset(subtasks)
        self.sinks = frozenset(sinks)
        self._staging = staging
        self._loops = loops
        self.state = JobState.RECOVERING
        self.attempt = 0
        self.manifest: Manifest | None = None
        self.in_flight: list[PendingCheckpoint] = []
        self._checkpoint_latest = 0
        self._failed_in_row = 0
        self._next_trigger_ms = 0
        self._delay_ms = 0
        self._deployed_by_ms = NEVER_MS
        self._deciding_since_ms = 0
        self._held = False
        self._note_declined_ms = 0
        self._full = frozenset[int]()
        """Workers whose state finds no room on the disk."""
        self._producers: dict[Subtask, int] = {}
        self._precommits: list[tuple[Precommit, int]] = []
        self._staged: list[StagedAck] = []
        self._order_logs: list[tuple[int, OrderLog]] = []
        self._acked: dict[Subtask, int] = {}
        self._stopping = False
        self._short = ""
        """Why a stop gets no last checkpoint."""
        self._ended_whole = False
        """Whether the newest completed checkpoint is the last one."""
        self._savepoints = SavepointRequests()
        self._read_by: int | None = None
        """The newest checkpoint when every source had reached its target; None: not yet."""
        self._finished = False
        """Whether nothing is left to read, and nothing goes round or waits to be overtaken."""
        self._pending_failure: Failed | None = None
        self._gave_up: ExactlyOnceError | None = None
        self._cancelled = ""
        """The request by which the job is cancelled."""

    @property
    def stopping(self) -> bool:
        """Whether the next checkpoint is the last: at once behind a stop, behind a savepoint's once none goes first."""
        return self._stopping or self._savepoints.stops(self._newest)

    @property
    def _newest(self) -> int:
        """The newest completed checkpoint; 0: none."""
        return self.manifest.checkpoint if self.manifest else 0

    @property
    def deciding(self) -> PendingCheckpoint | None:
        """The checkpoint whose decision is under way."""
        return next((each for each in self.in_flight if each.state is CheckpointState.DECIDING), None)

    @property
    def pinned(self) -> set[int]:
        """Completed checkpoints that something in flight builds on, or may before the present decision concludes."""
        return {each.base for each in self.in_flight} | ({self._newest} if self.manifest else set())

    @property
    def wake_ms(self) -> int:
        """When the next `Tick` is due, if nothing else happens."""
        triggered = (each for each in self.in_flight if each.state is CheckpointState.TRIGGERED)
        due = [each.triggered_ms + self.settings.timeout_ms for each in triggered]
        due += [self._deployed_by_ms] if self.state is JobState.DEPLOYING else []
        return min([*due, self._next_trigger_ms] if self._may_trigger else due, default=NEVER_MS)

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take *event* at *now_ms* (monotonic) and return what must be done, in order."""
        if self.state is JobState.ENDED or (self.state is JobState.RECOVERING and isinstance(event, OfWorkers)):
            return []  # the last words of workers that are being killed
        match event:
            case Tick():
                effects = self._unready(event, now_ms) or self._late(event, now_ms) or self._starved(event, now_ms)
                effects += self._hold(now_ms)
            case Recovered(manifest):
                effects = self._recovered(manifest, now_ms)
            case Deployed():
                effects = self._deployed(now_ms)
            case ProducerGranted(sink, subtask):
                require((sink, subtask) in self.sinks, "producers are granted to sinks of this job")
                self._producers[sink, subtask] = self._producers.get((sink, subtask), 0) + 1
                effects = []
            case Acknowledged(ack):
                effects = self._acknowledged(ack, now_ms)
            case Concluded(checkpoint, verdict):
                effects = self._concluded(checkpoint, verdict, now_ms)
            case Failed():
                effects = self._failed(event, now_ms)
            case SourcesFinished():
                self._read_by, self._next_trigger_ms = self._checkpoint_latest, now_ms
                self._finished = not (self._loops or self.settings.unaligned)
                effects = []
            case SavepointAsked(request, stop):
                effects = self._savepoint_asked(request, now_ms, stop=stop)
            case Room(worker, found):
                self._full = self._full - {worker} if found else self._full | {worker}
                effects = self._hold(now_ms) + self._stop_without_room(now_ms)
            case Stop():
                effects = self._stop(now_ms)
            case CancelAsked(request):
                effects = self._cancel(request)
        return effects + self._trigger(now_ms)

    def _move(self, state: JobState) -> None:
        require(state in JOB_TRANSITIONS[self.state], f"a job moves from {self.state} to {state}")
        self.state = state

    # --- states of the job --------------------------------------------------------------------------------------

    def _recovered(self, manifest: Manifest, now_ms: int) -> list[Effect]:
        require(manifest.checkpoint >= self._newest, "completed checkpoint ids only grow")
        self.manifest = manifest
        self._stopping |= self._savepoints.serve(manifest.requests)
        self._checkpoint_latest = max(self._checkpoint_latest, manifest.checkpoint)
        if self._stopping or self._gave_up or self._cancelled:
            return self._end(self._gave_up)
        self._move(JobState.DEPLOYING)
        self._deployed_by_ms = now_ms + self._delay_ms + self.settings.deploy_timeout_ms
        return [Deploy(self.attempt, manifest)]

    def _deployed(self, now_ms: int) -> list[Effect]:
        self._move(JobState.RUNNING)
        at_once = self._stopping or self._unserved
        self._next_trigger_ms = now_ms if at_once else now_ms + self.settings.interval_ms
        return []

    def _failed(self, failure: Failed, now_ms: int) -> list[Effect]:
        """Restart, or end. While a checkpoint is being decided the failure waits for the outcome."""
        if isinstance(failure.error, Fenced):
            return self._end(failure.error)
        if self.deciding is not None:
            self._note_pending(failure)
            return []
        if self._cancelled:
            return []  # the workers are being killed
        if failure.error is not None:
            return self._end(failure.error)
        return self._restart(failure.reason, now_ms) if failure.counts else self._recover(failure.reason, 0)

    def _note_pending(self, failure: Failed) -> None:
        """Of failures that wait for a decision the gravest counts, of equal ones the first."""
        pending = self._pending_failure or failure
        self._pending_failure = max(pending, failure, key=lambda each: (each.error is not None, each.counts))

    def _restart(self, reason: str, now_ms: int, *, unfinished: bool = False) -> list[Effect]:
        if self.state is JobState.RECOVERING and not unfinished:  # a decision that concludes then is a defect: `_move`
            return []
        delay_ms = self.restart.failed(now_ms)
        if delay_ms is None:
            self._gave_up = ExactlyOnceError(f"The job failed and its restart strategy gives up: {reason}")
            if not unfinished:  # else the restart finishes it, and ends then
                return self._end(self._gave_up)
        return self._recover(reason, delay_ms or 0)

    def _recover(self, reason: str, delay_ms: int) -> list[Effect]:
        """Replace the workers, whose transactions are aborted; after a stop, end instead of starting new ones."""
        if self._stopping and self.state is JobState.RUNNING:
            self._short = self._short or reason
        self._drop_in_flight()
        self.attempt += 1
        self._delay_ms = delay_ms
        self._move(JobState.RECOVERING)
        return [Restart(self.attempt, delay_ms, reason)]

    def _drop_in_flight(self) -> None:
        """Forget what is undecided: its transactions are aborted before the next attempt begins."""
        self._abort([*self.in_flight])
        self._precommits, self._staged, self._order_logs = [], [], []
        self._pending_failure = None
        self._producers, self._acked = {}, {}
        self._failed_in_row, self._read_by, self._finished = 0, None, False
        self._held, self._full = False, frozenset()

    def _end(self, error: ExactlyOnceError | None) -> list[Effect]:
        self._move(JobState.ENDED)
        if self._cancelled and not isinstance(error, (Fenced, Undetermined)):
            return [End(self.manifest, None, self._cancelled)]
        return [End(self.manifest, error, short="" if error or self._ended_whole else self._short)]

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    def _final(self) -> bool:
        return self.stopping or self._finished

    @property
    def _may_trigger(self) -> bool:
        """Whether only time keeps the next checkpoint from being triggered."""
        if self.state is not JobState.RUNNING or self._pending_failure or self._cancelled:
            return False
        if any(each.final for each in self.in_flight):
            return False
        if self._full:  # it would be declined, and what the others write for it is for nothing
            return False
        # The last one comes alone: nothing is written beside it, so that it may note its own block ends.
        if len(self.in_flight) >= (1 if self._final else self.settings.max_concurrent):
            return False
        # At a barrier a sink flushes a transaction and goes on with the next producer: it has two, or all stand still
        # behind it. Behind the last one nothing is written. Each that is awaited may use one up as well.
        awaited = sum(each.state is CheckpointState.TRIGGERED for each in self.in_flight)
        needed = awaited + (1 if self._final else 2)
        return all(self._producers.get(sink, 0) >= needed for sink in self.sinks)

    def _trigger(self, now_ms: int) -> list[Effect]:
        if now_ms < self._next_trigger_ms or not self._may_trigger:
            return []
        assert self.manifest is not None
        self._checkpoint_latest, base = self._checkpoint_latest + 1, self.manifest.checkpoint
        previous = self.in_flight[-1].checkpoint if self.in_flight else base
        plan = PendingCheckpoint(
            checkpoint=self._checkpoint_latest, base=base, previous=previous, final=self._final,
            triggered_ms=now_ms, attempt=self.attempt, requests=self._unserved,
        )  # fmt: skip
        self.in_flight.append(plan)
        self._next_trigger_ms = now_ms + self.settings.interval_ms
        may_overtake = self.settings.unaligned and not plan.final and not plan.requests
        after_ms = self.settings.aligned_timeout_ms if may_overtake else None
        return [Trigger(plan.checkpoint, base, plan.final, bool(plan.requests), after_ms)]

    def _unready(self, tick: Tick, now_ms: int) -> list[Effect]:
        """Workers that do not become ready: a user's `open()` hangs, or there is more state than time to read it."""
        if self.state is not JobState.DEPLOYING or now_ms < self._deployed_by_ms:
            return []
        late = f"the workers were not ready within {self.settings.deploy_timeout_ms} ms{_because(tick.hanging)}"
        return self._failed(Failed(f"{late}. If they only need longer, raise {setting('deploy_timeout')}"), now_ms)

    def _stop(self, now_ms: int) -> list[Effect]:
        self._stopping, self._next_trigger_ms = True, now_ms
        return self._recover("", 0) if self.state is JobState.DEPLOYING else self._stop_without_room(now_ms)

    def _stop_without_room(self, now_ms: int) -> list[Effect]:
        """A stop waits for nobody to make room on a disk: the next run reads on behind the newest checkpoint."""
        if not (self._stopping and self._full and self.state is JobState.RUNNING):
            return []
        self._short = "a worker's disk is full"
        return self._failed(Failed("", counts=False), now_ms)

    def _cancel(self, request: str) -> list[Effect]:
        """End as soon as nothing is being decided, with all that is undecided aborted."""
        if self._cancelled:
            return []
        self._cancelled = request
        return [] if self.deciding is not None or self.state is JobState.RECOVERING else self._recover("", 0)

    def _savepoint_asked(self, request: str, now_ms: int, *, stop: bool) -> list[Effect]:
        """The next checkpoint is to be a savepoint, and comes at once, unless an ordinary one has to go first; one that
        serves the request may be under way.

        Where an older incarnation has decided it, and died before it stopped, this one stops.
        """
        if stop and self._savepoints.is_served(request):
            return self._stop(now_ms)
        self._savepoints.ask(request, stop=stop)
        self._next_trigger_ms = now_ms if self._unserved else self._next_trigger_ms
        return []

    @property
    def _unserved(self) -> tuple[str, ...]:
        """The requests that the next checkpoint is to serve."""
        return self._savepoints.due(self._newest, {each for plan in self.in_flight for each in plan.requests})

    def _abort(self, plans: list[PendingCheckpoint], *, failed: bool = True) -> None:
        """Nothing comes of *plans*. *failed*: nor of another try at the same, if a savepoint is among them."""
        for plan in plans:
            plan.move(CheckpointState.ABORTED)
            self.in_flight.remove(plan)
        if failed:
            self._savepoints.fail([each for plan in plans for each in plan.requests], self._checkpoint_latest + 1)

    def _late(self, tick: Tick, now_ms: int) -> list[Effect]:
        """Abort the checkpoints that took too long. An ordinary one is a failure; beyond `tolerable_failed` the job
        restarts for it. A savepoint is none, unless the job ends with it anyway, but the workers are replaced at once:
        what they still write for it would make the next ones late."""
        late = [
            p for p in self.in_flight
            if p.state is CheckpointState.TRIGGERED and now_ms >= p.triggered_ms + self.settings.timeout_ms
        ]  # fmt: skip
        if not late:
            return []
        no_room = self._waits_for_room(tick)
        self._abort(late, failed=not no_room)
        self._next_trigger_ms = now_ms + self.settings.min_pause_ms
        names = ", ".join(str(plan.checkpoint) for plan in late)
        why = _because("; ".join(filter(None, (tick.hanging, tick.slow))))
        reason = f"checkpoint {names} was not acknowledged within {self.settings.timeout_ms} ms{why}"
        carried = "its output is carried by the next one"
        if no_room:
            return [Note(f"{reason}; aborted, {carried}, which waits for room on a worker's disk")]
        # Asked behind the abort: a stop that only waits for its savepoint ends nothing now.
        savepoint, ends = any(plan.requests for plan in late), self._final and any(plan.final for plan in late)
        timeout = setting("checkpoint_timeout")
        longer = f". A savepoint holds all state, and overtakes nothing: if it needs longer, raise {timeout}"
        hint = longer if savepoint else ""
        failure = Failed(reason, counts=ends or not savepoint)
        self._failed_in_row += len(late)
        if failure.counts and self._failed_in_row <= self.settings.tolerable_failed:
            return [Note(f"{reason}; aborted, {carried}{hint}")]
        return [Note(f"{reason}; aborted{hint}"), *self._failed(failure, now_ms)]

    def _waits_for_room(self, tick: Tick) -> bool:
        """Whether a disk is full and no worker hangs: what takes long then is no failure."""
        return bool(self._full) and not tick.hanging

    def _starved(self, tick: Tick, now_ms: int) -> list[Effect]:
        """A sink that gets no producer ready keeps checkpoints from being triggered; so does a worker that hangs."""
        late = now_ms >= self._next_trigger_ms + self.settings.timeout_ms
        stuck = self.state is JobState.RUNNING and not self.in_flight and not self._may_trigger
        if not stuck or not (late or self._spent) or self._waits_for_room(tick):
            return []
        since = "behind so many declined checkpoints" if self._spent else f"for {self.settings.timeout_ms} ms"
        reason = f"no producer was ready {since} at {self._waiting()}"
        if tick.hanging:
            reason = f"no checkpoint could be triggered for {self.settings.timeout_ms} ms: {tick.hanging}"
        return self._failed(Failed(reason, counts=not self._spent), now_ms)

    @property
    def _spent(self) -> bool:
        """Whether what declined checkpoints have flushed leaves a sink too few transactional ids for another one."""
        carried = [(each.sink, each.subtask) for each, _ in self._precommits]
        return any(carried.count(each) > self.settings.slots - (1 if self._final else 2) for each in {*carried})

    def _waiting(self) -> str:
        """The sinks that have no producer ready."""
        return ", ".join(f"sink {s} subtask {i}" for s, i in sorted(self.sinks) if self._producers.get((s, i), 0) < 2)

    def _acknowledged(self, ack: Ack, now_ms: int) -> list[Effect]:
        """Keep the precommits in any case; decide when every subtask has acknowledged."""
        subtask = (ack.task, ack.subtask)
        require(subtask in self.subtasks, "acknowledgements come from subtasks of this job")
        require(ack.checkpoint > self._acked.get(subtask, 0), "acknowledgements of one subtask come in order")
        self._acked[subtask] = ack.checkpoint
        for precommit in ack.precommits:
            self._precommits.append((precommit, now_ms - precommit.open_ms))
            self._producers[precommit.sink, precommit.subtask] -= 1
        self._staged += ack.staged
        if ack.order_log is not None:
            self._order_logs.append((ack.checkpoint, ack.order_log))
        plan = next((p for p in self.in_flight if p.checkpoint == ack.checkpoint), None)
        if plan is None:
            return []
        if ack.declined:
            return self._declined(plan, ack.declined, now_ms)
        plan.acks[subtask] = ack
        if plan.acks.keys() == self.subtasks:
            plan.move(CheckpointState.ACKNOWLEDGED)
        return self._decide(now_ms)

    def _declined(self, plan: PendingCheckpoint, why: str, now_ms: int) -> list[Effect]:
        """Abort a checkpoint that a subtask cannot take now. It is no failure: the job goes on, or waits, by itself."""
        self._abort([plan], failed=False)
        if now_ms < self._note_declined_ms:
            return []
        self._note_declined_ms = now_ms + DECLINED_NOTE_INTERVAL_MS
        return [Note(f"checkpoint {plan.checkpoint} was declined, and is aborted; nothing is lost. {why}")]

    def _decide(self, now_ms: int) -> list[Effect]:
        """Begin the decision of the oldest checkpoint in flight, if its turn has come."""
        if not self.in_flight or self.in_flight[0].state is not CheckpointState.ACKNOWLEDGED:
            return []
        plan = self.in_flight[0]
        assert self.manifest is not None
        plan.previous = self.manifest.checkpoint
        carried = [(p, opened) for p, opened in self._precommits if p.checkpoint <= plan.checkpoint]
        plan.precommits = [p for p, _ in carried]
        plan.staged = [each for each in self._staged if each.committable.checkpoint <= plan.checkpoint]
        plan.order_logs = [log for n, log in self._order_logs if n <= plan.checkpoint]
        plan.ages_ms = {p.transactional_id: now_ms - opened for p, opened in carried}
        plan.move(CheckpointState.DECIDING)
        self._deciding_since_ms = now_ms
        return [Decide(plan)]

    def _hold(self, now_ms: int) -> list[Effect]:
        """While a decided checkpoint waits for a store, what is read only makes the next one larger: sources pause. So
        they do while a worker's disk is full: what records change could only stay in its memory."""
        hold_after_ms = max(self.settings.interval_ms, HOLD_AFTER_MS)
        waits = self._staging and self.deciding is not None and now_ms - self._deciding_since_ms >= hold_after_ms
        held = waits or bool(self._full)
        if held == self._held or self.state is not JobState.RUNNING:
            return []
        self._held = held
        return [Hold(held)]

    def _concluded(self, checkpoint: int, verdict: Decided | Refuse | Unresolved, now_ms: int) -> list[Effect]:
        plan = self.deciding
        require(plan is not None and plan.checkpoint == checkpoint, "decisions come one by one")
        assert plan is not None
        if isinstance(verdict, Unresolved):
            unknown = f"Whether checkpoint {checkpoint} completed could not be learnt from the broker."
            return self._end(Undetermined(f"{unknown} Nothing is lost: run the pipeline again, it reads what is true."))
        if isinstance(verdict, Refuse):
            self._abort([plan])
            self._note_pending(Failed(verdict.reason))
            return self._after_decision(now_ms)
        plan.move(CheckpointState.COMPLETED)
        self.in_flight.remove(plan)
        self._completed(plan, verdict.manifest, now_ms)
        if not verdict.finalized:
            self._pending_failure = None
            reason = f"checkpoint {checkpoint} is decided, but not known to be committed"
            return self._restart(reason, now_ms, unfinished=True)
        announce: list[Effect] = [AnnounceFinalized(checkpoint)]
        if plan.final:  # nothing was read after it: a worker that died since is no loss
            return announce + self._end(self._pending_failure.error if self._pending_failure else None)
        return announce + (self._after_decision(now_ms) or self._decide(now_ms))

    def _completed(self, plan: PendingCheckpoint, manifest: Manifest, now_ms: int) -> None:
        assert self.manifest is not None
        require(manifest.checkpoint > self.manifest.checkpoint, "completed checkpoint ids only grow")
        self.manifest, self._ended_whole = manifest, plan.final
        self._precommits = [(p, opened) for p, opened in self._precommits if p.checkpoint > plan.checkpoint]
        self._staged = [each for each in self._staged if each.committable.checkpoint > plan.checkpoint]
        self._order_logs = [(n, log) for n, log in self._order_logs if n > plan.checkpoint]
        self._failed_in_row = 0
        self._stopping |= self._savepoints.serve(manifest.requests)
        paused_ms = now_ms + self.settings.min_pause_ms
        self._next_trigger_ms = paused_ms if self._unserved else max(self._next_trigger_ms, paused_ms)
        if self._read_by is not None and plan.checkpoint > self._read_by and not self._finished:
            self._finished = not manifest.channel_logs
            look_again_ms = max(paused_ms, now_ms + DRAINED_LOOK_INTERVAL_MS)
            self._next_trigger_ms = now_ms if self._finished else min(self._next_trigger_ms, look_again_ms)
        self.restart.completed(now_ms)

    def _after_decision(self, now_ms: int) -> list[Effect]:
        """The failure that had to wait for the decision, or the end of a job that is cancelled."""
        failure, self._pending_failure = self._pending_failure, None
        if self._cancelled:
            return self._recover("", 0)
        return self._failed(failure, now_ms) if failure else []


def _because(words: str) -> str:
    return f": {words}" if words else ""
