"""Chains and their indexes."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.checkpoint.manifest import BLOCK_SIZE_MAX, BlockRef
from exactlyonce.state.blocks import IMAGE, INCREMENT, BlockHeader, Section
from exactlyonce.state.chain import Chain, decode_index, encode_index
from exactlyonce.state.errors import DamagedState


def _ref(offset: int) -> BlockRef:
    return BlockRef(1, offset, f"block/1/1/totals/0/{offset}/1-0", 100, bytes(32))


def _header(checkpoint: int, kinds: dict[int, int]) -> BlockHeader:
    return BlockHeader("totals", checkpoint, tuple(Section(group, kind, 1, 1, 1) for group, kind in kinds.items()))


def _offsets(chain: Chain) -> list[int]:
    return [ref.offset for ref in chain.refs]


def test_a_block_goes_when_all_its_groups_have_newer_images() -> None:
    """A block is kept as long as one of its groups has no newer image, and older chains stay as they are."""
    first = Chain().extended([(_ref(0), _header(1, {0: IMAGE, 1: IMAGE})), (_ref(1), _header(1, {2: IMAGE}))])
    second = first.extended([(_ref(2), _header(2, {0: INCREMENT, 2: IMAGE}))])
    third = second.extended([(_ref(3), _header(3, {0: IMAGE})), (_ref(4), _header(3, {0: IMAGE, 1: INCREMENT}))])
    fourth = third.extended([(_ref(5), _header(5, {1: IMAGE, 2: IMAGE}))])
    assert [_offsets(chain) for chain in (first, second, third, fourth)] == [[0, 1], [0, 2], [0, 2, 3, 4], [3, 4, 5]]
    assert fourth.size == 300


def test_the_bytes_of_an_index_do_not_change() -> None:
    """Old indexes stay readable: this is one as it has always been written."""
    chain = Chain().extended([(BlockRef(1, 5, "k", 9, b"\1" * 32), _header(3, {4: IMAGE, 7: IMAGE}))])
    raw = bytes.fromhex(
        "95 a6746f74616c73 03 cc80 a3696e74 91 93"
        "85 a9706172746974696f6e01 a66f666673657405 a36b6579a16b a473697a6509 a6736861323536c420" + "01" * 32 + "04 07"
    )
    body = b"EOX1" + len(raw).to_bytes(4, "big") + zlib.compress(raw, 1)
    assert encode_index(chain, "totals", 3, 128, "int") == (body,)
    index = decode_index(body)
    assert (index.operator, index.checkpoint, index.max_parallelism, index.schema) == ("totals", 3, 128, "int")
    assert [(entry.ref, entry.first_group, entry.last_group) for entry in index.entries] == [(chain.refs[0], 4, 7)]


def test_a_long_chain_has_an_index_in_parts() -> None:
    """Every part is under the maximum, and together they list the chain; an empty one has no index."""
    chain = Chain().extended((_ref(number), _header(number, {0: INCREMENT})) for number in range(1, 10_001))
    parts = encode_index(chain, "totals", 10_000, 128, "int")
    assert len(parts) == 3
    assert max(map(len, parts)) < BLOCK_SIZE_MAX
    assert [entry.ref for part in parts for entry in decode_index(part).entries] == list(chain.refs)
    assert encode_index(Chain(), "totals", 1, 128, "int") == ()


@given(st.data())
def test_damage_never_surprises(data: st.DataObject) -> None:
    """An index with bytes changed, cut off or added either reads or raises `DamagedState`, and nothing else."""
    chain = Chain().extended([(_ref(0), _header(1, {0: IMAGE}))])
    body = bytearray(encode_index(chain, "totals", 3, 128, {"list": ["int"]})[0])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(body[: data.draw(st.integers(0, len(body)))]) + data.draw(st.binary(max_size=3))
    try:
        decode_index(damaged)
    except DamagedState as error:
        assert "damaged" in str(error)  # noqa: PT017 - reading may succeed as well


def test_a_bomb_is_not_unpacked() -> None:
    """What claims to be larger than an index can be, or claims nothing, is refused without decompressing it."""
    packed = zlib.compress(msgspec.msgpack.encode(bytes(100_000_000)), 1)
    for size in (0, 2**32 - 1):
        with pytest.raises(DamagedState, match="possible size"):
            decode_index(b"EOX1" + size.to_bytes(4, "big") + packed)
    with pytest.raises(DamagedState):
        decode_index(b"EOX1" + (1000).to_bytes(4, "big") + packed)
