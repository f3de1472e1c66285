"""The stop of a run from the command line, which is answered while the last checkpoint is taken."""

from __future__ import annotations

from typing import Any

from exactlyonce.cli.lines import show_from_handler
from exactlyonce.engines.local.run import Stopper

STOPPING = "stopping after a last checkpoint, if anything runs (asked again, it ends at once)"
ENDING_AT_ONCE = "ending at once, without a last checkpoint"


class SpeakingStopper(Stopper):
    """Answers every request to stop, since the last checkpoint may take a while; also while a reporter is writing."""

    def __init__(self, pipeline: str, *, in_terminal: bool) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._in_terminal = in_terminal

    def stop(self, *_: Any) -> None:
        text = ENDING_AT_ONCE if self.asked.is_set() else STOPPING
        super().stop()
        show_from_handler(self._pipeline, text, in_terminal=self._in_terminal)
