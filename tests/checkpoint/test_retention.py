"""Manifests and blocks are kept as long as they are needed."""

from __future__ import annotations

import random

import msgspec
import pytest

from exactlyonce.checkpoint import retention
from exactlyonce.checkpoint.records.manifest import BlockRef, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.retention import Ledger, by_storage


def block(number: int, storage: str = TOPIC) -> StoredBlock:
    return StoredBlock(storage, BlockRef(1, number, f"block/{number}", 1, b""))


def blocks(*numbers: int) -> tuple[StoredBlock, ...]:
    return tuple(map(block, numbers))


def test_the_newest_checkpoints_are_kept_and_older_ones_dropped_with_the_blocks_of_their_own() -> None:
    ledger = Ledger(2)
    ledger.completed(1, by_storage(blocks(1, 2)))
    ledger.completed(2, by_storage(blocks(2, 3)))
    assert ledger.expire() == ((), ())
    ledger.completed(3, by_storage(blocks(3, 4)))
    assert ledger.expire() == ((1,), blocks(1))
    assert ledger.retained == [2, 3]
    assert ledger.expire() == ((), ())


def test_a_block_that_is_damaged_is_kept_as_long_as_a_manifest_names_it() -> None:
    ledger = Ledger(1)
    ledger.completed(1, by_storage(blocks(1)))
    ledger.written(1, [block(1)._replace(ref=msgspec.structs.replace(block(1).ref, sha256=b"other"))])
    assert ledger.expire() == ((), ())


def test_a_storage_that_has_two_names() -> None:
    ledger = Ledger(1)
    ledger.completed(1, by_storage([block(1, "file:///mnt/blocks")]))
    ledger.written(1, [block(1, "file:///link"), block(2, "file:///link")])
    assert ledger.expire() == ((), (block(2, "file:///link"),))


def test_a_pinned_checkpoint_is_kept_until_it_is_no_longer_pinned() -> None:
    ledger = Ledger(1)
    ledger.completed(1, by_storage(blocks(1)))
    ledger.completed(2, by_storage(blocks(2)))
    assert ledger.expire(pinned=[1]) == ((), ())
    ledger.completed(3, by_storage(blocks(3)))
    assert ledger.expire() == ((1, 2), blocks(1, 2))


def test_the_blocks_of_savepoints_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be hundreds, with tens of thousands of blocks each, and every decision asks what may go."""
    looked: list[str] = []

    class Counted(str):
        def __hash__(self) -> int:
            looked.append(self)
            return super().__hash__()

    monkeypatch.setattr(retention, "_key", lambda ref: Counted(ref.key))
    ledger = Ledger(1)
    for number in range(1, 51):
        ledger.completed(number, by_storage(blocks(*range(1_000 * number, 1_000 * number + 200))), keep=True)
    ledger.completed(51, by_storage(blocks(1, 2, 1_001)))
    ledger.completed(52, by_storage(blocks(2, 3)))
    looked.clear()
    assert ledger.expire() == ((51,), blocks(1))
    assert len(looked) < 200, "fewer than a savepoint has"


def test_a_block_that_is_reported_twice_belongs_to_the_first_checkpoint() -> None:
    ledger = Ledger(1)
    ledger.written(1, blocks(1))
    ledger.written(9, blocks(1))
    ledger.completed(2, by_storage(blocks(2)))
    assert ledger.expire() == ((), blocks(1))


@pytest.mark.parametrize("seed", range(50))
def test_nothing_that_is_needed_is_ever_dropped_and_nothing_is_dropped_twice(seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger(rng.randint(1, 3))
    needs: dict[int, set[StoredBlock]] = {0: set()}
    kept: set[int] = set()
    written: set[StoredBlock] = set()
    dropped: set[StoredBlock] = set()
    ledger.completed(0, {})
    base = 0
    for checkpoint in range(1, 40):
        new = set(blocks(*(100 * checkpoint + i for i in range(rng.randint(0, 4)))))
        written |= new
        ledger.written(checkpoint, new)
        if rng.random() < 0.3:
            continue  # aborted
        chain = {each for each in needs[base] if rng.random() < 0.8} | new
        keep = rng.random() < 0.1
        needs[checkpoint] = chain
        kept |= {checkpoint} if keep else set()
        ledger.completed(checkpoint, by_storage(chain), keep=keep)
        pinned = {base} if rng.random() < 0.5 else set()
        gone, tombstones = ledger.expire(pinned)
        assert not dropped & set(tombstones)
        dropped |= set(tombstones)
        assert not set(gone) & (kept | pinned | {checkpoint})
        needs = {n: refs for n, refs in needs.items() if n not in gone}
        assert ledger.retained == sorted(needs)
        assert not dropped & set().union(*needs.values())
        base = checkpoint
    assert written - dropped <= set().union(*needs.values()) | {b for b in written if b.ref.offset // 100 > base}
