"""The coordinator's core: triggers, acknowledgements, late ones, failures. `scripted_job` explains the scripts."""

from __future__ import annotations

import pytest
from scripted_job import INTERVAL_MS, TIMEOUT_MS, ScriptedJob, play, precommit, scripts

from exactlyonce.checkpoint.events import Ack, Acknowledged, Decide, LeftOut, PendingCheckpoint, Phases, Tick
from exactlyonce.checkpoint.leader_config import LATE_MIN, LATE_SPAN, LateRecords
from exactlyonce.checkpoint.records.manifest import AbortedCheckpoint, OrderLog, SubtaskStats
from exactlyonce.pipeline.errors import RecordError


@scripts("""
# An incarnation goes from recovery over deployment to checkpoints: the first comes an interval after workers are ready.
job sinks=2
recovered 4 -> deploy 0 from 4
granted 0 1 0 1
10 deployed
1009 tick
1010 tick -> trigger 5 on 4
ack 5 -> decide 5 on 4
finalized 5 -> announce 5
2010 tick -> trigger 6 on 5

# An event in a state that the table does not allow is a violation: but words of workers reach no recovering job, and
# nothing reaches an ended one.
deployed
finalized 1 -> violation
recovered 0 -> deploy 0 from 0
recovered 0 -> violation
finalized 1 -> violation
deployed
deployed -> violation
recovered 0 -> violation
finalized 1 -> violation
failed Halt: x -> end at 0: Halt x
recovered 0
deployed
finalized 1

# An ended job does nothing.
job sinks=2
running
failed Halt: x -> end at 0: Halt x
99999 tick
stop
failed y
finished
granted 0
wake -> never

# Nothing is triggered before every sink has a producer for now and one for after.
job sinks=2
running with 1
1000 tick
granted 0
granted 1 -> trigger 1 on 0

# A precommit uses up a producer: an empty interval keeps it.
job sinks=2
running with 2
1000 tick -> trigger 1 on 0
ack 1 by 0 with 0
ack 1 by 1 -> decide 1 on 0 with id-1-0
finalized 1 -> announce 1
2000 tick
granted 1
granted 0 -> trigger 2 on 1

# Only a checkpoint that is not acknowledged may yet use up a producer.
job sinks=2 max_concurrent=2
running with 2
1000 tick -> trigger 1 on 0
2000 tick
ack 1 by 0 with 0 1
granted 0 1
ack 1 by 1 -> decide 1 on 0 with id-1-0 id-1-1 & trigger 2 on 0

# A sink that gets no producer restarts the job.
job sinks=2
running with 1
granted 0
5999 tick
6000 tick -> restart 1 after 70: no producer was ready for 5000 ms at sink out subtask 1

# A worker that hangs is blamed, and not the sink that waits for it.
job sinks=2
running with 1
6000 tick worker 1 hangs
-> restart 1 after 70: no checkpoint could be triggered for 5000 ms: worker 1 hangs

# A late checkpoint is explained by who hangs and who is slow.
triggered
6000 tick worker 0 hangs | x is slow
-> note checkpoint 1 was not acknowledged within 5000 ms: worker 0 hangs; x is slow; aborted
-> restart 1 after 70: checkpoint 1 was not acknowledged within 5000 ms: worker 0 hangs; x is slow

# A coordinator that slept does not blame the sinks.
job sinks=2
running
495000 tick -> trigger 1 on 0

# At most so many checkpoints are in flight: all relative to the newest that is complete.
job max_concurrent=2
running from 3
1000 tick -> trigger 4 on 3
2000 tick -> trigger 5 on 3
3000 tick
done 4 -> announce 4 & trigger 6 on 4

# The next wake is never in the past of what cannot be done: it is the timeout of what is in flight, and there is none
# while a checkpoint is being decided, or a producer is missing, or workers are restoring.
job sinks=2
wake -> never
running with 2
wake -> 1000
1000 tick -> trigger 1 on 0
wake -> 6000
ack 1 by 0 with 0 1
ack 1 by 1 -> decide 1 on 0 with id-1-0 id-1-1
wake -> never
finalized 1 -> announce 1
wake -> never
granted 0 1
wake -> 2000

# What is built upon is pinned: the bases of all in flight, and the newest, upon which something may yet be triggered.
job max_concurrent=3
running from 3
pinned -> 3
1000 tick -> trigger 4 on 3
2000 tick -> trigger 5 on 3
3000 tick -> trigger 6 on 3
ack 4 -> decide 4 on 3
pinned -> 3
finalized 4 -> announce 4
pinned -> 3 4

# Acknowledgements out of order are a violation: the same again, an older one, one of a stranger.
job max_concurrent=2 sinks=2
triggered
2000 tick -> trigger 2 on 0
ack 2 by 0
ack 2 by 0 -> violation
ack 1 by 0 -> violation
ack 1 by 9 -> violation
granted 9 -> violation

# Decisions come one by one, each after the one before is finalized.
job max_concurrent=2 sinks=2
triggered
2000 tick -> trigger 2 on 0
ack 1 -> decide 1 on 0
ack 2 by 0 with 0
ack 2 by 1
finalized 7 -> violation
finalized 1 -> announce 1 & decide 2 on 0 after 1 with id-2-0

# A precommit of a later checkpoint is not carried by an earlier one.
job max_concurrent=2 sinks=2
triggered
2000 tick -> trigger 2 on 0
ack 1 by 0 with 0
ack 2 by 0 with 0
ack 1 by 1 -> decide 1 on 0 with id-1-0
finalized 1 -> announce 1
ack 2 by 1 -> decide 2 on 0 after 1 with id-2-0

# Completed ids only grow.
triggered from 5
done 6 -> announce 6
failed a worker died -> restart 1 after 70: a worker died
recovered 5 -> violation

# Carried output is carried again if the next checkpoint is late too.
job tolerable_failed=2 sinks=2
triggered
ack 1 by 0 with 0
6000 tick -> note checkpoint 1 was not acknowledged ... & trigger 2 on 0
ack 2 by 0 with 0
11000 tick -> note checkpoint 2 was not acknowledged ... & trigger 3 on 0
ack 1 by 1
ack 3 -> decide 3 on 0 with id-1-0 id-2-0

# More late checkpoints in a row than tolerated restart the job: one that completes starts the count anew.
job tolerable_failed=1
triggered
6000 tick
-> note checkpoint 1 was not acknowledged within 5000 ms; aborted, its output is carried by the next one
-> trigger 2 on 0
done 2 -> announce 2
7000 tick -> trigger 3 on 2
12000 tick -> note checkpoint 3 was ... carried by the next one & trigger 4 on 2
17000 tick
-> note checkpoint 4 was not acknowledged within 5000 ms; aborted
-> restart 1 after 70: checkpoint 4 was not acknowledged within 5000 ms

# Each late checkpoint doubles the timeout of the next, after a restart too, as far as that of transactions allows: of
# 81 s, a restart takes 60, and an interval 1. One that completes keeps twice its own duration.
job transaction_timeout_ms=81000
triggered
6000 tick
-> note checkpoint 1 was not acknowledged within 5000 ms; aborted. The next one may take 10000 ms
-> restart 1 after 70: checkpoint 1 was not acknowledged within 5000 ms
+0 triggered
+9999 tick
wake -> 17000
+1 tick -> note checkpoint 2 was ... within 10000 ms; aborted. The next one may take 20000 ms & restart 2 after ...
+0 triggered
+20000 tick -> note checkpoint 3 was not acknowledged within 20000 ms; aborted & restart 3 after ...
+0 triggered
+9000 done 4 -> announce 4 & trigger 5 on 4
+17999 tick
+1 tick -> note checkpoint 5 was ... within 18000 ms; aborted. The next one may take 20000 ms & restart 4 after ...
+0 triggered from 4
+400 done 6 -> announce 6
+600 tick -> trigger 7 on 6
+5000 tick -> note checkpoint 7 was not acknowledged within 5000 ms; ... & restart 5 after ...

# A checkpoint keeps the timeout that it began with.
job max_concurrent=2 tolerable_failed=1 transaction_timeout_ms=181000
triggered
3000 tick -> trigger 2 on 0
6000 tick -> note checkpoint 1 was ... carried by the next one. The next one may take 10000 ms & trigger 3 on 0
8000 tick -> note checkpoint 2 was not acknowledged within 5000 ms; aborted. ... & restart 1 after ...

# Only what is not acknowledged can be late.
job max_concurrent=2
triggered
2000 tick -> trigger 2 on 0
ack 1 -> decide 1 on 0
ack 2
495000 tick

# A late checkpoint beyond the tolerated waits for the decision, and restarts then.
job max_concurrent=3
triggered
2000 tick -> trigger 2 on 0
ack 1 -> decide 1 on 0
7000 tick -> note checkpoint 2 was not acknowledged within 5000 ms; aborted
8000 tick
finalized 1 -> announce 1 & restart 1 after 70: checkpoint 2 was not acknowledged within 5000 ms

# A failed worker restarts the job and drops what is undecided: last words of the killed workers are not heard,
# producers are counted anew, and no id is used again.
job sinks=2 max_concurrent=2
triggered
ack 1 by 0 with 0
failed a worker died -> restart 1 after 70: a worker died
state -> recovering
ack 1 by 1 with 1
granted 0
finished
deployed
failed another worker died
recovered 0 -> deploy 1 from 0
deployed
5000 tick
granted 0 1 0
granted 1 -> trigger 2 on 0
ack 2 -> decide 2 on 0

# Sources pause while a decision waits for a store: not at once, not twice, and no longer than that.
job staging interval_ms=100
running
100 tick -> trigger 1 on 0
ack 1 by 0 staging
ack 1 by 1 -> decide 1 on 0 staged 1
1099 tick
1100 tick -> hold
2100 tick
finalized 1 -> announce 1 & trigger 2 on 1
tick -> go on

# What an aborted checkpoint staged is decided with the next one.
job staging tolerable_failed=1
triggered
6000 tick -> note checkpoint 1 was ... & trigger 2 on 0
ack 1 by 0 staging
ack 2 by 0 staging
ack 2 by 1 -> decide 2 on 0 staged 1 2
finalized 2 -> announce 2
7000 tick -> trigger 3 on 2
ack 3 -> decide 3 on 2
""")
def test_a_script(script: str) -> None:
    play(script)


def plan_of(job: ScriptedJob, *acks: Ack) -> PendingCheckpoint:
    effects = [effect for each in acks for effect in job(Acknowledged(each))]
    (decide,) = [each for each in effects if isinstance(each, Decide)]
    return decide.plan


def test_a_plan_carries_what_all_subtasks_have_acknowledged() -> None:
    job, log = ScriptedJob(sinks=2), OrderLog("task", 1, ())
    job.do("triggered")
    assert job(Acknowledged(Ack("task", 0, 1, precommits=(precommit(1, 0, open_ms=200),)))) == []
    job.now_ms += 50
    plan = plan_of(job, Ack("task", 1, 1, order_log=log))
    assert job.core.attempt.deciding is plan
    assert plan.acks.keys() == {("task", 0), ("task", 1)}
    assert plan.precommits == [precommit(1, 0, open_ms=200)]
    assert plan.ages_ms == {"id-1-0": 250}
    assert plan.order_logs == [log]
    assert (plan.base, plan.previous, plan.attempt) == (0, 0, 0)


def test_what_an_aborted_checkpoint_flushed_is_carried_by_the_next() -> None:
    """Precommits and order logs, acknowledged before the abort or after it, in order and with their whole age."""
    job, log = ScriptedJob(sinks=2, tolerable_failed=1), OrderLog("task", 0, ())
    job.do("triggered")
    job(Acknowledged(Ack("task", 0, 1, precommits=(precommit(1, 0),), order_log=log)))
    job.now_ms = INTERVAL_MS + TIMEOUT_MS
    job(Tick())
    job(Acknowledged(Ack("task", 1, 1, precommits=(precommit(1, 1, open_ms=900),))))
    more = (Ack("task", each, 2, precommits=(precommit(2, each),), order_log=log) for each in (0, 1))
    plan = plan_of(job, *more)
    assert [each.transactional_id for each in plan.precommits] == ["id-1-0", "id-1-1", "id-2-0", "id-2-1"]
    assert (plan.ages_ms["id-1-0"], plan.ages_ms["id-1-1"]) == (TIMEOUT_MS, 900)
    assert len(plan.order_logs) == 3
    assert job.do("finalized 2") == ["announce 2"]
    assert job.do("+1000 tick") == ["trigger 3 on 2"]
    plan = plan_of(job, Ack("task", 0, 3), Ack("task", 1, 3))
    assert (plan.precommits, plan.order_logs) == ([], [])


def test_a_plan_tells_how_long_each_subtask_took_and_what_was_aborted_before() -> None:
    """The checkpoint after the next tells of it no more."""
    job = ScriptedJob(sinks=2, tolerable_failed=1)
    job.do("triggered")
    job(Acknowledged(Ack("task", 0, 1)))
    job.now_ms = INTERVAL_MS + TIMEOUT_MS
    job(Tick(hanging="worker 1 hangs"))
    begun_ms = job.now_ms
    job.now_ms += 100
    job(Acknowledged(Ack("task", 0, 2, phases=Phases(10.0, 1.0, 29.0, 0.0, 40.0))))
    plan = plan_of(job, Ack("task", 1, 2))
    stats = [ack.stats(plan.acked_ms[subtask]) for subtask, ack in sorted(plan.acks.items())]
    times = {"waiting_ms": 20, "aligning_ms": 10, "snapshot_ms": 30, "capture_ms": 0, "flush_ms": 40}
    assert stats == [SubtaskStats(task="task", subtask=0, **times), SubtaskStats(task="task", subtask=1)]
    assert [each.acknowledged_ms for each in stats] == [100, None]
    why = f"checkpoint 1 was not acknowledged within {TIMEOUT_MS} ms: worker 1 hangs; task[1] had not acknowledged it"
    assert plan.aborted == (AbortedCheckpoint(1, begun_ms - INTERVAL_MS, TIMEOUT_MS, why),)
    job.do("finalized 2")
    assert job.do("+1000 tick") == ["trigger 3 on 2"]
    assert plan_of(job, Ack("task", 0, 3), Ack("task", 1, 3)).aborted == ()


def late_in(checkpoint: int, *counts: tuple[int, int]) -> PendingCheckpoint:
    """A checkpoint whose subtasks have left out so many of so many records since the attempt began."""
    plan = PendingCheckpoint(checkpoint=checkpoint, base=0, previous=0, final=False, triggered_ms=0, attempt=0)
    for subtask, (late, came) in enumerate(counts):
        plan.acks["task", subtask] = Ack("task", subtask, checkpoint, left_out=(LeftOut("op", late, came),))
    return plan


def test_a_job_stops_before_more_than_a_share_of_the_latest_records_is_left_out() -> None:
    """A hundred are never too many; records of long ago do not hide those of now; workers count anew in an attempt."""
    records = LateRecords(0.5)
    records.check(few := late_in(1, (LATE_MIN - 1, LATE_MIN - 1)))
    records.decided(few)
    with pytest.raises(RecordError, match=r"Operator 'op' leaves out 100 of its latest 100 records"):
        records.check(late_in(2, (LATE_MIN - 1, LATE_MIN - 1), (1, 1)))
    records.decided(late_in(2, (LATE_MIN - 1, LATE_SPAN * 100), (0, LATE_SPAN * 100)))
    records.begin_attempt()
    records.check(late_in(3, (LATE_SPAN, LATE_SPAN)))
    with pytest.raises(RecordError, match="checkpoint 4"):
        records.check(late_in(4, (LATE_SPAN, LATE_SPAN), (100, 100)))
    LateRecords(1.0).check(late_in(1, (LATE_SPAN, LATE_SPAN)))
