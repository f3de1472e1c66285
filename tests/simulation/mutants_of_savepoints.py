"""Planted defects, continued: rules about savepoints. See `mutants_of_coordinators`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import msgspec
from planting import LEFT, STATE, Table

from exactlyonce.checkpoint import coordinator, orphans, retention
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.savepoint_requests import SavepointRequests
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.savepoints import restoring
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
    yield patch.object(SavepointRequests, "serve", lambda *_: False)


@mutant("a savepoint is tried again before a checkpoint", r"is triggered before a checkpoint", luck="late savepoints")
def _at_once() -> Iterable[Any]:
    real = SavepointRequests.fail
    yield patch.object(SavepointRequests, "fail", lambda self, requests, first: real(self, requests, 0))


@mutant("workers stay behind a savepoint that is too late", r"while workers may still write", luck="late savepoints")
def _still_writing() -> Iterable[Any]:
    real = coordinator.Coordinator._failed

    def failed(self: Any, failure: Any, now_ms: int) -> Any:
        return real(self, failure, now_ms) if failure.counts else []

    yield patch.object(coordinator.Coordinator, "_failed", failed)


@mutant("a restored state lies with the wrong subtask", STATE, luck="from savepoint")
def _misplaced() -> Iterable[Any]:
    yield patch.object(restoring, "subtask_of", lambda group, parallelism, most: 0)


@mutant("a savepoint is restored without where its sources stood", r"Sn of .* goes back from", luck="from savepoint")
def _from_the_start() -> Iterable[Any]:
    def offsets_now(saved: Any, around: Any, asked: Any) -> Any:
        return tuple(msgspec.structs.replace(each, offset=0, leader_epoch=-1) for each in saved.offsets)

    yield patch.object(restoring, "offsets_now", offsets_now)


@mutant("what a restore left that died is not looked for", LEFT, luck="from savepoint")
def _not_behind() -> Iterable[Any]:
    real = KnownBlocks.ends_to_note

    def ends_to_note(self: Any, checkpoint: int, base: int, *, final: bool) -> Any:
        ends = real(self, checkpoint, base, final=final)
        return (10**9,) * len(ends) if checkpoint == base > 0 else ends

    yield patch.object(KnownBlocks, "ends_to_note", ends_to_note)
