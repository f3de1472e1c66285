"""Time as an argument: code that depends on time is given a `Clock`, so that a test can give a simulated one."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Wall-clock and monotonic time."""

    def now_ms(self) -> int:
        """Since 1970, by the wall clock. It may jump either way: for people, never for timeouts."""

    def monotonic_ms(self) -> int:
        """A time that never goes back, for intervals and timeouts."""

    def processing_s(self) -> float:
        """Seconds for the cost of the calling thread's work: they never go back, and stand still while it waits for a
        processor. Its sleep counts. Never for a timeout: others go by `monotonic_ms`."""
