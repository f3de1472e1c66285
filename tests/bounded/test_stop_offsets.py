"""The stop offsets of bounded work, while partitions are added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from exactlyonce.engines.bounded.stop_offsets import LATEST, StopOffsets
from exactlyonce.engines.surroundings.preflight import Inputs
from exactlyonce.pipeline.errors import ConfigError


def inputs(ends: dict[int, int]) -> Inputs:
    def end_offsets(topic: str, *, committed: bool) -> dict[int, int]:
        return ends

    topics = SimpleNamespace(end_offsets=end_offsets)
    return cast(Inputs, SimpleNamespace(sources={"s": SimpleNamespace(topic="t")}, topics=cast(Any, topics)))


def test_a_partition_that_appears_meanwhile() -> None:
    """It is no part of the stop offsets before it is known where the work stands, and naming it is refused until
    then."""
    seen, starts = inputs({0: 10, 1: 20, 2: 5}), {"s": {0: 3, 1: 4}}
    assert StopOffsets().ends(seen, starts) == {"s": {0: 10, 1: 20}}
    assert StopOffsets(offsets={"t": {0: 7, 1: LATEST}}).ends(seen, starts) == {"s": {0: 7, 1: 20}}
    with pytest.raises(ConfigError, match="Every partition of t needs an end: 0, 1;"):
        StopOffsets(offsets={"t": {0: 7, 1: LATEST, 2: 5}}).ends(seen, starts)
