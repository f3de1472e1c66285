"""Alignment of barriers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.pipeline.errors import InvariantViolation


def test_an_input_is_held_from_its_barrier_until_the_last_barrier_has_come() -> None:
    alignment = Alignment("abc")
    assert not alignment.barrier("b", 4)
    assert [alignment.is_held(each) for each in "abc"] == [False, True, False]
    assert not alignment.barrier("a", 4)
    assert [alignment.is_held(each) for each in "abc"] == [True, True, False]
    assert alignment.barrier("c", 4)
    assert [alignment.is_held(each) for each in "abc"] == [False, False, False]
    assert alignment.checkpoint_latest == 4


@pytest.mark.parametrize(
    ("exactly_once", "barriers"),
    [
        pytest.param(True, "a1 a2", id="a held input delivers a barrier"),
        pytest.param(True, "a1 b2", id="another barrier than the one awaited"),
        pytest.param(True, "a2 b2 a2", id="the same barrier again"),
        pytest.param(True, "a2 b2 a1", id="an older barrier"),
        pytest.param(True, "c1", id="a stranger"),
        pytest.param(False, "a1 b2", id="at least once, another barrier than the one awaited"),
        pytest.param(False, "a1 a2 b2", id="at least once, one that skips a barrier"),
        pytest.param(False, "a2 a2", id="at least once, the same barrier again"),
        pytest.param(False, "a2 a1", id="at least once, an older barrier"),
    ],
)
def test_a_barrier_out_of_order_is_a_violation(exactly_once: bool, barriers: str) -> None:
    alignment = Alignment("ab", exactly_once=exactly_once)
    *before, (source, checkpoint) = [(each[0], int(each[1])) for each in barriers.split()]
    for each in before:
        alignment.barrier(*each)
    with pytest.raises(InvariantViolation):
        alignment.barrier(source, checkpoint)


@pytest.mark.parametrize("feedback", ["", "f"])
def test_a_subtask_without_inputs_is_a_violation(feedback: str) -> None:
    with pytest.raises(InvariantViolation, match="at least one input that is no feedback"):
        Alignment([], feedback=feedback)


def test_at_least_once_nothing_is_held_and_inputs_may_be_barriers_ahead() -> None:
    alignment = Alignment("ab", exactly_once=False)
    assert not alignment.barrier("a", 3)
    assert not alignment.barrier("a", 5)
    assert alignment.is_ahead("a")
    assert not alignment.is_held("a")
    assert alignment.barrier("b", 3)
    assert alignment.is_ahead("a")
    assert not alignment.barrier("a", 6)
    assert alignment.barrier("b", 5)
    assert alignment.barrier("b", 6)
    assert not alignment.is_ahead("a")


def _intervals(rng: random.Random, *, exactly_once: bool) -> Iterator[tuple[bool, bool]]:
    """Whether each interval of an interleaving took exactly what lies between its barriers, and the violations."""
    between = {n: [f"{n}.{i}" for i in range(rng.randint(0, 2))] for n in range(1, 6)}
    channels: dict[str, list[Any]] = {name: [each for n in between for each in (*between[n], n)] for name in "abc"}
    alignment = Alignment(channels, exactly_once=exactly_once)
    taken: dict[str, list[str]] = {name: [] for name in channels}
    while any(channels.values()):
        name = rng.choice([each for each, queue in channels.items() if queue and not alignment.is_held(each)])
        item = channels[name].pop(0)
        if isinstance(item, str):
            alignment.take(name)
            taken[name].append(item)
        elif alignment.barrier(name, item):
            yield all(each == between[item] for each in taken.values()), alignment.exact
            taken = {name: [] for name in channels}


def test_no_interval_that_took_more_or_less_than_lies_between_its_barriers_counts_as_exact() -> None:
    found = {each for seed in range(100) for each in _intervals(random.Random(seed), exactly_once=True)}
    assert found == {(True, True)}
    found = {each for seed in range(100) for each in _intervals(random.Random(seed), exactly_once=False)}
    assert {(True, True), (False, False)} <= found <= {(True, True), (False, False), (True, False)}


def test_a_barrier_that_overtakes_waits_for_none_and_holds_none() -> None:
    """Overtaking ends the alignment: held inputs continue, and those without the barrier are named, until it comes."""
    alignment = Alignment("abc")
    assert not alignment.barrier("b", 4)
    assert alignment.is_held("b")
    assert alignment.overtake(4) == {"a", "c"}
    assert not alignment.is_held("b")
    assert alignment.overtake(5) == {"a", "b", "c"}
    assert not alignment.barrier("a", 4)
    assert not alignment.barrier("a", 5)
    assert not alignment.is_held("a")
    assert not alignment.barrier("a", 6)
    assert alignment.is_held("a")
    for name, checkpoint in (("c", 4), ("b", 5), ("c", 5), ("b", 6)):
        assert not alignment.barrier(name, checkpoint)
    assert alignment.barrier("c", 6)
    assert alignment.exact


def test_a_barrier_overtakes_in_its_turn_and_where_inputs_are_held() -> None:
    alignment = Alignment("ab")
    alignment.barrier("a", 1)
    with pytest.raises(InvariantViolation, match="in their order"):
        alignment.overtake(2)
    assert alignment.overtake(1) == {"b"}
    with pytest.raises(InvariantViolation, match="before its snapshot is taken"):
        alignment.overtake(1)
    with pytest.raises(InvariantViolation, match="where inputs are held back"):
        Alignment("ab", exactly_once=False).overtake(1)


def test_no_snapshot_waits_for_feedback() -> None:
    alignment = Alignment("ab", feedback="f")
    assert not alignment.barrier("a", 1)
    assert alignment.barrier("b", 1)
    assert alignment.owing(1) == {"f"}
    assert not alignment.barrier("f", 1)
    assert not alignment.owing(1)
    assert not any(map(alignment.is_held, "abf"))


def test_feedback_that_is_ahead_is_held_like_any_input() -> None:
    alignment = Alignment("a", feedback="f")
    assert not alignment.barrier("f", 1)
    assert alignment.is_held("f")
    assert alignment.barrier("a", 1)
    assert not alignment.is_held("f")
    assert alignment.exact
    loose = Alignment("a", feedback="f", exactly_once=False)
    assert not loose.barrier("f", 1)
    loose.take("f")
    assert loose.barrier("a", 1)
    assert loose.barrier("a", 2)
    assert not loose.exact


def test_a_barrier_that_overtakes_owes_feedback_too() -> None:
    alignment = Alignment("ab", feedback="f")
    assert not alignment.barrier("a", 1)
    assert alignment.overtake(1) == {"b", "f"}
