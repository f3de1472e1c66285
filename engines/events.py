"""Events: what machines are told of a command, each a dict that becomes one line of JSON.

Invariant: each has its kind in "event", the time in "at_ms" (ms since 1970) and the "pipeline", which is None before it
is known. Nothing secret is in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ExactlyOnceError, Fenced, Halt, class_name


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
