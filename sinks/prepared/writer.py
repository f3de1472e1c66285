"""One subtask of a prepared sink: a transaction of the store per interval, written as rows come, prepared at its end.

Invariants: a transaction holds the rows between two barriers and no others; a thread of its own uses one connection, so
the next interval's rows come after the last one is prepared; after a fault the job restarts from the last completed
checkpoint. An interval without rows has no transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.background import BackgroundWriter
from exactlyonce.sinks.prepared.committer import KIND
from exactlyonce.sinks.prepared.store import PreparedRow, PreparingStore, TransactionName
from exactlyonce.sinks.writer import FlushedInterval, SinkFailed, WriterContext

CHUNK_SIZE = 256 * 1024
BACKLOG_BYTES_MAX = 16 << 20
KEEP_INTERVAL_MS = 10_000
"""Servers end transactions of silent clients after a while."""


class PreparedWriter(BackgroundWriter):
    """See the module. *store* belongs to the thread from the first row on."""

    def __init__(self, store: PreparingStore, context: WriterContext) -> None:
        super().__init__(context.sink, context.subtask, "store", BACKLOG_BYTES_MAX)
        self.store, self.clock, self._context = store, context.clients.clock, context
        self._rows: list[bytes] = []
        self._size = self._kept_ms = 0
        self._nonce = secrets.token_hex(4)
        self._number = 0  # the thread's, as what follows
        self._open: TransactionName | None = None

    def write(self, outputs: list[bytes]) -> None:
        """Take rows, and send those that fill a chunk."""
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
            self._submit(partial(self._add, chunk), size=len(chunk))

    def _submit(self, work: Callable[[], object], *, size: int = 0, checkpoint: int | None = None) -> None:
        self._kept_ms = self.clock.monotonic_ms()
        super()._submit(work, size=size, checkpoint=checkpoint)

    def barrier(self, checkpoint: int) -> None:
        """See `SinkWriter`."""
        self._send()
        super().barrier(checkpoint)

    def poll(self, wait_s: float = 0.0) -> bool:
        """See `BackgroundWriter`."""
        if not self._steps and self.clock.monotonic_ms() >= self._kept_ms + KEEP_INTERVAL_MS:
            self._submit(self._keep)
        return super().poll(wait_s)

    def _explained(self, failure: BaseException) -> Exception | None:
        if isinstance(failure, StoreError):
            return StoreError(f"Sink {self.sink!r}: {failure}")
        if isinstance(failure, StoreUnavailable):
            return SinkFailed(f"sink {self.sink!r}: {failure}")
        return None

    # --- the thread -------------------------------------------------------------------------------------------------

    def _add(self, chunk: bytes) -> None:
        if self._open is None:
            self._number += 1
            context = self._context
            owner = self.store.owner(context.pipeline, context.sink)
            self._open = TransactionName(
                owner, context.subtask, self._number, context.incarnation, context.attempt, self._nonce
            )
            self.store.begin(self._open)
        self.store.add(chunk)

    def _keep(self) -> None:
        if self._open is not None:
            self.store.keep()

    def _end(self, checkpoint: int, records: int) -> FlushedInterval:
        name = str(self._open)
        row = PreparedRow(
            name=name, pipeline=self._context.pipeline, sink=self.sink, subtask=self.subtask, checkpoint=checkpoint,
            records=records,
        )  # fmt: skip
        hit("store-preparing")
        self.store.prepare(row)
        hit("store-prepared")
        self._open = None
        return self._staged(KIND, checkpoint, records, name.encode())

    def _release(self) -> None:
        self.store.close()
