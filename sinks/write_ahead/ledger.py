"""The ledger of one sink as one value, for stores that write it beside the rows: one row, one document, one key.

Invariant: the rules of a ledger are `require_writer` and `LedgerEntry.is_due`; a store reads the value, asks for the
next one, and writes it together with the rows, in one step that nobody comes between. A store with a row for each
subtask, which lets several be applied at once, asks for both itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from exactlyonce.sinks.write_ahead.store import LedgerEntry, require_writer


class SinkLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Who may write, and up to where rows are in the store. As it is made, that of a sink which has none yet.

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
        require_writer(
            pipeline, sink, incarnation, origin, newest=self.incarnation, begun_for=self.origin or origin
        )  # fmt: skip
        return msgspec.structs.replace(self, incarnation=incarnation, origin=origin)

    def applied(self, entry: LedgerEntry) -> SinkLedger | None:
        """The ledger to write together with the rows of *entry*, or what `Store.apply` raises; None: they are there."""
        checkpoint = self.checkpoints.get(entry.subtask, 0)
        if not entry.is_due(checkpoint=checkpoint, incarnation=self.incarnation, origin=self.origin):
            return None
        return msgspec.structs.replace(self, checkpoints={**self.checkpoints, entry.subtask: entry.checkpoint})
