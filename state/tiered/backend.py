"""The backend `rocksdb`: tables within a budget of memory, over local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from exactlyonce.pipeline.extras import needing
from exactlyonce.state.backend import Table
from exactlyonce.state.stored import StoredState

S = TypeVar("S")


class RocksDBBackend:
    """A `StateBackend`: one of each worker, which has *memory_bytes* in all, its tables share what the process leaves.

    The files of one operator and pipeline lie below *folder*, which workers of several runs may share.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        with needing("rocksdb", "rocksdict", 'state_backend "rocksdb"'):
            from exactlyonce.state.tiered.memory import Memory
        self._folder = folder
        self._memory = Memory(memory_bytes)
        self._tables: list[Any] = []

    def table(self, stored: StoredState[S]) -> Table[S]:
        """The table; nothing is read from blocks until a record, or `fetch`, wants it."""
        from exactlyonce.state.tiered.table import TieredTable

        table: TieredTable[S] = TieredTable(stored, self._folder / stored.operator, self._memory)
        self._tables.append(table)
        return table

    def close(self) -> None:
        for table in self._tables:
            table.close()
