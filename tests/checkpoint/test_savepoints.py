"""Savepoints in the core: asked for, triggered, carried over failures, kept, released; and their alignment."""

from __future__ import annotations

import pytest
from scripted_job import TIMEOUT_MS, ScriptedJob, manifest, play, scripts

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.coordinator import FIRST_MAX, TRIES_MAX, SavepointRequests
from exactlyonce.checkpoint.kept_blocks import BlockUse, by_storage
from exactlyonce.checkpoint.records.encoding import decode, encode
from exactlyonce.checkpoint.records.manifest import Manifest
from tests.checkpoint.test_retention import blocks


@scripts("""
# A request that comes while workers start is served once they are ready: it does not wait for the interval.
savepoint a
running -> trigger 1 on 0 savepoint

# A request is served at once, and the checkpoint after it is an ordinary one.
running
5 savepoint a -> trigger 1 on 0 savepoint
ack 1 -> decide 1 on 0 for a
finalized 1 -> announce 1
1005 tick -> trigger 2 on 1

# The barrier of a savepoint never overtakes: where others do, before it and after it.
job unaligned aligned_timeout_ms=7
running
1000 tick -> trigger 1 on 0 overtakes after 7
ack 1 -> decide 1 on 0
savepoint a
finalized 1 -> announce 1 & trigger 2 on 1 savepoint
done 2 -> announce 2
2000 tick -> trigger 3 on 2 overtakes after 7

# A request is served once: who asks goes on until the log answers.
running
savepoint a -> trigger 1 on 0 savepoint
savepoint a
ack 1 -> decide 1 on 0 for a
finalized 1 -> announce 1
savepoint a
1000 tick -> trigger 2 on 1

# Requests that wait together share a savepoint.
deciding
savepoint a
savepoint b
finalized 1 -> announce 1 & trigger 2 on 1 savepoint
ack 2 -> decide 2 on 1 for a b

# A request outlives what fails: it is served after a checkpoint that has an interval's progress to keep.
running
savepoint a -> trigger 1 on 0 savepoint
5000 tick -> note checkpoint 1 was not acknowledged ... & restart 1 after 0: checkpoint 1 was not ...
running
+1000 tick -> trigger 2 on 0
done 2 -> announce 2 & trigger 3 on 2 savepoint
failed a worker died -> restart 2 after 70: a worker died
running from 2
+1000 tick -> trigger 4 on 2
done 4 -> announce 4 & trigger 5 on 4 savepoint
done 5 -> announce 5

# What was triggered before a savepoint came to nothing is not what goes first: that it completes does not show that
# checkpoints still do.
job max_concurrent=2
triggered
savepoint a -> trigger 2 on 0 savepoint
ack 1 -> decide 1 on 0
+5000 tick -> note checkpoint 2 was ...
finalized 1 -> announce 1 & restart 1 after 0: checkpoint 2 was ...
running from 1
+1000 tick -> trigger 3 on 1

# A stop by signal is not held up: it is no savepoint, and no checkpoint goes first.
running
savepoint a -> trigger 1 on 0 savepoint
5000 tick -> note checkpoint 1 was ... & restart 1 after 0: checkpoint 1 was ...
running
stop -> trigger 2 on 0 final

# A late savepoint is no failure, and the workers are replaced at once: they may still write it, or hold channels.
job restart=none
running
savepoint a -> trigger 1 on 0 savepoint
5000 tick | count is slow
-> note checkpoint 1 ... count is slow; aborted. A... raise checkpoint_timeout (--checkpoint-timeout)
-> restart 1 after 0: checkpoint 1 was not acknowledged within 5000 ms: count is slow

# A late savepoint with a stop is no failure either.
job restart=none
running
savepoint a stop -> trigger 1 on 0 final savepoint
5000 tick -> note checkpoint 1 was ...; aborted. A savepoint ... & restart 1 after 0: checkpoint 1 was ...

# A late savepoint waits for the decision under way: workers go on from what is decided.
job restart=none max_concurrent=2
triggered
savepoint a -> trigger 2 on 0 savepoint
ack 1 -> decide 1 on 0
+5000 tick -> note checkpoint 2 was not acknowledged ...
finalized 1 -> announce 1 & restart 1 after 0: checkpoint 2 was not acknowledged within 5000 ms

# A late savepoint that is the last checkpoint of a job that ends is late like any other.
deciding
savepoint a
finished
finalized 1 -> announce 1 & trigger 2 on 1 final savepoint
+5000 tick -> note checkpoint 2 was ... & restart 1 after 70: checkpoint 2 was not acknowledged within 5000 ms

# A late savepoint at the end that is tolerated leaves the workers: the next checkpoint is for the same end.
job tolerable_failed=1
deciding
savepoint a
finished
finalized 1 -> announce 1 & trigger 2 on 1 final savepoint
+5000 tick -> note checkpoint 2 was ... & trigger 3 on 1 final

# What an older incarnation has decided is served.
recovered 7 serving a -> deploy 0 from 7
deployed
savepoint a

# A stop that an older incarnation did not live to see ends this one: its savepoint was decided.
recovered 7 serving a -> deploy 0 from 7
deployed
savepoint a stop -> trigger 8 on 7 final
savepoint a stop

# A stop with a savepoint is the last checkpoint: it comes alone, and the job ends with it.
job max_concurrent=3
triggered
savepoint a stop
done 1 -> announce 1 & trigger 2 on 1 final savepoint
done 2 -> announce 2 & end at 2

# A stop whose savepoint is not known to be committed ends with it: the commit is finished without workers.
running
savepoint a stop -> trigger 1 on 0 final savepoint
ack 1 -> decide 1 on 0 final for a
unsettled 1 -> restart 1 after 70: ...
recovered 1 -> end at 1

# A stop whose savepoint fails does not end without it.
running
savepoint a stop -> trigger 1 on 0 final savepoint
failed a worker died -> restart 1 after 70: a worker died
running
+1000 tick -> trigger 2 on 0
done 2 -> announce 2 & trigger 3 on 2 final savepoint

# The last checkpoint serves requests too: who stops the run meanwhile gets one that is the savepoint.
deciding
savepoint a
stop
finalized 1 -> announce 1 & trigger 2 on 1 final savepoint
""")
def test_a_script(script: str) -> None:
    play(script)


@pytest.mark.parametrize("tolerable_failed", [0, 2])
@pytest.mark.parametrize("stop", ["", " stop"])
def test_a_savepoint_that_is_never_in_time(stop: str, tolerable_failed: int) -> None:
    job, latest = ScriptedJob(tolerable_failed=tolerable_failed), 0
    job.do("running")
    effects = job.do(f"savepoint a{stop}")
    for _ in range(TRIES_MAX):
        assert effects[-1] == f"trigger {latest + 1} on {latest}{' final' if stop else ''} savepoint"
        assert job.do(f"+{TIMEOUT_MS} tick")[1].startswith("restart")
        job.do(f"running from {latest}")
        assert job.do("+1000 tick") == [f"trigger {latest + 2} on {latest}"]
        effects = job.do(f"done {latest + 2}")
        latest += 2
    assert job.do(f"savepoint a{stop}") == []
    assert job.do("stopping") == ["no"]
    assert job.do("flying") == ["none"]
    assert job.do(f"{job.core.wake_ms} tick") == [f"trigger {latest + 1} on {latest}"]


@pytest.mark.parametrize("stop", ["", " stop"])
def test_whoever_asks_again_and_again_does_not_stop_all_progress(stop: str) -> None:
    """After each request that is given up, twice as many ordinary checkpoints go first."""
    job, latest = ScriptedJob(min_pause_ms=300), 0
    job.do("running")
    job.do(f"savepoint first{stop}")
    for going_first in (1, 1, 2, 4, 8, 16, 32, 64, 64):
        late = job.core.attempt.in_flight[-1].checkpoint
        job.do(f"+{TIMEOUT_MS} tick")
        assert job.do(f"savepoint {late}-while-workers-are-replaced{stop}") == []
        assert job.do(f"running from {latest}") == []
        assert job.do(f"savepoint {late}-while-they-run{stop}") == []
        for checkpoint in range(late + 1, late + 1 + going_first):
            assert job.do(f"{job.core.wake_ms} tick") == [f"trigger {checkpoint} on {latest}"]
            assert job.do(f"savepoint {late}-while-a-checkpoint-is-under-way{stop}") == []
            assert job.do(f"done {checkpoint}") == [f"announce {checkpoint}"]
            latest = checkpoint
        final = " final" if stop else ""
        assert job.do("+300 tick") == [f"trigger {latest + 1} on {latest}{final} savepoint"]


def test_a_savepoint_that_fits_again_is_not_held_up_by_those_that_did_not() -> None:
    requests = SavepointRequests()
    for number in range(4 * TRIES_MAX):
        requests.ask(f"{number // TRIES_MAX}", stop=False)
        requests.fail([f"{number // TRIES_MAX}"], 100 * number)
    requests.ask("fits", stop=False)
    assert requests.due(100 * number + FIRST_MAX // 4 - 2, ()) == ()
    assert requests.due(100 * number + FIRST_MAX // 4 - 1, ()) == ("fits",)
    requests.serve(["fits"])
    requests.ask("again", stop=False)
    requests.fail(["again"], 9_000)
    assert requests.due(9_000, ()) == ("again",)


@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_savepoints_barrier_holds_back_in_every_mode(exactly_once: bool) -> None:
    alignment = Alignment("ab", exactly_once=exactly_once)
    assert not alignment.barrier("a", 1, aligned=True)
    assert alignment.is_held("a")
    assert alignment.barrier("b", 1, aligned=True)
    assert not alignment.is_held("a")
    alignment.barrier("a", 2)
    assert alignment.is_held("a") is exactly_once


def test_savepoints_do_not_count_among_the_retained() -> None:
    ledger = BlockUse(1)
    ledger.completed(1, by_storage(blocks(1)))
    for checkpoint in (2, 3):
        ledger.completed(checkpoint, by_storage(blocks(checkpoint)), keep=True)
        assert ledger.expire() == ((), ())
    ledger.completed(4, by_storage(blocks(4)))
    assert ledger.expire() == ((1,), blocks(1))
    assert ledger.retained == [2, 3, 4]


def test_a_savepoint_that_is_released_goes_when_it_may() -> None:
    ledger = BlockUse(2)
    ledger.completed(1, by_storage(blocks(1, 2)), keep=True)
    ledger.release(1)
    assert ledger.expire() == ((), ())
    ledger.completed(2, by_storage(blocks(2, 3)))
    assert ledger.expire(pinned=[1]) == ((), ())
    assert ledger.expire() == ((1,), blocks(1))


def test_requests_are_in_the_manifest() -> None:
    savepoint = manifest(3, kind="savepoint", requests=("a", "b"))
    assert decode(encode(savepoint), Manifest) == savepoint
