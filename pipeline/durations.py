"""Durations as people write them: "500ms", "1.5s", "10m" or "1h"."""

from __future__ import annotations

import re

from exactlyonce.pipeline.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)\Z")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


def duration_ms(text: str | int, name: str = "duration") -> int:
    """Milliseconds of a duration.

    >>> duration_ms("1.5s")
    1500
    """
    match = _DURATION.match(str(text).strip())
    if match is None:
        raise ConfigError(f"{name} is {text!r}: write a number with a unit, as 500ms, 1.5s, 10m or 1h.")
    return round(float(match[1]) * _UNIT_MS[match[2]])
