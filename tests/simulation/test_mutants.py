"""Planted defects, each of shipped code, that the simulator must find; and what it must say of each."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from mutants import MUTANTS, SAMPLE, planted
from watched import Asserted, Broken
from world import simulate

MUTANT_SEEDS = 120
"""Every planted defect is found by so many seeds."""


class Found(NamedTuple):
    seed: int
    broken: Broken


def found(name: str) -> Found | None:
    """None: no seed finds it. Seeds with which shipped code itself notices do not count, unless the mutant expects
    that; other errors are raised."""
    mutant = MUTANTS[name]
    with planted(name):
        for seed in range(mutant.first, mutant.first + MUTANT_SEEDS):
            try:
                simulate(seed, mutant.shape, mutant.luck)
            except Broken as broken:
                if not isinstance(broken, Asserted) or re.search(mutant.expected, str(broken)):
                    return Found(seed, broken)
    return None


@pytest.mark.slow
@pytest.mark.exhaustive(but=SAMPLE)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    first = found(name)
    assert first is not None, f"{MUTANT_SEEDS} seeds did not find it"
    assert re.search(MUTANTS[name].expected, str(first.broken)), "it was found for another reason"
    simulate(first.seed, MUTANTS[name].shape, MUTANTS[name].luck)
