"""A clock that stands still until it is advanced.

Advancing it fires the timers that come due, ordered by their times and then by the order in which they were set. While
a timer runs, the clock shows the timer's time. So a run depends on its script alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

START_MS = 1_700_000_000_000


class Timer:
    """A timer set by `SimulatedClock.call_after`; `cancel` keeps it from firing."""

    __slots__ = ("_action", "due_ms")

    def __init__(self, due_ms: int, action: Callable[[], None]) -> None:
        self.due_ms = due_ms
        """Monotonic time."""
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Keep it from firing; a timer that has fired is not affected."""
        self._action = None

    def fire(self) -> None:
        """Run the action, unless cancelled."""
        action, self._action = self._action, None
        if action is not None:
            action()


class SimulatedClock:
    """A `Clock` whose time passes only in `advance`.

    >>> clock = SimulatedClock()
    >>> timer = clock.call_after(500, lambda: print("half a second"))
    >>> clock.advance(1_000)
    half a second
    >>> clock.monotonic_ms()
    1000
    """

    def __init__(self, now_ms: int = START_MS, monotonic_ms: int = 0) -> None:
        self._monotonic_ms = monotonic_ms
        self._wall_ms = now_ms - monotonic_ms
        """The wall clock's time at monotonic time 0."""
        self._timers: list[tuple[int, int, Timer]] = []
        self._set = 0

    def now_ms(self) -> int:
        return self._wall_ms + self._monotonic_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def processing_s(self) -> float:
        return self._monotonic_ms / 1000

    def call_after(self, delay_ms: int, action: Callable[[], None]) -> Timer:
        """Run *action* once *delay_ms* have passed."""
        timer = Timer(self._monotonic_ms + delay_ms, action)
        heapq.heappush(self._timers, (timer.due_ms, self._set, timer))
        self._set += 1
        return timer

    def advance(self, duration_ms: int) -> None:
        """Let *duration_ms* pass and fire the timers that come due, also those set meanwhile."""
        end_ms = self._monotonic_ms + duration_ms
        while self._timers and self._timers[0][0] <= end_ms:
            due_ms, _, timer = heapq.heappop(self._timers)
            self._monotonic_ms = max(self._monotonic_ms, due_ms)
            timer.fire()
        self._monotonic_ms = max(self._monotonic_ms, end_ms)

    def jump(self, by_ms: int) -> None:
        """Move the wall clock by *by_ms*, forward or back. No time passes."""
        self._wall_ms += by_ms
