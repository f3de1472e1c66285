"""The common part of tests of state: a place to write blocks to and read them from, which counts what is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.backend import CheckpointedState, StateBackend, Table
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.key_groups import Merging, Parts
from exactlyonce.state.rocksdb.backend import RocksDBBackend
from exactlyonce.state.stored import Fetch
from exactlyonce.testing.state_contract.memory import StateBlocks


class Topic(StateBlocks):
    """Blocks in memory, and hash maps that are restored from them."""

    @property
    def bodies(self) -> dict[BlockRef, bytes]:
        return self._bodies

    @property
    def bytes_read(self) -> int:
        return sum(ref.size for ref in self.read)

    def restored(
        self, index: Iterable[bytes], checkpoint: int = 1, groups: range = range(128), max_parallelism: int = 0,
        type_: Any = int, touched: Collection[int] | None = None, fetch: Fetch | None = None, operator: str = "totals",
    ) -> Table[Any]:  # fmt: skip
        """A hash map, restored from what was written here; *groups* are all that there are unless it is said."""
        stored = CheckpointedState(
            operator=operator, type=type_, groups=groups, max_parallelism=max_parallelism or len(groups),
            checkpoint=checkpoint, indexes=list(index), fetch=fetch or self.fetch,
        )  # fmt: skip
        return stored.table(HashMapBackend(), touched)


@pytest.fixture
def topic() -> Topic:
    return Topic()


@pytest.fixture(params=["hashmap", "rocksdb"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], StateBackend]]:
    made: list[StateBackend] = []

    def make() -> StateBackend:
        made.append(HashMapBackend() if request.param == "hashmap" else RocksDBBackend(tmp_path, 64 << 20))
        return made[-1]

    yield make
    for each in made:
        each.close()


def choose_often(merging: Merging, checkpoint: int, changed: int, tables: Mapping[int, Sized]) -> dict[int, int | None]:
    """Images at every other checkpoint, whole and in parts: most histories are too short for `Merging.choose`."""
    chosen: dict[int, int | None] = {}
    for group, states in tables.items():
        turn, begun = (checkpoint + group) % 3, group in merging.parts
        if begun or turn == 1 or (turn == 2 and len(states) > 2):
            chosen[group] = 2 if turn != 1 and checkpoint % 7 else None
            if chosen[group]:
                merging.parts.setdefault(group, Parts(checkpoint))
    return chosen


@pytest.fixture
def images_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Merging, "choose", choose_often)


Restore = Callable[..., Table[Any]]


@pytest.fixture
def restored(topic: Any, backend: Callable[[], StateBackend]) -> Restore:
    def at(type_: Any, checkpoint: int, index: Any, touched: Any = None) -> Table[Any]:
        stored = CheckpointedState(
            operator="totals", type=type_, groups=range(16), max_parallelism=16, checkpoint=checkpoint, indexes=index,
            fetch=topic.fetch,
        )  # fmt: skip
        return stored.table(backend(), touched)

    return at
