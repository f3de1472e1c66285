"""Pace: slices that take about a given time, by what the last one cost per record.

Invariants: the size is at least 1 and at most what was said; it grows by its factor at most from one slice to the next,
and shrinks at once. So a first slow slice is a short one, unless records become slow all of a sudden. Pure: the
time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BATCH_RECORDS_MAX = 2_000


class Bounds(NamedTuple):
    """In seconds, by what records cost."""

    slice_s: float
    """How long a slice may take: barriers, producers and blocks wait for its end."""
    in_flight_s: float
    """How long what waits in front of a subtask may take: a barrier waits behind it, or it is written."""


ALIGNED, OVERTAKING = Bounds(0.075, 0.5), Bounds(0.02, 0.2)
"""A barrier that overtakes waits for the end of a slice alone; and what it has overtaken costs storage."""
HURRIED_SLICE_S = 0.005
"""While one that has overtaken is under way: several turns of a loop lie on its way."""
GATHER_S = 0.01
"""A source that had less than a batch is asked again so long after: a turn with a few records costs nearly as much as
one with some hundred, and at a modest load a loop would spend itself on such turns."""
IN_FLIGHT_RECORDS_MAX = 1 << 20
"""No bound: the bytes of a channel are bounded far below it."""


@dataclass
class Pace:
    """The size of the next slice, so that it takes about *target_s*, and at most *most* records.

    >>> pace = Pace(target_s=0.1, size=16, most=2_000)
    >>> for elapsed_s in (0.001, 0.002, 3.2, 0.05):
    ...     pace.took(pace.size, elapsed_s)
    ...     print(pace.size)
    32
    64
    2
    4
    """

    target_s: float
    size: int
    """Records."""
    most: int
    growth: int = 2
    _cost_s: float = 0.0
    """Of a record of the last slice."""

    def took(self, records: int, elapsed_s: float) -> None:
        """A slice of *records* took *elapsed_s*."""
        if records:
            self._cost_s = elapsed_s / records
            fits = records * self.target_s / max(elapsed_s, 1e-9)
            self.size = max(1, min(int(fits), self.growth * self.size, self.most))

    def within(self, hurried: bool) -> int:
        """The size of the next slice; *hurried*: one that takes no more than `HURRIED_SLICE_S`."""
        if not hurried or self._cost_s * self.size <= HURRIED_SLICE_S:
            return self.size
        return max(1, int(HURRIED_SLICE_S / self._cost_s))


SLICE_AT_FIRST, IN_FLIGHT_AT_FIRST = 4, 32
"""Each record of a first slice may have to wait for stored state of its own."""
SLICE_CAUTIOUS = 16


def slice_pace(*, cautious: bool = False, bounds: Bounds = ALIGNED) -> Pace:
    """Of an input: how many records are handed out at once. *cautious*: it does not grow before `most` is raised."""
    return Pace(bounds.slice_s, SLICE_AT_FIRST, SLICE_CAUTIOUS if cautious else BATCH_RECORDS_MAX)


def in_flight_pace(channels: int, *, cautious: bool = False, bounds: Bounds = ALIGNED) -> Pace:
    """Of one of so many channels into a subtask: how many records may be on their way in it; likewise.

    Each growth takes a round trip, in which the writer may have to pause: so there are few of them.
    """
    most = IN_FLIGHT_AT_FIRST if cautious else IN_FLIGHT_RECORDS_MAX
    return Pace(bounds.in_flight_s / channels, IN_FLIGHT_AT_FIRST, most, growth=8)


def snapshot_budget_s(records_s: float) -> float:
    """How long snapshots may be worked on in a turn of the loop that spent *records_s* on records: twice as long, for
    nobody sees what these put out before the next snapshot is done; but no pause of more than 20 ms is made for it,
    unless records take so long themselves that a snapshot would hardly come on.

    >>> [snapshot_budget_s(each) for each in (0.0, 0.003, 0.006, 0.03, 0.1)]
    [0.008, 0.008, 0.012, 0.02, 0.05]
    """
    return max(0.008, min(2 * records_s, 0.02), records_s / 2)
