"""A store in memory that keeps a ledger: what a `Store` promises, and no more; and the sink that writes to it.

Invariants: rows and their entry of the ledger come in one step; the ledger's checkpoint of a subtask only grows, and so
does the incarnation that may write; whoever is refused has changed nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from exactlyonce.pipeline.errors import Fenced
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
from exactlyonce.sinks.write_ahead.store import ForeignLedger, LedgerBehind, LedgerEntry

T = TypeVar("T")
Target = tuple[str, str]
"""Pipeline and sink."""

_LENGTH_BYTES = 4
_encode = msgspec.json.Encoder().encode


class Writer(NamedTuple):
    """Who may write to a target."""

    incarnation: int
    origin: str


@dataclass
class StoreContents:
    """All that a store keeps."""

    rows: dict[Target, list[bytes]] = field(default_factory=dict)
    """By target, in the order in which they were applied; each is a record as JSON."""
    ledger: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """By pipeline, sink and subtask: the checkpoint."""
    writers: dict[Target, Writer] = field(default_factory=dict)


class StoreServer(Protocol):
    """What a connection asks; each request is carried out as a whole, or not at all."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store.fence`."""

    def apply(self, rows: Sequence[bytes], entry: LedgerEntry) -> bool:
        """See `Store.apply`."""

    def write(self, rows: Sequence[bytes]) -> None:
        """See `Store.write`."""


class StoreModel:
    """The server: what is applied here can be read in `contents`."""

    def __init__(self) -> None:
        self.contents = StoreContents()
        self.unledgered: list[bytes] = []
        """What was written without the ledger."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store.fence`."""
        target = (pipeline, sink)
        if target in self.contents.writers:
            self._require_own(target, origin)
        self._require_newest(target, incarnation)
        self.contents.writers[target] = Writer(incarnation, origin)
        return {key[2]: checkpoint for key, checkpoint in self.contents.ledger.items() if key[:2] == target}

    def apply(self, rows: Sequence[bytes], entry: LedgerEntry) -> bool:
        """See `Store.apply`."""
        target, key = (entry.pipeline, entry.sink), (entry.pipeline, entry.sink, entry.subtask)
        self._require_own(target, entry.origin)
        self._require_newest(target, entry.incarnation)
        has = self.contents.ledger.get(key, 0)
        if has >= entry.checkpoint:
            return False
        self._require_reached(has, entry.previous)
        self.contents.rows.setdefault(target, []).extend(rows)
        self.contents.ledger[key] = entry.checkpoint
        return True

    def _require_own(self, target: Target, origin: str) -> None:
        writer = self.contents.writers.get(target)
        if writer is None or writer.origin != origin:
            raise ForeignLedger(writer.origin if writer is not None else "")

    def _require_newest(self, target: Target, incarnation: int) -> None:
        writer = self.contents.writers.get(target)
        if writer is not None and writer.incarnation > incarnation:
            raise Fenced(
                f"The ledger of sink {target[1]} has incarnation {writer.incarnation}: a newer instance has taken over "
                f"from incarnation {incarnation}. This one ends; nothing is lost."
            )

    def _require_reached(self, has: int, previous: int) -> None:
        if has < previous:
            raise LedgerBehind(has)

    def write(self, rows: Sequence[bytes]) -> None:
        """See `Store.write`."""
        self.unledgered += rows

    def backup(self) -> StoreContents:
        """All that there is now."""
        return copy.deepcopy(self.contents)

    def restore(self, backup: StoreContents) -> None:
        """As it was when *backup* was made."""
        self.contents = copy.deepcopy(backup)


class MemoryRows:
    """A row is its length and the record as JSON."""

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """One entry for each record; TypeError where one is no JSON."""
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
        """It takes whatever is JSON."""

    def encoder(self) -> MemoryRows:
        """See `Store.encoder`."""
        return MemoryRows()

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store.fence`."""
        return self.server.fence(pipeline, sink, incarnation, origin)

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """See `Store.apply`."""
        return self.server.apply(list(decode_rows(chunks)), entry)

    def write(self, chunks: Iterable[bytes]) -> None:
        """See `Store.write`."""
        self.server.write(list(decode_rows(chunks)))

    def close(self) -> None:
        """Nothing is held."""


class MemorySink(WriteAheadSink[T]):
    """A sink whose rows end in *server*, for pipelines that run in this process."""

    def __init__(self, name: str, server: StoreServer) -> None:
        self.name, self.server = name, server

    def describe(self, type_: Any) -> dict[str, Any]:
        """See `Sink.describe`."""
        return {"store": "memory", "name": self.name}

    def store(self, type_: Any) -> MemoryStore:
        """See `WriteAheadSink.store`."""
        return MemoryStore(self.server)
