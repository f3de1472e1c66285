"""The activity of a thread: its present place, the cost of each operator, a breath between chunks of a batch.

Invariants: `current` is a tuple and `turned_s` a number, each replaced whole, so that another thread may read them at
any time. Nothing else is shared. An operator's time excludes the time of downstream operators.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

CHUNK_RECORDS = 250
"""The records of an operator between two looks at the clock."""
BREATH_INTERVAL_S = 0.1
"""The time of a batch after which the thread breathes."""


class Place(NamedTuple):
    """The place of a thread, since a time of `Activity.now_s`."""

    name: str
    """The id of an operator, or a phase in words."""
    is_operator: bool
    since_s: float

    def __str__(self) -> str:
        return f"operator {self.name!r}" if self.is_operator else self.name


class Cost(NamedTuple):
    """The operator that took most of a period."""

    operator: str
    record_ms: float
    share: float
    """Its share of the period, 0 to 1."""


class Activity:
    """Written by the working thread. Other threads may read `current` and `turned_s`."""

    def __init__(self, now_s: Callable[[], float] = perf_counter) -> None:
        self.now_s = now_s
        now = now_s()
        self.current = Place("its start", False, now)
        self.turned_s = now
        """The time when the thread's loop last came round."""
        self.breath: Callable[[], None] = lambda: None
        """Called between two chunks of a slow batch."""
        self._breathe_at = now + BREATH_INTERVAL_S
        self.seconds: dict[str, float] = {}
        """The time in each operator since the start."""
        self.records: dict[str, int] = {}
        """The records that have come to each."""
        self._began_s = now
        self._before: tuple[dict[str, float], dict[str, int]] = {}, {}
        """Both at the last `forget`."""

    def phase(self, name: str) -> None:
        """The thread begins work that is no operator's."""
        self.current = Place(name, False, self.now_s())

    def enter(self, operator: str) -> float:
        """The thread begins a batch in *operator*. Returns the time, for `leave`."""
        now = self.now_s()
        self.current = Place(operator, True, now)
        return now

    def leave(self, operator: str, entered_s: float, records: int) -> None:
        """The thread has done *records* in *operator*."""
        self.seconds[operator] = self.seconds.get(operator, 0.0) + self.now_s() - entered_s
        self.records[operator] = self.records.get(operator, 0) + records

    def breathe(self) -> None:
        """Breathe between two chunks, if the last breath or turn of the loop is long ago."""
        if self.now_s() >= self._breathe_at:
            self.breath()
            self._breathe_at = self.now_s() + BREATH_INTERVAL_S

    def turn(self) -> None:
        """The loop comes round: the thread is in no place that could hang."""
        now = self.now_s()
        self.current = Place("its loop", False, now)
        self.turned_s, self._breathe_at = now, now + BREATH_INTERVAL_S

    def costliest(self) -> Cost | None:
        """The operator that took most time since the last `forget`, if any took time."""
        seconds_before, records_before = self._before
        seconds = {operator: total - seconds_before.get(operator, 0.0) for operator, total in self.seconds.items()}
        operator = max(seconds, key=seconds.__getitem__, default="")
        if not seconds.get(operator):
            return None
        records = self.records[operator] - records_before.get(operator, 0)
        return Cost(
            operator,
            1000 * seconds[operator] / max(1, records),
            seconds[operator] / max(1e-9, self.now_s() - self._began_s),
        )

    def forget(self) -> None:
        self._began_s, self._before = self.now_s(), (dict(self.seconds), dict(self.records))
