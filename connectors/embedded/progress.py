"""Progress of what takes long: a function is called with each line, and whoever passes it decides where lines go.

Invariant: a line is permanent unless it is a `Passing` one, which only says how far something is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str], None]

INTERVAL_S = 5.0
_ERASE = "\r\x1b[K"


class Passing(str):
    """A line that the next one replaces where lines can be replaced."""

    __slots__ = ()


def told_on(stream: TextIO) -> Progress:
    """Writes to *stream*: in a terminal the next line replaces a passing one, elsewhere one comes every few seconds."""

    def tell(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    def overwrite(line: str) -> None:
        stream.write(f"{_ERASE}{line}" if isinstance(line, Passing) else f"{_ERASE}{line}\n")
        stream.flush()

    return overwrite if stream.isatty() else seldom(tell)


def seldom(tell: Progress, interval_s: float = INTERVAL_S, now_s: Callable[[], float] = time.monotonic) -> Progress:
    """Hands lines on to *tell*, but of the passing ones only what comes *interval_s* after the line before."""
    told_at = float("-inf")

    def tell_seldom(line: str) -> None:
        nonlocal told_at
        if not isinstance(line, Passing) or now_s() - told_at >= interval_s:
            told_at = now_s()
            tell(line)

    return tell_seldom
