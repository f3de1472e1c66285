"""The checkpoints of a run, from their trigger on, as its events tell of them.

Invariant: the last `CHECKPOINTS` are kept; one that has ended, completed or aborted, changes no more but for its notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

CHECKPOINTS = 60
"""How many are kept."""
_CHECKPOINT = re.compile(r"\bcheckpoint (\d+)\b")


class TriggeredCheckpoint(msgspec.Struct, omit_defaults=True):
    """A checkpoint that was triggered in this run. Times are in milliseconds since 1970."""

    id: int
    triggered_ms: int
    outcome: str = "running"
    """running, completed or aborted"""
    acknowledged: list[tuple[str, int, int, float, float]] = []
    """Task, subtask, time, and the milliseconds of the synchronous and the asynchronous part, by subtask."""
    visible_ms: int = 0
    finalized_ms: int = 0
    event: Mapping[str, Any] = {}
    """Its event, once it is completed."""
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
                return self._noted(event["text"])
            case "checkpoint", _ if known is not None:
                known.outcome, known.finalized_ms, known.event = "completed", event["at_ms"], dict(event)
                return [known]
            case "step", "deployed":  # what the last workers were at will never be complete
                return self._abort(self.by_number.values())
            case "step", "triggered":
                self.by_number[event["checkpoint"]] = TriggeredCheckpoint(event["checkpoint"], event["at_ms"])
                while len(self.by_number) > CHECKPOINTS:
                    del self.by_number[min(self.by_number)]
            case "step", "acknowledged" if known is not None:
                row = (event["task"], event["worker"], event["at_ms"], event["sync_ms"], event["async_ms"])
                known.acknowledged.append(row)
            case "step", "requests until visible" if known is not None:
                known.visible_ms = event["at_ms"]
        return []

    def _noted(self, text: str) -> list[TriggeredCheckpoint]:
        named = [self.by_number[number] for number in {*map(int, _CHECKPOINT.findall(text))} & self.by_number.keys()]
        for known in named:
            known.notes.append(text)
        return self._abort(named) if "aborted" in text else []

    def _abort(self, checkpoints: Iterable[TriggeredCheckpoint]) -> list[TriggeredCheckpoint]:
        running = [known for known in checkpoints if known.outcome == "running"]
        for known in running:
            known.outcome = "aborted"
        return running
