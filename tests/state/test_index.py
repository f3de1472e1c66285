"""The bytes of indexes."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX, BlockRef
from exactlyonce.pipeline.keys import canonical_key, described_forms, key_forms_of
from exactlyonce.state.chain import Chain, ChainBlock, IndexHead, decode_index, encode_index
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.key_groups import group_range, mask_of, subtask_of
from exactlyonce.state.slots import GroupTimes

_HEAD = IndexHead("totals", 5, 12, "int", 2.0)


def _chain() -> Chain:
    blocks = [
        ChainBlock(BlockRef(1, 900, "k1", 9, b"\1" * 32), 3, mask_of([4, 7]), mask_of([4, 7])),
        ChainBlock(BlockRef(2, 500, "k2", 8, b"\2" * 32), 3, mask_of([11]), mask_of([11])),
        ChainBlock(BlockRef(1, 902, "k3", 7, b"\3" * 32), 5, mask_of([0, 4, 7]), mask_of([0])),
    ]
    return Chain(blocks)


def test_the_bytes_of_an_index_do_not_change() -> None:
    columns = bytes.fromhex(
        "98 95 a6746f74616c73 05 0c a3696e74 cb4000000000000000"
        "93010201 93cd0384cd01f402 93a26b31a26b32a26b33 93090807 93030002"
        "c406 9000 0008 9100 c406 9000 0008 0100"
    )
    body = b"EOX2" + zlib.compress(columns, 6) + b"\1" * 32 + b"\2" * 32 + b"\3" * 32
    assert encode_index(_chain(), _HEAD) == (body,)
    index = decode_index(body)
    assert index.head == _HEAD
    assert index.blocks == _chain().blocks


def test_heads() -> None:
    for version in (1, 2):
        for keys in (None, "str", {"tuple": ["str", "int"]}):
            head = IndexHead("totals", 5, 12, "int", 2.0, version, keys)
            (body,) = encode_index(_chain(), head)
            assert decode_index(body).head == head
            unpacked = msgspec.msgpack.decode(zlib.decompressobj().decompress(body[4:]))
            assert len(unpacked[0]) == (7 if keys else 4 + version)


def test_the_times_of_a_timed_table() -> None:
    """They are written where there is no block, too; an index without them decodes as ever."""
    times = GroupTimes([1, 5], [10, -3], [-1 << 63, 7], [20, (1 << 63) - 1], "tumbling=1000")
    head = IndexHead("totals", 5, 12, "int", 2.0, times=times)
    for chain in (_chain(), Chain()):
        (body,) = encode_index(chain, head)
        assert decode_index(body).head == head
        assert decode_index(body).blocks == chain.blocks
    columns = msgspec.msgpack.decode(zlib.decompressobj().decompress(body[4:]))
    assert columns[0][7] == [[1, 5], [10, -3], [-1 << 63, 7], [20, (1 << 63) - 1], "tumbling=1000", []]
    assert encode_index(Chain(), IndexHead("totals", 5, 12, "int", times=GroupTimes())) == ()


def test_what_keys_are_is_noted_of_each_block() -> None:
    """A block of before says nothing; nor does an index all of whose blocks are of before."""
    forms = [key_forms_of([canonical_key(each) for each in keys]) for keys in (["ann"], [], [7, None])]
    blocks = [msgspec.structs.replace(block, key_forms=of) for block, of in zip(_chain().blocks, forms, strict=True)]
    for known in (blocks, [_chain().blocks[0], *blocks[1:]]):
        (body,) = encode_index(Chain(known), _HEAD)
        assert decode_index(body).blocks == tuple(known)
    assert [each.key_forms for each in Chain.of(blocks, mask_of([4])).blocks] == [forms[0], forms[2]]
    found = [described_forms(of) for of in (*forms, forms[0] | forms[1], forms[0] | forms[2], 0)]
    assert found == ["str", None, {"union": ["int", "null"]}, "str", None, None]
    keys = (("ann", 1), 1.5, True, b"x", -1, 1 << 40)
    others = [described_forms(key_forms_of([canonical_key(key)])) for key in keys]
    assert others == [None, "float", "bool", "bytes", "int", "int"]


def test_a_long_chain_has_an_index_in_parts() -> None:
    noise = random.Random(1)
    blocks = [
        ChainBlock(BlockRef(1, number, f"block/{number}", 1, bytes(32)), number, noise.getrandbits(32_768), 0)
        for number in range(1, 1_500)
    ]
    parts = encode_index(Chain(blocks), IndexHead("totals", 1_500, 32_768, "int"))
    assert len(parts) > 5
    assert max(map(len, parts)) < BLOCK_SIZE_MAX
    assert [block for part in parts for block in decode_index(part).blocks] == blocks
    assert encode_index(Chain(), _HEAD) == ()


def test_a_block_takes_little_more_than_its_digest() -> None:
    noise = random.Random(1)
    blocks = [
        ChainBlock(
            BlockRef(1 + group % 4, 3 * checkpoint, key, noise.randrange(95_000, 105_000), noise.randbytes(32)),
            checkpoint,
            mask_of(range(128)) if group == 0 else 1 << group,
            0 if group == 0 else 1 << group,
        )
        for checkpoint in range(5_000, 5_200)
        for group in (checkpoint * 37 % 128, 0)
        for key in (f"block/3/{checkpoint}/totals/{group}/{2 * checkpoint + (group == 0)}/1-3f2a9c1b04de",)
    ]
    chain = Chain(blocks)
    (body,) = encode_index(chain, IndexHead("totals", 5_200, 128, "int"))
    assert len(body) < 48 * len(chain.blocks)


@given(st.data())
def test_damage_never_surprises(data: st.DataObject) -> None:
    (whole,) = encode_index(_chain(), _HEAD)
    raw = zlib.decompressobj()
    columns, packs = raw.decompress(whole[4:]), data.draw(st.booleans())
    body = bytearray(columns if packs else whole)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(body[: data.draw(st.integers(0, len(body)))]) + data.draw(st.binary(max_size=3))
    try:
        decode_index(b"EOX2" + zlib.compress(damaged) + raw.unused_data if packs else damaged)
    except DamagedState as error:
        assert "damaged" in str(error)  # noqa: PT017 - reading may succeed as well


@pytest.mark.parametrize("size", [20_000_000, 100_000_000])
def test_a_bomb_is_not_unpacked(size: int) -> None:
    with pytest.raises(DamagedState, match="larger than an index can be"):
        decode_index(b"EOX2" + zlib.compress(msgspec.msgpack.encode(bytes(size)), 1))


@given(st.integers(1, 300), st.data())
def test_ranges_partition_the_groups(max_parallelism: int, data: st.DataObject) -> None:
    parallelism = data.draw(st.integers(1, max_parallelism))
    ranges = [group_range(subtask, parallelism, max_parallelism) for subtask in range(parallelism)]
    assert [group for each in ranges for group in each] == list(range(max_parallelism))
    for subtask, groups in enumerate(ranges):
        assert {subtask_of(group, parallelism, max_parallelism) for group in groups} == {subtask}
