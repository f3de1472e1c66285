"""The rate meter: the records that have left a place lately, and so the number that may wait there.

One rule bounds the records that wait before a barrier, or are flushed at one: a place may hold as many as left it in
the last stretch of time. They are then gone in about such a stretch, and a faster place may hold more.
docs/design/backpressure.md has the reasons.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class _Left(NamedTuple):
    since_s: float
    until_s: float
    records: int


class RateMeter:
    """Counts the records that leave one place. They count for the whole time in which they could have left.

    >>> place = RateMeter(0.5)
    >>> place.left(40, since_s=0.0, until_s=1.0)
    >>> place.left(5, since_s=1.0, until_s=1.25)
    >>> [place.lately(now_s) for now_s in (1.25, 1.5, 1.625, 2.0)]
    [15, 5, 2, 0]
    """

    def __init__(self, stretch_s: float) -> None:
        self._stretch_s = stretch_s
        self._left: deque[_Left] = deque()
        self._records = 0

    def left(self, records: int, *, since_s: float, until_s: float) -> None:
        """*records* have left by *until_s*. They could have left *since_s*: when others left before them, or when they
        came to an empty place."""
        self._drop(until_s - self._stretch_s)
        self._left.append(_Left(since_s, until_s, records))
        self._records += records

    def lately(self, now_s: float) -> int:
        """The records that left in the stretch of time up to *now_s*."""
        begin_s = now_s - self._stretch_s
        self._drop(begin_s)
        if not self._left or (first := self._left[0]).since_s >= begin_s:
            return self._records
        before = first.records * (begin_s - first.since_s) / (first.until_s - first.since_s)
        return int(self._records - before)

    def _drop(self, begin_s: float) -> None:
        """Forget what left before *begin_s*."""
        while self._left and self._left[0].until_s <= begin_s:
            self._records -= self._left.popleft().records
