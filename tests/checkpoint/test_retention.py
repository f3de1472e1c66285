"""Manifests and blocks are kept as long as they are needed."""

from __future__ import annotations

import random

import msgspec
import pytest

from exactlyonce.checkpoint.kept_blocks import BlockUse, by_storage
from exactlyonce.checkpoint.records.manifest import BlockRef, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC


def block(number: int, storage: str = TOPIC) -> StoredBlock:
    return StoredBlock(storage, BlockRef(1, number, f"block/{number}", 1, b""))


def blocks(*numbers: int) -> tuple[StoredBlock, ...]:
    return tuple(map(block, numbers))


def test_a_block_that_is_damaged_is_kept_as_long_as_a_manifest_names_it() -> None:
    ledger = BlockUse(1)
    ledger.completed(1, by_storage(blocks(1)))
    ledger.written(1, [block(1)._replace(ref=msgspec.structs.replace(block(1).ref, sha256=b"other"))])
    assert ledger.expire() == ((), ())


def test_a_storage_that_has_two_names() -> None:
    ledger = BlockUse(1)
    ledger.completed(1, by_storage([block(1, "file:///mnt/blocks")]))
    ledger.written(1, [block(1, "file:///link"), block(2, "file:///link")])
    assert ledger.expire() == ((), (block(2, "file:///link"),))


def test_a_pinned_checkpoint_is_kept_until_it_is_no_longer_pinned() -> None:
    ledger = BlockUse(1)
    ledger.completed(1, by_storage(blocks(1)))
    ledger.completed(2, by_storage(blocks(2)))
    assert ledger.expire(pinned=[1]) == ((), ())
    ledger.completed(3, by_storage(blocks(3)))
    assert ledger.expire() == ((1, 2), blocks(1, 2))


def test_a_block_that_is_reported_twice_belongs_to_the_first_checkpoint() -> None:
    ledger = BlockUse(1)
    ledger.written(1, blocks(1))
    ledger.written(9, blocks(1))
    ledger.completed(2, by_storage(blocks(2)))
    assert ledger.expire() == ((), blocks(1))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_is_needed_is_ever_dropped_and_nothing_is_dropped_twice(seed: int) -> None:
    rng = random.Random(seed)
    ledger = BlockUse(rng.randint(1, 3))
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
