"""Planted defects of runs that are cancelled: what is decided, what is left open. See `mutants_of_coordinators`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from planting import Table

from exactlyonce.checkpoint.coordinator import Coordinator

ENDS = Table()
"""By name."""
mutant = ENDS.mutant


@mutant("a cancelled run takes a last checkpoint", "that was cancelled takes another checkpoint", luck="cancelled")
def _stopped() -> Iterable[Any]:
    yield patch.object(Coordinator, "_cancel", lambda self, _: self._stop(0))


@mutant("a cancelled run leaves its transactions open", r"is left Ongoing", luck="cancelled")
def _left_open() -> Iterable[Any]:
    real = Coordinator._cancel

    def _cancel(self: Any, request: str) -> Any:
        effects = real(self, request)
        return self._end(None) if effects else []

    yield patch.object(Coordinator, "_cancel", _cancel)
