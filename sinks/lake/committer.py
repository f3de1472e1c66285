"""The committer of a lake sink: one commit of the table for all of a checkpoint.

Invariant: what is committed is decided by the ledger of the very state of the table that the commit replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.sinks.committer import CommitterContext, StoreView
from exactlyonce.sinks.lake.table import Conflict, Lake, LoadedTable
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger

ATTEMPTS_MAX = 20
"""Commits that other writers may overtake, one after the other, before the store counts as away."""


class _Change(NamedTuple):
    ledger: SinkLedger
    committables: Sequence[StoreCommittable] = ()


@dataclass
class LakeCommitter:
    """See the module, and `Committer`."""

    context: CommitterContext
    lake: Lake
    kind: str
    ledger: str

    def check(self) -> None:
        self.lake.check()

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Committer`. It is a commit of the table, which every commit of an older incarnation conflicts with."""
        pipeline, sink = self.context.pipeline, self.context.sink
        ledger, _ = self._changed(lambda ledger: _Change(ledger.fenced(pipeline, sink, incarnation, origin)))
        return ledger.checkpoints

    def commit(self, committables: Sequence[StoreCommittable], incarnation: int, origin: str) -> bool:
        """See `Committer`."""
        due: list[StoreCommittable] = []

        def change(ledger: SinkLedger) -> _Change:
            due.clear()
            for committable in committables:
                entry = LedgerEntry.of(self.context.pipeline, self.context.sink, committable, incarnation, origin)
                if (after := ledger.applied(entry)) is not None:
                    ledger = after
                    due.append(committable)
            return _Change(ledger, due)

        _, table = self._changed(change)
        try:
            table.forget([committable.body for committable in committables if committable.records])
        except StoreError as error:  # given up as lost, a later sweep would remove files of the table
            raise StoreUnavailable(
                f"{error} The output is in the table, and nothing of it is lost; what was set aside for it must be "
                f"removed."
            ) from error
        return bool(due)

    def _changed(self, change: Callable[[SinkLedger], _Change]) -> tuple[SinkLedger, LoadedTable]:
        """The ledger after *change*, committed unless it is the same, and the table as it was before."""
        for _ in range(ATTEMPTS_MAX):
            table = self.lake.load()
            before = table.ledger
            after, committables = change(before)
            if after == before:
                return after, table
            staged = [committable.body for committable in committables if committable.records]
            try:
                table.commit(after, staged, max((one.checkpoint for one in committables), default=0))
            except Conflict:
                continue
            except StoreError:  # a commit of the same removes what was set aside, once it is done
                if self.lake.load().ledger == before:
                    raise
                continue
            return after, table
        raise StoreUnavailable(
            f"Other writers of the table were faster {ATTEMPTS_MAX} times in a row. Let them commit less often. "
            f"Nothing is lost: it is asked again."
        )

    def clean(self, incarnation: int, attempt: int) -> None:
        """See `Committer`. No commit will name what is removed, as for the files of a `FileSink`."""
        table = self.lake.load()
        if table.ledger.incarnation <= incarnation:
            table.sweep(incarnation, attempt)

    def look(self) -> StoreView:
        """See `Inspectable`."""
        try:
            self.lake.inspect()
            problem = ""
        except (StoreError, ConfigError) as error:
            problem = str(error)
        try:
            table = self.lake.load()
        except StoreError as error:
            return StoreView(problem=problem or str(error))
        return StoreView.of(table.ledger, problem=problem, growth=table.growth)

    def close(self) -> None:
        self.lake.close()
