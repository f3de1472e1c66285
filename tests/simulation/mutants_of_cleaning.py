"""Planted defects, continued: rules about what is left behind. See `mutants_of_coordinators`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from planting import LEFT, Table

from exactlyonce.checkpoint import decision, leader, orphans

CLEANING = Table()
"""By name."""
mutant = CLEANING.mutant


@mutant("a restart does not look for the blocks of the attempt before", LEFT, first=162)
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
    yield patch.object(orphans, "first_places", lambda history: history.latest.block_end_offsets)


@mutant("a finished checkpoint is finalized before its orphans are dropped", LEFT, first=18)
def _finish_drops_nothing() -> Iterable[Any]:
    real: Any = decision.finish

    def finish(*known: Any, **options: Any) -> Any:
        *others, expire = known

        def nothing(manifest: Any) -> Any:
            yield from expire(manifest)
            return (), ()

        return real(*others, nothing, **options)

    yield patch.object(leader, "finish", finish)
