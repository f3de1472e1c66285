"""Time as an argument: code that depends on time is given a `Clock`, so that a test can give a simulated one."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Wall-clock and monotonic time, in milliseconds."""

    def now_ms(self) -> int:
        """Since 1970, by the wall clock. It may jump either way: for people, never for timeouts."""

    def monotonic_ms(self) -> int:
        """A time that never goes back, for intervals and timeouts."""
