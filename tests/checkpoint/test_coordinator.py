"""The coordinator's core: each transition of the job and of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.coordinator import NEVER_MS, Coordinator
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.events import (
    Ack,
    Acknowledged,
    AnnounceFinalized,
    Concluded,
    Decide,
    Deploy,
    Deployed,
    Effect,
    Event,
    Failed,
    Note,
    PendingCheckpoint,
    ProducerGranted,
    Recovered,
    Restart,
    SourcesFinished,
    Stop,
    Tick,
    Trigger,
)
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import Manifest, OrderLog
from exactlyonce.checkpoint.restart import FixedDelay, RestartStrategy
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.states import JobState
from exactlyonce.pipeline.errors import Halt, InvariantViolation

INTERVAL_MS, TIMEOUT_MS = 1_000, 5_000
SUBTASKS, SINKS = {("task", 0), ("task", 1)}, {("out", 0), ("out", 1)}


def manifest(checkpoint: int = 0) -> Manifest:
    """A manifest of which only the number matters."""
    return Manifest(
        pipeline="p", checkpoint=checkpoint, incarnation=1, attempt=0, kind="checkpoint", base=0, previous=0,
        triggered_at_ms=0, completed_at_ms=0, fingerprint="f", max_parallelism=128, parallelism=2, block_partitions=4,
        written_bytes=0, block_end_offsets=(), offsets=(), operators=(), order_logs=(), sinks=(), committables=(),
    )  # fmt: skip


def precommit(checkpoint: int, subtask: int = 0, open_ms: int = 0) -> Precommit:
    """What the sink of *subtask* flushed for *checkpoint*."""
    return Precommit(
        transactional_id=f"id-{checkpoint}-{subtask}", producer_id=7, epoch=0, sink="out", subtask=subtask,
        checkpoint=checkpoint, records=3, open_ms=open_ms,
    )  # fmt: skip


class Job:
    """A coordinator, and shorthands for what happens to it. `now_ms` is the time of every event."""

    def __init__(self, restart: RestartStrategy | None = None, sinks: bool = True, **settings: Any) -> None:
        asked: dict[str, Any] = {"interval_ms": INTERVAL_MS, "timeout_ms": TIMEOUT_MS, **settings}
        self.core = Coordinator(
            CheckpointSettings(**asked), restart or FixedDelay(delay_ms=70), SUBTASKS, SINKS if sinks else set()
        )
        self.now_ms = 0

    def __call__(self, event: Event, now_ms: int | None = None) -> list[Effect]:
        self.now_ms = self.now_ms if now_ms is None else now_ms
        return self.core.handle(event, self.now_ms)

    def grant(self, producers: int = 1) -> list[Effect]:
        """So many more producers for each sink subtask."""
        effects: list[Effect] = []
        for sink, subtask in sorted(SINKS) * producers:
            effects += self(ProducerGranted(sink, subtask))
        return effects

    def running(self, producers: int = 9, checkpoint: int = 0) -> Job:
        """Recovered from *checkpoint* and deployed."""
        self(Recovered(manifest(checkpoint)))
        if self.core.sinks:
            self.grant(producers)
        self(Deployed())
        return self

    def trigger(self, at_ms: int | None = None) -> int:
        """Wait for the next trigger; its checkpoint."""
        effects = self(Tick(), self.core.wake_ms if at_ms is None else at_ms)
        (trigger,) = [each for each in effects if isinstance(each, Trigger)]
        return trigger.checkpoint

    def ack(self, checkpoint: int, subtasks: str = "01", **more: Any) -> list[Effect]:
        """Acknowledgements of these subtasks; all effects."""
        effects: list[Effect] = []
        for subtask in subtasks:
            effects += self(Acknowledged(Ack("task", int(subtask), checkpoint, **more)))
        return effects

    def deciding(self) -> int:
        """Trigger and acknowledge; the checkpoint that is being decided."""
        checkpoint = self.trigger()
        (decide,) = self.ack(checkpoint)
        assert isinstance(decide, Decide)
        return checkpoint

    def complete(self) -> int:
        """One whole checkpoint."""
        checkpoint = self.deciding()
        self.conclude(checkpoint)
        return checkpoint

    def conclude(self, checkpoint: int) -> list[Effect]:
        """Decided and finalized."""
        return self(Concluded(checkpoint, Decided(manifest(checkpoint))))


def plan_of(effects: list[Effect]) -> PendingCheckpoint:
    """The plan to be decided on."""
    (decide,) = [each for each in effects if isinstance(each, Decide)]
    return decide.plan


# --- life of a job --------------------------------------------------------------------------------------------------


def test_an_incarnation_goes_from_recovery_over_deployment_to_checkpoints() -> None:
    """Recovered deploys the manifest it found; the first trigger comes an interval after the workers are ready."""
    job = Job()
    assert job(Recovered(manifest(4))) == [Deploy(0, manifest(4))]
    job.grant(2)
    assert job(Deployed(), 10) == []
    assert job(Tick(), 10 + INTERVAL_MS - 1) == []
    assert job(Tick(), 10 + INTERVAL_MS) == [Trigger(5, base=4, final=False)]
    (decide,) = job.ack(5)
    assert isinstance(decide, Decide)
    assert job.core.deciding is decide.plan
    assert job.conclude(5) == [AnnounceFinalized(5)]
    assert job(Tick(), 10 + 2 * INTERVAL_MS) == [Trigger(6, base=5, final=False)]


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", [Recovered(manifest()), Deployed(), Concluded(1, Refuse("x"))], ids=repr)
def test_an_event_in_a_state_that_the_table_does_not_allow_is_a_violation(state: JobState, event: Event) -> None:
    """Recovered is for a recovering job, Deployed for a deploying one, Concluded for one that is deciding: elsewhere
    they raise InvariantViolation, but words of workers reach no recovering job and nothing reaches an ended one."""
    job = Job()
    if state is not JobState.RECOVERING:
        job(Recovered(manifest()))
    if state is JobState.RUNNING:
        job(Deployed())
    if state is JobState.ENDED:
        job(Failed("x", Halt("x")))
    welcome = {Recovered: JobState.RECOVERING, Deployed: JobState.DEPLOYING}.get(type(event)) is state
    ignored = state is JobState.ENDED or (state is JobState.RECOVERING and isinstance(event, Deployed))
    if welcome or ignored:
        job(event)
    else:
        with pytest.raises(InvariantViolation):
            job(event)


def test_an_ended_job_does_nothing() -> None:
    """After the end no event has an effect."""
    job = Job().running()
    job(Failed("x", Halt("x")))
    for event in (Tick(), Deployed(), Stop(), Failed("y"), SourcesFinished(), ProducerGranted("out", 0)):
        assert job(event, 99_999) == []
    assert job.core.wake_ms == NEVER_MS


# --- triggers -------------------------------------------------------------------------------------------------------


def test_nothing_is_triggered_before_every_sink_has_a_producer_for_now_and_one_for_after() -> None:
    """The trigger waits until each sink subtask has the producer it writes with and the next one, then comes at
    once."""
    job = Job().running(producers=1)
    assert job(Tick(), INTERVAL_MS) == []
    assert job(ProducerGranted("out", 0)) == []
    assert job(ProducerGranted("out", 1)) == [Trigger(1, 0, final=False)]


def test_a_precommit_uses_up_a_producer() -> None:
    """After a precommit the next trigger waits for another producer of that sink subtask; an empty interval keeps
    it."""
    job = Job().running(producers=2)
    checkpoint = job.trigger()
    job.ack(checkpoint, "0", precommits=(precommit(1),))
    job.ack(checkpoint, "1")
    job.conclude(checkpoint)
    assert job(Tick(), 2 * INTERVAL_MS) == []
    assert job(ProducerGranted("out", 1)) == []
    assert job(ProducerGranted("out", 0)) == [Trigger(2, 1, final=False)]


def test_only_a_checkpoint_that_is_not_acknowledged_may_yet_use_up_a_producer() -> None:
    """With two checkpoints allowed, the second needs a third producer while the first may still precommit; once that
    is acknowledged the two that are ready suffice, also while it is being decided."""
    job = Job(max_concurrent=2).running(producers=2)
    job.trigger()
    assert job(Tick(), 2 * INTERVAL_MS) == []
    assert job.ack(1, "0", precommits=(precommit(1, 0), precommit(1, 1))) == []
    job.grant(1)
    (decide, trigger) = job.ack(1, "1")
    assert isinstance(decide, Decide)
    assert trigger == Trigger(2, 0, final=False)


def test_a_sink_that_gets_no_producer_restarts_the_job() -> None:
    """When a producer is missing for as long as a checkpoint may take, the job restarts and says at which sinks."""
    job = Job().running(producers=1)
    job(ProducerGranted("out", 0))
    assert job(Tick(), INTERVAL_MS + TIMEOUT_MS - 1) == []
    assert job(Tick(), INTERVAL_MS + TIMEOUT_MS) == [
        Restart(1, 70, "no producer was ready for 5000 ms at sink out subtask 1")
    ]


def test_a_worker_that_hangs_is_blamed_and_not_the_sink_that_waits_for_it() -> None:
    """A producer is missing because its worker does not come back from somewhere: that is the reason given."""
    job = Job().running(producers=1)
    assert job(Tick("worker 1 has been in operator 'x' for 5 s"), INTERVAL_MS + TIMEOUT_MS) == [
        Restart(1, 70, "no checkpoint could be triggered for 5000 ms: worker 1 has been in operator 'x' for 5 s")
    ]


@pytest.mark.parametrize("tick", [Tick("worker 0 hangs"), Tick("worker 0 hangs", "x is slow"), Tick("", "x is slow")])
def test_a_late_checkpoint_is_explained(tick: Tick) -> None:
    """The reason says which worker hangs, and which operator takes its time."""
    job = Job().running()
    job.trigger()
    why = "; ".join(filter(None, (tick.hanging, tick.slow)))
    reason = f"checkpoint 1 was not acknowledged within 5000 ms: {why}"
    assert job(tick, INTERVAL_MS + TIMEOUT_MS) == [Note(f"{reason}; aborted"), Restart(1, 70, reason)]


def test_a_coordinator_that_slept_does_not_blame_the_sinks() -> None:
    """If the first tick comes long after the trigger was due and producers are ready, it triggers."""
    assert Job().running()(Tick(), 99 * TIMEOUT_MS) == [Trigger(1, 0, final=False)]


def test_a_job_without_transactional_sinks_needs_no_producers() -> None:
    """With no transactional sinks checkpoints come by time alone."""
    assert Job(sinks=False).running().complete() == 1


def test_at_most_so_many_checkpoints_are_in_flight() -> None:
    """Triggers come each interval up to the number allowed, all relative to the newest completed checkpoint."""
    job = Job(max_concurrent=2).running(checkpoint=3)
    assert [job.trigger(), job.trigger()] == [4, 5]
    assert job(Tick(), 3 * INTERVAL_MS) == []
    assert {each.base for each in job.core.in_flight} == {3}
    job.ack(4)
    assert job.conclude(4) == [AnnounceFinalized(4), Trigger(6, 4, final=False)]


def test_the_pause_between_checkpoints_is_kept() -> None:
    """After a checkpoint the next trigger waits for the pause, even if the interval is over."""
    job = Job(min_pause_ms=300).running()
    checkpoint = job.trigger()
    job.ack(checkpoint)
    job.now_ms += INTERVAL_MS
    assert job.conclude(checkpoint) == [AnnounceFinalized(checkpoint)]
    assert job(Tick(), job.now_ms + 299) == []
    assert job(Tick(), job.now_ms + 1) == [Trigger(2, 1, final=False)]


def test_the_next_wake_is_never_in_the_past_of_what_cannot_be_done() -> None:
    """While a checkpoint is in flight the next wake is its timeout; while it is being decided, or a producer is
    missing, or workers are restoring, there is none."""
    job = Job()
    assert job.core.wake_ms == NEVER_MS
    job.running(producers=2)
    assert job.core.wake_ms == INTERVAL_MS
    checkpoint = job.trigger()
    assert job.core.wake_ms == INTERVAL_MS + TIMEOUT_MS
    job.ack(checkpoint, precommits=(precommit(1),))
    assert job.core.wake_ms == NEVER_MS
    job.conclude(checkpoint)
    assert job.core.wake_ms == NEVER_MS
    job.grant(2)
    assert job.core.wake_ms == 2 * INTERVAL_MS


def test_what_is_built_upon_is_pinned() -> None:
    """Pinned are the bases of all in flight, and the newest completed checkpoint: while it is the newest, something
    may still be triggered upon it."""
    job = Job(max_concurrent=3).running(checkpoint=3)
    assert job.core.pinned == {3}
    for _ in range(3):
        job.trigger()
    job.ack(4)
    assert job.core.pinned == {3}
    job.conclude(4)
    assert job.core.pinned == {3, 4}


# --- acknowledgements and decisions ---------------------------------------------------------------------------------


def test_a_checkpoint_is_decided_when_the_last_subtask_has_acknowledged() -> None:
    """Until every subtask has acknowledged nothing is decided; then the plan carries their acknowledgements."""
    job = Job().running()
    checkpoint = job.trigger()
    log = OrderLog("task", 1, ())
    assert job.ack(checkpoint, "0", precommits=(precommit(1, 0, open_ms=200),)) == []
    job.now_ms += 50
    plan = plan_of(job.ack(checkpoint, "1", order_log=log))
    assert plan.acks.keys() == SUBTASKS
    assert plan.precommits == [precommit(1, 0, open_ms=200)]
    assert plan.ages_ms == {"id-1-0": 250}
    assert plan.order_logs == [log]
    assert (plan.base, plan.previous, plan.attempt) == (0, 0, 0)


@pytest.mark.parametrize(
    "acks",
    [
        pytest.param([("task", 0, 1), ("task", 0, 1)], id="the same again"),
        pytest.param([("task", 0, 2), ("task", 0, 1)], id="an older one"),
        pytest.param([("other", 0, 1)], id="a stranger"),
    ],
)
def test_acknowledgements_out_of_order_are_a_violation(acks: list[tuple[str, int, int]]) -> None:
    """An acknowledgement that is not newer than the subtask's last, or of no subtask of the job, raises
    InvariantViolation."""
    job = Job(max_concurrent=2).running()
    job.trigger()
    job.trigger()
    for ack in acks[:-1]:
        job(Acknowledged(Ack(*ack)))
    with pytest.raises(InvariantViolation):
        job(Acknowledged(Ack(*acks[-1])))


def test_a_producer_of_no_sink_is_a_violation() -> None:
    """A grant to something that is no sink subtask of the job raises InvariantViolation."""
    with pytest.raises(InvariantViolation):
        Job().running()(ProducerGranted("task", 0))


def test_decisions_come_one_by_one_each_after_the_one_before_is_finalized() -> None:
    """A checkpoint that is acknowledged while another is being decided is decided when that one is concluded."""
    job = Job(max_concurrent=2).running()
    job.trigger()
    job.trigger()
    assert plan_of(job.ack(1)).checkpoint == 1
    assert job.ack(2, precommits=(precommit(2, 0),)) == []
    effects = job.conclude(1)
    assert effects[0] == AnnounceFinalized(1)
    assert (plan_of(effects).checkpoint, plan_of(effects).previous, plan_of(effects).base) == (2, 1, 0)


def test_a_precommit_of_a_later_checkpoint_is_not_carried_by_an_earlier_one() -> None:
    """What a fast subtask has flushed for the next checkpoint is not part of this one's manifest."""
    job = Job(max_concurrent=2).running()
    job.trigger()
    job.trigger()
    job.ack(1, "0", precommits=(precommit(1, 0),))
    job.ack(2, "0", precommits=(precommit(2, 0),))
    assert plan_of(job.ack(1, "1")).precommits == [precommit(1, 0)]
    assert plan_of(job.conclude(1) + job.ack(2, "1")).precommits == [precommit(2, 0)]


def test_a_verdict_on_another_checkpoint_is_a_violation() -> None:
    """A conclusion must be about the checkpoint that is being decided."""
    job = Job().running()
    job.deciding()
    with pytest.raises(InvariantViolation):
        job.conclude(7)


def test_completed_ids_only_grow() -> None:
    """A recovery to an older checkpoint than one that completed raises InvariantViolation."""
    job = Job().running(checkpoint=5)
    job.complete()
    job(Failed("a worker died"))
    with pytest.raises(InvariantViolation):
        job(Recovered(manifest(5)))


def test_ids_of_aborted_checkpoints_are_not_used_again() -> None:
    """After a restart the next checkpoint has a number that no earlier attempt has used."""
    job = Job().running()
    assert job.trigger() == 1
    job(Failed("a worker died"))
    assert job.running().trigger() == 2


# --- late and aborted checkpoints -----------------------------------------------------------------------------------


def test_what_an_aborted_checkpoint_flushed_is_carried_by_the_next() -> None:
    """A checkpoint that is late is aborted and the job goes on: its precommits and order logs, whether acknowledged
    before the abort or after it, are part of the next manifest, in order, with their whole age."""
    job = Job(tolerable_failed=1).running()
    log = OrderLog("task", 0, ())
    job.trigger()
    job.ack(1, "0", precommits=(precommit(1, 0),), order_log=log)
    effects = job(Tick(), INTERVAL_MS + TIMEOUT_MS)
    assert effects == [
        Note("checkpoint 1 was not acknowledged within 5000 ms; aborted, its output is carried by the next one"),
        Trigger(2, 0, final=False),
    ]
    assert job.ack(1, "1", precommits=(precommit(1, 1, open_ms=900),)) == []
    plan = plan_of(job.ack(2, "01", precommits=(precommit(2, 0),), order_log=log))
    assert [each.transactional_id for each in plan.precommits] == ["id-1-0", "id-1-1", "id-2-0", "id-2-0"]
    assert plan.ages_ms["id-1-0"] == TIMEOUT_MS
    assert plan.ages_ms["id-1-1"] == 900
    assert len(plan.order_logs) == 3
    job.conclude(2)
    assert plan_of(job.ack(job.trigger())).precommits == []


def test_carried_output_is_carried_again_if_the_next_checkpoint_is_late_too() -> None:
    """With several failures in a row everything since the last completed checkpoint is carried."""
    job = Job(tolerable_failed=2).running()
    for checkpoint in (1, 2):
        assert job.trigger(job.now_ms + TIMEOUT_MS) == checkpoint
        job.ack(checkpoint, "0", precommits=(precommit(checkpoint, 0),))
    job.trigger(job.now_ms + TIMEOUT_MS)
    job.ack(1, "1")
    plan = plan_of(job.ack(3))
    assert [each.checkpoint for each in plan.precommits] == [1, 2]


def test_more_late_checkpoints_in_a_row_than_tolerated_restart_the_job() -> None:
    """One late checkpoint beyond the tolerated ones restarts the job; a completed one in between starts the count
    anew."""
    job = Job(tolerable_failed=1).running()
    job.trigger()
    assert job.trigger(job.now_ms + TIMEOUT_MS) == 2
    job.ack(2)
    job.conclude(2)
    assert job.trigger(job.now_ms + INTERVAL_MS) == 3
    assert job.trigger(job.now_ms + TIMEOUT_MS) == 4
    effects = job(Tick(), job.now_ms + TIMEOUT_MS)
    assert [type(each) for each in effects] == [Note, Restart]
    assert effects[1] == Restart(1, 70, "checkpoint 4 was not acknowledged within 5000 ms")


def test_only_what_is_not_acknowledged_can_be_late() -> None:
    """A checkpoint that is acknowledged, or being decided, is not aborted however long it takes."""
    job = Job(max_concurrent=2).running()
    job.trigger()
    job.trigger()
    job.ack(1)
    job.ack(2)
    assert job(Tick(), 99 * TIMEOUT_MS) == []
    assert job.core.deciding is not None


def test_a_late_checkpoint_beyond_the_tolerated_waits_for_the_decision_and_then_restarts() -> None:
    """While one checkpoint is being decided another one is late: nothing is triggered or restarted until the decision
    is known, then the job restarts."""
    job = Job(max_concurrent=3).running()
    job.trigger()
    job.trigger()
    job.ack(1)
    effects = job(Tick(), 2 * INTERVAL_MS + TIMEOUT_MS)
    assert [type(each) for each in effects] == [Note]
    assert job(Tick(), 3 * INTERVAL_MS + TIMEOUT_MS) == []
    announced, restart = job.conclude(1)
    assert announced == AnnounceFinalized(1)
    assert restart == Restart(1, 70, "checkpoint 2 was not acknowledged within 5000 ms")


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_worker_restarts_the_job_and_drops_what_is_undecided() -> None:
    """After a restart nothing of the attempt before is carried: its transactions are aborted. Producers are counted
    anew."""
    job = Job(max_concurrent=2).running()
    job.trigger()
    job.ack(1, "0", precommits=(precommit(1, 0),))
    assert job(Failed("a worker died")) == [Restart(1, 70, "a worker died")]
    assert job.core.state is JobState.RECOVERING
    assert job(Recovered(manifest())) == [Deploy(1, manifest())]
    assert job(Deployed()) == []
    assert job(Tick(), 4 * INTERVAL_MS) == []
    assert job.grant(2) == [Trigger(2, 0, final=False)]
    assert plan_of(job.ack(2)).precommits == []


def test_the_last_words_of_killed_workers_are_not_heard() -> None:
    """What workers of the attempt before have said and is read only while the job recovers has no effect."""
    job = Job().running()
    job.trigger()
    job(Failed("a worker died"))
    ack = Acknowledged(Ack("task", 0, 1, precommits=(precommit(1),)))
    for event in (ack, ProducerGranted("out", 0), SourcesFinished(), Deployed(), Failed("another worker died")):
        assert job(event) == []
    job.running(producers=2)
    assert job(Tick(), job.core.wake_ms) == [Trigger(2, 0, final=False)]
