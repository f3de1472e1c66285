"""The figures that explain how long a checkpoint took.

They are written with its mark, and no recovery needs them: older marks have none, and an unreadable one is as if it had
none. A history keeps them packed, for it may have thousands.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from exactlyonce.pipeline.durations import shown_duration

NOT_KNOWN = -1
STATS_SIZE_MAX = 256 * 1024
"""Larger ones are left out of a mark."""
ABORTED_MAX = 60
REASON_LENGTH_MAX = 400


class SubtaskStats(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask's part of a checkpoint: its phases in order, in ms, each `NOT_KNOWN` if it was not timed."""

    task: str
    subtask: int
    waiting_ms: int = NOT_KNOWN
    """From the trigger until its first barrier came."""
    aligning_ms: int = NOT_KNOWN
    """Until the barrier had come on every input, or had overtaken."""
    snapshot_ms: int = NOT_KNOWN
    """Until its state was written."""
    capture_ms: int = NOT_KNOWN
    """Until the records that the barrier had overtaken, or that went round a loop, were captured and written."""
    flush_ms: int = NOT_KNOWN
    """Until its output was flushed or staged, and everything else durable: then it acknowledged."""
    state_bytes: int = 0
    written_bytes: int = 0
    """Bytes of the blocks that this checkpoint wrote."""
    records_in_flight: int = 0
    bytes_in_flight: int = 0

    @property
    def acknowledged_ms(self) -> int | None:
        """The time of its acknowledgement after the trigger; None: not known."""
        phases = (self.waiting_ms, self.aligning_ms, self.snapshot_ms, self.capture_ms, self.flush_ms)
        return None if NOT_KNOWN in phases else sum(phases)

    @property
    def figures(self) -> dict[str, str | int | None]:
        """All of it for a program or a page: None is not known."""
        figures = msgspec.structs.asdict(self) | {"acknowledged_ms": self.acknowledged_ms}
        return {name: None if value == NOT_KNOWN else value for name, value in figures.items()}


_WORDS = {
    "waiting_ms": "waiting for its barrier",
    "aligning_ms": "aligning barriers",
    "snapshot_ms": "writing its snapshot",
    "capture_ms": "capturing in-flight records",
    "flush_ms": "flushing its output",
}


def slowest(subtasks: Iterable[SubtaskStats]) -> str:
    """The subtask that acknowledged last, and its longest phase; empty: not known.

    >>> times = {"waiting_ms": 5, "aligning_ms": 900, "snapshot_ms": 20, "capture_ms": 0, "flush_ms": 7}
    >>> slowest([SubtaskStats(task="totals", subtask=3, **times), SubtaskStats(task="totals", subtask=4)])
    'totals[3] took 932 ms, 900 ms of it aligning barriers'
    """
    last = max(subtasks, key=lambda stats: stats.acknowledged_ms or 0, default=None)
    if last is None or last.acknowledged_ms is None:
        return ""
    took_ms, phase = max((getattr(last, name), phase) for name, phase in _WORDS.items())
    place = f"{last.task}[{last.subtask}]"
    return f"{place} took {shown_duration(last.acknowledged_ms)}, {shown_duration(took_ms)} of it {phase}"


def slowest_first(subtasks: Iterable[SubtaskStats]) -> list[SubtaskStats]:
    """*subtasks* in the order of their acknowledgements, the last one first; those that were not timed last."""
    return sorted(subtasks, key=lambda stats: -(stats.acknowledged_ms or 0))


class AbortedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was aborted before this one was completed."""

    checkpoint: int
    before_ms: int
    """How long before this one it was triggered; negative: after it."""
    lasted_ms: int
    reason: str


class CheckpointStats(msgspec.Struct, frozen=True):
    checkpoint: int
    subtasks: tuple[SubtaskStats, ...] = ()
    aborted: tuple[AbortedCheckpoint, ...] = ()
    """Those since the last completed one, the last `ABORTED_MAX`."""
