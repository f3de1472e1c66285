"""Durations: "500ms", "1.5s", "10m", "1h", "2d" or "1w", or a `timedelta`."""

from __future__ import annotations

import dataclasses
import re
from datetime import timedelta
from fractions import Fraction
from typing import Any

from exactlyonce.pipeline.errors import ConfigError

Duration = str | timedelta
"""A text as "5s", or a `timedelta` of whole milliseconds."""

_MILLISECOND = timedelta(milliseconds=1)
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\Z")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def duration_ms(duration: Duration, name: str = "duration") -> int:
    """Milliseconds of a duration, which is not negative.

    >>> duration_ms("1.5s"), duration_ms(timedelta(seconds=1.5))
    (1500, 1500)
    """
    if isinstance(duration, timedelta):
        milliseconds = Fraction(duration // timedelta.resolution, 1_000)
    elif isinstance(duration, str) and (match := _DURATION.match(duration.strip())):
        milliseconds = Fraction(match[1]) * _UNIT_MS[match[2]]
    elif isinstance(duration, int) and not isinstance(duration, bool):
        raise ConfigError(
            f'{name} is {duration}, without a unit: write "{duration}s", or timedelta(seconds={duration}) in Python.'
        )
    else:
        raise ConfigError(
            f"{name} is {duration!r}: write a number with a unit, as 500ms, 1.5s, 10m, 1h, 2d or 1w, or a timedelta."
        )
    if milliseconds < 0:
        raise ConfigError(f"{name} is {duration!r}: it must not be negative.")
    if milliseconds.denominator > 1:
        raise ConfigError(f"{name} is {duration!r}: the smallest unit is 1ms.")
    return int(milliseconds)


def duration_problems(duration: Duration, name: str, *, least_ms: int = 1) -> list[str]:
    """The mistake in *duration*, of the argument *name*, with its remedy; *least_ms* is 0 or 1.

    >>> duration_problems("7d", "ttl"), duration_problems("0s", "ttl")
    ([], ['ttl= must be above 0'])
    """
    try:
        return [] if duration_ms(duration, name) >= least_ms else [f"{name}= must be above 0"]
    except ConfigError as error:
        return [str(error).removesuffix(".")]


def as_text(duration: Any) -> Any:
    """*duration* as text, if it is a `timedelta` of whole milliseconds; else as it is.

    >>> as_text(timedelta(minutes=5)), as_text(timedelta(minutes=-5)), as_text("5m")
    ('5m', '-5m', '5m')
    """
    if not isinstance(duration, timedelta) or duration % _MILLISECOND:
        return duration
    return "-" * (duration < timedelta(0)) + written_duration(abs(duration) // _MILLISECOND)


def write_durations(holder: Any) -> None:
    """Write each `timedelta` of *holder*, a dataclass, as text: equal ones are equal then, in descriptions, too."""
    for field in dataclasses.fields(holder):
        object.__setattr__(holder, field.name, as_text(getattr(holder, field.name)))


def shown_duration(milliseconds: int) -> str:
    """A duration for people, in at most 7 characters.

    >>> [shown_duration(ms) for ms in (113, 12_340, 192_000, 7_500_000)]
    ['113 ms', '12.3 s', '3m 12s', '2h 05m']
    """
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f} s"
    minutes, seconds = divmod(milliseconds // 1000, 60)
    return f"{minutes}m {seconds:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def written_duration(milliseconds: int) -> str:
    """A duration as `duration_ms` reads it.

    >>> [written_duration(ms) for ms in (0, 10, 1_500, 60_000, 3_600_000, 172_800_000)]
    ['0s', '10ms', '1500ms', '1m', '1h', '2d']
    """
    units = (unit for unit, size_ms in reversed(_UNIT_MS.items()) if milliseconds % size_ms == 0)
    unit = next(units, "ms") if milliseconds else "s"
    return f"{milliseconds // _UNIT_MS[unit]}{unit}"
