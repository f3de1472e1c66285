"""The notes of the command itself while a pipeline runs, in the form of the run's own events."""

from __future__ import annotations

import json
import sys
from typing import Any

from exactlyonce.engines.local.run import Stopper
from exactlyonce.engines.system_clock import SystemClock

STOPPING = "stopping behind a last checkpoint, if anything runs (asked again, it ends at once)"
ENDING_AT_ONCE = "ending at once, without a last checkpoint"


def note(pipeline: str, text: str) -> dict[str, Any]:
    """An event that a reporter shows to people."""
    return {"event": "note", "at_ms": SystemClock().now_ms(), "pipeline": pipeline, "text": text}


class SpeakingStopper(Stopper):
    """Answers every request to stop, since the last checkpoint may take a while.

    It may be called while a reporter is writing, so it writes past Python's buffers, which cannot be entered twice.
    """

    def __init__(self, pipeline: str, *, in_terminal: bool) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._in_terminal = in_terminal

    def stop(self, *_: Any) -> None:
        text = ENDING_AT_ONCE if self.asked.is_set() else STOPPING
        super().stop()
        line = f"\r\x1b[K{text}" if self._in_terminal else json.dumps(note(self._pipeline, text))
        with open(sys.stderr.fileno(), "wb", buffering=0, closefd=False) as unbuffered:
            unbuffered.write(f"{line}\n".encode())
