"""Pace: how much is taken at once, and how much may wait.

A slice takes about a given time, by what the last one cost per record. Its size is at least 1 and at most what was
said; it doubles at most from one slice to the next, and shrinks at once. So a first slow slice is a short one, unless
records become slow all of a sudden.

A place where records wait (a channel, a sink's client) may hold as many as have left it lately, however they left: see
`exactlyonce.pipeline.departures`. A subtask takes no more than what is behind it has room for: an `Outlet` knows how
much of that one record needs. Pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

BATCH_RECORDS_MAX = 2_000


class Bounds(NamedTuple):
    """In seconds, by what records cost."""

    slice_s: float
    """How long a slice may take: barriers, producers and blocks wait for its end."""
    in_flight_s: float
    """For so long a barrier waits behind what waits in front of a subtask, or that is written."""


ALIGNED, OVERTAKING = Bounds(0.075, 0.5), Bounds(0.02, 0.2)
"""A barrier that overtakes waits for the end of a slice alone; and what it has overtaken costs storage."""
HURRIED_SLICE_S = 0.005
"""While one that has overtaken is under way: several turns of a loop lie on its way."""
GATHER_S = 0.01
"""A source that had less than a batch is asked again so long after: a turn with a few records costs nearly as much as
one with some hundred, and at a modest load a loop would spend itself on such turns."""


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
    _cost_s: float = 0.0
    """Of a record of the last slice."""

    def took(self, records: int, elapsed_s: float) -> None:
        """A slice of *records* took *elapsed_s*."""
        if records:
            self._cost_s = elapsed_s / records
            fits = records * self.target_s / max(elapsed_s, 1e-9)
            self.size = max(1, min(int(fits), 2 * self.size, self.most))

    def within(self, hurried: bool) -> int:
        """The size of the next slice; *hurried*: one that takes no more than `HURRIED_SLICE_S`."""
        if not hurried or self._cost_s * self.size <= HURRIED_SLICE_S:
            return self.size
        return max(1, int(HURRIED_SLICE_S / self._cost_s))


SLICE_AT_FIRST = 4
"""Each record of a first slice may have to wait for stored state of its own."""
SLICE_CAUTIOUS, IN_FLIGHT_CAUTIOUS = 16, 32
IN_FLIGHT_MIN = 8
"""In front of a subtask, by all channels of a shuffle: what leaves doubles with each round trip from there."""


def slice_pace(*, cautious: bool = False, bounds: Bounds = ALIGNED) -> Pace:
    """Of an input: how many records are handed out at once. *cautious*: it does not grow before `most` is raised."""
    return Pace(bounds.slice_s, SLICE_AT_FIRST, SLICE_CAUTIOUS if cautious else BATCH_RECORDS_MAX)


class TakesRecords(Protocol):
    """What a subtask puts records out to: a channel, or a sink's writer."""

    @property
    def room(self) -> int:
        """How many more it should be given now; 0: who gives them should pause."""

    @property
    def records(self) -> int:
        """How many it was given so far."""


SHARE_MIN = 1e-3
SHARE_RECORDS = 1_000


@dataclass
class Outlet:
    """*behind* a subtask, and how much of it one record takes that the subtask does.

    That is far below 1 where a shuffle sends it few of the keys, and above where operators make several of one. It
    rises at once, and falls with some `SHARE_RECORDS`.
    """

    behind: TakesRecords
    share: float = 1.0
    _sent: int = 0

    @property
    def room(self) -> int:
        """How many records the subtask may take."""
        room = self.behind.room
        return room and max(1, int(room / self.share))

    def took(self, records: int) -> None:
        """The subtask has taken *records*, and has put out what came of them."""
        if not records:
            return
        sent, self._sent = self.behind.records - self._sent, self.behind.records
        share = max(sent / records, SHARE_MIN)
        fall = min(1.0, records / SHARE_RECORDS)
        self.share = share if share > self.share else self.share + (share - self.share) * fall


def snapshot_budget_s(records_s: float) -> float:
    """How long snapshots may be worked on in a turn of the loop that spent *records_s* on records: twice as long, for
    nobody sees what these put out before the next snapshot is done; but no pause of more than 20 ms is made for it,
    unless records take so long themselves that a snapshot would hardly come on.

    >>> [snapshot_budget_s(each) for each in (0.0, 0.003, 0.006, 0.03, 0.1)]
    [0.008, 0.008, 0.012, 0.02, 0.05]
    """
    return max(0.008, min(2 * records_s, 0.02), records_s / 2)
