"""The seam of a write-ahead sink: what a store has to be able to do.

The ledger lies in the store, beside the data: one row for each subtask of a sink, and one that holds the incarnation
that may write. It is what decides whether rows have been applied; an answer, or its absence, decides nothing.
Invariant: rows and their ledger row become visible together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from exactlyonce.checkpoint.commits.of_stores import ForeignLedger, LedgerBehind
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import Fenced

__all__ = ["ForeignLedger", "LedgerBehind", "LedgerEntry", "RowEncoder", "SinkLedger", "Store", "require_writer"]


def require_writer(pipeline: str, sink: str, incarnation: int, origin: str, *, newest: int, begun_for: str) -> None:
    """Raise `ForeignLedger` or `Fenced` unless *incarnation*, with the checkpoint topic *origin*, may write to a ledger
    that has *newest* and *begun_for*. The topic comes first: incarnations of another one are counted from 1 again."""
    if begun_for != origin:
        raise ForeignLedger(begun_for)
    if newest > incarnation:
        raise Fenced(
            f"The ledger of sink {sink!r} of pipeline {pipeline!r} has incarnation {newest}: a newer instance has "
            f"taken over from incarnation {incarnation}. This one ends; nothing is lost."
        )


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The row of the ledger that a transaction writes together with the rows of one committable."""

    pipeline: str
    sink: str
    subtask: int
    checkpoint: int
    """At whose barrier the rows were cut; of one subtask, they come in this order."""
    previous: int
    """The checkpoint that the ledger has by then; 0: none."""
    incarnation: int
    """Of the coordinator that applies them."""
    origin: str
    """The id of its checkpoint topic. Where a pipeline begins anew, incarnations and checkpoints count from 1 again: it
    alone tells the zombies of the life before."""

    @classmethod
    def of(cls, pipeline: str, sink: str, committable: StoreCommittable, incarnation: int, origin: str) -> LedgerEntry:
        """That which *committable* is to have once this incarnation has committed it."""
        return cls(
            pipeline=pipeline, sink=sink, subtask=committable.subtask, checkpoint=committable.checkpoint,
            previous=committable.previous, incarnation=incarnation, origin=origin,
        )  # fmt: skip

    def is_due(self, *, checkpoint: int, incarnation: int, origin: str) -> bool:
        """Whether the rows are still to be written, by a ledger that has *checkpoint* for the subtask, 0 if it has no
        row for it, and *incarnation* and *origin* for the sink. False: they have been. Raises `ForeignLedger`,
        `Fenced`, `LedgerBehind`.

        Only as true as what it is told: read that in the transaction that writes the rows, its rows locked.

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
    """The ledger of one sink as one value: who may write, and up to where rows are in the store. As it is made, that of
    a sink which has none yet.

    The rules of a ledger are `require_writer` and `LedgerEntry.is_due`. A store reads the value, asks for the next one,
    and writes it together with the rows, in one step that nobody comes between. A store with a row for each subtask,
    which lets several be applied at once, asks for both itself.

    >>> ledger = SinkLedger().fenced("shop", "orders", 3, "topic-1")
    >>> of = {"pipeline": "shop", "sink": "orders", "subtask": 0, "incarnation": 3, "origin": "topic-1"}
    >>> entry = LedgerEntry(checkpoint=7, previous=0, **of)
    >>> ledger = SinkLedger.decode(ledger.applied(entry).encode())
    >>> ledger.checkpoints, ledger.applied(entry)
    ({0: 7}, None)
    """

    incarnation: int = 0
    origin: str = ""
    """The id of the checkpoint topic that the checkpoints are counted in; empty: nobody has fenced yet."""
    checkpoints: Mapping[int, int] = msgspec.field(default_factory=dict)
    """By subtask."""

    @classmethod
    def decode(cls, value: bytes | str | None) -> SinkLedger:
        """What `encode` gave; None is a ledger that is not there yet."""
        return cls() if value is None else msgspec.json.decode(value, type=cls)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    def fenced(self, pipeline: str, sink: str, incarnation: int, origin: str) -> SinkLedger:
        """The ledger to write at `Store.fence`, or what that raises."""
        begun_for = self.origin or origin
        require_writer(pipeline, sink, incarnation, origin, newest=self.incarnation, begun_for=begun_for)
        return msgspec.structs.replace(self, incarnation=incarnation, origin=origin)

    def applied(self, entry: LedgerEntry) -> SinkLedger | None:
        """The ledger to write together with the rows of *entry*, or what `Store.apply` raises; None: they are there."""
        checkpoint = self.checkpoints.get(entry.subtask, 0)
        if not entry.is_due(checkpoint=checkpoint, incarnation=self.incarnation, origin=self.origin):
            return None
        return msgspec.structs.replace(self, checkpoints={**self.checkpoints, entry.subtask: entry.checkpoint})


class RowEncoder(Protocol):
    """Turns records into the bytes that wait in the checkpoint topic."""

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """One entry for each record. What it raises on a record names what of it does not fit; it has no effects."""


class Store(Protocol):
    """A connection to a store, for one sink. Made without effect; it connects when it is first asked, and again after
    it was lost. Used by one thread at a time.

    Whatever cannot be reached, or has not answered, is `StoreUnavailable`; what another attempt would meet again is
    `StoreError`, which says what is missing and how to add it. Neither holds a secret. No library below may repeat a
    request by itself.
    """

    def check(self) -> None:
        """Raise `StoreError` unless rows of this sink can be written: table, columns, types and rights are looked at,
        and created where the sink says so. Makes the ledger if there is none."""

    def encoder(self) -> RowEncoder:
        """Of the rows of this sink. It knows what fits into the store as it is now."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """Let nobody of an older incarnation apply anything from now on; -> by subtask, the checkpoint in the ledger.

        An apply of an older one that is under way has ended when this returns, or will fail. *origin* is the id of the
        checkpoint topic: it is noted with the first call. Raises `Fenced` where the ledger has a newer incarnation,
        `ForeignLedger` where it was begun for another checkpoint topic: changes nothing then.
        """

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """Write *chunks*, each some encoded rows behind one another, and *entry*, in one transaction, if the ledger has
        an older checkpoint for the subtask; -> whether it did. False: they had been applied before.

        May be called again after any outcome, by any process. Raises `Fenced` where the ledger has a newer incarnation,
        `LedgerBehind` where it has an older checkpoint than the one before, `ForeignLedger` where it was begun for
        another checkpoint topic, or by nobody yet.
        """

    def write(self, chunks: Iterable[bytes]) -> None:
        """Write *chunks*, in one transaction, without the ledger: for sinks whose delivery is not exactly once."""

    def close(self) -> None:
        """Let go of the connection."""


@runtime_checkable
class InspectableStore(Protocol):
    """A `Store` that can also be looked at beside a run, as `exactlyonce doctor` does. Neither call changes, locks or
    waits for anything."""

    def inspect(self) -> None:
        """As `Store.check`, but what is missing and would be made is left missing."""

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        """The ledger of a sink as far as it is committed; as `SinkLedger` is made where there is none."""
