"""Checkpoints that a subtask declines, and the pause while a worker's state finds no room."""

from __future__ import annotations

import pytest
from scripted_job import ScriptedJob, play, scripts

from exactlyonce.checkpoint.coordinator import DECLINED_NOTE_INTERVAL_MS, TRIES_MAX


@scripts("""
# A declined checkpoint is aborted without a failure, however often: the next is relative to the same base, and carries
# what sinks have flushed, before the subtask declined or with it. Nobody waits for the others any more.
job sinks=2
triggered
ack 1 by 0 with 0
ack 1 by 1 with 1 declined The disk is full.
-> note checkpoint 1 was declined, and is aborted; nothing is lost. The disk is full.
2000 tick -> trigger 2 on 0
ack 2 by 1 declined The disk is full.
ack 2 by 0
3000 tick -> trigger 3 on 0
ack 3 by 1 declined The disk is full.
ack 3 by 0
4000 tick -> trigger 4 on 0
ack 4 -> decide 4 on 0 with id-1-0 id-1-1

# More is declined than a sink has ids for: what is carried keeps its ids until a checkpoint is complete. Workers are
# replaced, which is no failure, and begin anew with all ids; but not before there is room.
job sinks=1 restart=none
running with 2
1000 tick -> trigger 1 on 0
ack 1 by 0 with 0
ack 1 by 1 declined The disk is full. -> note checkpoint 1 was declined...
granted 0
2000 tick -> trigger 2 on 0
ack 2 by 0 with 0
ack 2 by 1 declined The disk is full.
granted 0
3000 tick -> trigger 3 on 0
full 1 -> hold
ack 3 by 0 with 0
ack 3 by 1 declined The disk is full.
4000 tick
room 1 -> go on
tick -> restart 1 after 0: no producer was ready after so many declined checkpoints at sink out subtask 0
running
5000 tick -> trigger 4 on 0

# A stop needs one id and one producer: after the last checkpoint nothing is written.
job sinks=1 restart=none
running with 2
1000 tick -> trigger 1 on 0
ack 1 by 0 with 0
ack 1 by 1 declined The disk is full. -> note checkpoint 1 was declined...
granted 0
2000 tick -> trigger 2 on 0
ack 2 by 0 with 0
ack 2 by 1 declined The disk is full.
granted 0
3000 tick -> trigger 3 on 0
full 1 -> hold
ack 3 by 0 with 0
ack 3 by 1 declined The disk is full.
4000 tick
room 1 -> go on
stop -> trigger 4 on 0 final

# Sources pause while any worker finds no room: new workers begin without the pause.
running
room 1
full 1 -> hold
full 0
room 1
room 0 -> go on
full 0 -> hold
failed a worker died -> restart 1 after 70: a worker died
running
room 0

# Nothing is triggered while a worker finds no room, for however long: it would be declined. What hangs is a failure.
triggered
full 1 -> hold
ack 1 by 1 declined The disk is full. -> note ...
60000 tick
6000000 tick
tick worker 0 hangs -> restart 1 after 70: no checkpoint could be triggered for 5000 ms: worker 0 hangs
running
+60000 full 0 -> hold
room 0 -> go on & trigger 2 on 0

# What hangs is a failure though a disk is full.
triggered
full 1 -> hold
+5000 tick worker 0 hangs -> note ... & restart 1 after 70: ...worker 0 hangs

# A savepoint in which a worker hangs is one too, though a disk is full.
running
savepoint a -> trigger 1 on 0 savepoint
full 1 -> hold
+5000 tick worker 0 hangs -> note ... & restart 1 after 0: ...worker 0 hangs

# A stop waits for no room: the run ends with its newest checkpoint, for room may never come.
running
full 1 -> hold
stop -> restart 1 after 0
recovered 0 -> end at 0 short: a worker's disk is full

# A stop gives up what is under way when a disk is full.
triggered
full 1 -> hold
stop -> restart 1 after 0
recovered 0 -> end at 0 short: a worker's disk is full

# A stop gives up its last checkpoint when a disk is full.
triggered
stop
full 1 -> hold & restart 1 after 0
recovered 0 -> end at 0 short: a worker's disk is full
""")
def test_a_script(script: str) -> None:
    play(script)


def test_it_is_said_now_and_then() -> None:
    job, notes = ScriptedJob(), 0
    job.do("running")
    while job.now_ms < 3 * DECLINED_NOTE_INTERVAL_MS:
        (trigger,) = job.do("+1000 tick")
        notes += len(job.do(f"ack {trigger.split()[1]} by 0 declined The disk is full."))
    assert notes == 3


@pytest.mark.parametrize("savepoint", ["", " savepoint"])
def test_what_is_late_while_a_worker_finds_no_room_is_no_failure(savepoint: str) -> None:
    job = ScriptedJob()
    job.do("running")
    assert job.do("savepoint a" if savepoint else "+1000 tick") == [f"trigger 1 on 0{savepoint}"]
    for number in range(1, 2 * TRIES_MAX):
        job.do("full 1")
        assert job.do("+5000 tick") == [
            f"note checkpoint {number} was not acknowledged within 5000 ms; aborted, its output is carried by the next "
            f"one, which waits for room on a worker's disk"
        ]
        assert job.do("flying") == ["none"]
        assert job.do("+5000 room 1") == ["go on", f"trigger {number + 1} on 0{savepoint}"]
