"""Stored state: how much is read of blocks that many key groups share, and what is held of them."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from exactlyonce.state import stored
from exactlyonce.state.blocks import IMAGE, INCREMENT, BlockEncoder, encode_keys
from exactlyonce.state.chain import Chain
from exactlyonce.state.stored import StoredState

GROUPS = 32
INCREMENTS = 40
IMAGE_BYTES, CHANGE_BYTES = 30_000, 4_000


def chain_of(topic: Any, *, compressible: bool) -> StoredState[Any]:
    """An image of each key group, in blocks of a few, and behind them increments that have something of every one."""

    def added(encoder: BlockEncoder, group: int, kind: int, key: bytes, size: int) -> None:
        states = msgspec.msgpack.encode([bytes(size) if compressible else os.urandom(size)])
        keep(encoder.add(group, kind, encode_keys([key], []), states, 1))

    def keep(block: Any) -> None:
        if block is not None:
            written.append((topic.put(block), block.header))

    written: list[Any] = []
    for checkpoint in range(1, INCREMENTS + 2):
        encoder = BlockEncoder("totals", checkpoint)
        for group in range(GROUPS):
            kind, size = (IMAGE, IMAGE_BYTES) if checkpoint == 1 else (INCREMENT, CHANGE_BYTES)
            added(encoder, group, kind, b"%d" % checkpoint, size)
        keep(encoder.flush())
    return StoredState(
        operator="totals", type=bytes, groups=range(GROUPS), max_parallelism=GROUPS, checkpoint=INCREMENTS + 1,
        chain=Chain().extended(written), schema="bytes", fetch=topic.fetch,
    )  # fmt: skip


def keys_read(state: StoredState[Any], bytes_max: int) -> Iterator[int]:
    """How many keys each key group has, all of them read as `together` says."""
    groups = list(state.groups)
    while groups:
        some = state.together(groups, bytes_max)
        for group, found in state.reading_raw(some):
            assert group == groups[0]
            yield len(found.states)
            del groups[0]


def test_what_key_groups_share_is_not_read_for_each(topic: Any) -> None:
    state = chain_of(topic, compressible=False)
    assert state.chain.size > 5_000_000
    assert list(keys_read(state, 1_000_000)) == [INCREMENTS + 1] * GROUPS
    assert topic.bytes_read == state.chain.size
    assert set(keys_read(state, IMAGE_BYTES * 10)) == {INCREMENTS + 1}
    assert topic.bytes_read < 5 * state.chain.size, "a quarter of the images at a time"


def test_what_is_shared_is_not_all_decompressed_at_once(topic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "RAW_BYTES", 1_000_000)
    state = chain_of(topic, compressible=True)
    raw_bytes = GROUPS * (IMAGE_BYTES + INCREMENTS * CHANGE_BYTES)
    assert raw_bytes > 20 * state.chain.size
    tracemalloc.start()
    try:
        assert list(keys_read(state, 1_000_000)) == [INCREMENTS + 1] * GROUPS
        assert tracemalloc.get_traced_memory()[1] < 3_000_000 < raw_bytes / 2
    finally:
        tracemalloc.stop()
