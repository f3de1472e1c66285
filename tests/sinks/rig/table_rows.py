"""Rows of a table, the key that its sink has, and entries of its ledger."""

from __future__ import annotations

import msgspec

from exactlyonce.sinks.ledger import LedgerEntry

ORIGIN = "topic-1"


class Total(msgspec.Struct, frozen=True):
    customer: str
    cents: int


def key_of(mode: str, *columns: str) -> tuple[str, ...]:
    """An append has none."""
    return () if mode == "append" else columns or ("customer",)


def entry(
    checkpoint: int, incarnation: int = 1, subtask: int = 0, pipeline: str = "p", sink: str = "s", previous: int = 0
) -> LedgerEntry:
    return LedgerEntry(
        pipeline=pipeline, sink=sink, subtask=subtask, checkpoint=checkpoint, previous=previous,
        incarnation=incarnation, origin=ORIGIN,
    )  # fmt: skip
