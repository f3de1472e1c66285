"""The events of a command, for machines: each is a dict that becomes one line of JSON.

Invariant: each has its kind in "event", the time in "at" (ISO 8601, UTC) and in "at_ms" (ms since 1970), and the
"pipeline", None before that is known. None has a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, Fenced, Halt, class_name

LEVELS = ("debug", "info", "warning", "error")
_LEVELS = {"step": "debug", "note": "warning", "failed": "error", "taken_over": "error"}
"""The level of each kind; all others are "info"."""
IDLE_INTERVAL_MS = 60_000
"""A run that reads nothing reports one checkpoint in this time."""


def event(kind: str, pipeline: str | None, /, **fields: Any) -> dict[str, Any]:
    now_ms = SystemClock().now_ms()
    at = datetime.fromtimestamp(now_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    return {"event": kind, "at": at.replace("+00:00", "Z"), "at_ms": now_ms, "pipeline": pipeline, **fields}


def level_of(kind: str) -> str:
    """The level of an event of this kind."""
    return _LEVELS.get(kind, "info")


def note(pipeline: str | None, text: str) -> dict[str, Any]:
    return event("note", pipeline, text=text)


def ending(error: ExactlyOnceError, pipeline: str | None, redact: Callable[[str], str]) -> dict[str, Any]:
    """The last event of a command that ends with *error*: a newer instance took over, or it failed."""
    fields: dict[str, Any] = {"code": error.exit_code, "error": class_name(error), "text": redact(str(error))}
    fields |= {name: redact(fact) if isinstance(fact, str) else fact for name, fact in error.facts.items()}
    if isinstance(error, Halt) and error.choices:
        fields["choices"] = [redact(choice) for choice in error.choices]
    return event("taken_over" if isinstance(error, Fenced) else "failed", pipeline, **fields)


class Selection:
    """Selects events of *level* or graver. Checkpoints of an idle run are "debug", except for one a minute."""

    def __init__(self, level: str = "info") -> None:
        if level not in LEVELS:
            raise ConfigError(f"log_level is {level!r}: it must be one of {', '.join(LEVELS)}.")
        self._least = LEVELS.index(level)
        self._reported: Mapping[str, Any] | None = None
        """The newest selected checkpoint."""

    def __call__(self, event: Mapping[str, Any]) -> bool:
        """Whether *event*, the newest, is selected."""
        is_checkpoint = event["event"] == "checkpoint"
        level = "debug" if is_checkpoint and self._is_idle(event) else level_of(event["event"])
        selected = LEVELS.index(level) >= self._least
        if is_checkpoint and selected:
            self._reported = event
        return selected

    def _is_idle(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether nothing was read or written since the checkpoint reported less than a minute ago."""
        last = self._reported
        if last is None or checkpoint["kind"] != "checkpoint" or checkpoint["records_committed"]:
            return False
        since_ms = checkpoint["at_ms"] - last["at_ms"]  # negative once the clock was set back
        return bool(checkpoint["records_in"] == last["records_in"] and 0 <= since_ms < IDLE_INTERVAL_MS)
