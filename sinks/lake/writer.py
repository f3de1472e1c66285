"""The writer of one subtask of a lake sink, apart from the description, which does without Arrow: rows are held as
Arrow, and a thread of its own writes them as files.

Invariant: the committable of an interval is told once its files and the list of them are durable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.background import BackgroundWriter
from exactlyonce.sinks.lake.table import StagedFiles
from exactlyonce.sinks.writer import FlushedInterval, SinkFailed

BACKLOG_BYTES_MAX = 32 << 20
AWAY_INTERVAL_S = 1.0
"""Between two looks whether the table's disk is mounted again."""


class LakeWriter(BackgroundWriter):
    """Writes files once *roll_bytes* of rows are held, and at barriers. *note* hears that the table is away."""

    def __init__(
        self, sink: str, subtask: int, kind: str, files: StagedFiles, roll_bytes: int, note: Callable[[str], None]
    ) -> None:
        super().__init__(sink, subtask, "lake", BACKLOG_BYTES_MAX)
        self._kind, self._files, self._roll_bytes, self._note = kind, files, roll_bytes, note
        self._held: list[Any] = []
        self._held_bytes = 0

    def write(self, outputs: Any) -> None:
        """Take a batch of rows."""
        self.records += outputs.num_rows
        self._interval_records += outputs.num_rows
        self._submit(partial(self._hold, outputs), size=outputs.nbytes)

    def _hold(self, batch: Any) -> None:
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= self._roll_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            rows = pa.Table.from_batches(self._held).combine_chunks()  # Parquet is written in half the time
            self._held, self._held_bytes = [], 0
            self._await_table()
            self._files.write(rows)

    def _end(self, checkpoint: int, records: int) -> FlushedInterval:
        self._flush()
        self._await_table()
        staged = self._files.cut(checkpoint)
        if staged.rows != records:
            raise StoreError(
                f"{staged.rows:,} rows are in files, and {records:,} records were written: the table cannot take them."
            )
        return self._staged(self._kind, checkpoint, records, staged.body)

    def _await_table(self) -> None:
        """Wait until the table is there. Its interval stays open meanwhile, until the checkpoint times out."""
        noted = False
        while True:
            try:
                return self._files.require_table()
            except StoreUnavailable as error:
                if not noted:
                    self._note(f"sink {self.sink!r} waits: {error}")
                    noted = True
                with self._changed:
                    if self._changed.wait_for(lambda: self._abandoned, AWAY_INTERVAL_S):
                        raise

    def _release(self) -> None:
        self._files.close()

    def _explained(self, failure: BaseException) -> SinkFailed | None:
        if isinstance(failure, StoreError | StoreUnavailable):
            return SinkFailed(f"sink {self.sink!r} cannot write files: {failure}")
        return None
