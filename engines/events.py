"""Events: what machines are told of a command, each a dict that becomes one line of JSON.

Invariant: each has its kind in "event", the time in "at_ms" (ms since 1970) and the "pipeline", which is None before it
is known. Nothing secret is in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, Fenced, Halt, class_name

LEVELS = ("debug", "info", "warning", "error")
_LEVELS = {"step": "debug", "note": "warning", "failed": "error", "taken_over": "error"}
"""By kind; all others are "info"."""
IDLE_INTERVAL_MS = 60_000
"""Of the checkpoints of a run that reads nothing, one in this time is told."""


def event(kind: str, pipeline: str | None, /, **fields: Any) -> dict[str, Any]:
    """An event of now."""
    return {"event": kind, "at_ms": SystemClock().now_ms(), "pipeline": pipeline, **fields}


def note(pipeline: str | None, text: str) -> dict[str, Any]:
    """The event that has what a person should know."""
    return event("note", pipeline, text=text)


def ending(error: ExactlyOnceError, pipeline: str | None, redact: Callable[[str], str]) -> dict[str, Any]:
    """The last event of a command, which ends with *error*: a newer instance took over, or it failed."""
    fields: dict[str, Any] = {"code": error.exit_code, "error": class_name(error), "text": redact(str(error))}
    fields |= {name: redact(fact) if isinstance(fact, str) else fact for name, fact in error.facts.items()}
    if isinstance(error, Halt) and error.choices:
        fields["choices"] = [redact(choice) for choice in error.choices]
    return event("taken_over" if isinstance(error, Fenced) else "failed", pipeline, **fields)


class Selection:
    """Chooses the events to be told: of *level* or graver, and not every checkpoint of a run that reads nothing.

    Such a checkpoint is a detail, level "debug", unless none was told for a minute.
    """

    def __init__(self, level: str = "info") -> None:
        if level not in LEVELS:
            raise ConfigError(f"log_level is {level!r}: it must be one of {', '.join(LEVELS)}.")
        self._least = LEVELS.index(level)
        self._told: Mapping[str, Any] | None = None
        """The newest checkpoint of those that were told."""

    def __call__(self, event: Mapping[str, Any]) -> bool:
        """Whether *event*, which comes after all that were asked about, is told."""
        is_checkpoint = event["event"] == "checkpoint"
        level = "debug" if is_checkpoint and self._is_idle(event) else _LEVELS.get(event["event"], "info")
        told = LEVELS.index(level) >= self._least
        if is_checkpoint and told:
            self._told = event
        return told

    def _is_idle(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether nothing was read or written since the checkpoint that was told, a moment ago."""
        told = self._told
        if told is None or checkpoint["kind"] != "checkpoint" or checkpoint["records_committed"]:
            return False
        since_ms = checkpoint["at_ms"] - told["at_ms"]  # negative once the clock was set back
        return bool(checkpoint["records_in"] == told["records_in"] and 0 <= since_ms < IDLE_INTERVAL_MS)
