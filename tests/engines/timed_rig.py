"""Operators of event time over a table in memory, made as the engine makes them, and driven without it."""

from __future__ import annotations

import sys
from typing import Any

from exactlyonce.engines.runtime.timed_operators import TimedOperator, TimedParts
from exactlyonce.pipeline.graph import Node
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.slots import TableTimes
from exactlyonce.state.stored import StoredState

MAX_PARALLELISM = 4
GROUPS = range(MAX_PARALLELISM)


def parts_of(
    node: Node, kept: VersionedState, *, by_key: bool = False, watermarks: dict[int, int] | None = None,
    table: Any = None, function: Any = None,
) -> TimedParts:  # fmt: skip
    """The parts of *node*'s operator: its table is that of one before, or has *kept* entries and *watermarks*."""
    stored = StoredState[Any](
        operator=node.id, type=kept, groups=GROUPS, max_parallelism=MAX_PARALLELISM,
        times=TableTimes(watermarks={**(watermarks or {})}),
    )  # fmt: skip
    if table is None:
        table = HashMapBackend().timed_table(stored, by_key=by_key)
    return TimedParts(node=node, table=table, groups=GROUPS, max_parallelism=MAX_PARALLELISM, function=function)


def advance(operator: TimedOperator[Any], watermark: int, room: int = 1) -> int:
    """Fire all that is due at *watermark* in slices of the *room*; the watermark that the operator has then."""
    operator.advance(watermark)
    operator.begin()
    while operator.fires:
        operator.fire(sys.maxsize, room)
    operator.firings.clear()
    return operator.watermark


def group_of(key: str) -> int:
    return key_group(canonical_key(key), MAX_PARALLELISM)
