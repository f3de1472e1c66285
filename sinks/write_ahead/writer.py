"""One subtask of a write-ahead sink: rows become blocks of the checkpoint topic, in the order in which they came.
If its delivery is at least once, they go to the store as they come.

Invariants: a block holds whole rows of one interval; the committable of an interval names its blocks, or the indexes
that list them, once all are durable. Blocks are written as rows come, before their checkpoint is triggered: so the
search for orphans of such a pipeline begins at its base.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks, Ticket
from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX, BlockRef, StagedAck, StoreCommittable
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.write_ahead.store import RowEncoder, Store
from exactlyonce.sinks.writer import BLOCKS_PENDING_MAX, ROOM, BlockStaging, FlushedInterval, IntervalWriter, SinkFailed

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

BACKLOG_BYTES_MAX = 32 << 20
TRANSACTION_BYTES = 4 << 20
"""Size at which a transaction takes no more batches."""

_encode_index = msgspec.msgpack.Encoder().encode
decode_index = msgspec.msgpack.Decoder(list[BlockRef]).decode
"""The blocks of rows in an index, in their order."""


def staged_chunks(committable: StoreCommittable, blocks: Blocks) -> Iterator[bytes]:
    """The bodies of the blocks of rows. All blocks of a subtask are of one key group, so they come in the order in
    which they were put."""
    refs = list(committable.blocks)
    if committable.body == INDEXED:
        refs = [ref for _, index in blocks.fetch(refs) for ref in decode_index(index.body)]
    return (block.body for _, block in blocks.fetch(refs))


def require_room(largest: int) -> None:
    """ValueError if a row of so many bytes is larger than a block."""
    if largest > ROW_SIZE_MAX:
        raise ValueError(
            f"a row of {largest:,} bytes is larger than {ROW_SIZE_MAX:,}, the most that the checkpoint topic takes"
        )


class BoundedRows:
    """A store's encoder that refuses rows larger than a block."""

    def __init__(self, encoder: RowEncoder) -> None:
        self._encoder = encoder

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """See `RowEncoder`; ValueError if a row is too large."""
        rows = self._encoder.encode(records)
        require_room(max(map(len, rows), default=0))
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
    """Stages rows for `commits.stores`, as blocks; exactly once."""

    kind: ClassVar[str] = KIND
    """See `Committer.kind`."""

    subtask: int
    staging: BlockStaging
    _rows: list[Any] = field(default_factory=list)
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

    def write(self, outputs: Any) -> None:
        """Take rows, and send those that fill a block."""
        self.records += len(outputs)
        self._interval_records += len(outputs)
        for chunk, size in self._chunks_of(outputs):
            if self._size + size > CHUNK_SIZE:
                self._send()
            self._rows += chunk
            self._size += size

    def _chunks_of(self, outputs: Any) -> Iterator[tuple[list[Any], int]]:
        """*outputs* in order, in parts that fit into a block, each with its size in bytes."""
        return chunks_of(outputs)

    def _body(self, rows: list[Any]) -> bytes:
        """The body of a block."""
        return b"".join(rows)

    def _send(self) -> None:
        if self._rows:
            self._tickets.append(self.staging.write(ROWS, self._next, self._body(self._rows)))
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
            sink=self.sink, subtask=self.subtask, checkpoint=interval.checkpoint, records=interval.records,
            kind=self.kind, blocks=named, body=body,
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


@dataclass
class DirectWriter(IntervalWriter):
    """Writes rows in their order, one transaction after the other, on a thread of its own; at least once.

    A barrier is flushed once everything before it was written. There is no block, committable or ledger. A failed
    transaction is not retried: the job restarts, and the rows come again.
    """

    store: Store
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "store"))
    _backlog: deque[list[bytes]] = field(default_factory=deque)
    _backlog_bytes: int = 0
    _writing: tuple[Future[None], int] | None = None
    """The transaction in progress, and its number of rows."""
    _done: int = 0
    """The number of `records` that were written."""
    _barriers: deque[tuple[int, int]] = field(default_factory=deque)
    """Checkpoints, each with the number of records before its barrier."""

    @property
    def room(self) -> int:
        """See `SinkWriter`: 0 while too much waits to be written."""
        return 0 if self._backlog_bytes > BACKLOG_BYTES_MAX else ROOM

    def write(self, outputs: list[bytes]) -> None:
        """Take rows; `poll` writes them."""
        if outputs:
            self.records += len(outputs)
            self._backlog.append(outputs)
            self._backlog_bytes += _size(outputs)

    def barrier(self, checkpoint: int) -> None:
        """See `SinkWriter`."""
        self._barriers.append((checkpoint, self.records))

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        """See `SinkWriter`: an empty interval, once all rows before its barrier are done."""
        self._pass_barriers()
        return super().take_flushed(checkpoint)

    def poll(self, wait_s: float = 0.0) -> bool:
        """Go on writing; True if a transaction has ended. Raises `SinkFailed` or `StoreError` if it failed."""
        moved = self._settle(wait_s)
        if self._writing is None and self._backlog:
            rows = self._next()
            chunks = (b"".join(part) for part, _ in chunks_of(rows))
            self._writing = self._thread.submit(self.store.write, chunks), len(rows)
        return moved

    def _next(self) -> list[bytes]:
        """The rows of the next transaction."""
        rows: list[bytes] = []
        size = 0
        while self._backlog and size < TRANSACTION_BYTES:
            batch = self._backlog.popleft()
            size += _size(batch)
            rows += batch
        self._backlog_bytes -= size
        return rows

    def _settle(self, wait_s: float) -> bool:
        if self._writing is None:
            return False
        future, count = self._writing
        if wait_s:
            wait([future], wait_s)
        if not future.done():
            return False
        self._writing = None
        try:
            future.result()
        except StoreError as error:
            raise StoreError(f"Sink {self.sink!r}: {error}") from error
        except StoreUnavailable as error:
            raise SinkFailed(f"sink {self.sink!r}: {error}") from error
        self._done += count
        return True

    def _pass_barriers(self) -> None:
        """Flush the barriers whose rows are done."""
        while self._barriers and self._barriers[0][1] <= self._done:
            checkpoint, _ = self._barriers.popleft()
            self._flushed[checkpoint] = FlushedInterval()

    def abandon(self) -> None:
        """Write no further rows, and do not wait for the transaction in progress."""
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=False)


def _size(rows: list[bytes]) -> int:
    return sum(map(len, rows))
