"""Pace: how many records are taken at once, and how many may wait; see docs/design/backpressure.md.

A slice takes about a given time, by the cost of a record in the last slice. Its size grows to its double at most, and
shrinks at once, but not below what an operator asks services for at a time. A channel or a sink's client may hold as
many records as have left it lately. A subtask takes no more than its outputs have room for. Pure: the time is an
argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

BATCH_RECORDS_MAX = 2_000


class Bounds(NamedTuple):
    """Bounds in seconds of processing, by `Clock.processing_s`."""

    slice_s: float
    """The time of a slice: barriers, producers and blocks wait for its end."""
    in_flight_s: float
    """The time that a barrier waits behind records in front of a subtask, or that are being written."""


ALIGNED, OVERTAKING = Bounds(0.075, 0.5), Bounds(0.02, 0.2)
"""A barrier that overtakes only waits for the end of a slice, and overtaken records cost storage."""
HURRIED_SLICE_S = 0.005
"""The slice while a barrier that has overtaken is under way: several turns of the loop lie on its way."""
GATHER_S = 0.01
"""The pause after a poll of a source that gave less than a batch: a turn costs nearly as much with a few records as
with hundreds."""


@dataclass
class Pace:
    """The size of the next slice: about *target_s* of work, and *most* records at most.

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
    least: int = 1
    """Records that take no longer than one: a service is asked for all of them at a time."""
    _cost_s: float = 0.0
    """The cost of a record in the last slice."""

    def took(self, records: int, elapsed_s: float) -> None:
        if records:
            self._cost_s = elapsed_s / records
            fits = records * self.target_s / max(elapsed_s, 1e-9)
            self.size = max(self.least, min(int(fits), 2 * self.size, self.most))

    def within(self, hurried: bool) -> int:
        """The size of the next slice; *hurried*: of `HURRIED_SLICE_S` at most."""
        if not hurried or self._cost_s * self.size <= HURRIED_SLICE_S:
            return self.size
        return max(self.least, int(HURRIED_SLICE_S / self._cost_s))


SLICE_AT_FIRST = 4
"""Each record of a first slice may wait for stored state."""
SLICE_CAUTIOUS, IN_FLIGHT_CAUTIOUS = 16, 32
IN_FLIGHT_MIN = 8
"""The least window of all channels of a shuffle into a subtask. It can double with each round trip."""


def slice_pace(*, cautious: bool = False, bounds: Bounds = ALIGNED, least: int = 1) -> Pace:
    """The pace of an input. *cautious*: it stays small until `most` is raised. *least*: `Pace.least`."""
    most = SLICE_CAUTIOUS if cautious else BATCH_RECORDS_MAX
    return Pace(bounds.slice_s, max(SLICE_AT_FIRST, least), max(most, least), least)


class TakesRecords(Protocol):
    """An output of a subtask: a channel, or a sink's writer."""

    @property
    def room(self) -> int:
        """The records that it should get now; 0: pause."""

    @property
    def records(self) -> int:
        """The records that it got so far."""


SHARE_MIN = 1e-3
SHARE_RECORDS = 1_000


@dataclass
class Outlet:
    """An output, and the records that it gets for each record that the subtask takes.

    The share is far below 1 if a shuffle sends it few of the keys, and above 1 if operators multiply records. It rises
    at once, and falls over some `SHARE_RECORDS`.
    """

    output: TakesRecords
    share: float = 1.0
    _sent: int = 0

    @property
    def room(self) -> int:
        """The records that the subtask may take."""
        room = self.output.room
        return room and max(1, int(room / self.share))

    def fired(self) -> None:
        """The subtask has put out results without taking records: the share does not count them."""
        self._sent = self.output.records

    def took(self, records: int) -> None:
        """The subtask has taken *records* and put out their results."""
        if not records:
            return
        sent, self._sent = self.output.records - self._sent, self.output.records
        share = max(sent / records, SHARE_MIN)
        fall = min(1.0, records / SHARE_RECORDS)
        self.share = share if share > self.share else self.share + (share - self.share) * fall


def snapshot_budget_s(records_s: float) -> float:
    """The time for snapshots in a turn of the loop that spent *records_s* on records: twice that, for no output is
    visible before the next snapshot is done. It is 20 ms at most, or half of *records_s* if that is more.

    >>> [snapshot_budget_s(each) for each in (0.0, 0.003, 0.006, 0.03, 0.1)]
    [0.008, 0.008, 0.012, 0.02, 0.05]
    """
    return max(0.008, min(2 * records_s, 0.02), records_s / 2)
