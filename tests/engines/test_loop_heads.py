"""The head of a loop: whose turn it is, and when nothing new is taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exactlyonce.engines.batch_codec import BatchCodec, Coordinates
from exactlyonce.engines.in_flight import InFlightFrame
from exactlyonce.engines.local import task
from exactlyonce.engines.local.channels import BarrierFrame, LocalChannel
from exactlyonce.engines.local.inputs import ChannelInput, RestoredChannel, RestoredInput
from exactlyonce.engines.local.loops import FeedbackInput, LoopChannel
from exactlyonce.engines.local.pace import BATCH_RECORDS_MAX
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.operators import Batch
from exactlyonce.pipeline.graph import Kind, Node

CODEC = BatchCodec(str)
ORIGIN = Coordinates("in", 0, 0)


class Head:
    """A subtask with a channel of what is new, and a loop that nobody feeds but the test."""

    def __init__(self, pause_ms: int = 0, restored: Sequence[str] = ()) -> None:
        """*restored*: what went round at the restored checkpoint, each a frame of its own."""
        self.taken: list[str] = []
        self.new = LocalChannel()
        self.loop = LoopChannel(Node("loop", Kind.FEEDBACK, pause_ms=pause_ms), Node("end", Kind.MAP), self.now_s)
        self.subtask = Subtask(
            name="head",
            index=0,
            inputs=[
                ChannelInput("new", self.new, CODEC, self.push),
                FeedbackInput(">loop:0", self.loop, CODEC, self.push),
            ],
            tables=[],
            sinks=[],
            outputs=[],
            fed=[self.loop],
            blocks=cast(Any, None),  # what writes the snapshots, which nobody advances here
            names=cast(Any, None),
            acknowledge=lambda message: None,
            order=None,
            monotonic_s=self.now_s,
            restored=self.restored(restored),
        )

    def restored(self, records: Sequence[str]) -> RestoredInput | None:
        if not records:
            return None
        frames = [CODEC.encode(Batch([record], [ORIGIN], None)) for record in records]
        edges = {">loop": RestoredChannel(CODEC, self.push)}
        return RestoredInput(deque(InFlightFrame(">loop:3", each) for each in frames), edges, cautious=True)

    def now_s(self) -> float:
        return 0.0

    def push(self, batch: Batch) -> None:
        self.taken += batch.records

    def send(self, channel: LocalChannel, *records: str) -> None:
        """Each as a frame of its own."""
        for record in records:
            channel.send(CODEC.encode(Batch([record], [ORIGIN], None)), 1)

    def steps(self) -> list[str]:
        self.taken.clear()
        while self.subtask.step():
            pass
        return list(self.taken)


def test_what_goes_round_is_taken_between_any_two_of_what_is_new() -> None:
    head = Head()
    head.send(head.new, "n1", "n2", "n3")
    head.send(head.loop, "r1", "r2")
    assert head.steps() == ["r1", "n1", "r2", "n2", "n3"]


def test_nothing_new_is_taken_while_too_much_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "ROUND_RECORDS_MAX", 2)
    head = Head(pause_ms=500)
    head.send(head.loop, "r1", "r2")
    head.send(head.new, "n1")
    assert head.steps() == ["n1"]
    head.send(head.loop, "r3")
    head.send(head.new, "n2")
    assert head.subtask.going_round == 3
    assert head.steps() == []
    head.loop.took(1, 1)
    assert head.steps() == ["n2"]


def test_what_lies_before_a_barrier_is_taken_however_much_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "ROUND_RECORDS_MAX", 0)
    head = Head(pause_ms=500)
    head.send(head.loop, "r1")
    head.send(head.new, "n1")
    assert head.steps() == []
    frame = BarrierFrame(1, 0)
    head.subtask.triggered(frame, None)
    head.new.send_barrier(frame)
    head.send(head.new, "n2")
    assert head.steps() == ["n1"]
    assert head.subtask.alignment.checkpoint_latest == 1
    assert head.subtask.busy


def test_nothing_comes_round_behind_the_last_barrier() -> None:
    head = Head()
    frame = BarrierFrame(1, 0)
    head.subtask.triggered(frame, None, final=True)
    head.send(head.loop, "r1")
    assert head.steps() == ["r1"]
    head.send(head.loop, "r2")
    head.new.send_barrier(frame)
    assert head.steps() == []
    assert head.subtask.busy


def test_what_went_round_at_a_restart_comes_before_what_comes_round() -> None:
    head = Head(restored=["o1", "o2", "o3"])
    head.send(head.new, "n1", "n2")
    head.send(head.loop, "r1", "r2")
    assert head.subtask.going_round == 5
    assert head.steps() == ["o1", "n1", "o2", "n2", "o3", "r1", "r2"]


def test_no_barrier_waits_for_what_went_round_at_a_restart() -> None:
    """Else a checkpoint could come too late each time, and what was tried until then be tried again each time."""
    head = Head(restored=["o1", "o2", "o3"])
    frame = BarrierFrame(1, 0)
    head.subtask.triggered(frame, None, final=True)
    head.send(head.new, "n1")
    head.new.send_barrier(frame)
    assert head.steps() == ["o1", "n1", "o2"]
    assert head.subtask.alignment.checkpoint_latest == 1
    assert head.subtask.restored is not None
    assert [each.channel for each in head.subtask.restored.left()] == [">loop:3"]
    assert head.subtask.restored.slices.pace.most == BATCH_RECORDS_MAX, "it may be handed out faster now"


def test_what_was_restored_waits_while_a_disk_is_full() -> None:
    """As sources do: only what is on its way already is taken, and barriers."""
    head, table = Head(restored=["o1", "o2"]), SimpleNamespace(full="no room")
    head.subtask.tables = cast(Any, [table])
    head.send(head.new, "n1")
    assert head.steps() == ["n1"]
    table.full = ""
    assert head.steps() == ["o1", "o2"]
