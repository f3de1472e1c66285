"""The checkpoints of a run, from their trigger on, as its events tell of them.

Invariant: the last `CHECKPOINTS` are kept; one that has ended, completed or aborted, changes no more but for its notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import SubtaskStats

CHECKPOINTS = 60
"""How many are kept."""
RUNNING, COMPLETED, ABORTED = "running", "completed", "aborted"
"""The outcomes of a checkpoint, as the page and spans have them."""
_CHECKPOINT = re.compile(r"\bcheckpoint (\d+)\b")


class TriggeredCheckpoint(msgspec.Struct, omit_defaults=True):
    """A checkpoint that was triggered in this run. Times are in milliseconds since 1970."""

    id: int
    triggered_ms: int
    outcome: str = RUNNING
    subtasks: list[SubtaskStats] = []
    """Those that have acknowledged it, in that order."""
    event: Mapping[str, Any] = {}
    """Its event, once it is completed."""
    aborted_ms: int = 0
    notes: list[str] = []
    """What was said about it."""


class TriggeredCheckpoints:
    """Those of one run, by number."""

    def __init__(self) -> None:
        self.by_number: dict[int, TriggeredCheckpoint] = {}

    def event(self, event: Mapping[str, Any]) -> list[TriggeredCheckpoint]:
        """Take in an event of the run. Gives the checkpoints that it ended."""
        known = self.by_number.get(event.get("checkpoint", -1))
        match event["event"], event.get("step"):
            case "note", _:
                return self._noted(event)
            case "checkpoint", _ if known is not None:
                known.outcome, known.event = COMPLETED, dict(event)
                return [known]
            case "step", "deployed":  # what the last workers were at will never be complete
                return self._abort(self.by_number.values(), event["at_ms"])
            case "step", "triggered":
                self.by_number[event["checkpoint"]] = TriggeredCheckpoint(event["checkpoint"], event["at_ms"])
                while len(self.by_number) > CHECKPOINTS:
                    del self.by_number[min(self.by_number)]
            case "step", "acknowledged" if known is not None:
                figures = {name: event[name] for name in SubtaskStats.__struct_fields__ if name in event}
                known.subtasks.append(SubtaskStats(**figures, subtask=event["worker"]))
        return []

    def _noted(self, note: Mapping[str, Any]) -> list[TriggeredCheckpoint]:
        text = note["text"]
        named = [self.by_number[number] for number in {*map(int, _CHECKPOINT.findall(text))} & self.by_number.keys()]
        for known in named:
            known.notes.append(text)
        return self._abort(named, note["at_ms"]) if "aborted" in text else []

    def _abort(self, checkpoints: Iterable[TriggeredCheckpoint], at_ms: int) -> list[TriggeredCheckpoint]:
        running = [known for known in checkpoints if known.outcome == RUNNING]
        for known in running:
            known.outcome, known.aborted_ms = ABORTED, at_ms
        return running
