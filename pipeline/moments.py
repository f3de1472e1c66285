"""Moments in text: "2026-11-01T00:00:00Z"."""

from __future__ import annotations

from datetime import datetime

from exactlyonce.pipeline.errors import ConfigError


def moment_of(text: str) -> datetime | None:
    """A moment in ISO 8601; None for other text. `ConfigError` without a time zone.

    >>> moment_of("2026-11-01T00:00:00Z")
    datetime.datetime(2026, 11, 1, 0, 0, tzinfo=datetime.timezone.utc)
    """
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        raise ConfigError(f"{text!r} has no time zone: append Z for UTC, or an offset as +01:00.")
    return moment
