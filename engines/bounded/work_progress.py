"""The progress of bounded work, for programs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exactlyonce.pipeline.sizes import counted


@dataclass(frozen=True)
class WorkProgress:
    """The progress at one moment; its text is a line for people.

    >>> print(WorkProgress("orders: checkpoint 12, stage totals", 3, 40, 5_000_000, 12_000_000))
    orders: checkpoint 12, stage totals, 3 of 40 units; 5,000,000 of 12,000,000 offsets
    >>> print(WorkProgress("orders: checkpoint 12", 0, 0, 12_000_000, 12_000_000))
    orders: checkpoint 12; 12,000,000 of 12,000,000 offsets
    """

    stage: str
    """The pipeline, the checkpoint and the stage; without a stage the checkpoint is complete."""
    units_done: int
    units: int
    """The units of the stage."""
    offsets_done: int
    """The offsets of complete checkpoints."""
    offsets: int
    """The offsets of all the work; 0 for a repair before it begins."""

    def __str__(self) -> str:
        units = f", {self.units_done:,} of {counted(self.units, 'unit')}" if self.units else ""
        offsets = f"; {self.offsets_done:,} of {counted(self.offsets, 'offset')}" if self.offsets else ""
        return f"{self.stage}{units}{offsets}"


OnProgress = Callable[[WorkProgress], object]
"""A program's function for progress, as `print`."""
