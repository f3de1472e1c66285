"""Planted defects, continued: rules about what is left behind. See `mutants_of_coordinators`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from planting import LEFT, SWEPT, Table

from exactlyonce.checkpoint import decision, leader, orphans, requests
from exactlyonce.checkpoint.records.committable import TransactionalId
from exactlyonce.checkpoint.transactions import commit

CLEANING = Table()
"""By name."""
mutant = CLEANING.mutant


@mutant("a restart does not look for the blocks of the attempt before", LEFT, first=7)
def _no_scan() -> Iterable[Any]:
    real = orphans.KnownBlocks.begin_attempt

    def begin_attempt(self: Any, newest: Any, incarnation: int, attempt: int, **options: Any) -> Any:
        written = self.ledger.written
        self.ledger.written = lambda *_: None
        yield from real(self, newest, incarnation, attempt, **options)
        self.ledger.written = written

    yield patch.object(orphans.KnownBlocks, "begin_attempt", begin_attempt)


@mutant("what a killed worker had sent and arrives late is not looked for", LEFT, luck="late requests")
def _no_second_scan() -> Iterable[Any]:
    real = orphans.KnownBlocks._begin

    def begin(self: Any, newest: Any, start: Any, attempt: Any, *, late: bool) -> Any:
        yield from real(self, newest, start, attempt, late=False)

    yield patch.object(orphans.KnownBlocks, "_begin", begin)


@mutant("recovery looks behind a manifest that is not finalized", LEFT, first=18)
def _scan_from_the_newest() -> Iterable[Any]:
    yield patch.object(orphans, "_first_places", lambda history: history.latest.block_end_offsets)


@mutant("a manifest notes the ends though others are in flight behind it", LEFT, luck="concurrent")
def _note_the_ends() -> Iterable[Any]:
    real = orphans.KnownBlocks.ends_to_note

    def ends_to_note(self: Any, checkpoint: int, base: int, **_: Any) -> Any:
        return real(self, checkpoint, base, final=True)

    yield patch.object(orphans.KnownBlocks, "ends_to_note", ends_to_note)


@mutant("a finished checkpoint is finalized before its orphans are dropped", LEFT, first=18)
def _finish_drops_nothing() -> Iterable[Any]:
    real = decision.finish

    def finish(manifest: Any, repairs: Any, life: Any, at_ms: int, expire: Any, **options: Any) -> Any:
        def nothing(manifest: Any) -> Any:
            yield from expire(manifest)
            return (), ()

        return real(manifest, repairs, life, at_ms, nothing, **options)

    yield patch.object(leader, "finish", finish)


@mutant("ids that are Empty are not ended again once older attempts were fenced", SWEPT, luck="zombies")
def _pass_over_empty() -> Iterable[Any]:
    real = commit.sweep

    def sweep(pipeline: str, incarnation: int, attempt: int, **options: Any) -> Any:
        below = options.get("fenced_below", (0, 0))
        procedure = real(pipeline, incarnation, attempt, **options)
        request = next(procedure)
        try:
            while True:
                answer = yield request
                if isinstance(request, requests.ListTransactions):
                    names = {each: TransactionalId.parse(each.transactional_id) for each in answer}
                    answer = [
                        each
                        for each, name in names.items()
                        if name is None or name.written_in >= below or each.state != "Empty"
                    ]
                request = procedure.send(answer)
        except StopIteration as end:
            return end.value

    yield patch.object(decision, "sweep", sweep)
    yield patch.object(leader, "sweep", sweep)
