"""A short round of kills of captured changes, with a failover; `make changes-kills` has long ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_rounds import Round, World

pytestmark = pytest.mark.broker


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.remove()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_change_is_there_once(world: World, tmp_path: Path) -> None:
    """Though the run, its walsender and the primary are killed among pages and changes."""
    round = Round(world, tmp_path / "evidence", 1, 0, ("run", "sender", "failover", "worker"))
    try:
        assert round.play() == []
        assert round.halted == ""
    finally:
        round.close()
