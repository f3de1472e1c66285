"""The channel of a back edge: pauses, bounds, captures; and the head of a loop: whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exactlyonce.engines.local import channels
from exactlyonce.engines.local.channels import LocalChannel, LoopChannel
from exactlyonce.engines.local.inputs import BATCH_RECORDS_MAX, ChannelInput, FeedbackInput, Outlet, RestoredInput
from exactlyonce.engines.local.task import Snapshots, Subtask
from exactlyonce.engines.runtime.assembler import RestoredEdge, TaskOperators
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.watermarks import Barrier
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.graph import Kind, Node


class Now:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def channel(now: Now, pause_ms: int = 0) -> LoopChannel:
    return LoopChannel(
        Node("retry", Kind.FEEDBACK, pause_ms=pause_ms), Node("try", Kind.MAP, location="here.py:7"), now
    )


def test_what_rests_comes_when_its_pause_is_over() -> None:
    now = Now()
    loop = channel(now, pause_ms=500)
    loop.send(b"a", 1)
    loop.send_signal(Barrier(1, 0))
    assert not loop.ready
    assert loop.receive() is None
    now.now_s += 0.5
    assert loop.ready
    assert loop.receive() == b"a"
    assert loop.receive() == Barrier(1, 0)
    assert loop.receive() is None


def test_a_loop_that_breeds_ends_the_job_and_names_who_feeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LOOP_RECORDS_MAX", 100)
    loop = channel(Now())
    loop.send(b"a", 100)
    loop.took(100, 1)
    assert loop.waiting == 0
    loop.send(b"a", 100)
    with pytest.raises(GraphError, match=r"'try' \(here.py:7\) feeds more and more records to loop 'retry'"):
        loop.send(b"a", 1)
    monkeypatch.setattr(channels, "LOOP_BYTES_MAX", 10)
    with pytest.raises(GraphError, match="feeds more and more"):
        channel(Now()).send(bytes(11), 1)


def test_what_is_taken_over_from_several_subtasks_does_not_breed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It feeds the loop before anything of it is taken, so both wait; more is too much all the same."""
    monkeypatch.setattr(channels, "LOOP_RECORDS_MAX", 100)
    monkeypatch.setattr(channels, "ROUND_RECORDS_MAX", 20)
    monkeypatch.setattr(channels, "LOOP_BYTES_MAX", 10)
    monkeypatch.setattr(channels, "ROUND_BYTES_MAX", 5)
    loop = channel(Now())
    loop.takes_over(200, 10)
    for _ in range(11):
        loop.send(b"a", 20)
    with pytest.raises(GraphError, match=r"220 are allowed"):
        loop.send(b"a", 1)
    loop = channel(Now())
    loop.takes_over(200, 10)
    with pytest.raises(GraphError, match="feeds more and more"):
        loop.send(bytes(16), 1)


def test_the_bounds_are_those_that_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    for said in (
        f"{channels.ROUND_RECORDS_MAX:,} records",
        f"{channels.LOOP_RECORDS_MAX:,} wait",
        f"{channels.LOOP_BYTES_MAX >> 20} MB",
    ):
        assert said in page


CODEC = BatchCodec(str)
ORIGIN = Coordinates("in", 0, 0)


class Head:
    """A subtask with a channel of what is new, and a loop that nobody feeds but the test."""

    def __init__(self, pause_ms: int = 0, restored: Sequence[str] = ()) -> None:
        """*restored*: what went round at the restored checkpoint, each a frame of its own."""
        self.taken: list[str] = []
        self.new = LocalChannel()
        self.loop = LoopChannel(Node("loop", Kind.FEEDBACK, pause_ms=pause_ms), Node("end", Kind.MAP), self.now_s)
        operators, blocks = TaskOperators("head", 0), cast(Any, None)  # nobody advances the snapshots here
        self.subtask = Subtask(
            operators=operators,
            inputs=[
                ChannelInput("new", self.new, CODEC, self.push),
                FeedbackInput(">loop:0", self.loop, CODEC, self.push),
            ],
            outputs=[],
            fed=[self.loop],
            snapshots=Snapshots(operators, blocks, lambda message: None, self.now_s),
            monotonic_s=self.now_s,
            processing_s=self.now_s,
            restored=self.restored(restored),
        )

    def restored(self, records: Sequence[str]) -> RestoredInput | None:
        if not records:
            return None
        frames = [CODEC.encode(Batch([record], [ORIGIN], None)) for record in records]
        edges = {">loop": RestoredEdge(CODEC, self.push)}
        return RestoredInput(deque(InFlightFrame(">loop:3", each) for each in frames), edges, cautious=True)

    def now_s(self) -> float:
        return 0.0

    def push(self, batch: Batch) -> None:
        self.taken += batch.records

    def send(self, channel: LocalChannel, *records: str) -> None:
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


def test_a_barrier_needs_no_room() -> None:
    """Not even one behind a frame that is decoded and has to wait; the frame still comes first."""
    head = Head()
    behind = LocalChannel()
    head.subtask._outlets = [Outlet(behind)]
    behind.send(b"", behind.room)
    head.send(head.new, "n1")
    assert head.steps() == []
    head.new.send_signal(Barrier(1, 0))
    assert head.steps() == []
    behind.took(behind.records, 8)
    head.subtask.outputs = [behind]
    assert head.steps() == ["n1"]
    behind.send(b"", behind.room)
    head.new.send_signal(Barrier(2, 1))
    head.steps()
    assert head.subtask.alignment.checkpoint_latest == 2


def test_what_went_round_at_a_restart_comes_before_what_comes_round() -> None:
    head = Head(restored=["o1", "o2", "o3"])
    head.send(head.new, "n1", "n2")
    head.send(head.loop, "r1", "r2")
    assert head.subtask.going_round == 5
    assert head.steps() == ["o1", "n1", "o2", "n2", "o3", "r1", "r2"]


def test_no_barrier_waits_for_what_went_round_at_a_restart() -> None:
    """Otherwise a checkpoint could be late each time, and the same retries be made after each restart."""
    head = Head(restored=["o1", "o2", "o3"])
    frame = Barrier(1, 0)
    head.subtask.triggered(frame, None, final=True)
    head.send(head.new, "n1")
    head.new.send_signal(frame)
    assert head.steps() == ["o1", "n1", "o2"]
    assert head.subtask.alignment.checkpoint_latest == 1
    assert head.subtask.restored is not None
    assert [each.channel for each in head.subtask.restored.left()] == [">loop:3"]
    assert head.subtask.restored.slices.pace.most == BATCH_RECORDS_MAX, "it may be handed out faster now"


def test_what_was_restored_waits_while_a_disk_is_full() -> None:
    head, table = Head(restored=["o1", "o2"]), SimpleNamespace(full="no room")
    head.subtask.operators.tables = cast(Any, [table])
    head.send(head.new, "n1")
    assert head.steps() == ["n1"]
    table.full = ""
    assert head.steps() == ["o1", "o2"]
