"""Histories under constant load: checkpoints complete in time, and no queue grows without bound."""

from __future__ import annotations

import pytest
from luck import LUCK
from topologies import LOAD_SHAPES
from world import lived

LOADS = [luck for luck in LUCK if LUCK[luck].load]


@pytest.mark.slow
@pytest.mark.exhaustive(but=["one-shuffle-1", "two-shuffles-1", "retry-1"])
@pytest.mark.parametrize("seeds", [1, 25])
@pytest.mark.parametrize("shape", LOAD_SHAPES)
def test_constant_load_is_carried(shape: str, seeds: int) -> None:
    """Records cost up to 50 ms behind one to three shuffles, brokers limit sinks, and a called service is away."""
    for luck in LOADS if seeds > 1 else ["constant load"]:
        seen = lived(range(1, 1 + seeds), shape, luck)
        assert seen["checkpoint"] > seeds
        assert bool(seen["called in vain"]) == (shape == "retry")
        assert seen["sender muted"] or seeds == 1
