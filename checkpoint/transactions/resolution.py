"""The resolution of a decided checkpoint: what stands for each of its committables now, and what has become of it.

Invariants: a fate never changes; a repair stands in for its committable from the moment it is durable; what is lost of
a committable is a part of what the manifest names, whichever repair of it was lost last; no committable is given up but
by the user's word.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.manifest import LOSS_ACCEPTED, Manifest, Repair
from exactlyonce.checkpoint.transactions.commit import Commits
from exactlyonce.pipeline.errors import Halt


@dataclass
class _Committable:
    original: Committable
    """As the manifest names it."""
    current: Committable
    """The committable that stands for it now: itself, or its newest repair."""
    lost: Committable
    """The part of the original that is to be written again, if it was lost or comes behind what was."""
    fate: str = ""


class Resolution:
    """How far the committables of *manifest* have come, each known by the transactional id that the manifest names."""

    def __init__(self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool) -> None:
        self.manifest = manifest
        self._accept_loss = accept_loss
        self._all = {c.transactional_id: _Committable(c, c, c) for c in manifest.committables if c.records}
        older = sorted(repairs, key=lambda repair: repair.number)
        self._numbers = itertools.count(1 + max((each.number for each in older), default=0))
        self._stand_in(older)

    def _stand_in(self, repairs: Iterable[Repair]) -> None:
        for each in repairs:
            self._all[each.replaced].current = each.committable

    @property
    def fates(self) -> dict[str, str]:
        """Those that are known."""
        return {name: each.fate for name, each in self._all.items() if each.fate}

    @property
    def waiting(self) -> list[Committable]:
        """The stand-ins of the committables whose fate is not known."""
        return [each.current for each in self._all.values() if not each.fate]

    @property
    def named(self) -> set[str]:
        """The transactional ids that durable records name, and no sweep may abort."""
        return {each.current.transactional_id for each in self._all.values()}

    def current(self, name: str) -> Committable:
        """The committable that stands for *name* now."""
        return self._all[name].current

    def note(self, commits: Commits) -> None:
        """Take in what became of those that were committed; Halt where nothing can be learnt of one.

        What follows a lost transaction of the same sink subtask is to be written again with it.
        """
        by_current = {each.current.transactional_id: each for each in self._all.values()}
        for name, fate in commits.fates.items():
            each = by_current[name]
            each.fate = "repaired" if each.current is not each.original else fate
        for gone in commits.gone:
            each = by_current[gone.transactional_id]
            self._halt_unless_accepted(
                each, gone, "its records are no longer in the output log, so their fate is unknown"
            )
        for part in (*commits.lost, *commits.held):
            each = by_current[part.transactional_id]
            each.lost = each.original.within(part)

    def chains(self, commits: Commits) -> list[Sequence[str]]:
        """By lost transaction, itself and what follows it from its sink subtask: these are repaired together."""
        names = {each.current.transactional_id: name for name, each in self._all.items()}
        held = [(each.writer, names[each.transactional_id]) for each in commits.held]
        return [
            [names[lost.transactional_id], *(name for writer, name in held if writer == lost.writer)]
            for lost in commits.lost
        ]

    def lost(self, name: str) -> Committable:
        """The part of committable *name* that is to be written again."""
        return self._all[name].lost

    def next_number(self) -> int:
        """Of a repair: numbers only grow, over all incarnations, so that the newest repair is the one that stands."""
        return next(self._numbers)

    def replace_by(self, repairs: Iterable[Repair]) -> list[Committable]:
        """These repairs are durable now; returns what they stand in for, of which nothing may be committed any more."""
        superseded = [self.current(each.replaced) for each in repairs]
        self._stand_in(repairs)
        return superseded

    def give_up(self, name: str, why: str) -> None:
        """Committable *name* cannot be repaired: a halt, unless the user has accepted the loss."""
        each = self._all[name]
        self._halt_unless_accepted(each, each.lost, f"the broker aborted it, and {why}")

    def _halt_unless_accepted(self, each: _Committable, lost: Committable, what: str) -> None:
        if not self._accept_loss:
            raise Halt(self.explain(lost, what))
        each.fate = LOSS_ACCEPTED

    def explain(self, lost: Committable, what: str) -> str:
        """The text of a halt: which records, and the choices."""
        checkpoint, pipeline = self.manifest.checkpoint, self.manifest.pipeline
        return (
            f"Checkpoint {checkpoint} was decided, but the output of sink {lost.sink!r} subtask {lost.subtask} "
            f"for it is not visible to readers: {what}.\n"
            f"  Affected: {places_of(lost)} (transaction {lost.transactional_id}).\n"
            f"  Choices: (1) if the output log can be restored from a replica or a backup, do so and run it again; "
            f"(2) `exactlyonce reset {pipeline}` and recompute the output from the input into a new topic; "
            f"(3) go on without these {lost.records} records: `exactlyonce run ... --accept-loss {checkpoint}`, in "
            f"Python accept_loss={checkpoint}.\n"
            f"  Nothing else is affected: state and the other sinks are at checkpoint {checkpoint}."
        )


def places_of(committable: Committable) -> str:
    """Its records by place."""
    return ", ".join(
        f"{w.topic}[{w.partition}] offsets {w.first_offset} and on, {w.count} records" for w in committable.written
    )
