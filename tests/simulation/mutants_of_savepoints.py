"""Planted defects, continued: rules about savepoints. See `mutants_of_coordinators`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from planting import Table

from exactlyonce.checkpoint import coordinator, orphans, retention
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.local.task import Subtask
from exactlyonce.state.table import KeyedTable

SAVEPOINTS = Table()
"""By name."""
mutant = SAVEPOINTS.mutant
DROPPED = r"savepoint \d+ is dropped though nobody has deleted it"
TWICE = r"request-\d+ is served twice"


@mutant("a savepoint expires", DROPPED, luck="savepoints")
def _expiring() -> Iterable[Any]:
    real = retention.Ledger.completed

    def completed(self: Any, checkpoint: int, blocks: Any, **_: Any) -> None:
        real(self, checkpoint, blocks)

    yield patch.object(retention.Ledger, "completed", completed)


@mutant("recovery does not know savepoints", DROPPED, luck="savepoints")
def _forgotten() -> Iterable[Any]:
    real = orphans.KnownBlocks.recover

    def recover(self: Any, history: Any, incarnation: int) -> Any:
        with patch.object(Manifest, "is_savepoint", False):
            yield from ()
            procedure = real(self, history, incarnation)
        answer = None
        while True:
            with patch.object(Manifest, "is_savepoint", False):
                try:
                    request = procedure.send(answer)
                except StopIteration as end:
                    return end.value
            answer = yield request

    yield patch.object(orphans.KnownBlocks, "recover", recover)


@mutant("a savepoint is an increment", r"savepoint \d+ stands on a block of checkpoint \d+", luck="savepoints")
def _increment() -> Iterable[Any]:
    real = KeyedTable.freeze

    def freeze(self: Any, checkpoint: int, base: int, **_: Any) -> Any:
        return real(self, checkpoint, base)

    yield patch.object(KeyedTable, "freeze", freeze)


WHOLE = r"checkpoint \d+ stands on a block of checkpoint \d+"


@mutant("checkpoints are increments where each is to hold all state", WHOLE, luck="whole state")
def _increments() -> Iterable[Any]:
    real = Subtask.__post_init__

    def __post_init__(self: Any) -> None:
        self.incremental = True
        real(self)

    yield patch.object(Subtask, "__post_init__", __post_init__)


@mutant("a request that is served is not taken off the list", TWICE, luck="savepoints")
def _never_served() -> Iterable[Any]:
    yield patch.object(coordinator.Coordinator, "_note_served", lambda *_: None)
