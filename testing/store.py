"""A store in memory that keeps a ledger, and the sink that writes to it.

Invariants: rows and their ledger entry come in one step; a refused request changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink

T = TypeVar("T")
Target = tuple[str, str]
"""Pipeline and sink."""

_LENGTH_BYTES = 4
_encode = msgspec.json.Encoder().encode


@dataclass
class StoreContents:
    """The contents of a store."""

    rows: dict[Target, list[bytes]] = field(default_factory=dict)
    """By target, in the order in which they were applied; each is a record as JSON."""
    ledgers: dict[Target, SinkLedger] = field(default_factory=dict)

    def ledger(self, pipeline: str, sink: str) -> SinkLedger:
        """The ledger of one target; an empty one if there is none yet."""
        return self.ledgers.get((pipeline, sink), SinkLedger())


class StoreServer(Protocol):
    """The server of a connection; each request is atomic."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store.fence`."""

    def apply(self, rows: Sequence[bytes], entry: LedgerEntry) -> bool:
        """See `Store.apply`."""

    def write(self, rows: Sequence[bytes]) -> None:
        """See `Store.write`."""


class StoreModel:
    """The server; tests read its `contents`."""

    def __init__(self) -> None:
        self.contents = StoreContents()
        self.unledgered: list[bytes] = []
        """The rows written without the ledger."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        ledger = self.contents.ledger(pipeline, sink).fenced(pipeline, sink, incarnation, origin)
        self.contents.ledgers[pipeline, sink] = ledger
        return ledger.checkpoints

    def apply(self, rows: Sequence[bytes], entry: LedgerEntry) -> bool:
        target = entry.pipeline, entry.sink
        ledger = self.contents.ledger(*target).applied(entry)
        if ledger is None:
            return False
        self.contents.rows.setdefault(target, []).extend(rows)
        self.contents.ledgers[target] = ledger
        return True

    def write(self, rows: Sequence[bytes]) -> None:
        self.unledgered += rows

    def backup(self) -> StoreContents:
        """A copy of the contents."""
        return copy.deepcopy(self.contents)

    def restore(self, backup: StoreContents) -> None:
        """Go back to *backup*."""
        self.contents = copy.deepcopy(backup)


class MemoryRows:
    """A row is its length and the record as JSON."""

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """See `RowEncoder`; TypeError if a record is not JSON."""
        bodies = map(_encode, records)
        return [len(body).to_bytes(_LENGTH_BYTES, "big") + body for body in bodies]


def decode_rows(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The records of *chunks*, as JSON."""
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            begin = at + _LENGTH_BYTES
            at = begin + int.from_bytes(chunk[at:begin], "big")
            yield chunk[begin:at]


@dataclass
class MemoryStore:
    """A connection to *server*."""

    server: StoreServer

    def check(self) -> None:
        """It takes any JSON."""

    def encoder(self) -> MemoryRows:
        return MemoryRows()

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        return self.server.fence(pipeline, sink, incarnation, origin)

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        return self.server.apply(list(decode_rows(chunks)), entry)

    def write(self, chunks: Iterable[bytes]) -> None:
        self.server.write(list(decode_rows(chunks)))

    def close(self) -> None:
        """There is no connection."""


class MemorySink(WriteAheadSink[T]):
    """A sink that writes to *server*, for pipelines that run in this process."""

    def __init__(self, name: str, server: StoreServer) -> None:
        self.name, self.server = name, server

    def describe(self, type_: Any) -> dict[str, Any]:
        return {"store": "memory", "name": self.name}

    def store(self, type_: Any) -> MemoryStore:
        return MemoryStore(self.server)
