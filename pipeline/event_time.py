"""Event time as numbers: signed 64-bit integers of ms since 1970, and what they stand for. No clock is read.

`positions` reads the times that people write.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from math import isfinite
from typing import Any

NO_WATERMARK = -(1 << 63)
"""Below every watermark: none is known yet."""
NO_FLOOR = NO_WATERMARK
"""The floor of a record that is not late."""
END_OF_TIME = (1 << 63) - 1
"""The watermark of a drained source."""


LATEST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999: a later time is one of microseconds or nanoseconds."""
EARLIEST_MS = -62_135_596_800_000
"""The first millisecond of the year 1."""
LIKE_SECONDS = range(1_000_000_000, 100_000_000_000)
"""ms from 12 January 1970 until March 1973, which are seconds since 2001 more likely."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = timedelta(milliseconds=1)


class NoTime(ValueError):
    """A record has no usable time."""


def ms_of(time: Any, subject: str = "time= gave") -> int:
    """The ms since 1970 that *time* stands for; *subject* is it in an error. Raises `NoTime`.

    >>> ms_of(datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=timezone.utc))
    -1
    """
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise NoTime(f"{subject} {time!r}, which has no time zone: give tzinfo, as timezone.utc")
        if EARLIEST_MS <= (time_ms := (time - _EPOCH) // _MS) <= LATEST_MS:
            return time_ms
        raise NoTime(f"{subject} {time}, which is outside of the years 1 to 9999 in UTC")
    if isinstance(time, bool) or not isinstance(time, int):
        seconds = ": of seconds give round(1000 * seconds)" if isinstance(time, float) and isfinite(time) else ""
        raise NoTime(f"{subject} {time!r:.100}, which is neither an integer of ms since 1970 nor a datetime{seconds}")
    if time < 0:
        raise NoTime(f"{subject} {time}, and ms since 1970 are not negative: earlier times are given as datetime")
    if time > LATEST_MS:
        raise NoTime(
            f"{subject} {time}, as ms after the year 9999: divide microseconds by 1,000, nanoseconds by 1,000,000"
        )
    return time


def shown_time(ms: int) -> str:
    """A time for people; before and after the calendar, its first or last millisecond.

    >>> shown_time(1_700_000_000_123)
    '2023-11-14T22:13:20.123Z'
    """
    shown = _EPOCH + max(EARLIEST_MS, min(ms, LATEST_MS)) * _MS
    return shown.isoformat(timespec="milliseconds").replace("+00:00", "Z")
