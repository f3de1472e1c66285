"""Time as an argument: whoever depends on time is given a `Clock`, so that a test can give one that it moves itself."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Two times in milliseconds: one that people set, one that only grows."""

    def now_ms(self) -> int:
        """Since 1970, by the wall clock. It may jump either way: for what people read, never for timeouts."""

    def monotonic_ms(self) -> int:
        """Since an unnamed instant. It never goes back: for intervals and timeouts."""
