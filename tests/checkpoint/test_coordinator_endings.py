"""The coordinator's core: what waits for a decision, what a verdict leads to, and every way to end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint import events
from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.decision import Decided, Unresolved
from exactlyonce.checkpoint.events import (
    Ack,
    Acknowledged,
    Concluded,
    End,
    Failed,
    Recovered,
    Restart,
    Stop,
    Tick,
    Trigger,
)
from exactlyonce.checkpoint.records.manifest import ChannelLog, Manifest
from exactlyonce.checkpoint.restart import FixedDelay, NoRestart, RestartStrategy
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.states import CHECKPOINT_TRANSITIONS, JOB_TRANSITIONS, CheckpointState, JobState
from exactlyonce.pipeline.errors import ExactlyOnceError, Fenced, Halt, InvariantViolation, RecordError, Undetermined

INTERVAL_MS, TIMEOUT_MS = 1_000, 5_000
FAILED = Failed("a worker died")
RESTART = Restart(1, 70, "a worker died")


def manifest(checkpoint: int) -> Manifest:
    """A manifest of which only the number matters."""
    return Manifest(
        pipeline="p", checkpoint=checkpoint, incarnation=1, attempt=0, kind="checkpoint", base=0, previous=0,
        triggered_at_ms=0, completed_at_ms=0, fingerprint="print", max_parallelism=128, parallelism=1,
        block_partitions=4, block_end_offsets=(), written_bytes=0, offsets=(), operators=(), order_logs=(),
        committables=(), sinks=(),
    )  # fmt: skip


def finalized(checkpoint: int) -> Decided:
    """A verdict: the manifest is durable, and all is committed."""
    return Decided(manifest(checkpoint))


def not_committed(checkpoint: int) -> Decided:
    """A verdict: the manifest is durable, but the broker refused a commit."""
    return Decided(manifest(checkpoint), unsettled={"id": "refused"})


class Job:
    """A job of one subtask without transactional sinks."""

    def __init__(self, restart: RestartStrategy | None = None, *, loops: bool = False, **settings: Any) -> None:
        asked: dict[str, Any] = {"interval_ms": INTERVAL_MS, "timeout_ms": TIMEOUT_MS, **settings}
        self.core = Coordinator(
            CheckpointSettings(**asked), restart or FixedDelay(delay_ms=70), {("task", 0)}, set(),
            loops=loops,
        )  # fmt: skip
        self.now_ms = 0

    def __call__(self, event: events.Event) -> list[events.Effect]:
        return self.core.handle(event, self.now_ms)

    def running(self, checkpoint: int = 0) -> Job:
        """Recovered and deployed."""
        self(Recovered(manifest(checkpoint)))
        self(events.Deployed())
        return self

    def in_flight(self) -> Job:
        """A checkpoint is triggered and not acknowledged."""
        self.now_ms += INTERVAL_MS
        assert isinstance(self(Tick())[-1], Trigger)
        return self

    def deciding(self) -> Job:
        """The checkpoint is being decided."""
        assert isinstance(self.ack(self.in_flight().core.in_flight[-1].checkpoint)[-1], events.Decide)
        return self

    def ack(self, checkpoint: int) -> list[events.Effect]:
        """The one subtask acknowledges."""
        return self(Acknowledged(Ack("task", 0, checkpoint)))


# --- while a checkpoint is being decided ----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [FAILED, Failed("bad record", RecordError("bad record"))], ids=repr)
def test_a_failure_waits_for_the_decision(failure: Failed) -> None:
    """While a checkpoint is being decided nothing is restarted or ended, and nothing new is triggered."""
    job = Job(max_concurrent=2).running().deciding()
    assert job(failure) == []
    job.now_ms += 99 * TIMEOUT_MS
    assert job(Tick()) == []
    assert job.core.state is JobState.RUNNING


def test_a_failure_that_waited_restarts_from_what_was_decided() -> None:
    """Once the checkpoint is finalized the failure that waited restarts the job, from that checkpoint."""
    job = Job().running().deciding()
    job(FAILED)
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), RESTART]
    assert job.core.manifest == manifest(1)


def test_an_error_that_waited_ends_the_job_after_the_decision() -> None:
    """An error that no restart can help ends the job once the decision is known."""
    job = Job().running().deciding()
    error = RecordError("bad record")
    job(Failed("bad record", error))
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), End(manifest(1), error)]


NOT_COUNTED = Failed("a savepoint is late", counts=False)


def test_of_failures_that_waited_the_gravest_counts() -> None:
    """Whichever came first: an error that no restart can help, else one that the restart strategy counts."""
    error = RecordError("bad record")
    job = Job(max_concurrent=2).running().deciding()
    for each in (NOT_COUNTED, FAILED, Failed("bad record", error), FAILED):
        assert job(each) == []
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), End(manifest(1), error)]


@pytest.mark.parametrize("counted", [FAILED, Concluded(1, Refuse("expired"))], ids=repr)
def test_what_counts_is_not_hidden_by_what_does_not(counted: events.Event) -> None:
    """A worker that died, or a checkpoint that is refused, behind a savepoint that is late."""
    job = Job(NoRestart()).running().deciding()
    job(NOT_COUNTED)
    end = [*job(counted), *job(Concluded(1, finalized(1)))][-1]
    assert isinstance(end, End)
    assert isinstance(end.error, ExactlyOnceError)


def test_a_failure_and_a_refusal_are_one_restart() -> None:
    """If the checkpoint is refused while a failure waits, the job restarts once, for the failure."""
    job = Job().running().deciding()
    job(FAILED)
    assert job(Concluded(1, Refuse("expired"))) == [RESTART]


def test_a_fence_ends_the_job_even_while_it_decides() -> None:
    """A newer instance ends this one at once: whatever is being decided, that one reads what is true."""
    job = Job().running().deciding()
    error = Fenced("a newer instance took over")
    assert job(Failed("fenced", error)) == [End(manifest(0), error)]
    assert job(Concluded(1, finalized(1))) == []


def test_a_refused_checkpoint_restarts_the_job_from_the_last_completed_one() -> None:
    """A checkpoint that was refused never happened: the job restarts from the one before, with the reason."""
    job = Job().running().deciding()
    assert job(Concluded(1, Refuse("expired"))) == [Restart(1, 70, "expired")]
    assert job.core.manifest == manifest(0)


def test_an_unknown_outcome_ends_the_job() -> None:
    """If it cannot be learnt whether the manifest is durable, this incarnation ends and says that nothing is lost."""
    job = Job().running().deciding()
    (end,) = job(Concluded(1, Unresolved(1)))
    assert isinstance(end, End)
    assert isinstance(end.error, Undetermined)
    assert "Nothing is lost" in str(end.error)


def test_a_decided_checkpoint_that_is_not_committed_is_finished_by_a_restart() -> None:
    """If the broker refused a commit the sinks are stopped and the checkpoint is finished; the job goes on from it,
    and nothing is announced before it is finalized."""
    job = Job().running().deciding()
    (restart,) = job(Concluded(1, not_committed(1)))
    assert restart == Restart(1, 70, "checkpoint 1 is decided, but not known to be committed")
    assert job(Recovered(manifest(1))) == [events.Deploy(1, manifest(1))]
    job(events.Deployed())
    assert job.in_flight().core.in_flight[0].base == 1


def test_a_strategy_that_gives_up_still_has_the_decided_checkpoint_finished() -> None:
    """Without restarts left the decided checkpoint is finished first; then the job ends with the failure."""
    job = Job(NoRestart()).running().deciding()
    reason = "checkpoint 1 is decided, but not known to be committed"
    assert job(Concluded(1, not_committed(1))) == [Restart(1, 0, reason)]
    (end,) = job(Recovered(manifest(1)))
    assert isinstance(end, End)
    assert "gives up" in str(end.error)


def test_what_was_decided_before_a_failure_is_known_is_finished_all_the_same() -> None:
    """A failure that waits for a decision whose commit is refused is covered by the restart that finishes it."""
    job = Job().running().deciding()
    job(FAILED)
    (restart,) = job(Concluded(1, not_committed(1)))
    assert isinstance(restart, Restart)
    assert restart.reason == "checkpoint 1 is decided, but not known to be committed"


# --- the tables and the strategy --------------------------------------------------------------------------------------


def test_the_tables_have_an_end_and_every_state_is_reached() -> None:
    """Every state has a row, every state but the first is reached from another, and the end leads nowhere."""
    over = {CheckpointState.COMPLETED, CheckpointState.ABORTED}
    for table, first, ends in (
        (JOB_TRANSITIONS, JobState.RECOVERING, {JobState.ENDED}),
        (CHECKPOINT_TRANSITIONS, CheckpointState.TRIGGERED, over),
    ):
        states: set[object] = set(type(first))
        assert table.keys() == states
        assert set().union(*table.values()) | {first} == states
        assert {state for state, after in table.items() if not after} == ends


def test_a_checkpoint_moves_only_as_its_table_allows() -> None:
    """A move that the table does not have raises InvariantViolation."""
    plan = events.PendingCheckpoint(checkpoint=1, base=0, previous=0, final=False, triggered_ms=0, attempt=0)
    with pytest.raises(InvariantViolation):
        plan.move(CheckpointState.COMPLETED)


def test_workers_that_do_not_become_ready_restart_the_job() -> None:
    """After the timeout for deploying the job restarts, says who is not ready and what to change, and so until its
    strategy gives up; a delay before the start is not counted."""
    job = Job(FixedDelay(attempts=1, delay_ms=70), deploy_timeout_ms=9_000)
    job(Recovered(manifest(0)))
    assert job.core.wake_ms == 9_000
    job.now_ms = 8_999
    assert job(Tick("worker 1 hangs")) == []
    job.now_ms = 9_000
    late = "the workers were not ready within 9000 ms: worker 1 hangs. If they only need longer, raise "
    late += "deploy_timeout (--deploy-timeout)"
    assert job(Tick("worker 1 hangs")) == [Restart(1, 70, late)]
    job(Recovered(manifest(0)))
    job.now_ms += 9_000 + 69
    assert job(Tick()) == []
    job.now_ms += 1
    (end,) = job(Tick())
    assert isinstance(end, End)
    assert "gives up: the workers were not ready within 9000 ms. If" in str(end.error)


def test_workers_that_are_ready_in_time_are_not_replaced() -> None:
    """Once all are ready the timeout for deploying is over."""
    job = Job(deploy_timeout_ms=9_000).running()
    job.now_ms = 9_000
    assert isinstance(job(Tick())[0], Trigger)


def test_a_worker_that_dies_while_restoring_restarts_the_job() -> None:
    """A failure in a deployment is a failure like any other."""
    job = Job()
    job(Recovered(manifest(0)))
    assert job(FAILED) == [RESTART]


def test_a_completed_checkpoint_is_progress_to_the_restart_strategy() -> None:
    """Each completed checkpoint makes the strategy's restarts available again."""
    job = Job(FixedDelay(attempts=1, delay_ms=1)).running()
    for completed in (1, 2, 3):
        assert isinstance(job(FAILED)[0], Restart)
        job.running(completed - 1).deciding()
        job(Concluded(completed, finalized(completed)))
    job(FAILED)
    job.running(3)
    assert isinstance(job(FAILED)[0], End)


# --- the end --------------------------------------------------------------------------------------------------------


def test_a_stop_takes_a_last_checkpoint_at_once_and_ends_when_it_is_finalized() -> None:
    """A stop triggers a final checkpoint without waiting for the interval; the job ends cleanly with its manifest."""
    job = Job().running()
    assert job(Stop()) == [Trigger(1, 0, final=True)]
    (decide,) = job.ack(1)
    assert isinstance(decide, events.Decide)
    assert decide.plan.final
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), End(manifest(1), None)]


@pytest.mark.parametrize("deciding", [False, True])
def test_a_stop_waits_for_what_is_in_flight(deciding: bool) -> None:
    """With a checkpoint in flight the final one is triggered when that is finalized."""
    job = Job(max_concurrent=3).running()
    job = job.deciding() if deciding else job.in_flight()
    assert job(Stop()) == []
    if not deciding:
        job.ack(1)
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), Trigger(2, 1, final=True)]


def test_a_stop_while_recovering_ends_once_the_last_checkpoint_is_finished() -> None:
    """A job that is stopped while it recovers ends cleanly when the last checkpoint is finalized and older
    transactions are fenced, not before; it deploys nothing."""
    job = Job()
    assert job(Stop()) == []
    assert job(Recovered(manifest(4))) == [End(manifest(4), None)]


def test_a_stop_while_restarting_does_not_hide_that_a_checkpoint_is_unfinished() -> None:
    """Between a refused commit and its repair a stop waits: a clean end means that everything decided is visible."""
    job = Job().running().deciding()
    job(Concluded(1, not_committed(1)))
    assert job(Stop()) == []
    assert job(Recovered(manifest(1))) == [End(manifest(1), None)]


def test_a_stop_while_deploying_ends_the_job_at_once() -> None:
    """Workers that are starting are not waited for: they are replaced by nothing, once the transactions are aborted
    that those may have opened which were ready before the others. That is no failure."""
    job = Job(NoRestart())
    job(Recovered(manifest(4)))
    assert job(Stop()) == [Restart(1, 0, "")]
    assert job(events.Deployed()) == []
    assert job(Recovered(manifest(4))) == [End(manifest(4), None)]


def test_a_failure_after_a_stop_ends_with_the_last_completed_checkpoint() -> None:
    """If a worker dies before the final checkpoint is complete, the job ends at the last one once the transactions of
    the attempt are aborted."""
    job = Job().running()
    job(Stop())
    assert job(FAILED) == [RESTART]
    assert job(Recovered(manifest(0))) == [End(manifest(0), None)]


def test_a_second_stop_changes_nothing() -> None:
    """Stopping again neither triggers nor ends anything more."""
    job = Job().running()
    job(Stop())
    assert job(Stop()) == []
    assert job.ack(1) != []


def test_finished_sources_take_a_final_checkpoint_and_end() -> None:
    """When every source has reached its target a final checkpoint is taken at once, and the job ends with it."""
    job = Job().running()
    assert job(events.SourcesFinished()) == [Trigger(1, 0, final=True)]
    job.ack(1)
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), End(manifest(1), None)]


def test_sources_that_finish_before_all_workers_are_ready_are_heard() -> None:
    """A bounded job whose sources finish while others still restore takes its final checkpoint once all are ready."""
    job = Job()
    job(Recovered(manifest(0)))
    assert job(events.SourcesFinished()) == []
    job.now_ms += INTERVAL_MS
    job(events.Deployed())
    job.now_ms += INTERVAL_MS
    assert job(Tick()) == [Trigger(1, 0, final=True)]


def test_finished_sources_are_forgotten_by_a_restart() -> None:
    """After a restart the sources have yet to finish again: the next checkpoint is an ordinary one."""
    job = Job().running()
    job(events.SourcesFinished())
    job(FAILED)
    job.running().in_flight()
    assert not job.core.in_flight[0].final


def test_after_a_final_checkpoint_nothing_is_triggered() -> None:
    """While a final checkpoint is in flight no other one is triggered, whatever the concurrency."""
    job = Job(max_concurrent=3).running()
    job(Stop())
    job.now_ms += 4 * INTERVAL_MS
    assert job(Tick()) == []


def test_a_final_checkpoint_that_is_late_is_followed_by_another() -> None:
    """A late final checkpoint within what is tolerated is aborted and taken again."""
    job = Job(tolerable_failed=1).running()
    job(Stop())
    job.now_ms += TIMEOUT_MS
    note, trigger = job(Tick())
    assert isinstance(note, events.Note)
    assert trigger == Trigger(2, 0, final=True)


def test_a_worker_that_dies_after_the_final_checkpoint_was_acknowledged_is_no_loss() -> None:
    """A worker that dies while the final checkpoint is being decided does not restart the job: nothing was read after
    it."""
    job = Job(NoRestart()).running()
    job(Stop())
    job.ack(1)
    assert job(FAILED) == []
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), End(manifest(1), None)]


def test_an_error_after_the_final_checkpoint_was_acknowledged_is_reported() -> None:
    """An error that came while the final checkpoint was being decided ends the job with that error."""
    job = Job().running()
    job(Stop())
    job.ack(1)
    error = RecordError("bad record")
    job(Failed("bad record", error))
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), End(manifest(1), error)]


def test_a_final_checkpoint_that_is_refused_ends_with_the_one_before() -> None:
    """After a stop, a final checkpoint that was refused leaves the last completed one: the job ends there, once the
    open transactions are aborted."""
    job = Job().running()
    job(Stop())
    job.ack(1)
    assert job(Concluded(1, Refuse("expired"))) == [Restart(1, 70, "expired")]
    assert job(Recovered(manifest(0))) == [End(manifest(0), None)]


@pytest.mark.parametrize("state", [JobState.RECOVERING, JobState.DEPLOYING, JobState.RUNNING])
def test_a_failure_that_no_restart_can_help_ends_the_job(state: JobState) -> None:
    """An error given with the failure ends the job in every state."""
    job = Job()
    if state is not JobState.RECOVERING:
        job(Recovered(manifest(0)))
    if state is JobState.RUNNING:
        job(events.Deployed())
    error = Halt("no")
    assert job(Failed("no", error)) == [End(None if state is JobState.RECOVERING else manifest(0), error)]


def test_a_strategy_that_gives_up_ends_the_job_with_the_reason() -> None:
    """When the restart strategy gives up the job ends with an error that names the failure."""
    job = Job(NoRestart()).running()
    (end,) = job(Failed("a worker died"))
    assert isinstance(end, End)
    assert "gives up: a worker died" in str(end.error)


@pytest.mark.parametrize("error", [Halt("h"), ExactlyOnceError("e")])
def test_an_error_of_recovery_itself_ends_the_job(error: ExactlyOnceError) -> None:
    """What recovery cannot do ends the job with recovery's own error, also after a stop."""
    job = Job()
    job(Stop())
    assert job(Failed("recovery", error)) == [End(None, error)]


@pytest.mark.parametrize("after_ms", [0, 700])
def test_a_trigger_says_when_its_barrier_may_overtake(after_ms: int) -> None:
    """Barriers of unaligned checkpoints overtake after the time that is set, and the last one before an end never."""
    job = Job(unaligned=True, aligned_timeout_ms=after_ms).running()
    job.now_ms = INTERVAL_MS
    assert job(Tick()) == [Trigger(1, 0, final=False, overtakes_after_ms=after_ms)]
    job.ack(1)
    assert job(Stop()) == []
    last = Trigger(2, 1, final=True, overtakes_after_ms=None)
    assert job(Concluded(1, finalized(1))) == [events.AnnounceFinalized(1), last]


def going_round(checkpoint: int) -> Decided:
    """A verdict: finalized, and records went round a loop."""
    logs = (ChannelLog("task", 0, 3, ()),)
    return Decided(msgspec.structs.replace(manifest(checkpoint), channel_logs=logs))


def test_where_records_go_round_the_last_checkpoint_comes_behind_an_empty_round() -> None:
    """Neither a checkpoint that was triggered before all was read, nor one that found records in a loop, is enough."""
    job = Job(loops=True).running().in_flight()
    assert job(events.SourcesFinished()) == []
    job.ack(1)
    assert Trigger(2, 1, final=False) in job(Concluded(1, finalized(1)))
    job.ack(2)
    assert job(Concluded(2, going_round(2))) == [events.AnnounceFinalized(2)]
    job.now_ms += INTERVAL_MS
    assert job(Tick()) == [Trigger(3, 2, final=False)]
    job.ack(3)
    assert job(Concluded(3, finalized(3))) == [events.AnnounceFinalized(3), Trigger(4, 3, final=True)]
    job.ack(4)
    assert job(Concluded(4, finalized(4)))[-1] == End(manifest(4), None)


def test_after_a_restart_loops_are_looked_at_anew() -> None:
    """What was known of sources and loops is forgotten with the attempt."""
    job = Job(loops=True).running()
    assert job(events.SourcesFinished()) == [Trigger(1, 0, final=False)]
    job(Failed("a worker died"))
    job.running()
    job.now_ms += INTERVAL_MS
    assert job(Tick()) == [Trigger(2, 0, final=False)]
    job.ack(2)
    assert job(Concluded(2, finalized(2))) == [events.AnnounceFinalized(2)]


def test_a_stop_waits_for_no_loop() -> None:
    """Its checkpoint is the last one, whatever goes round."""
    job = Job(loops=True).running()
    assert job(Stop()) == [Trigger(1, 0, final=True)]
    job.ack(1)
    assert isinstance(job(Concluded(1, going_round(1)))[-1], End)
