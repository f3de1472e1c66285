"""Joins in windows: the records of both sides are the accumulator of a window.

Invariants: those of a window operator; and the pairs of a window and key come in the order of their left records, then
of their right ones, each by (time, topic, partition, offset), whichever came first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product, repeat
from operator import itemgetter
from typing import Any

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import coordinates_of
from exactlyonce.engines.runtime.operators import Sides
from exactlyonce.engines.runtime.timed_operators import SLICE_KEYS, Due, TimedParts
from exactlyonce.engines.runtime.window_operators import (
    HoppingWindows,
    SessionWindows,
    TumblingWindows,
    WindowOperator,
    WindowResults,
)
from exactlyonce.pipeline.aggregates import Accumulator
from exactlyonce.pipeline.joins import Pair, WindowJoin
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.windows import Hopping, Session, Tumbling

LEFT, RIGHT = 0, 1
Entry = tuple[int, str, int, int, Any]
"""(time, topic, partition, offset, record)."""
State = tuple[list[Entry], list[Entry]]
"""The entries of the left side and of the right side, in order of arrival."""
_turn = itemgetter(0, 1, 2, 3)
_record = itemgetter(4)


def _with(state: State | None, given: tuple[int, Entry]) -> State:
    side, entry = given
    state = ([], []) if state is None else state
    state[side].append(entry)
    return state


def _merged(one: State, other: State) -> State:
    return [*one[LEFT], *other[LEFT]], [*one[RIGHT], *other[RIGHT]]


def _copied(state: State) -> State:
    return [*state[LEFT]], [*state[RIGHT]]


_NOTHING = WindowResults(0, 0, (), (), ())
_BOTH_SIDES = Accumulator(state=State, value=Pair, add=_with, merge=_merged)


@dataclass(slots=True)
class WindowJoiner(Sides, WindowOperator[Any]):
    """The common part of the operators, one for each kind of window."""

    how: str = field(kw_only=True)

    @classmethod
    def made(cls, parts: TimedParts) -> WindowJoiner:
        join = parts.node.timed
        assert isinstance(join, WindowJoin)
        return _OF_WINDOW[type(join.window)](
            *parts.shared,
            join.window,
            _BOTH_SIDES,
            parts.read_keys,
            _copied,
            how=join.how,
        )

    def left(self, batch: Batch) -> None:
        self(batch)

    def right(self, batch: Batch) -> None:
        self(batch, right=True)

    def _given(self, batch: Batch, *, right: bool) -> Sequence[Any]:
        assert batch.times is not None
        entries = zip(batch.times, *coordinates_of(batch.origins), batch.records, strict=True)
        return list(zip(repeat(RIGHT if right else LEFT), entries, strict=False))

    def _slices(
        self, last: int, group: int, starts: Sequence[int], keys: Sequence[bytes], states: Sequence[State]
    ) -> Iterator[Due[WindowResults]]:
        pairs = (
            (start, key, pair)
            for start, key, state in zip(starts, keys, states, strict=True)
            for pair in self._pairs(state)
        )
        ahead = next(pairs, None)
        while ahead is not None:
            some = [ahead, *islice(pairs, min(SLICE_KEYS, self._size) - 1)]
            ahead = next(pairs, None)
            own = [key for _, key, _ in some]
            results = WindowResults(group, last, *zip(*some, strict=True))
            yield Due(last, len(some), results, len(some), group, own, ahead is None or ahead[1] != own[-1])
        yield Due(last, 0, _NOTHING, 0, group)

    def _pairs(self, state: State) -> Iterator[Pair[Any, Any]]:
        lefts, rights = (list(map(_record, sorted(entries, key=_turn))) for entries in state)
        if not rights and self.how in ("left", "full"):
            rights = [None]
        if not lefts and self.how in ("right", "full"):
            lefts = [None]
        return (Pair(left, right) for left, right in product(lefts, rights))


@dataclass(slots=True)
class TumblingJoiner(WindowJoiner, TumblingWindows):
    """See `TumblingWindows`."""


@dataclass(slots=True)
class HoppingJoiner(WindowJoiner, HoppingWindows):
    """See `HoppingWindows`."""


@dataclass(slots=True)
class SessionJoiner(WindowJoiner, SessionWindows):
    """See `SessionWindows`."""


_OF_WINDOW: dict[type[Timed], type[WindowJoiner]] = {
    Tumbling: TumblingJoiner, Hopping: HoppingJoiner, Session: SessionJoiner,
}  # fmt: skip

OPERATORS: dict[type[Timed], type[WindowJoiner]] = {WindowJoin: WindowJoiner}
