"""The channel of a back edge: pauses, bounds, and what a capture has of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactlyonce.engines.local import loops
from exactlyonce.engines.local.channels import BarrierFrame
from exactlyonce.engines.local.loops import LoopChannel
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
    loop.send_barrier(BarrierFrame(1, 0))
    assert not loop.ready
    assert loop.receive() is None
    now.now_s += 0.5
    assert loop.ready
    assert loop.receive() == b"a"
    assert loop.receive() == BarrierFrame(1, 0)
    assert loop.receive() is None


def test_a_capture_has_what_rests_and_does_not_wait_for_it() -> None:
    loop = channel(Now(), pause_ms=500)
    loop.send(b"a", 1)
    capture = loop.capture(1)
    loop.send(b"b", 1)
    assert not capture.whole
    loop.send_barrier(BarrierFrame(1, 0))
    loop.send(b"c", 1)
    assert capture.whole
    assert capture.frames == [b"a", b"b"]


def test_a_loop_that_breeds_ends_the_job_and_names_who_feeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LOOP_RECORDS_MAX", 100)
    loop = channel(Now())
    loop.send(b"a", 100)
    loop.took(100, 1)
    assert loop.waiting == 0
    loop.send(b"a", 100)
    with pytest.raises(GraphError, match=r"'try' \(here.py:7\) feeds more and more records to loop 'retry'"):
        loop.send(b"a", 1)
    monkeypatch.setattr(loops, "LOOP_BYTES_MAX", 10)
    with pytest.raises(GraphError, match="feeds more and more"):
        channel(Now()).send(bytes(11), 1)


def test_what_is_taken_over_from_several_subtasks_does_not_breed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before anything that it feeds is taken, so that this waits beside it; more is too much all the same."""
    monkeypatch.setattr(loops, "LOOP_RECORDS_MAX", 100)
    monkeypatch.setattr(loops, "ROUND_RECORDS_MAX", 20)
    monkeypatch.setattr(loops, "LOOP_BYTES_MAX", 10)
    monkeypatch.setattr(loops, "ROUND_BYTES_MAX", 5)
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


def test_what_is_taken_over_again_and_again_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that breeds is named however often the job is killed before that."""
    monkeypatch.setattr(loops, "LOOP_RECORDS_MAX", 100)
    monkeypatch.setattr(loops, "ROUND_RECORDS_MAX", 10)
    for waiting in (0, 50, 90):
        loop = channel(Now())
        loop.takes_over(waiting, 0)
        loop.send(b"a", 100)
        with pytest.raises(GraphError, match=r"101 wait in one subtask, and 100 are allowed"):
            loop.send(b"a", 1)


def test_the_bounds_are_those_that_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    for said in (
        f"{loops.ROUND_RECORDS_MAX:,} records",
        f"{loops.LOOP_RECORDS_MAX:,} wait",
        f"{loops.LOOP_BYTES_MAX >> 20} MB",
    ):
        assert said in page
