"""The coordinator's core: what waits for a decision, what a verdict leads to, and every way to end."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_job import INTERVAL_MS, TIMEOUT_MS, ScriptedJob, play, scripts

from exactlyonce.checkpoint import events
from exactlyonce.checkpoint.coordinator import JOB_TRANSITIONS, JobState
from exactlyonce.checkpoint.events import CHECKPOINT_TRANSITIONS, CheckpointState
from exactlyonce.pipeline.errors import InvariantViolation


@scripts("""
# A failure waits for the decision, and restarts from what was decided: nothing new is triggered meanwhile.
job max_concurrent=2
deciding
failed a worker died
496000 tick
state -> running
finalized 1 -> announce 1 & restart 1 after 70: a worker died
newest -> 1

# Of failures that waited the gravest counts, whichever came first.
job max_concurrent=2
deciding
uncounted a savepoint is late
failed a worker died
failed RecordError: bad record
failed a worker died
finalized 1 -> announce 1 & end at 1: RecordError bad record

# What counts is not hidden by what does not.
job restart=none
deciding
uncounted a savepoint is late
failed a worker died
finalized 1 -> announce 1 & end at 1: ExactlyOnceError ... gives up: a worker died

# A refusal is not hidden by what does not count.
job restart=none
deciding
uncounted a savepoint is late
refused 1 expired -> end at 0: ExactlyOnceError ... gives up: expired

# A failure and a refusal are one restart.
deciding
failed a worker died
refused 1 expired -> restart 1 after 70: a worker died

# A fence ends the job even while it decides: the newer instance reads what is true.
deciding
failed Fenced: a newer instance took over -> end at 0: Fenced a newer instance took over
finalized 1

# A refused checkpoint restarts the job from the last completed one.
deciding
refused 1 expired -> restart 1 after 70: expired
newest -> 0

# An unknown outcome ends the job.
deciding
unresolved 1 -> end at 0: Undetermined ...Nothing is lost...

# A decided checkpoint that is not committed is finished by a restart: nothing is announced before.
deciding
unsettled 1 -> restart 1 after 70: checkpoint 1 is decided, but not known to be committed
recovered 1 -> deploy 1 from 1
deployed
+1000 tick -> trigger 2 on 1

# A strategy that gives up still has the decided checkpoint finished.
job restart=none
deciding
unsettled 1 -> restart 1 after 0: checkpoint 1 is decided, but not known to be committed
recovered 1 -> end at 1: ExactlyOnceError ... gives up: checkpoint 1 is decided, ...

# A failure that waited is covered by the restart that finishes the decided checkpoint.
deciding
failed a worker died
unsettled 1 -> restart 1 after 70: checkpoint 1 is decided, but not known to be committed

# Workers that do not become ready restart the job until its strategy gives up: a delay before the start is not counted.
job restart=1 deploy_timeout_ms=9000
recovered 0 -> deploy 0 from 0
wake -> 9000
8999 tick worker 1 hangs
9000 tick worker 1 hangs
-> restart 1 after 70: the workers were not ready within 9000 ms: worker 1 hangs. If ... raise deploy_timeout ...
recovered 0 -> deploy 1 from 0
18069 tick
18070 tick -> end at 0: ExactlyOnceError ... gives up: the workers were not ready within 9000 ms. If...

# Workers that are ready in time are not replaced.
job deploy_timeout_ms=9000
running
9000 tick -> trigger 1 on 0

# A worker that dies while restoring restarts the job.
recovered 0 -> deploy 0 from 0
failed a worker died -> restart 1 after 70: a worker died

# A stop takes a last checkpoint at once, and ends when it is finalized: a second stop changes nothing.
running
stop -> trigger 1 on 0 final
stop
ack 1 -> decide 1 on 0 final
finalized 1 -> announce 1 & end at 1

# A stop waits for what is in flight: after the last checkpoint nothing is triggered, whatever the concurrency.
job max_concurrent=3
triggered
stop
done 1 -> announce 1 & trigger 2 on 1 final
+4000 tick

# A stop waits for what is being decided.
job max_concurrent=3
deciding
stop
finalized 1 -> announce 1 & trigger 2 on 1 final

# A stop while recovering ends once the last checkpoint is finished: it deploys nothing.
stop
recovered 4 -> end at 4

# A stop while restarting does not hide that a checkpoint is unfinished.
deciding
unsettled 1 -> restart 1 after 70: ...
stop
recovered 1 -> end at 1

# A stop while deploying ends the job at once, which is no failure: transactions of workers that were ready are aborted.
job restart=none
recovered 4 -> deploy 0 from 4
stop -> restart 1 after 0
deployed
recovered 4 -> end at 4

# A failure after a stop ends with the last completed checkpoint, once the transactions are aborted, and says so.
running
stop -> trigger 1 on 0 final
failed a worker died -> restart 1 after 70: a worker died
recovered 0 -> end at 0 short: a worker died

# So does a last checkpoint that is late.
running
stop -> trigger 1 on 0 final
5000 tick -> note checkpoint 1 was not acknowledged ... & restart 1 after 70: checkpoint 1 was not acknowledged ...
recovered 0 -> end at 0 short: checkpoint 1 was not acknowledged ...

# One that is decided is finished by the restart.
running
stop -> trigger 1 on 0 final
ack 1 -> decide 1 on 0 final
unsettled 1 -> restart 1 after 70: checkpoint 1 is decided, but not known to be committed
recovered 1 -> end at 1

# Finished sources take a final checkpoint, and the job ends with it.
running
finished -> trigger 1 on 0 final
done 1 -> announce 1 & end at 1

# A final checkpoint before all results of the end of time are out is an ordinary one, and another one is the last.
running
finished -> trigger 1 on 0 final
ack 1 by 0 going-on
ack 1 by 1 -> decide 1 on 0
finalized 1 -> announce 1
1000 tick -> trigger 2 on 1 final
done 2 -> announce 2 & end at 2

# Sources that finish before all workers are ready are heard.
recovered 0 -> deploy 0 from 0
finished
1000 deployed
2000 tick -> trigger 1 on 0 final

# Finished sources are forgotten by a restart.
running
finished -> trigger 1 on 0 final
failed a worker died -> restart 1 after 70: a worker died
running
+1000 tick -> trigger 2 on 0

# A final checkpoint that is late is followed by another.
job tolerable_failed=1
running
stop -> trigger 1 on 0 final
5000 tick -> note checkpoint 1 was not acknowledged ... & trigger 2 on 0 final

# A worker that dies after the final checkpoint was acknowledged is no loss: nothing was read after it.
job restart=none
running
stop -> trigger 1 on 0 final
ack 1 -> decide 1 on 0 final
failed a worker died
finalized 1 -> announce 1 & end at 1

# An error after the final checkpoint was acknowledged is reported.
running
stop -> trigger 1 on 0 final
ack 1 -> decide 1 on 0 final
failed RecordError: bad record
finalized 1 -> announce 1 & end at 1: RecordError bad record

# A final checkpoint that is refused ends with the one before: once the open transactions are aborted.
running
stop -> trigger 1 on 0 final
ack 1 -> decide 1 on 0 final
refused 1 expired -> restart 1 after 70: expired
recovered 0 -> end at 0 short: expired

# An error that no restart can help ends a job that deploys.
recovered 0 -> deploy 0 from 0
failed Halt: no -> end at 0: Halt no

# An error of recovery itself ends the job, also after a stop.
stop
failed ExactlyOnceError: recovery -> end at nothing: ExactlyOnceError recovery

# A strategy that gives up ends the job with the reason.
job restart=none
running
failed a worker died -> end at 0: ExactlyOnceError ... gives up: a worker died

# A trigger says when its barrier may overtake: the last one never.
job unaligned aligned_timeout_ms=700
running
1000 tick -> trigger 1 on 0 overtakes after 700
ack 1 -> decide 1 on 0
stop
finalized 1 -> announce 1 & trigger 2 on 1 final

# Where records go round, the last checkpoint comes after an empty round: one that was triggered before all was read is
# not enough, nor is one that found records in a loop.
job loops
triggered
finished
done 1 -> announce 1 & trigger 2 on 1
ack 2 -> decide 2 on 1
looping 2 -> announce 2
+1000 tick -> trigger 3 on 2
done 3 -> announce 3 & trigger 4 on 3 final
done 4 -> announce 4 & end at 4

# After a restart loops are looked at anew.
job loops
running
finished -> trigger 1 on 0
failed a worker died -> restart 1 after 70: a worker died
running
+1000 tick -> trigger 2 on 0
done 2 -> announce 2

# A stop waits for no loop.
job loops
running
stop -> trigger 1 on 0 final
ack 1 -> decide 1 on 0 final
looping 1 -> announce 1 & end at 1

# What is still on its way at the end is looked for soon: not an interval later, which may be hours, nor all the time.
job loops interval_ms=600000
running
finished -> trigger 1 on 0
ack 1 -> decide 1 on 0
looping 1 -> announce 1
wake -> 1000
""")
def test_a_script(script: str) -> None:
    play(script)


def test_the_tables_have_an_end_and_every_state_is_reached() -> None:
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
    plan = events.PendingCheckpoint(checkpoint=1, base=0, previous=0, final=False, triggered_ms=0, attempt=0)
    with pytest.raises(InvariantViolation):
        plan.move(CheckpointState.COMPLETED)


class Backlogged(ScriptedJob):
    """Everything is read, and what is on its way takes a while: an aligned barrier comes after it, and one that
    overtakes at once, with what is left. A restart goes on from the newest completed checkpoint."""

    def __init__(self, backlog_ms: int, **settings: Any) -> None:
        super().__init__(unaligned=True, **settings)
        self.left_ms = self.kept_ms = backlog_ms
        self.ended: events.End | None = None

    def live(self, until_ms: int) -> None:
        self.perform(self._recovered("0"))
        while self.ended is None and self.now_ms < until_ms:
            self.now_ms += INTERVAL_MS // 10
            self.left_ms = max(0, self.left_ms - INTERVAL_MS // 10)
            self.perform(self(events.Tick()))
            for plan in self.core.attempt.in_flight:
                if not plan.final or not self.left_ms:
                    self.perform(self._ack(str(plan.checkpoint)))

    def perform(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Restart():
                    self.left_ms = self.kept_ms
                    assert self.core.manifest is not None
                    self.perform(self(events.Recovered(self.core.manifest, 0)))
                case events.Deploy():
                    self.perform([*self(events.Deployed()), *self(events.SourcesFinished())])
                case events.Decide(plan):
                    self.kept_ms = self.left_ms
                    conclude = self._looping if self.left_ms else self._finalized
                    self.perform(conclude(str(plan.checkpoint)))
                case events.End():
                    self.ended = effect


@pytest.mark.parametrize("backlog_ms", [0, INTERVAL_MS, 7 * TIMEOUT_MS])
def test_a_run_to_an_end_under_back_pressure(backlog_ms: int) -> None:
    """The last checkpoint waits until an overtaking one has left nothing to overtake: else it would always be late."""
    job = Backlogged(backlog_ms)
    job.live(until_ms=1_000 * TIMEOUT_MS)
    assert job.ended is not None
    assert job.ended.error is None
    assert job.now_ms <= backlog_ms + 3 * INTERVAL_MS
    assert job.core.attempt.number == 0
