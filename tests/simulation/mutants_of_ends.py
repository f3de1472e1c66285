"""Planted defects of runs that are cancelled: what is decided, what is left open. See `mutants_of_coordinators`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from planting import Table

from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records.manifest import Manifest

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


@mutant(
    "a cancelled run does not finish what is decided",
    r"checkpoint \d+ is condemned before it is known to be committed",
    luck="cancelled and deleted",
    first=13,
)
def _unfinished() -> Iterable[Any]:
    real = Coordinator._restart

    def _restart(self: Any, reason: str, now_ms: int, *, unfinished: bool = False) -> Any:
        if unfinished and self._cancelled:
            return self._end(None)
        return real(self, reason, now_ms, unfinished=unfinished)

    yield patch.object(Coordinator, "_restart", _restart)


@mutant("a cancelled run condemns its savepoints", r"savepoints .* are condemned", luck="cancelled and deleted")
def _savepoints() -> Iterable[Any]:
    real = Leader.conclude

    def conclude(self: Any, cancelled: str = "") -> Any:
        procedure, answer = real(self, cancelled), None
        while True:
            with patch.object(Manifest, "is_savepoint", False):
                try:
                    request = procedure.send(answer)
                except StopIteration:
                    return
            answer = yield request

    yield patch.object(Leader, "conclude", conclude)
