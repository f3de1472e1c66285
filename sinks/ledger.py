"""The ledger of a sink: its rules, whatever the store.

A ledger lies in the store, beside the data. It holds the checkpoint of each subtask whose output is in the store, the
incarnation that may write, and the id of the checkpoint topic that counts both. Invariants: numbers only grow; an entry
becomes visible with its data or not at all; the ledger alone decides whether output was committed, an answer never.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from exactlyonce.checkpoint.commits.stores import ForeignLedger, LedgerBehind
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import Fenced

__all__ = ["ForeignLedger", "LedgerBehind", "LedgerEntry", "SinkLedger", "require_writer"]


def require_writer(pipeline: str, sink: str, incarnation: int, origin: str, *, newest: int, begun_for: str) -> None:
    """Raise `ForeignLedger` or `Fenced` unless *incarnation*, with the checkpoint topic *origin*, may write to a ledger
    that has *newest* and *begun_for*. The topic comes first: another one counts incarnations from 1 again."""
    if begun_for != origin:
        raise ForeignLedger(begun_for)
    if newest > incarnation:
        raise Fenced(
            f"The ledger of sink {sink!r} of pipeline {pipeline!r} has incarnation {newest}: a newer instance has "
            f"taken over from incarnation {incarnation}. This one ends; nothing is lost."
        )


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The entry that is written together with the output of one committable."""

    pipeline: str
    sink: str
    subtask: int
    checkpoint: int
    """The one at whose barrier the output was cut; a subtask's committables come in this order."""
    previous: int
    """The checkpoint that the ledger has by then; 0: none."""
    incarnation: int
    """The coordinator's that commits."""
    origin: str
    """The id of its checkpoint topic. A pipeline that begins anew counts incarnations and checkpoints from 1 again: the
    topic alone tells the zombies of the life before."""

    @classmethod
    def of(cls, pipeline: str, sink: str, committable: StoreCommittable, incarnation: int, origin: str) -> LedgerEntry:
        """The entry of *committable* once this incarnation has committed it."""
        return cls(
            pipeline=pipeline, sink=sink, subtask=committable.subtask, checkpoint=committable.checkpoint,
            previous=committable.previous, incarnation=incarnation, origin=origin,
        )  # fmt: skip

    def is_due(self, *, checkpoint: int, incarnation: int, origin: str) -> bool:
        """Whether the output is still to be written; False: it was. Raises `ForeignLedger`, `Fenced`, `LedgerBehind`.

        The arguments are what the ledger has: the subtask's *checkpoint*, 0 without a row, and the sink's *incarnation*
        and *origin*. Read them in the transaction that writes the output, with their rows locked, or compare and set.

        >>> entry = LedgerEntry(pipeline="p", sink="s", subtask=0, checkpoint=7, previous=5, incarnation=2, origin="t")
        >>> [entry.is_due(checkpoint=number, incarnation=2, origin="t") for number in (5, 7)]
        [True, False]
        """
        require_writer(
            self.pipeline, self.sink, self.incarnation, self.origin, newest=incarnation, begun_for=origin
        )  # fmt: skip
        if checkpoint >= self.checkpoint:
            return False
        if checkpoint < self.previous:
            raise LedgerBehind(checkpoint)
        return True


class SinkLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of one sink as one value; without arguments, of a sink which has none yet.

    A store reads the value, asks it for the next one, and writes that together with the output, in one atomic step. A
    store that lets several subtasks commit at once has a row for each, and calls `LedgerEntry.is_due` itself.

    >>> ledger = SinkLedger().fenced("shop", "orders", 3, "topic-1")
    >>> of = {"pipeline": "shop", "sink": "orders", "subtask": 0, "incarnation": 3, "origin": "topic-1"}
    >>> entry = LedgerEntry(checkpoint=7, previous=0, **of)
    >>> ledger = SinkLedger.decode(ledger.applied(entry).encode())
    >>> ledger.checkpoints, ledger.applied(entry)
    ({0: 7}, None)
    """

    incarnation: int = 0
    origin: str = ""
    """The id of the checkpoint topic; empty: no leader has fenced yet."""
    checkpoints: Mapping[int, int] = msgspec.field(default_factory=dict)
    """By subtask."""

    @classmethod
    def decode(cls, value: bytes | str | None) -> SinkLedger:
        """The ledger that `encode` gave; None: there is none yet."""
        return cls() if value is None else msgspec.json.decode(value, type=cls)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    def fenced(self, pipeline: str, sink: str, incarnation: int, origin: str) -> SinkLedger:
        """The ledger to write at `Store.fence`, or the error to raise there."""
        begun_for = self.origin or origin
        require_writer(pipeline, sink, incarnation, origin, newest=self.incarnation, begun_for=begun_for)
        return msgspec.structs.replace(self, incarnation=incarnation, origin=origin)

    def applied(self, entry: LedgerEntry) -> SinkLedger | None:
        """The ledger to write with the output of *entry*; None: it has been written. Raises as `Store.apply` does."""
        checkpoint = self.checkpoints.get(entry.subtask, 0)
        if not entry.is_due(checkpoint=checkpoint, incarnation=self.incarnation, origin=self.origin):
            return None
        return msgspec.structs.replace(self, checkpoints={**self.checkpoints, entry.subtask: entry.checkpoint})
