"""Tables of the tiered backend over blocks in memory, and how a test makes them small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.state import blocks as state_blocks
from exactlyonce.state.rocksdb import files, groups, interval, store
from exactlyonce.state.rocksdb.backend import RocksDBBackend
from exactlyonce.state.rocksdb.memory import TableMemory
from exactlyonce.state.rocksdb.table import TieredTable
from exactlyonce.testing.state_contract.memory import StateBlocks, Subtasks

BUDGET = 4 << 20


@pytest.fixture(autouse=True)
def read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of tests count as too many to be read whole."""
    monkeypatch.setattr(groups, "WHOLE_BYTES", 0)


@pytest.fixture
def blocks() -> StateBlocks:
    return StateBlocks()


@pytest.fixture
def process(tmp_path: Path, blocks: StateBlocks) -> Callable[..., Subtasks]:
    """The subtasks of a new process of this machine, at a checkpoint."""

    def begin(type_: Any = int, indexes: Sequence[bytes] = (), checkpoint: int = 0, **more: Any) -> Subtasks:
        backend = RocksDBBackend(tmp_path, BUDGET)
        return Subtasks(backend, blocks, type_, checkpoint=checkpoint, indexes=indexes, **more)

    return begin


@pytest.fixture
def every_one_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files are saved at every checkpoint, whatever it takes, and the test waits for them."""
    monkeypatch.setattr(files, "SAVING_SHARE", float("inf"))
    sealed = TieredTable._sealed

    def waiting(self: TieredTable[Any], checkpoint: int, parts: tuple[bytes, ...]) -> None:
        sealed(self, checkpoint, parts)
        self._files._saver.submit(int).result()

    monkeypatch.setattr(TieredTable, "_sealed", waiting)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly nothing stays in memory, every interval spills; slices are short, and blocks, none of which stays."""

    def limit(self: TableMemory) -> None:
        self.cached_max, self.changes_max = 5, 4

    monkeypatch.setattr(interval, "SLICE_ENTRIES", 3)
    monkeypatch.setattr(state_blocks, "RAW_TARGET", 40)
    monkeypatch.setattr(interval, "KEPT_BYTES", 0)
    monkeypatch.setattr(store, "AGAIN_ENTRIES", 2)
    monkeypatch.setattr(store, "SLICE_BYTES", 8)
    monkeypatch.setattr(TableMemory, "limit", limit)
