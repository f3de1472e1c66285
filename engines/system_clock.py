"""The clock of the machine. Outside tests, this is where time comes from."""

from __future__ import annotations

import time

NS_PER_MS = 1_000_000


class SystemClock:
    """A `Clock` that tells the machine's time."""

    def now_ms(self) -> int:
        return time.time_ns() // NS_PER_MS

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // NS_PER_MS
