"""Savepoints in the core: asked for, triggered, carried over failures, kept, released; and their alignment."""

from __future__ import annotations

import msgspec
import pytest

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.events import (
    AnnounceFinalized,
    Concluded,
    Deployed,
    Effect,
    End,
    Failed,
    Note,
    Recovered,
    Restart,
    SavepointAsked,
    SourcesFinished,
    Stop,
    Tick,
    Trigger,
)
from exactlyonce.checkpoint.records.encoding import decode, encode
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.restart import NoRestart
from exactlyonce.checkpoint.retention import Ledger, by_storage
from exactlyonce.checkpoint.savepoint_requests import FIRST_MAX, TRIES_MAX, SavepointRequests
from tests.checkpoint.test_coordinator import INTERVAL_MS, TIMEOUT_MS, Job, manifest, plan_of
from tests.checkpoint.test_retention import blocks


def savepoint(checkpoint: int, *requests: str) -> Manifest:
    """One that serves *requests*."""
    return msgspec.structs.replace(manifest(checkpoint), kind="savepoint", requests=requests)


def redeployed(job: Job, checkpoint: int = 0) -> list[Effect]:
    """The workers of the next attempt, which goes on from *checkpoint*, are ready."""
    job(Recovered(manifest(checkpoint)))
    job.grant(9)
    return job(Deployed())


def test_a_request_that_comes_while_workers_start_is_served_once_they_are_ready() -> None:
    """It does not wait for the interval."""
    job = Job()
    assert job(SavepointAsked("a")) == []
    assert redeployed(job) == [Trigger(1, 0, final=False, savepoint=True)]


def test_a_request_is_served_at_once_by_the_next_checkpoint() -> None:
    """It does not wait for the interval, is told to be a savepoint, and the one after it is an ordinary one."""
    job = Job().running()
    assert job(SavepointAsked("a"), 5) == [Trigger(1, 0, final=False, savepoint=True)]
    plan = plan_of(job.ack(1))
    assert plan.requests == ("a",)
    job(Concluded(1, Decided(savepoint(1, "a"))))
    assert job(Tick(), 5 + INTERVAL_MS) == [Trigger(2, 1, final=False)]


def test_the_barrier_of_a_savepoint_never_overtakes() -> None:
    """Where barriers do, before it and behind it, it is aligned all the same."""
    job = Job(unaligned=True, aligned_timeout_ms=7).running()
    job.now_ms = INTERVAL_MS
    assert job(Tick()) == [Trigger(1, 0, final=False, overtakes_after_ms=7)]
    job.ack(1)
    assert job(SavepointAsked("a")) == []
    assert job(Concluded(1, Decided(manifest(1))))[1:] == [Trigger(2, 1, final=False, savepoint=True)]
    job.ack(2)
    job(Concluded(2, Decided(savepoint(2, "a"))))
    job.now_ms += INTERVAL_MS
    assert job(Tick()) == [Trigger(3, 2, final=False, overtakes_after_ms=7)]


def test_a_request_is_served_once() -> None:
    """Whoever asks does so until the log answers: neither in flight nor behind it is it a new request."""
    job = Job().running()
    job(SavepointAsked("a"))
    assert job(SavepointAsked("a")) == []
    job.ack(1)
    job(Concluded(1, Decided(savepoint(1, "a"))))
    assert job(SavepointAsked("a")) == []
    assert job.trigger() == 2
    assert job.core.in_flight[0].requests == ()


def test_requests_that_wait_together_share_a_savepoint() -> None:
    """While an ordinary checkpoint is under way two ask, and the next one serves both."""
    job = Job().running()
    first = job.deciding()
    job(SavepointAsked("a"))
    job(SavepointAsked("b"))
    assert job.conclude(first)[-1] == Trigger(2, 1, final=False, savepoint=True)
    assert job.core.in_flight[0].requests == ("a", "b")


def test_a_request_outlives_what_fails() -> None:
    """A savepoint that is late, or ends with the workers, is tried again, behind a checkpoint that has an interval's
    progress to keep."""
    job = Job().running()
    job(SavepointAsked("a"))
    job(Tick(), TIMEOUT_MS)
    assert redeployed(job) == []
    assert job(Tick(), job.now_ms + INTERVAL_MS) == [Trigger(2, 0, final=False)]
    job.ack(2)
    assert job.conclude(2)[-1] == Trigger(3, 2, final=False, savepoint=True)
    (restart,) = job(Failed("a worker died"))
    assert isinstance(restart, Restart)
    assert redeployed(job, 2) == []
    assert job(Tick(), job.now_ms + INTERVAL_MS) == [Trigger(4, 2, final=False)]
    job.ack(4)
    assert job.conclude(4)[-1] == Trigger(5, 4, final=False, savepoint=True)
    job.ack(5)
    job(Concluded(5, Decided(savepoint(5, "a"))))
    assert job.core.in_flight == []


@pytest.mark.parametrize("tolerable_failed", [0, 2])
@pytest.mark.parametrize("stop", [False, True])
def test_a_savepoint_that_is_never_in_time(stop: bool, tolerable_failed: int) -> None:
    """It is tried some times, behind a checkpoint each, and given up then, whoever still asks for it: a request may
    outlive who has asked."""
    job = Job(tolerable_failed=tolerable_failed).running()
    latest, effects = 0, job(SavepointAsked("a", stop=stop))
    for _ in range(TRIES_MAX):
        assert effects[-1] == Trigger(latest + 1, latest, final=stop, savepoint=True)
        effects = checkpoint_behind_late_savepoint(job, latest)
        latest += 2
    assert job(SavepointAsked("a", stop=stop)) == []
    assert (job.core.stopping, job.core.in_flight) == (False, [])
    assert job(Tick(), job.core.wake_ms) == [Trigger(latest + 1, latest, final=False)]


def checkpoint_behind_late_savepoint(job: Job, latest: int) -> list[Effect]:
    """The savepoint behind *latest* is too late, and an ordinary checkpoint, which is the next one, completes."""
    _, restart = job(Tick(), job.now_ms + TIMEOUT_MS)
    assert isinstance(restart, Restart)
    redeployed(job, latest)
    assert job(Tick(), job.core.wake_ms) == [Trigger(latest + 2, latest, final=False)]
    job.ack(latest + 2)
    return job.conclude(latest + 2)


@pytest.mark.parametrize("stop", [False, True])
def test_whoever_asks_again_and_again_does_not_stop_all_progress(stop: bool) -> None:
    """Behind a savepoint that came to nothing no other is triggered, and nothing is the last checkpoint for one, before
    an ordinary checkpoint is complete, and a pause over: also for who asks meanwhile. Where request after request is
    given up, twice as many go first each time."""
    job = Job(min_pause_ms=300).running()
    job(SavepointAsked("0", stop=stop))
    latest = 0
    for going_first in (1, 1, 2, 4, 8, 16, 32, 64, 64):
        late = job.core.in_flight[-1].checkpoint
        job(Tick(), job.now_ms + TIMEOUT_MS)
        assert job(SavepointAsked(f"{late} while workers are replaced", stop=stop)) == []
        assert redeployed(job, latest) == []
        assert job(SavepointAsked(f"{late} while they run", stop=stop)) == []
        for checkpoint in range(late + 1, late + 1 + going_first):
            assert job(Tick(), job.core.wake_ms) == [Trigger(checkpoint, latest, final=False)]
            assert job(SavepointAsked(f"{late} while a checkpoint is under way", stop=stop)) == []
            job.ack(checkpoint)
            assert job.conclude(checkpoint) == [AnnounceFinalized(checkpoint)]
            latest = checkpoint
        then = job(Tick(), job.now_ms + 300)
        assert then == [Trigger(latest + 1, latest, final=stop, savepoint=True)]


def test_a_savepoint_that_fits_again_is_not_held_up_by_those_that_did_not() -> None:
    """Once one is complete, a single checkpoint goes first behind the next that comes to nothing."""
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


def test_what_was_triggered_before_a_savepoint_came_to_nothing_is_not_what_goes_first() -> None:
    """That it completes does not show that checkpoints still do: the next attempt takes another ordinary one first."""
    job = Job(max_concurrent=2).running()
    first = job.trigger()
    job(SavepointAsked("a"))
    job.ack(first)
    job(Tick(), job.now_ms + TIMEOUT_MS)
    job.conclude(first)
    redeployed(job, first)
    assert job(Tick(), job.core.wake_ms) == [Trigger(3, first, final=False)]


def test_a_stop_by_signal_is_not_held_up() -> None:
    """It is no savepoint: no checkpoint has to go first."""
    job = Job().running()
    job(SavepointAsked("a"))
    job(Tick(), TIMEOUT_MS)
    redeployed(job)
    assert job(Stop()) == [Trigger(2, 0, final=True)]


@pytest.mark.parametrize("stop", [False, True])
def test_a_late_savepoint_is_no_failure_and_the_workers_are_replaced(stop: bool) -> None:
    """Some of them may still write it, or hold channels at its barrier, so that what comes behind it would be late,
    too. The restart strategy is not asked, nothing waits for its delay, and whoever reads is told what to change."""
    job = Job(NoRestart()).running()
    job(SavepointAsked("a", stop=stop))
    late = "checkpoint 1 was not acknowledged within 5000 ms: count is slow"
    hint = "A savepoint holds all state, and overtakes nothing: if it needs longer, raise timeout"
    note = Note(f"{late}; aborted. {hint} (--checkpoint-timeout)")
    assert job(Tick(slow="count is slow"), TIMEOUT_MS) == [note, Restart(1, 0, late)]


def test_a_late_savepoint_waits_for_the_decision_under_way() -> None:
    """The workers are replaced once the checkpoint before it is decided, and go on from that."""
    job = Job(NoRestart(), max_concurrent=2).running()
    first = job.trigger()
    job(SavepointAsked("a"))
    job.ack(first)
    (note,) = job(Tick(), job.now_ms + TIMEOUT_MS)
    assert isinstance(note, Note)
    (announced, restart) = job.conclude(first)
    assert announced == AnnounceFinalized(first)
    assert restart == Restart(1, 0, "checkpoint 2 was not acknowledged within 5000 ms")


@pytest.mark.parametrize("tolerable_failed", [0, 1])
def test_a_late_savepoint_that_is_the_last_checkpoint_of_a_job_that_ends(tolerable_failed: int) -> None:
    """It is a late checkpoint like any other: it counts, and within what is tolerated the workers stay; the next one is
    the last one for the same end, and no savepoint."""
    job = Job(tolerable_failed=tolerable_failed).running()
    first = job.deciding()
    job(SavepointAsked("a"))
    job(SourcesFinished())
    assert job.conclude(first)[-1] == Trigger(2, 1, final=True, savepoint=True)
    note, then = job(Tick(), job.now_ms + TIMEOUT_MS)
    assert isinstance(note, Note)
    if tolerable_failed:
        assert then == Trigger(3, 1, final=True)
    else:
        assert then == Restart(1, 70, "checkpoint 2 was not acknowledged within 5000 ms")


def test_what_an_older_incarnation_has_decided_is_served() -> None:
    """A savepoint that was decided before the coordinator died is not taken again."""
    job = Job()
    job(Recovered(savepoint(7, "a")))
    job.grant(9)
    job(Deployed())
    assert job(SavepointAsked("a")) == []


def test_a_stop_that_an_older_incarnation_did_not_live_to_see() -> None:
    """Its savepoint was decided; who waits for the stop asks this one, which ends with a last checkpoint."""
    job = Job()
    job(Recovered(savepoint(7, "a")))
    job.grant(9)
    job(Deployed())
    assert job(SavepointAsked("a", stop=True)) == [Trigger(8, 7, final=True)]
    assert job(SavepointAsked("a", stop=True)) == []


def test_a_stop_behind_a_savepoint() -> None:
    """It is the last checkpoint: it comes alone, and the job ends with it."""
    job = Job(max_concurrent=3).running()
    first = job.trigger()
    assert job(SavepointAsked("a", stop=True)) == []
    job.ack(first)
    assert job.conclude(first)[-1] == Trigger(2, 1, final=True, savepoint=True)
    job.ack(2)
    assert isinstance(job(Concluded(2, Decided(savepoint(2, "a"))))[-1], End)


def test_a_stop_behind_a_savepoint_that_is_not_known_to_be_committed() -> None:
    """Nothing is read behind it all the same: its commit is finished without workers, and the job ends with it."""
    job = Job().running()
    job(SavepointAsked("a", stop=True))
    job.ack(1)
    (restart,) = job(Concluded(1, Decided(savepoint(1, "a"), unsettled={"out/0/1": "unknown"})))
    assert isinstance(restart, Restart)
    assert job(Recovered(savepoint(1, "a"))) == [End(savepoint(1, "a"), None)]


def test_a_stop_whose_savepoint_fails_is_asked_again() -> None:
    """The job does not end without the savepoint: it restarts, and takes it behind another checkpoint."""
    job = Job().running()
    job(SavepointAsked("a", stop=True))
    (restart,) = job(Failed("a worker died"))
    assert isinstance(restart, Restart)
    redeployed(job)
    assert job(Tick(), job.core.wake_ms) == [Trigger(2, 0, final=False)]
    job.ack(2)
    assert job.conclude(2)[-1] == Trigger(3, 2, final=True, savepoint=True)


def test_the_last_checkpoint_serves_requests_too() -> None:
    """Who stops the run meanwhile gets a last checkpoint that is the savepoint."""
    job = Job().running()
    first = job.deciding()
    job(SavepointAsked("a"))
    job(Stop())
    assert job.conclude(first)[-1] == Trigger(2, 1, final=True, savepoint=True)


@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_savepoints_barrier_holds_back_in_every_mode(exactly_once: bool) -> None:
    """Also at least once an input waits behind it; before and after it is as the mode says."""
    alignment = Alignment("ab", exactly_once=exactly_once)
    assert not alignment.barrier("a", 1, aligned=True)
    assert alignment.is_held("a")
    assert alignment.barrier("b", 1, aligned=True)
    assert not alignment.is_held("a")
    alignment.barrier("a", 2)
    assert alignment.is_held("a") is exactly_once


def test_savepoints_do_not_count_among_the_retained() -> None:
    """However many there are, as many ordinary checkpoints are kept as the setting says; and the newest of all."""
    ledger = Ledger(1)
    ledger.completed(1, by_storage(blocks(1)))
    for checkpoint in (2, 3):
        ledger.completed(checkpoint, by_storage(blocks(checkpoint)), keep=True)
        assert ledger.expire() == ((), ())
    ledger.completed(4, by_storage(blocks(4)))
    assert ledger.expire() == ((1,), blocks(1))
    assert ledger.retained == [2, 3, 4]


def test_a_savepoint_that_is_released_goes_when_it_may() -> None:
    """Not while it is the newest or pinned; and what later ones stand on stays."""
    ledger = Ledger(2)
    ledger.completed(1, by_storage(blocks(1, 2)), keep=True)
    ledger.release(1)
    assert ledger.expire() == ((), ())
    ledger.completed(2, by_storage(blocks(2, 3)))
    assert ledger.expire(pinned=[1]) == ((), ())
    assert ledger.expire() == ((1,), blocks(1))


def test_requests_are_in_the_manifest() -> None:
    """What it serves is written and read."""
    assert decode(encode(savepoint(3, "a", "b")), Manifest) == savepoint(3, "a", "b")
