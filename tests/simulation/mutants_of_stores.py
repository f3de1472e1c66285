"""Planted defects of stores that keep a ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
import planting
from planting import COUNT, LEFT, TOMBSTONED, in_place_of, replaced, unchecked
from topologies import ANY_STORE

from exactlyonce.checkpoint import decision_log, events, kept_blocks, leader
from exactlyonce.checkpoint.commits.stores import StagedCommits
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.decision import Fates
from exactlyonce.checkpoint.events import PendingCheckpoint
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.sinks import ledger
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead import sink as write_ahead
from exactlyonce.sinks.write_ahead.writer import RowsWriter

UNDECIDED = r"is applied though no durable manifest names it"
FENCED = r"is applied by who was fenced"
NOT_THERE = r"is finalized though it is not in the store"
DISORDERED = r"is applied before \["
OTHER_ROWS = r"is applied with other rows than were set aside"
SET_ASIDE = r"rows set aside, not"
FORGOTTEN = r"says that the ledgers have"
UNNOTICED = r"goes on to a clean end though the store was put back"


mutant = partial(planting.mutant, shape=ANY_STORE)

# --- the ledger -----------------------------------------------------------------------------------------------------


@mutant("a store does not look at the checkpoint before", DISORDERED, luck="restored while away", first=6)
@in_place_of(LedgerEntry, "is_due")
def _previous_ignored(real: Any, self: LedgerEntry, **ledger: Any) -> Any:
    return real(msgspec.structs.replace(self, previous=0), **ledger)


@mutant("a store lets whoever was fenced apply", FENCED, luck="stores")
@in_place_of(ledger, "require_writer")
def _fence_ignored(real: Any, *writer: Any, newest: int, begun_for: str) -> None:
    real(*writer, newest=0, begun_for=begun_for)


@mutant(
    "a store does not look at the topic that its ledger was begun for", UNDECIDED + "|" + OTHER_ROWS, luck="reset",
    first=2,
)  # fmt: skip
@in_place_of(ledger, "require_writer")
def _topic_ignored(real: Any, *writer: Any, newest: int, begun_for: str) -> None:
    *_, origin = writer
    real(*writer, newest=newest, begun_for=origin)


@mutant("a ledger that is behind is fenced, and not looked at", UNNOTICED, luck="restored while down", first=4)
@in_place_of(StagedCommits, "fence")
def _behind_ignored(real: Any, self: Any, newest: Any, finalized: Any) -> Any:
    return real(self, newest, None)


@mutant("the ledger's checkpoints of subtasks that are gone are forgotten", FORGOTTEN, luck="stores")
@in_place_of(leader.Leader, "_manifest")
def _gone_forgotten(real: Any, self: Any, *arguments: Any, **options: Any) -> Any:
    manifest = real(self, *arguments, **options)
    kept = tuple(each for each in manifest.ledger if each[1] < manifest.parallelism)
    return msgspec.structs.replace(manifest, ledger=kept)


# --- decisions ------------------------------------------------------------------------------------------------------


@mutant("rows are applied before the manifest is durable", UNDECIDED)
@in_place_of(leader.Leader, "_produced")
def _applied_first(real: Any, self: Any, plan: Any) -> Any:
    manifest = yield from real(self, plan)
    if isinstance(manifest, Manifest):
        yield from self._stores.commit(manifest)
    return manifest


@mutant("a checkpoint is finalized before its rows are applied", NOT_THERE)
def _finalized_first() -> Iterable[Any]:
    commit = StagedCommits.commit

    def later(real: Any, self: Any, manifest: Manifest) -> Any:
        yield from ()
        return Fates(dict.fromkeys((each.name for each in manifest.staged), "committed"))

    def decide(real: Any, self: Any, plan: Any, pinned: Any) -> Any:
        verdict = yield from real(self, plan, pinned)
        if isinstance(verdict, events.Decided):
            yield from commit(self._stores, verdict.manifest)
        return verdict

    yield replaced(StagedCommits, "commit", later)
    yield replaced(leader.Leader, "_decide", decide)


@mutant("recovery does not apply what was decided", NOT_THERE, luck="stores")
@in_place_of(StagedCommits, "finish")
def _recovery_applies_nothing(real: Any, self: Any, manifest: Manifest, *known: Any, **options: Any) -> Any:
    yield from ()
    return dict.fromkeys((each.name for each in manifest.staged), "committed")


@mutant("a restart carries rows of the attempt before", COUNT)
@in_place_of(Coordinator, "_recover")
def _carried_through_restart(real: Any, self: Coordinator, *given: Any) -> Any:
    kept = self.attempt.undecided.staged
    effects = real(self, *given)
    self.attempt.undecided.staged = kept
    return effects


# --- blocks ---------------------------------------------------------------------------------------------------------


@mutant("rows are not looked for as early as they are written", LEFT, luck="late rows", first=26)
@in_place_of(kept_blocks.BlockRetention, "__init__")
def _not_ahead(real: Any, self: Any, settings: Any, *, staging: bool = False) -> None:
    real(self, settings)


@mutant("no manifest stands on the rows that it has staged", TOMBSTONED)
@in_place_of(
    PendingCheckpoint, "references", unchecked(decision_log, "A block that a manifest names must not be dropped")
)
def _not_stood_on(real: Any, self: PendingCheckpoint, manifest: Manifest) -> Any:
    return real(dataclasses.replace(self, staged=[]), msgspec.structs.replace(manifest, staged=()))


@mutant("rows are applied in another order than they were set aside", OTHER_ROWS)
@in_place_of(write_ahead, "staged_chunks")
def _disordered(real: Any, committable: Any, blocks: Any) -> Any:
    return reversed(list(real(committable, blocks)))


@mutant("what a barrier meets in memory goes to the next checkpoint", SET_ASIDE, first=1)
@in_place_of(RowsWriter, "barrier")
def _not_sent(real: Any, self: RowsWriter, checkpoint: int) -> None:
    rows, size, self._rows, self._size = self._rows, self._size, [], 0
    real(self, checkpoint)
    self._rows, self._size = rows, size
