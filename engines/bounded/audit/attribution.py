"""The attribution of visible records by the decision log: what each checkpoint claims of each partition. Pure.

Invariant: where a repair stands in for a transaction, in some partitions or all, it is the repair's records that are
claimed there, of several the newest; every transaction that any record of the log names is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import LOSS_ACCEPTED, Manifest

Place = tuple[str, int]
"""Topic and partition."""


class Claim(NamedTuple):
    """What a transaction of a checkpoint has in one partition."""

    checkpoint: int
    """The one whose manifest names it."""
    sink: str
    subtask: int
    place: Place
    producer_id: int
    epoch: int
    first_offset: int
    records: int
    given_up: bool
    """Whether its loss was accepted by the user."""

    @property
    def writer(self) -> tuple[int, int]:
        """Of the transaction."""
        return self.producer_id, self.epoch


def claims_of(history: History, manifest: Manifest) -> Iterator[Claim]:
    """What *manifest* claims, in the order in which each sink subtask wrote it."""
    finalized = history.finalized.get(manifest.checkpoint)
    fates = dict(finalized.fates) if finalized else {}
    stand_ins: dict[str, list[Committable]] = {}
    for repair in history.repairs_of(manifest.checkpoint):
        stand_ins.setdefault(repair.replaced, []).append(repair.committable)
    for original in sorted(manifest.committables, key=lambda each: each.checkpoint):
        given_up = fates.get(original.transactional_id) == LOSS_ACCEPTED
        current = {(each.topic, each.partition): (original, each) for each in original.written}
        for committable in stand_ins.get(original.transactional_id, ()):
            current.update({(each.topic, each.partition): (committable, each) for each in committable.written})
        for place, (committable, written) in sorted(current.items()):
            yield Claim(
                checkpoint=manifest.checkpoint,
                sink=original.sink,
                subtask=original.subtask,
                place=place,
                producer_id=committable.producer_id,
                epoch=committable.epoch,
                first_offset=written.first_offset,
                records=written.count,
                given_up=given_up,
            )


def known_writers(histories: Iterable[History]) -> set[tuple[int, int]]:
    """Producer id and epoch of every transaction that the decision log names."""
    named = [
        committable
        for history in histories
        for manifest in history.manifests.values()
        for committable in (
            *manifest.committables,
            *(repair.committable for repair in history.repairs_of(manifest.checkpoint)),
        )
    ]
    return {(each.producer_id, each.epoch) for each in named}
