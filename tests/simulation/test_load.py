"""The judge of constant load sees a queue that stays full after a burst, and a pipeline that begins anew by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from load import LATELY_MS, Load
from watched import Broken
from world import World

from exactlyonce.checkpoint.coordinator import JobState

BURST = 1_000


def begun(shape: str, seed: int) -> tuple[World, Load, Any]:
    """A pipeline that runs, through which a burst has gone at once."""
    world = World(seed, shape, "constant load")
    load = world.load
    assert load is not None
    attempt: Any = SimpleNamespace(in_flight=[])
    coordinator: Any = SimpleNamespace(core=SimpleNamespace(state=JobState.RUNNING, attempt=attempt))
    world.coordinator = coordinator
    load.begins(attempt)
    for step in ("read", *load._before):
        for _ in range(BURST):
            load.leaves(step, attempt)
    return world, load, attempt


def fills(world: World, load: Load, attempt: Any) -> None:
    """Half as many records as the burst had come, and wait."""
    for _ in range(BURST // 2):
        load.leaves("read", attempt)
    load._finished, load._due_ms = 0, world.clock.monotonic_ms() + 1_000
    load.judge()


def test_as_many_may_wait_as_left_lately_and_no_more_later() -> None:
    world, load, attempt = begun("one-shuffle", 1)
    fills(world, load, attempt)
    world.clock.advance(LATELY_MS + 1)
    with pytest.raises(Broken, match=r"500 records wait before totals, and 0 at most leave it in 500 ms"):
        load.judge()


def test_the_time_for_which_a_called_service_is_away_does_not_count() -> None:
    world, load, attempt = begun("retry", 1)
    world.clock.advance(load._away_ms.start - world.clock.monotonic_ms())
    fills(world, load, attempt)
    world.clock.advance(len(load._away_ms))
    load._due_ms = world.clock.monotonic_ms()
    load.judge()
    world.clock.advance(LATELY_MS + 1)
    load._due_ms = world.clock.monotonic_ms()
    with pytest.raises(Broken, match="records wait before totals"):
        load.judge()


def test_an_attempt_that_no_crash_has_caused_is_found_in_any_state() -> None:
    world, load, attempt = begun("one-shuffle", 1)
    load.judge()
    world.coordinator = None
    load.begins(attempt)
    with pytest.raises(Broken, match="attempt 2 begins, and 0 crashes were caused"):
        load.judge()
    world.seen["worker crashed"] += 1
    load.judge()
