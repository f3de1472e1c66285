"""The checker of cuts, against the definition of a consistent cut, and flaw by flaw."""

from __future__ import annotations

from pathlib import Path

import pytest
from chandy_lamport import cuts
from chandy_lamport.cuts import CausalHistory, Cut, Flaw, Violation
from hypothesis import given
from hypothesis import strategies as st
from network import Graph, Link
from schedules import any_graph

CHANNELS = {"pq": ("p", "q"), "qp": ("q", "p")}


@pytest.fixture
def history() -> CausalHistory:
    history = CausalHistory("pq", CHANNELS)
    for message in (1, 2, 3):
        history.sent("pq", message)
    history.received("pq", 1)
    history.sent("qp", 4)
    history.received("pq", 2)
    history.received("qp", 4)
    return history


@pytest.mark.parametrize(
    ("positions", "in_flight", "flaws"),
    [
        pytest.param({"p": 4, "q": 3}, {"pq": (3,)}, [], id="all that happened"),
        pytest.param({"p": 0, "q": 0}, {}, [], id="nothing"),
        pytest.param({"p": 2, "q": 2}, {"pq": (2,), "qp": (4,)}, [], id="in the middle"),
        pytest.param({"p": 3, "q": 0}, {"pq": (1, 2, 3)}, [], id="nothing received"),
        pytest.param({"p": 1, "q": 3}, {"qp": (4,)}, [(Flaw.SENT_AFTER, "pq", 2)], id="from the future"),
        pytest.param({"p": 4, "q": 1}, {"pq": (2, 3)}, [(Flaw.SENT_AFTER, "qp", 4)], id="from the future, back"),
        pytest.param({"p": 3, "q": 1}, {"pq": (3,)}, [(Flaw.LOST, "pq", 2)], id="missing"),
        pytest.param({"p": 3, "q": 1}, {"pq": (1, 2, 3)}, [(Flaw.RECEIVED_TOO, "pq", 1)], id="also received"),
        pytest.param({"p": 2, "q": 1}, {"pq": (2, 3)}, [(Flaw.UNSENT, "pq", 3)], id="not yet sent"),
        pytest.param({"p": 2, "q": 1}, {"pq": (2, 9)}, [(Flaw.UNSENT, "pq", 9)], id="never sent"),
        pytest.param({"p": 3, "q": 1}, {"pq": (2, 3, 2)}, [(Flaw.TWICE, "pq", 2)], id="twice"),
        pytest.param({"p": 3, "q": 0}, {"pq": (1, 3, 2)}, [(Flaw.OUT_OF_ORDER, "pq", 3)], id="out of order"),
        pytest.param({"p": 3}, {"pq": (1, 3, 2)}, [(Flaw.NO_STATE, "q", None)], id="no state"),
    ],
)
def test_what_is_wrong_is_named(
    history: CausalHistory, positions: dict[str, int], in_flight: dict[str, tuple[int, ...]], flaws: list[Violation]
) -> None:
    assert history.violations(Cut(positions, in_flight)) == flaws


def test_a_violation_is_a_sentence(history: CausalHistory) -> None:
    assert [str(each) for each in history.violations(Cut({"p": 1, "q": 3}, {}))] == [
        "message 2 of channel pq was received before the cut and sent after it",
        "message 4 of channel qp was on its way at the cut and is not recorded",
    ]
    assert [str(each) for each in history.violations(Cut({"q": 3}))] == ["process p has no recorded state"]


Event = tuple[int, int]
"""Process, and which of its events, from 1 on."""


@given(any_graph(), st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=30), st.data())
def test_clocks_decide_as_the_definition_does(graph: Graph, steps: list[tuple[bool, int]], data: st.DataObject) -> None:
    """A cut is consistent by its clocks if and only if it has all dependencies; otherwise such a message is named."""
    history = CausalHistory(range(graph.processes), {link: (link.sender, link.receiver) for link in graph.links})
    sent: dict[Link, list[Event]] = {link: [] for link in graph.links}
    received = dict.fromkeys(graph.links, 0)
    depends: dict[Event, set[Event]] = {}
    for sends, pick in steps:
        links = [link for link in graph.links if sends or received[link] < len(sent[link])]
        if not links:
            continue
        link = links[pick % len(links)]
        process = link.sender if sends else link.receiver
        causes = {(process, history.position(process))}
        if sends:
            history.sent(link, len(sent[link]))
        else:
            causes.add(sent[link][received[link]])
            history.received(link, received[link])
            received[link] += 1
        event = process, history.position(process)
        sent[link] += [event] if sends else []
        depends[event] = causes.union(*(depends.get(cause, set()) for cause in causes))
    positions = {each: data.draw(st.integers(0, history.position(each))) for each in range(graph.processes)}
    inside = {(process, number) for process in positions for number in range(positions[process] + 1)}
    consistent = all(depends[event] <= inside for event in inside & depends.keys())
    assert history.is_consistent(positions) == consistent
    assert any(each.flaw is Flaw.SENT_AFTER for each in history.violations(Cut(positions))) != consistent


def test_the_checker_shares_no_code_with_the_algorithm() -> None:
    assert "chandy_lamport" not in Path(cuts.__file__).read_text()
