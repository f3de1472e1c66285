"""The activity of a thread: its place at the moment, the cost of each operator, a breath between chunks of a batch.

Invariants: `current` is one tuple and `turned_s` one number, each replaced whole, so that another thread may read them
at any time; nothing else here is shared between threads. An operator's time is its own: what the operators behind it
take is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

CHUNK_RECORDS = 250
"""How many records an operator takes between two looks at the clock."""
BREATH_INTERVAL_S = 0.1
"""How long a batch may take before the thread breathes."""


class Place(NamedTuple):
    """Where a thread is, since when (by `Activity.now_s`)."""

    name: str
    """The id of an operator, or a phase in words."""
    is_operator: bool
    since_s: float

    def __str__(self) -> str:
        return f"operator {self.name!r}" if self.is_operator else self.name


class Cost(NamedTuple):
    """The operator that took most of a stretch of time."""

    operator: str
    record_ms: float
    share: float
    """Of the time, 0 to 1."""


class Activity:
    """Kept by the thread that works; `current` and `turned_s` may be read by others."""

    def __init__(self, now_s: Callable[[], float] = perf_counter) -> None:
        self.now_s = now_s
        now = now_s()
        self.current = Place("its start", False, now)
        self.turned_s = now
        """When the thread's loop last came round."""
        self.breath: Callable[[], None] = _nothing
        """Called between two chunks of a batch that takes long."""
        self._breathe_at = now + BREATH_INTERVAL_S
        self._began_s = now
        self._seconds: dict[str, float] = {}
        self._records: dict[str, int] = {}

    def phase(self, name: str) -> None:
        """The thread begins something that is no operator's work on records."""
        self.current = Place(name, False, self.now_s())

    def enter(self, operator: str) -> float:
        """The thread begins with a batch in *operator*; returns the time, for `leave`."""
        now = self.now_s()
        self.current = Place(operator, True, now)
        return now

    def leave(self, operator: str, entered_s: float, records: int) -> None:
        """It is through with *records* there."""
        self._seconds[operator] = self._seconds.get(operator, 0.0) + self.now_s() - entered_s
        self._records[operator] = self._records.get(operator, 0) + records

    def breathe(self) -> None:
        """Between two chunks: if the last breath, or turn of the loop, is long ago, take one."""
        if self.now_s() >= self._breathe_at:
            self.breath()
            self._breathe_at = self.now_s() + BREATH_INTERVAL_S

    def turn(self) -> None:
        """The loop comes round: the thread is in nothing that could hang."""
        now = self.now_s()
        self.current = Place("its loop", False, now)
        self.turned_s, self._breathe_at = now, now + BREATH_INTERVAL_S

    def costliest(self) -> Cost | None:
        """The operator that took most time since the last `forget`; None if none took any."""
        if not self._seconds:
            return None
        operator = max(self._seconds, key=self._seconds.__getitem__)
        seconds, records = self._seconds[operator], self._records[operator]
        return Cost(operator, 1000 * seconds / max(1, records), seconds / max(1e-9, self.now_s() - self._began_s))

    def forget(self) -> None:
        """Begin a new stretch of time."""
        self._began_s, self._seconds, self._records = self.now_s(), {}, {}


def _nothing() -> None:
    """The breath of one who has nothing to poll: none."""
