"""Event time: the numbers that all parts share. A time is a signed 64-bit integer of ms since 1970."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from exactlyonce.pipeline.dead_letters import DeadLetterTarget

NO_WATERMARK = -(1 << 63)
"""Below every watermark: none is known yet."""
NO_FLOOR = NO_WATERMARK
"""The floor of a record that is not late."""
END_OF_TIME = (1 << 63) - 1
"""The watermark of a drained source."""


@dataclass(frozen=True, kw_only=True)
class EventTime:
    """The event time of a source's records: *time* of each, in any order within *disorder_ms* in its split."""

    time: Callable[[Any], Any]
    """Gives ms since 1970 or an aware datetime."""
    disorder_ms: int
    idle_ms: int | None
    """A split without new records for so long does not hold back others; None: it always does."""
    ahead_ms: int | None
    """How far a time may lie after the timestamp of the record's message; None: any."""
    on_error: Literal["fail", "skip"] | DeadLetterTarget
    """The treatment of a record without a usable time."""
