"""Checkpoints that a subtask declines, and the pause while a worker's state finds no room."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.checkpoint.coordinator import DECLINED_NOTE_INTERVAL_MS, Coordinator
from exactlyonce.checkpoint.events import (
    Ack,
    Acknowledged,
    Decide,
    Deployed,
    Effect,
    End,
    Failed,
    Hold,
    Note,
    ProducerGranted,
    Recovered,
    Restart,
    Room,
    SavepointAsked,
    Stop,
    Tick,
    Trigger,
)
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.restart import FixedDelay, NoRestart, RestartStrategy
from exactlyonce.checkpoint.savepoint_requests import TRIES_MAX
from exactlyonce.checkpoint.settings import CheckpointSettings

FULL = "The disk is full."
BEGINNING = Manifest(
    pipeline="p", checkpoint=0, incarnation=1, attempt=0, kind="checkpoint", base=0, previous=0,
    triggered_at_ms=0, completed_at_ms=0, fingerprint="f", max_parallelism=128, parallelism=2, block_partitions=4,
    written_bytes=0, block_end_offsets=(), offsets=(), operators=(), order_logs=(), sinks=(), committables=(),
)  # fmt: skip


class Job:
    """A coordinator of two subtasks and a sink, which tolerates no failure."""

    def __init__(self, restart: RestartStrategy | None = None) -> None:
        subtasks, sinks = {("task", 0), ("task", 1)}, {("out", 0)}
        self.core = Coordinator(CheckpointSettings(), restart or FixedDelay(delay_ms=70), subtasks, sinks)
        self.now_ms = 0

    def __call__(self, event: Any) -> list[Effect]:
        return self.core.handle(event, self.now_ms)

    def start(self) -> None:
        """Its workers run."""
        self(Recovered(BEGINNING))
        for _ in range(9):
            self(ProducerGranted("out", 0))
        self(Deployed())

    def trigger(self) -> int:
        """The next checkpoint."""
        self.now_ms = max(self.now_ms, self.core.wake_ms)
        (trigger,) = [each for each in self(Tick()) if isinstance(each, Trigger)]
        return trigger.checkpoint

    def ack(self, checkpoint: int, subtask: int, **more: Any) -> list[Effect]:
        """The acknowledgement of one subtask."""
        return self(Acknowledged(Ack("task", subtask, checkpoint, **more)))


@pytest.fixture
def job() -> Job:
    """Running, without a checkpoint."""
    job = Job()
    job.start()
    return job


def precommit(checkpoint: int, subtask: int) -> Precommit:
    """What a sink has flushed."""
    return Precommit(
        transactional_id=f"id-{checkpoint}-{subtask}", producer_id=7, epoch=0, sink="out", subtask=0,
        checkpoint=checkpoint, records=3, open_ms=0,
    )  # fmt: skip


def test_a_declined_checkpoint_is_aborted_without_a_failure(job: Job) -> None:
    """However often one is declined the job goes on, and the next one is relative to the same base; what sinks have
    flushed, before the subtask declined or with it, is carried."""
    job.trigger()
    assert job.ack(1, 0, precommits=(precommit(1, 0),)) == []
    (note,) = job.ack(1, 1, precommits=(precommit(1, 1),), declined=FULL)
    assert note == Note(f"checkpoint 1 was declined, and is aborted; nothing is lost. {FULL}")
    for checkpoint in (2, 3):
        assert job.trigger() == checkpoint
        job.ack(checkpoint, 1, declined=FULL)
        assert job.ack(checkpoint, 0) == [], "nobody waits for the others any more"
    assert job.trigger() == 4
    job.ack(4, 0)
    (decide,) = job.ack(4, 1)
    assert isinstance(decide, Decide)
    assert (decide.plan.checkpoint, decide.plan.base) == (4, 0)
    assert [each.transactional_id for each in decide.plan.precommits] == ["id-1-0", "id-1-1"]


@pytest.mark.parametrize("stopped", [False, True])
def test_more_is_declined_than_a_sink_has_transactional_ids_for(stopped: bool) -> None:
    """Where a disk fills again and again. What is carried keeps its ids until a checkpoint is complete, so that none
    can be triggered any more: the workers are replaced at once, which is no failure, and begin anew with all ids; but
    not before there is room."""
    job = Job(NoRestart())
    job(Recovered(BEGINNING))
    job(ProducerGranted("out", 0))
    job(ProducerGranted("out", 0))  # a writer has two, and another one whenever it has used one, while it has ids
    job(Deployed())
    for checkpoint in range(1, job.core.settings.slots):
        assert job.trigger() == checkpoint
        job(Room(1, found=False))
        job.ack(checkpoint, 0, precommits=(precommit(checkpoint, 0),))
        job.ack(checkpoint, 1, declined=FULL)
        if checkpoint <= job.core.settings.slots - 2:
            job(ProducerGranted("out", 0))
            job(Room(1, found=True))
    assert job(Tick()) == [], "there is no room"
    job(Room(1, found=True))
    said = job(Stop()) if stopped else []
    if stopped:
        assert said == [Trigger(4, 0, final=True)], "behind the last one nothing is written: one producer will do"
        return
    (restart,) = job(Tick())
    assert restart == Restart(1, 0, "no producer was ready behind so many declined checkpoints at sink out subtask 0")
    job.start()
    assert job.trigger() == 4


def test_it_is_said_now_and_then(job: Job) -> None:
    """While checkpoint after checkpoint is declined, it is said once in ten seconds."""
    notes = 0
    while job.now_ms < 3 * DECLINED_NOTE_INTERVAL_MS:
        notes += len(job.ack(job.trigger(), 0, declined=FULL))
    assert notes == 3


def test_sources_pause_while_a_worker_finds_no_room(job: Job) -> None:
    """As long as any worker's disk is full nothing but barriers is read; new workers begin without it."""
    assert job(Room(1, found=True)) == []
    assert job(Room(1, found=False)) == [Hold(True)]
    assert job(Room(0, found=False)) == job(Room(1, found=True)) == []
    assert job(Room(0, found=True)) == [Hold(False)]
    assert job(Room(0, found=False)) == [Hold(True)]
    assert isinstance(job(Failed("a worker died"))[0], Restart)
    job.start()
    assert job(Room(0, found=True)) == []


def test_nothing_is_triggered_while_a_worker_finds_no_room(job: Job) -> None:
    """It would be declined, however often: the others would write what they hold again each time, without end. That it
    takes long is no failure; once there is room it comes at once."""
    job.trigger()
    job(Room(1, found=False))
    job.ack(1, 1, declined=FULL)
    for _ in range(100):
        job.now_ms += 60_000
        assert job(Tick()) == []
    (restart,) = [each for each in job(Tick(hanging="worker 0 hangs")) if not isinstance(each, Note)]
    assert isinstance(restart, Restart), "but what hangs is"
    job.start()
    job.now_ms += 60_000
    job(Room(0, found=False))
    assert Trigger(2, 0, final=False) in job(Room(0, found=True))


def begin(job: Job, *, savepoint: bool) -> None:
    """A checkpoint is under way."""
    if savepoint:
        job(SavepointAsked("a"))
    else:
        job.trigger()


@pytest.mark.parametrize("savepoint", [False, True])
def test_what_is_late_while_a_worker_finds_no_room_is_no_failure(job: Job, savepoint: bool) -> None:
    """It is aborted, and the job waits for room; a savepoint is taken then, at once, and has lost none of its tries."""
    begin(job, savepoint=savepoint)
    for number in range(1, 2 * TRIES_MAX):
        job(Room(1, found=False))
        job.now_ms += 60_000
        (note,) = job(Tick())
        assert note == Note(
            f"checkpoint {number} was not acknowledged within 60000 ms; aborted, its output is carried by the next "
            f"one, which waits for room on a worker's disk"
        )
        assert job.core.in_flight == []
        job.now_ms += 60_000
        assert Trigger(number + 1, 0, final=False, savepoint=savepoint) in job(Room(1, found=True))


@pytest.mark.parametrize("savepoint", [False, True])
def test_what_hangs_is_a_failure_though_a_disk_is_full(job: Job, savepoint: bool) -> None:
    """There is no room, but that is not why the checkpoint is late."""
    begin(job, savepoint=savepoint)
    job(Room(1, found=False))
    job.now_ms += 60_000
    _, restart = job(Tick(hanging="worker 0 hangs"))
    assert isinstance(restart, Restart)


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("stopped_first", [False, True])
def test_a_stop_waits_for_no_room(job: Job, under_way: bool, stopped_first: bool) -> None:
    """The run ends with its newest checkpoint, and takes no last one: room may never come."""
    if under_way or stopped_first:
        job.trigger()
    for event in (Stop(), Room(1, found=False)) if stopped_first else (Room(1, found=False), Stop()):
        said = job(event)
    note, restart = said[-2:]
    assert isinstance(note, Note)
    assert "the run ends with its newest checkpoint" in note.text
    assert isinstance(restart, Restart)
    assert restart.reason == ""
    assert job(Recovered(BEGINNING)) == [End(BEGINNING, None)]
