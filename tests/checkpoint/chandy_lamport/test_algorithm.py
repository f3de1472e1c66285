"""The algorithm's part of one process: what follows from each event, and what it does not put up with."""

from __future__ import annotations

import pytest

from exactlyonce.checkpoint.chandy_lamport.algorithm import (
    ChandyLamport,
    Complete,
    Forget,
    Initiate,
    MarkerReceived,
    MessageReceived,
    RecordState,
    SendMarker,
    SnapshotEvent,
)
from exactlyonce.pipeline.errors import InvariantViolation


def test_an_initiator_records_its_state_and_sends_markers_first() -> None:
    process = ChandyLamport(["in"], ["x", "y"])
    assert process.handle(Initiate(7)) == [RecordState(7), SendMarker(7, "x"), SendMarker(7, "y")]
    assert process.under_way == [7]


def test_the_first_marker_does_the_same_and_finds_its_channel_empty() -> None:
    process = ChandyLamport("ab", ["x"])
    process.handle(MessageReceived("b", "before"))
    assert process.handle(MarkerReceived("a", 1)) == [RecordState(1), SendMarker(1, "x")]
    for channel in "ab":
        process.handle(MessageReceived(channel, f"after, on {channel}"))
    assert process.handle(MarkerReceived("b", 1)) == [Complete(1, {"a": (), "b": ("after, on b",)})]
    assert process.under_way == []


def test_without_inputs_a_part_is_complete_at_once() -> None:
    assert ChandyLamport([], ["x"]).handle(Initiate(1)) == [RecordState(1), SendMarker(1, "x"), Complete(1, {})]


def test_a_loop_to_itself_is_a_channel_like_any_other() -> None:
    process = ChandyLamport(["loop"], ["loop"])
    assert process.handle(Initiate(1)) == [RecordState(1), SendMarker(1, "loop")]
    process.handle(MessageReceived("loop", "on its way"))
    assert process.handle(MarkerReceived("loop", 1)) == [Complete(1, {"loop": ("on its way",)})]


@pytest.mark.parametrize("complete", [False, True], ids=["under way", "complete"])
def test_to_initiate_what_has_begun_does_nothing(complete: bool) -> None:
    process = ChandyLamport("ab", [])
    process.handle(MarkerReceived("a", 1))
    if complete:
        process.handle(MarkerReceived("b", 1))
    assert process.handle(Initiate(1)) == []


def test_snapshots_under_way_at_once_do_not_touch_each_other() -> None:
    """A message counts in each snapshot between its own state and its own marker; the numbers come in any order."""
    process = ChandyLamport("ab", [])
    process.handle(MarkerReceived("a", 2))
    process.handle(MessageReceived("b", "first"))
    process.handle(MarkerReceived("a", 1))
    process.handle(MessageReceived("b", "second"))
    assert process.under_way == [2, 1]
    assert process.handle(MarkerReceived("b", 1)) == [Complete(1, {"a": (), "b": ("second",)})]
    process.handle(MessageReceived("b", "third"))
    assert process.handle(MarkerReceived("b", 2)) == [Complete(2, {"a": (), "b": ("first", "second", "third")})]


def test_what_a_marker_has_overtaken_is_the_last_of_its_channel() -> None:
    process = ChandyLamport("ab", [])
    process.handle(Initiate(1))
    process.handle(MessageReceived("b", "first"))
    process.handle(MarkerReceived("b", 1, ("second", "third")))
    for message in ("second", "third", "fourth"):
        process.handle(MessageReceived("b", message))
    assert process.handle(MarkerReceived("a", 1)) == [Complete(1, {"a": (), "b": ("first", "second", "third")})]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        pytest.param(
            [MarkerReceived("a", 1), MarkerReceived("a", 1)],
            "one marker of snapshot 1 comes on channel 'a', not two",
            id="a second marker",
        ),
        pytest.param(
            [MarkerReceived("a", 1), MarkerReceived("b", 1), MarkerReceived("a", 1)],
            "one marker of snapshot 1 comes on channel 'a', not two",
            id="a second marker behind the end",
        ),
        pytest.param(
            [MessageReceived("c", "hello")], "a message comes on an input, and 'c' is none", id="a message from nowhere"
        ),
        pytest.param([MarkerReceived("x", 1)], "a marker comes on an input, and 'x' is none", id="a marker's output"),
        pytest.param(
            [MarkerReceived("a", 1), Forget(2)],
            r"snapshots \[1\] are not complete here, and so not everywhere",
            id="forgotten early",
        ),
        pytest.param(
            [Initiate(1), MarkerReceived("a", 1), MarkerReceived("b", 1), Forget(2), MarkerReceived("a", 1)],
            "snapshot 1 was said to be complete everywhere",
            id="a marker of what is forgotten",
        ),
        pytest.param([Forget(2), Initiate(1)], "snapshot 1 was said to be complete", id="initiate what is forgotten"),
    ],
)
def test_a_breach_of_the_protocol_is_a_violation(events: list[SnapshotEvent], said: str) -> None:
    process = ChandyLamport("ab", ["x"])
    for event in events[:-1]:
        process.handle(event)
    with pytest.raises(InvariantViolation, match=said):
        process.handle(events[-1])


def test_a_marker_from_nowhere_begins_nothing() -> None:
    process = ChandyLamport("ab", ["x"])
    with pytest.raises(InvariantViolation):
        process.handle(MarkerReceived("c", 1))
    assert process.under_way == []


def test_nothing_is_kept_but_what_is_recorded() -> None:
    process = ChandyLamport("ab", ["x"])
    kept = repr(vars(process))
    for snapshot in range(1, 100):
        process.handle(MessageReceived("a", "between snapshots"))
        for channel in "ab":
            process.handle(MarkerReceived(channel, snapshot))
            process.handle(MessageReceived("a", "behind its channel's marker"))
        process.handle(Forget(snapshot + 1))
    assert repr(vars(process)) == kept.replace("'_forgotten_below': 0", "'_forgotten_below': 100")
