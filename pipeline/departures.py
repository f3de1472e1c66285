"""Departures: what has left a place lately, and so how much may wait there.

One rule bounds all that waits before a barrier, or is flushed at one: a place may hold what left it in the last
stretch of time, whatever held it up: the work of an operator, what waits behind that, a server. What waits is then gone
in about such a stretch, and a place from which more and more leaves may hold more and more.

A place that takes turns, such as a broker with a quota, lets much out in a moment and then little for seconds. So a
place may hold no more than leaves it in a stretch on average, while anything waits there.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

AVERAGED_STRETCHES = 10
"""The average is over so many stretches of time in which something waited."""
AVERAGED_STRETCHES_MIN = 3
"""It counts so many at least: at the start, what may wait grows by about a third with each round trip."""


class _Left(NamedTuple):
    since_s: float
    until_s: float
    records: int


class Departures:
    """Of one place. Records count for the whole time in which they might have left.

    >>> place = Departures(0.5)
    >>> place.left(40, since_s=0.0, until_s=1.0)
    >>> place.left(5, since_s=1.0, until_s=1.25)
    >>> [place.lately(now_s) for now_s in (1.25, 1.5, 1.625, 2.0)]
    [15, 5, 2, 0]
    >>> place.left(1_000, since_s=4.5, until_s=9.5)
    >>> place.left(500, since_s=9.5, until_s=9.51)  # a burst
    >>> place.lately(9.51)
    149
    """

    def __init__(self, stretch_s: float) -> None:
        self._stretch_s = stretch_s
        self._left: deque[_Left] = deque()
        self._records = 0
        self._averaged: deque[_Left] = deque()
        self._averaged_records = 0
        self._averaged_s = 0.0

    def left(self, records: int, *, since_s: float, until_s: float) -> None:
        """*records* have left by *until_s*. They could have done so *since_s*: when others left before them, or when
        they came to an empty place."""
        left = _Left(since_s, until_s, records)
        self._left.append(left)
        self._records += records
        self._averaged.append(left)
        self._averaged_records += records
        self._averaged_s += until_s - since_s
        most_s = AVERAGED_STRETCHES * self._stretch_s
        while self._averaged_s - (first := self._averaged[0]).until_s + first.since_s >= most_s:
            self._averaged.popleft()
            self._averaged_records -= first.records
            self._averaged_s -= first.until_s - first.since_s

    def lately(self, now_s: float) -> int:
        """How many records have left in the stretch of time up to *now_s*, which never falls, and no more than leave in
        a stretch on average."""
        average_s = max(self._averaged_s, AVERAGED_STRETCHES_MIN * self._stretch_s)
        return min(self._last_stretch(now_s), int(self._averaged_records * self._stretch_s / average_s))

    def _last_stretch(self, now_s: float) -> int:
        begin_s = now_s - self._stretch_s
        while self._left and self._left[0].until_s <= begin_s:
            self._records -= self._left.popleft().records
        if not self._left or (first := self._left[0]).since_s >= begin_s:
            return self._records
        before = first.records * (begin_s - first.since_s) / (first.until_s - first.since_s)
        return int(self._records - before)
