"""The resolution of a decided checkpoint: the fate of each committable, and the repair that stands in for it.

Invariants: a fate never changes; a repair stands in for its committable from the moment it is durable; the lost part of
a committable is a part of the one in the manifest, whichever repair was lost last; only the user gives one up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exactlyonce.checkpoint.records.manifest import LOSS_ACCEPTED, REPAIRED, Committable, Manifest, Repair
from exactlyonce.checkpoint.transactions.commit import Commits
from exactlyonce.pipeline.errors import Halt


@dataclass
class _Committable:
    original: Committable
    """As the manifest names it."""
    current: Committable
    """The committable that stands for it now: itself, or its newest repair."""
    lost: Committable
    """The part of the original that is to be written again, if it or an earlier one was lost."""
    fate: str = ""


class Resolution:
    """The committables of *manifest*, by the transactional ids in it."""

    def __init__(self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool) -> None:
        self.manifest = manifest
        self._accept_loss = accept_loss
        self._all = {c.transactional_id: _Committable(c, c, c) for c in manifest.committables if c.records}
        older = sorted(repairs, key=lambda repair: repair.number)
        self._numbers = itertools.count(1 + max((repair.number for repair in older), default=0))
        self._stand_in(older)

    def _stand_in(self, repairs: Iterable[Repair]) -> None:
        for repair in repairs:
            self._all[repair.replaced].current = repair.committable

    @property
    def fates(self) -> dict[str, str]:
        return {name: committable.fate for name, committable in self._all.items() if committable.fate}

    @property
    def waiting(self) -> list[Committable]:
        """The stand-ins of the committables without a known fate."""
        return [committable.current for committable in self._all.values() if not committable.fate]

    @property
    def named(self) -> set[str]:
        """The transactional ids that durable records name, and no sweep may abort."""
        return {committable.current.transactional_id for committable in self._all.values()}

    def note(self, commits: Commits) -> None:
        """Take in the outcome of *commits*; Halt if nothing can be learnt about one.

        Later transactions of the same sink subtask are to be written again with a lost one.
        """
        by_current = {committable.current.transactional_id: committable for committable in self._all.values()}
        for name, fate in commits.fates.items():
            committable = by_current[name]
            committable.fate = REPAIRED if committable.current is not committable.original else fate
        why = "its records are no longer in the output log, so their fate is unknown"
        for gone in commits.gone:
            self._halt_unless_accepted(by_current[gone.transactional_id], gone, why)
        for part in (*commits.lost, *commits.held):
            committable = by_current[part.transactional_id]
            committable.lost = committable.original.within(part)

    def chains(self, commits: Commits) -> list[Sequence[str]]:
        """Each lost transaction with later ones of its sink subtask: these are repaired together."""
        names = {committable.current.transactional_id: name for name, committable in self._all.items()}
        held = [(committable.writer, names[committable.transactional_id]) for committable in commits.held]
        return [
            [names[lost.transactional_id], *(name for writer, name in held if writer == lost.writer)]
            for lost in commits.lost
        ]

    def lost(self, name: str) -> Committable:
        """The part of committable *name* that is to be written again."""
        return self._all[name].lost

    def next_number(self) -> int:
        """The number of the next repair: numbers only grow, over all incarnations, so that the newest repair stands."""
        return next(self._numbers)

    def replace_by(self, repairs: Iterable[Repair]) -> list[Committable]:
        """*repairs* are durable now; returns the committables that they replace, which must not be committed now."""
        superseded = [self._all[repair.replaced].current for repair in repairs]
        self._stand_in(repairs)
        return superseded

    def give_up(self, name: str, why: str) -> None:
        """Committable *name* cannot be repaired: Halt, unless the user has accepted the loss."""
        committable = self._all[name]
        self._halt_unless_accepted(committable, committable.lost, f"the broker aborted it, and {why}")

    def _halt_unless_accepted(self, committable: _Committable, lost: Committable, why: str) -> None:
        if not self._accept_loss:
            raise Halt(self.explain(lost, why))
        committable.fate = LOSS_ACCEPTED

    def explain(self, lost: Committable, why: str) -> str:
        """The text of a halt: the lost records, and the choices."""
        checkpoint, pipeline = self.manifest.checkpoint, self.manifest.pipeline
        subtask = f" subtask {lost.subtask}" if self.manifest.partitions_of(lost.sink) is None else ""
        return (
            f"Checkpoint {checkpoint} was decided, but the output of sink {lost.sink!r}{subtask} for it is not visible "
            f"to readers: {why}.\n"
            f"  Affected: {places_of(lost)} (transaction {lost.transactional_id}).\n"
            f"  Choices: (1) if the output log can be restored from a replica or a backup, do so and run it again; "
            f"(2) `exactlyonce reset {pipeline}` and recompute the output from the input into a new topic; "
            f"(3) go on without these {lost.records} records: `exactlyonce run ... --accept-loss {checkpoint}`, in "
            f"Python accept_loss={checkpoint}.\n"
            f"  Nothing else is affected: state and the other sinks are at checkpoint {checkpoint}."
        )


def places_of(committable: Committable) -> str:
    """The records of *committable* by place, as text."""
    return ", ".join(
        f"{w.topic}[{w.partition}] offsets {w.first_offset} and on, {w.count} records" for w in committable.written
    )
