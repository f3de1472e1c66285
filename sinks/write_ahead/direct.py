"""One subtask of a sink over a `Store` whose delivery is at least once: rows go to the store as they come.

Invariants: rows are written in their order, one transaction after the other, on a thread of its own; a barrier is
flushed once everything before it was written. There is no block, committable or ledger. A failed transaction is not
retried: the job restarts, and the rows come again.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.write_ahead.store import Store
from exactlyonce.sinks.write_ahead.writer import chunks_of
from exactlyonce.sinks.writer import ROOM, FlushedInterval, IntervalWriter, SinkFailed

BACKLOG_BYTES_MAX = 32 << 20
TRANSACTION_BYTES = 4 << 20
"""Size at which a transaction takes no more batches."""


@dataclass
class DirectWriter(IntervalWriter):
    """See the module."""

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
