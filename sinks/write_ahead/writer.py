"""One subtask of a write-ahead sink: rows become blocks of the checkpoint topic, in the order in which they came.

Invariants: a block holds whole rows of one interval; the committable of an interval names its blocks, or the indexes
that list them, once all are durable. Blocks are written as rows come, before their checkpoint is triggered: so the
search for orphans of such a pipeline begins at its base.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX, BlockRef, StagedAck, StoreCommittable
from exactlyonce.sinks.write_ahead.store import RowEncoder
from exactlyonce.sinks.writer import BLOCKS_PENDING_MAX, ROOM, BlockStaging, FlushedInterval, IntervalWriter

KIND = "rows"
ROWS, ROWS_INDEX = "rows", "rows-index"
"""Kinds of blocks."""
INDEXED = b"indexed"
"""The body of a committable whose blocks are indexes."""

ROW_SIZE_MAX = BLOCK_SIZE_MAX - 4096
CHUNK_SIZE = 512 * 1024
NAMED_MAX = 4
"""Blocks that a committable names itself; more are listed in indexes, so that a manifest stays small."""
LISTED_MAX = 4_000
"""Blocks in one index."""

_encode_index = msgspec.msgpack.Encoder().encode
decode_index = msgspec.msgpack.Decoder(list[BlockRef]).decode
"""The blocks of rows in an index, in their order."""


class BoundedRows:
    """A store's encoder that refuses rows larger than a block."""

    def __init__(self, encoder: RowEncoder) -> None:
        self._encoder = encoder

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """See `RowEncoder`; ValueError if a row is too large."""
        rows = self._encoder.encode(records)
        if rows and (largest := max(map(len, rows))) > ROW_SIZE_MAX:
            raise ValueError(
                f"a row of {largest:,} bytes is larger than {ROW_SIZE_MAX:,}, the most that the checkpoint topic takes"
            )
        return rows


@dataclass
class _Interval:
    """The rows between two barriers."""

    checkpoint: int
    records: int
    tickets: list[Ticket]
    indexes: list[Ticket] | None = None


@dataclass
class RowsWriter(IntervalWriter):
    """Stages rows for `commits.stores`; see the module."""

    subtask: int
    staging: BlockStaging
    _rows: list[bytes] = field(default_factory=list)
    _size: int = 0
    _tickets: list[Ticket] = field(default_factory=list)
    _interval_records: int = 0
    _next: int = 0
    """The checkpoint expected after the last barrier: only for the blocks' keys."""
    _cut: deque[_Interval] = field(default_factory=deque)

    @property
    def room(self) -> int:
        """See `SinkWriter`: 0 while too many blocks are in flight."""
        return 0 if self.staging.pending > BLOCKS_PENDING_MAX else ROOM

    def write(self, outputs: list[bytes]) -> None:
        """Take rows, and send those that fill a block."""
        self.records += len(outputs)
        self._interval_records += len(outputs)
        for chunk, size in chunks_of(outputs):
            if self._size + size > CHUNK_SIZE:
                self._send()
            self._rows += chunk
            self._size += size

    def _send(self) -> None:
        if self._rows:
            self._tickets.append(self.staging.write(ROWS, self._next, b"".join(self._rows)))
            self._rows, self._size = [], 0

    def barrier(self, checkpoint: int) -> None:
        self._send()
        self._cut.append(_Interval(checkpoint, self._interval_records, self._tickets))
        self._tickets, self._interval_records, self._next = [], 0, checkpoint + 1

    def poll(self, wait_s: float = 0.0) -> bool:
        """Whether an interval has become durable."""
        moved = False
        while self._cut and (flushed := self._finished(self._cut[0])) is not None:
            self._flushed[self._cut.popleft().checkpoint] = flushed
            moved = True
        return moved

    def _finished(self, interval: _Interval) -> FlushedInterval | None:
        refs = _durable(interval.tickets)
        if refs is None:
            return None
        if not refs:
            return FlushedInterval()
        named, body = refs, b""
        if len(refs) > NAMED_MAX:
            if interval.indexes is None:
                parts = (refs[start : start + LISTED_MAX] for start in range(0, len(refs), LISTED_MAX))
                interval.indexes = [
                    self.staging.write(ROWS_INDEX, interval.checkpoint, _encode_index(part)) for part in parts
                ]
            indexes = _durable(interval.indexes)
            if indexes is None:
                return None
            named, body = indexes, INDEXED
        committable = StoreCommittable(
            sink=self.sink, subtask=self.subtask, checkpoint=interval.checkpoint, records=interval.records, kind=KIND,
            blocks=named, body=body,
        )  # fmt: skip
        everything = tuple(dict.fromkeys((*named, *refs)))
        return FlushedInterval(staged=StagedAck(committable, everything), written=everything)


def _durable(tickets: list[Ticket]) -> tuple[BlockRef, ...] | None:
    """The references of all blocks; None while one is in flight."""
    refs = [ticket.ref for ticket in tickets]
    return tuple(ref for ref in refs if ref is not None) if all(refs) else None


def chunks_of(rows: list[bytes]) -> Iterator[tuple[list[bytes], int]]:
    """*rows* in order, in parts that fit into a block, each with its size in bytes."""
    size = sum(map(len, rows))
    if size <= CHUNK_SIZE:
        yield rows, size
        return
    part: list[bytes] = []
    size = 0
    for row in rows:
        if part and size + len(row) > CHUNK_SIZE:
            yield part, size
            part, size = [], 0
        part.append(row)
        size += len(row)
    yield part, size
