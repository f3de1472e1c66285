"""Planted defects of stores that keep a ledger: each patches shipped code. See `mutants`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import msgspec
from planting import COUNT, LEFT, TOMBSTONED, Table, unchecked
from topologies import ANY_STORE

from exactlyonce.checkpoint import decision, decision_log, leader, orphans, references
from exactlyonce.checkpoint.commits import of_stores
from exactlyonce.checkpoint.commits.of_stores import StagedCommits
from exactlyonce.checkpoint.commits.protocol import Fates
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.events import PendingCheckpoint
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.write_ahead.committer import RowsCommitter
from exactlyonce.sinks.write_ahead.writer import RowsWriter
from exactlyonce.testing.store import StoreModel

STORES = Table()
"""By name."""

APPLIED_TWICE = r"is applied twice"
UNDECIDED = r"is applied though no durable manifest names it"
FENCED = r"is applied by who was fenced"
NOT_THERE = r"is finalized though it is not in the store"
DISORDERED = r"is applied before \["
OTHER_ROWS = r"is applied with other rows than were set aside"
SET_ASIDE = r"rows set aside, not"
FORGOTTEN = r"says that the ledgers have"
UNNOTICED = r"goes on to a clean end though the store was put back"
ANEW = r"is taken over by a topic that was made anew"


def mutant(name: str, expected: str, *, luck: str | None = None, first: int = 0) -> Callable[[Any], None]:
    """See `Table.mutant`; any topology with a store."""
    return STORES.mutant(name, expected, ANY_STORE, luck=luck, first=first)


# --- the ledger -----------------------------------------------------------------------------------------------------


@mutant("a store applies what its ledger has", APPLIED_TWICE, luck="stores")
def _ledger_ignored() -> Iterable[Any]:
    real = StoreModel.apply

    def apply(self: StoreModel, rows: Any, entry: Any) -> bool:
        self.contents.ledger.pop((entry.pipeline, entry.sink, entry.subtask), None)
        return real(self, rows, msgspec.structs.replace(entry, previous=0))

    yield patch.object(StoreModel, "apply", apply)


@mutant("a store does not look at the checkpoint before", DISORDERED, luck="restored while away")
def _previous_ignored() -> Iterable[Any]:
    yield patch.object(StoreModel, "_require_reached")


@mutant("a store lets whoever was fenced apply", FENCED, luck="stores")
def _fence_ignored() -> Iterable[Any]:
    yield patch.object(StoreModel, "_require_newest")


@mutant("a store does not look at the topic that its ledger was begun for", UNDECIDED + "|" + OTHER_ROWS, luck="reset")
def _origin_ignored() -> Iterable[Any]:
    yield patch.object(StoreModel, "_require_own")


@mutant("the checkpoint before is not named", DISORDERED, luck="restored while away")
def _previous_unnamed() -> Iterable[Any]:
    real = of_stores.in_order

    def in_order(committables: Any, *known: Any) -> Any:
        return tuple(msgspec.structs.replace(each, previous=0) for each in real(committables, *known))

    yield patch.object(of_stores, "in_order", in_order)


@mutant("a store is fenced by whatever topic asks", ANEW, luck="topic made anew")
def _taken_over() -> Iterable[Any]:
    real = StoreModel.fence

    def fence(self: StoreModel, pipeline: str, sink: str, incarnation: int, origin: str) -> Any:
        writer = self.contents.writers.get((pipeline, sink))
        if writer is not None:
            self.contents.writers[pipeline, sink] = writer._replace(origin=origin)
        return real(self, pipeline, sink, incarnation, origin)

    yield patch.object(StoreModel, "fence", fence)


@mutant("a ledger that is behind is fenced, and not looked at", UNNOTICED, luck="restored while down")
def _behind_ignored() -> Iterable[Any]:
    real = StagedCommits.fence

    def fence(self: Any, newest: Any, finalized: Any) -> Any:
        return real(self, newest, None)

    yield patch.object(StagedCommits, "fence", fence)


@mutant("the ledger's checkpoints of subtasks that are gone are forgotten", FORGOTTEN, luck="stores")
def _gone_forgotten() -> Iterable[Any]:
    real = leader.Leader._manifest

    def made(self: Any, *arguments: Any, **options: Any) -> Manifest:
        manifest = real(self, *arguments, **options)
        kept = tuple(each for each in manifest.ledger if each[1] < manifest.parallelism)
        return msgspec.structs.replace(manifest, ledger=kept)

    yield patch.object(leader.Leader, "_manifest", made)


# --- decisions ------------------------------------------------------------------------------------------------------


@mutant("rows are applied before the manifest is durable", UNDECIDED)
def _applied_first() -> Iterable[Any]:
    real_decide, real_produced = decision.decide, decision._produced
    stores: list[Any] = []

    def decide(plan: Any, protocols: Any, *more: Any, **named: Any) -> Any:
        stores[:] = protocols[1:]
        return (yield from real_decide(plan, protocols, *more, **named))

    def produced(*arguments: Any) -> Any:
        manifest = yield from real_produced(*arguments)
        if isinstance(manifest, Manifest):
            yield from stores[0].commit(manifest)
        return manifest

    yield patch.object(leader, "decide", decide)
    yield patch.object(decision, "_produced", produced)


@mutant("a checkpoint is finalized before its rows are applied", NOT_THERE)
def _finalized_first() -> Iterable[Any]:
    real, commit = decision.decide, StagedCommits.commit

    def later(self: Any, manifest: Manifest) -> Any:
        yield from ()
        return Fates(dict.fromkeys((each.name for each in manifest.staged), "committed"))

    def decide(plan: Any, protocols: Any, *more: Any, **named: Any) -> Any:
        verdict = yield from real(plan, protocols, *more, **named)
        if isinstance(verdict, decision.Decided):
            yield from commit(protocols[1], verdict.manifest)
        return verdict

    yield patch.object(StagedCommits, "commit", later)
    yield patch.object(leader, "decide", decide)


@mutant("a store that does not answer is taken to have applied", NOT_THERE, luck="stores")
def _unknown_is_applied() -> Iterable[Any]:
    def persistently(self: Any, request: Any, sink: str) -> Any:
        try:
            return (yield request)
        except StoreUnavailable:
            return {}

    yield patch.object(StagedCommits, "_persistently", persistently)


@mutant("recovery does not apply what was decided", NOT_THERE, luck="stores")
def _recovery_applies_nothing() -> Iterable[Any]:
    def finish(self: Any, manifest: Manifest, *known: Any, **options: Any) -> Any:
        yield from ()
        return dict.fromkeys((each.name for each in manifest.staged), "committed")

    yield patch.object(StagedCommits, "finish", finish)


@mutant("rows of aborted checkpoints are not carried", COUNT, luck="carried")
def _not_carried() -> Iterable[Any]:
    real = Coordinator._decide

    def decide(self: Coordinator, now_ms: int) -> Any:
        effects: Any = real(self, now_ms)
        for effect in effects:
            plan = effect.plan
            plan.staged = [each for each in plan.staged if each.committable.checkpoint == plan.checkpoint]
        return effects

    yield patch.object(Coordinator, "_decide", decide)


@mutant("carried rows are applied behind newer ones", DISORDERED, luck="carried")
def _carried_last() -> Iterable[Any]:
    real = of_stores.ledger_after

    def in_order(committables: Any, before: Any, descriptions: Any) -> Any:
        newest_first = sorted(committables, key=lambda each: (-each.checkpoint, *each.writer))
        replaced = msgspec.structs.replace
        return tuple(
            replaced(each, previous=before.get(each.writer, 0), description=descriptions[each.sink])
            for each in newest_first
        )

    yield patch.object(of_stores, "in_order", in_order)
    yield patch.object(of_stores, "ledger_after", lambda found, before: real(reversed(found), before))


@mutant("a restart carries rows of the attempt before", COUNT)
def _carried_through_restart() -> Iterable[Any]:
    real = Coordinator._drop_in_flight

    def drop(self: Coordinator) -> None:
        kept = self._staged
        real(self)
        self._staged = kept

    yield patch.object(Coordinator, "_drop_in_flight", drop)


# --- blocks ---------------------------------------------------------------------------------------------------------


@mutant("rows are not looked for as early as they are written", LEFT, luck="late rows", first=20)
def _not_ahead() -> Iterable[Any]:
    real = orphans.KnownBlocks.__init__

    def made(self: Any, settings: Any, *, staging: bool = False) -> None:
        real(self, settings)

    yield patch.object(orphans.KnownBlocks, "__init__", made)


@mutant("no manifest stands on the rows that it has staged", TOMBSTONED)
def _not_stood_on() -> Iterable[Any]:
    real = references.references_of

    def references_of(plan: PendingCheckpoint, manifest: Manifest) -> Any:
        return real(dataclasses.replace(plan, staged=[]), msgspec.structs.replace(manifest, staged=()))

    yield unchecked(decision_log, "A block that a manifest names must not be dropped")
    yield patch.object(leader, "references_of", references_of)


@mutant("no manifest stands on rows that only an index lists", TOMBSTONED)
def _listed_not_stood_on() -> Iterable[Any]:
    real = references.references_of

    def references_of(plan: PendingCheckpoint, manifest: Manifest) -> Any:
        return real(dataclasses.replace(plan, staged=[]), manifest)

    yield patch.object(leader, "references_of", references_of)


@mutant("rows are applied in another order than they were set aside", OTHER_ROWS)
def _disordered() -> Iterable[Any]:
    real = RowsCommitter._chunks

    def chunks(self: Any, committable: Any) -> Any:
        return reversed(list(real(self, committable)))

    yield patch.object(RowsCommitter, "_chunks", chunks)


@mutant("what a barrier meets in memory goes to the next checkpoint", SET_ASIDE)
def _not_sent() -> Iterable[Any]:
    real = RowsWriter.barrier

    def barrier(self: RowsWriter, checkpoint: int) -> None:
        rows, size, self._rows, self._size = self._rows, self._size, [], 0
        real(self, checkpoint)
        self._rows, self._size = rows, size

    yield patch.object(RowsWriter, "barrier", barrier)
