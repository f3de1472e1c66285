"""Planted defects, each of shipped code, that the simulator must find; and what it must say of each."""

from __future__ import annotations

import re

import pytest
from mutants import MUTANTS, planted
from watched import Broken
from world import simulate

MUTANT_SEEDS = 120
"""Within so many seeds every planted defect is found."""


def first_broken(name: str) -> Broken | None:
    """What the first seed to find the planted defect says; None: no seed does. Any other exception is raised."""
    with planted(name):
        for seed in range(MUTANT_SEEDS):
            try:
                simulate(seed, MUTANTS[name].shape)
            except Broken as broken:
                return broken
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    """The first invariant that a planted defect breaks is the one that the table names."""
    broken = first_broken(name)
    assert broken is not None, f"{MUTANT_SEEDS} seeds did not find it"
    assert re.search(MUTANTS[name].expected, str(broken)), "it was found for another reason"


def test_there_are_thirty_planted_defects_and_more() -> None:
    """At least thirty rules are left out in turn."""
    assert len(MUTANTS) >= 30
