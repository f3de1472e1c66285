"""Progress of slow steps: a function of the caller gets each line.

Invariant: a line is permanent unless it is a `Passing` one, which the next line may replace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str], None]

INTERVAL_S = 5.0
_ERASE = "\r\x1b[K"


class Passing(str):
    """A line that the next one replaces in a terminal."""

    __slots__ = ()


def told_on(stream: TextIO) -> Progress:
    """Write to *stream*: in a terminal the next line replaces a passing one, elsewhere one comes every few seconds."""

    def tell(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    def overwrite(line: str) -> None:
        stream.write(f"{_ERASE}{line}" if isinstance(line, Passing) else f"{_ERASE}{line}\n")
        stream.flush()

    return overwrite if stream.isatty() else seldom(tell)


def seldom(tell: Progress, interval_s: float = INTERVAL_S, now_s: Callable[[], float] = time.monotonic) -> Progress:
    """Call *tell* with each line, but with a passing one only *interval_s* after the line before."""
    told_at = float("-inf")

    def tell_seldom(line: str) -> None:
        nonlocal told_at
        if not isinstance(line, Passing) or now_s() - told_at >= interval_s:
            told_at = now_s()
            tell(line)

    return tell_seldom
