"""Cyclic garbage of a user's functions: a run lets about as much of it grow as a plain loop does."""

from __future__ import annotations

from exactlyonce.engines.processes import THRESHOLDS

PLAIN_THRESHOLDS = (700, 10, 10)
"""Python's own."""


def until_full(thresholds: tuple[int, int, int]) -> int:
    """How many objects may be made between two collections of everything."""
    first, second, third = thresholds
    return first * (second + 1) * (third + 1)


def test_everything_is_collected_as_often_as_in_a_plain_loop() -> None:
    assert until_full(THRESHOLDS) <= until_full(PLAIN_THRESHOLDS)
