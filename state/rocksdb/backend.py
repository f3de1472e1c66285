"""The backend `rocksdb`: tables within a budget of memory, over local files. It imports the library only when made."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from exactlyonce.pipeline.extras import needing
from exactlyonce.state.backend import Table, TimedTable
from exactlyonce.state.stored import StoredState

S = TypeVar("S")


class RocksDBBackend:
    """A `StateBackend` of one worker with *memory_bytes* in all; its tables share what the process leaves.

    The files lie below *folder*, which workers of several runs may share. *worker* is its number, as `0-of-2`.
    """

    def __init__(self, folder: Path, memory_bytes: int, worker: str = "") -> None:
        with needing("rocksdb", "rocksdict", 'state_backend "rocksdb"'):
            from exactlyonce.state.rocksdb.memory import Memory
        self._folder, self._worker = folder, worker
        self._memory = Memory(memory_bytes)
        self._tables: list[Any] = []

    def table(self, stored: StoredState[S]) -> Table[S]:
        """The table; nothing is read from blocks until a record, or `fetch`, wants it."""
        from exactlyonce.state.rocksdb.table import TieredTable

        table: TieredTable[S] = TieredTable(stored, *self._place(stored))
        self._tables.append(table)
        return table

    def timed_table(self, stored: StoredState[S], *, by_key: bool = False) -> TimedTable[S]:
        """The same; a key group is also read from blocks when one of its slots ends."""
        from exactlyonce.state.rocksdb.table import TieredTimedTable

        table: TieredTimedTable[S] = TieredTimedTable(stored, *self._place(stored), by_key=by_key)
        self._tables.append(table)
        return table

    def _place(self, stored: StoredState[Any]) -> tuple[Path, Any, str]:
        """The folder, the memory and the worker's name for a table."""
        has_all = len(stored.groups) == stored.max_parallelism  # other workers may have all, too
        return self._folder / stored.operator, self._memory, self._worker if has_all else ""

    def delete_others(self, operators: Collection[str]) -> None:
        """Delete the files of operators that the pipeline no longer has; it has *operators*."""
        from exactlyonce.state.rocksdb.files import delete_others

        delete_others(self._folder, operators)

    def close(self) -> None:
        for table in self._tables:
            table.close()
