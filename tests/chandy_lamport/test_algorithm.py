"""The algorithm's part of one process: what follows from each event, and what it does not put up with."""

from __future__ import annotations

import pytest
from chandy_lamport.algorithm import (
    ChandyLamport,
    Forget,
    Initiate,
    MarkerReceived,
    MessageReceived,
    SnapshotEvent,
)

from exactlyonce.pipeline.errors import InvariantViolation


@pytest.mark.parametrize("complete", [False, True], ids=["under way", "complete"])
def test_to_initiate_what_has_begun_does_nothing(complete: bool) -> None:
    process = ChandyLamport("ab", [])
    process.handle(MarkerReceived("a", 1))
    if complete:
        process.handle(MarkerReceived("b", 1))
    assert process.handle(Initiate(1)) == []


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
