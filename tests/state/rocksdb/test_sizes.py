"""The tiered table and the budget of memory, whatever a batch wants and however large states are."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.chain import decode_index
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.rocksdb.backend import RocksDBBackend
from exactlyonce.testing.state_contract.memory import MAX_PARALLELISM, StateBlocks, Subtasks, key_of

Process = Callable[..., Subtasks]
KEYS = range(400)
BUDGET = 4 << 20


@pytest.fixture
def process(tmp_path: Path, blocks: StateBlocks) -> Process:
    def begin(type_: Any = int, **more: Any) -> Subtasks:
        return Subtasks(RocksDBBackend(tmp_path, BUDGET), blocks, type_, **more)

    return begin


def written(blocks: StateBlocks) -> list[bytes]:
    """The index of checkpoint 1: an image of every key."""
    before = Subtasks(HashMapBackend(), blocks)
    before.put(dict.fromkeys(range(30_000), 1))
    return before.write(before.freeze(1, 0))


def test_a_batch_that_wants_every_key_group(
    process: Process, blocks: StateBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes, together = written(blocks), list[int]()
    fetch = blocks.fetch

    def noted(refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, bytes]]:
        together.append(sum(ref.size for ref in refs))
        return fetch(refs)

    monkeypatch.setattr(blocks, "fetch", noted)
    after = process(indexes=indexes, checkpoint=1)
    together.clear()
    table: Any = after.tables[0]
    table.apply(lambda state, record: (record, None), [key_of(number) for number in KEYS], [2] * len(KEYS))
    assert not table._groups.unread
    group = max(sum(ref.size for ref in own) for own in _own_blocks(indexes))
    assert sum(together) > 2 * max(together)
    assert max(together) <= group + table._memory.fetched_bytes
    assert after.items() == {key_of(each): 1 for each in range(30_000)} | dict.fromkeys(map(key_of, KEYS), 2)


def _own_blocks(indexes: list[bytes]) -> list[list[BlockRef]]:
    """The blocks of each key group."""
    found = [block for part in indexes for block in decode_index(part).blocks]
    return [[block.ref for block in found if block.groups >> group & 1] for group in range(MAX_PARALLELISM)]


@pytest.mark.exhaustive(but=["1"])
@pytest.mark.parametrize("every", [1, 20])
def test_large_states(every: int, process: Process) -> None:
    """Fewer of them are held, also of a few that no sample shows; a batch that wants many is applied in parts."""
    subtasks, large = process(bytes), 100_000
    (table,) = subtasks.tables

    def put(state: bytes | None, number: int) -> tuple[bytes | None, int]:
        return (os.urandom(large) if number % every == 0 else b"small"), number

    tracemalloc.start()
    try:
        numbers = range(160 * every)
        for start in range(0, len(numbers), 2_000):
            some = numbers[start : start + 2_000]
            assert table.apply(put, [key_of(number) for number in some], some) == [*some]
        settled = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        read = table.apply(
            lambda state, number: (state, len(state or b"")), [key_of(each) for each in numbers], numbers
        )
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == [large if number % every == 0 else 5 for number in numbers]
    assert 160 * large > 3.5 * BUDGET
    assert max(settled, now, peak) < 3 * BUDGET


def test_a_failure_in_a_part_of_a_batch(process: Process) -> None:
    (table,) = process().tables

    def fail(state: int | None, number: int) -> tuple[int, None]:
        return 1 // (777 - number), None

    with pytest.raises(ApplyFailed) as failed:
        table.apply(fail, [key_of(number) for number in range(1_000)], range(1_000))
    assert failed.value.index == 777
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
