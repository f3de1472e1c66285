"""Event time as numbers: signed 64-bit integers of ms since 1970, for pure modules, which import no `datetime`."""

from __future__ import annotations

NO_WATERMARK = -(1 << 63)
"""Below every watermark: none is known yet."""
NO_FLOOR = NO_WATERMARK
"""The floor of a record that is not late."""
END_OF_TIME = (1 << 63) - 1
"""The watermark of a drained source."""
