"""One subtask of a prepared sink: a transaction of the store per interval, written as rows come, prepared at its end.

Invariants: a transaction holds the rows between two barriers and no others; what the loop hands over is done on one
thread, in its order, over one connection, so that the next interval's rows come after the last one is prepared; after
a fault nothing more is done, the writer raises, and the job restarts from the last completed checkpoint. An interval
without rows has no transaction. Writing never blocks: what the store has not taken waits, bounded by bytes.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.manifest import StagedAck, StoreCommittable
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.prepared.committer import KIND
from exactlyonce.sinks.prepared.store import PreparedRow, PreparingStore, TransactionName
from exactlyonce.sinks.writer import ROOM, FlushedInterval, IntervalWriter, SinkFailed, WriterContext

CHUNK_SIZE = 256 * 1024
BACKLOG_BYTES_MAX = 16 << 20
KEEP_INTERVAL_MS = 10_000
"""Servers end transactions whose client has been silent for a minute, so that those of dead clients end."""


class _Transactions:
    """The transactions of one subtask, one after the other; all is done on one thread, but for what ends it."""

    def __init__(self, store: PreparingStore, context: WriterContext) -> None:
        self._store = store
        self._context = context
        self._nonce = secrets.token_hex(4)
        self._number = 0
        self._open: TransactionName | None = None
        self.over = False
        """Nothing more is to be done."""

    def step(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Do *what*, unless it is over; a fault ends it."""
        if self.over:
            return None
        try:
            return what(*arguments)
        except BaseException:
            self.over = True
            raise

    def add(self, chunk: bytes) -> None:
        """Write rows."""
        if self._open is None:
            self._number += 1
            context = self._context
            owner = self._store.owner(context.pipeline, context.sink)
            self._open = TransactionName(
                owner, context.subtask, self._number, context.incarnation, context.attempt, self._nonce
            )
            self._store.begin(self._open)
        self._store.add(chunk)

    def keep(self) -> None:
        """Show that the open transaction is not given up."""
        if self._open is not None:
            self._store.keep()

    def prepare(self, checkpoint: int, records: int) -> str:
        """End the interval; -> the transaction's name."""
        context, name = self._context, str(self._open)
        row = PreparedRow(
            name=name, pipeline=context.pipeline, sink=context.sink, subtask=context.subtask, checkpoint=checkpoint,
            records=records,
        )  # fmt: skip
        hit("store-preparing")
        self._store.prepare(row)
        hit("store-prepared")
        self._open = None
        return name


@dataclass(frozen=True)
class _Step:
    """What was handed to the thread."""

    future: Future[Any]
    size: int = 0
    ends: tuple[int, int] | None = None
    """Checkpoint and records of the interval that it ends."""


@dataclass
class PreparedWriter(IntervalWriter):
    """See the module. *store* is the thread's from the first row on."""

    subtask: int
    clock: Clock
    store: PreparingStore
    transactions: _Transactions
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "store"))
    _rows: list[bytes] = field(default_factory=list)
    _size: int = 0
    _interval_records: int = 0
    _steps: deque[_Step] = field(default_factory=deque)
    _backlog_bytes: int = 0
    _kept_ms: int = 0

    @property
    def room(self) -> int:
        """None while too much waits for the store."""
        return 0 if self._backlog_bytes > BACKLOG_BYTES_MAX else ROOM

    @property
    def held_up(self) -> str:
        """The store, if there are rows that it has not taken."""
        waiting = self._backlog_bytes
        return f"sink {self.sink!r} waits for its store to take {waiting:,} bytes" if waiting else ""

    def write(self, outputs: list[bytes]) -> None:
        """Take rows; they go as soon as they make a chunk."""
        self.records += len(outputs)
        self._interval_records += len(outputs)
        for row in outputs:
            self._rows.append(row)
            self._size += len(row)
            if self._size >= CHUNK_SIZE:
                self._send()

    def _send(self) -> None:
        if self._rows:
            chunk = b"".join(self._rows)
            self._rows, self._size = [], 0
            self._backlog_bytes += len(chunk)
            self._submit(self.transactions.add, chunk, size=len(chunk))

    def _submit(
        self, what: Callable[..., Any], *arguments: Any, size: int = 0, ends: tuple[int, int] | None = None
    ) -> None:
        self._kept_ms = self.clock.monotonic_ms()
        self._steps.append(_Step(self._thread.submit(self.transactions.step, what, *arguments), size, ends))

    def barrier(self, checkpoint: int) -> None:
        """All rows so far belong to *checkpoint*."""
        self._send()
        records, self._interval_records = self._interval_records, 0
        if records:
            self._submit(self.transactions.prepare, checkpoint, records, ends=(checkpoint, records))
        else:
            self._flushed[checkpoint] = FlushedInterval()

    def poll(self, wait_s: float = 0.0) -> bool:
        """Whether the store has taken something. `SinkFailed` where it is away, `StoreError` where it refuses."""
        if not self._steps and self.clock.monotonic_ms() >= self._kept_ms + KEEP_INTERVAL_MS:
            self._submit(self.transactions.keep)
        if wait_s and self._steps:
            wait([self._steps[0].future], wait_s)
        moved = False
        while self._steps and self._steps[0].future.done():
            self._take(self._steps.popleft())
            moved = True
        return moved

    def _take(self, step: _Step) -> None:
        self._backlog_bytes -= step.size
        try:
            name = step.future.result()
        except StoreError as error:
            raise StoreError(f"Sink {self.sink!r}: {error}") from error
        except StoreUnavailable as error:
            raise SinkFailed(f"sink {self.sink!r}: {error}") from None
        if step.ends is not None:
            checkpoint, records = step.ends
            committable = StoreCommittable(
                sink=self.sink, subtask=self.subtask, checkpoint=checkpoint, records=records, kind=KIND,
                body=name.encode(),
            )  # fmt: skip
            self._flushed[checkpoint] = FlushedInterval(staged=StagedAck(committable))

    def abandon(self) -> None:
        """What is open is rolled back; what is prepared stays."""
        self.transactions.over = True
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=False)


def open_writer(store: PreparingStore, context: WriterContext) -> PreparedWriter:
    """The writer of one subtask."""
    return PreparedWriter(context.sink, context.subtask, context.clients.clock, store, _Transactions(store, context))
