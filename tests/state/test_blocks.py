"""The bytes of blocks."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX, BlockRef
from exactlyonce.state.blocks import (
    IMAGE,
    INCREMENT,
    RAW_TARGET,
    SECTION_SIZE_MAX,
    BlockDecoder,
    BlockEncoder,
    BlockHeader,
    EncodedBlock,
    Section,
    encode_keys,
)
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import DamagedState, StateUnstorable
from exactlyonce.state.key_groups import mask_of


def _block() -> EncodedBlock:
    writer = BlockEncoder("totals", 7)
    assert writer.add(3, IMAGE, encode_keys([b"\xa1a", b"\xa1b"], []), b"\x92\x01\x02", 2) is None
    assert writer.add(9, INCREMENT, encode_keys([b"\xa1c"], [b"\xa1d"]), b"\x91\x03", 2) is None
    block = writer.flush()
    assert block is not None
    return block


def test_the_bytes_of_a_block_do_not_change() -> None:
    header = bytes.fromhex("93 a6746f74616c73 07 92 950300020b03 950901020b02")
    raw = bytes.fromhex("92 92c402a161c402a162 90 920102 92 91c402a163 91c402a164 9103")
    body = b"EOS1" + len(header).to_bytes(4, "big") + header + zlib.compress(raw, 1)
    assert _block().body == body
    reader = BlockDecoder(body)
    assert reader.header == msgspec.structs.replace(_block().header, key_forms=0)
    keys, deleted, states = reader.section(1)
    assert (keys, deleted, bytes(states)) == ([b"\xa1c"], [b"\xa1d"], b"\x91\x03")
    keys, deleted, states = reader.section(0)
    assert (keys, deleted, bytes(states)) == ([b"\xa1a", b"\xa1b"], [], b"\x92\x01\x02")


@given(st.data())
def test_damage_never_surprises(data: st.DataObject) -> None:
    body = bytearray(_block().body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(body[: data.draw(st.integers(0, len(body)))]) + data.draw(st.binary(max_size=3))
    try:
        reader = BlockDecoder(damaged)
        for number in range(len(reader.header.sections)):
            reader.section(number)
    except DamagedState as error:
        assert "damaged" in str(error)  # noqa: PT017 - reading may succeed as well


def test_a_header_that_promises_too_much_is_refused_unread() -> None:
    packed = zlib.compress(bytes(50_000_000), 1)

    def body(key_bytes: int) -> bytes:
        header = msgspec.msgpack.encode(["totals", 1, [[0, IMAGE, 1, key_bytes, 10]]])
        return b"EOS1" + len(header).to_bytes(4, "big") + header + packed

    with pytest.raises(DamagedState, match="impossible sizes"):
        BlockDecoder(body(50_000_000))
    with pytest.raises(DamagedState, match="another number of bytes"):
        BlockDecoder(body(1000)).section(0)


@pytest.mark.parametrize("size", [RAW_TARGET // 2, RAW_TARGET, SECTION_SIZE_MAX - 100])
def test_blocks_stay_small(size: int) -> None:
    noise = random.Random(1).randbytes(size)
    writer = BlockEncoder("totals", 1)
    blocks = [writer.add(group, IMAGE, encode_keys([noise], []), b"\x90", 1) for group in range(5)]
    bodies = [block.body for block in (*blocks, writer.flush()) if block is not None]
    assert len(bodies) == 5
    assert max(map(len, bodies)) < BLOCK_SIZE_MAX


def test_a_state_too_large_for_a_block_is_an_error() -> None:
    with pytest.raises(StateUnstorable, match=r"operator 'totals' takes 900.*Spread it over more keys"):
        BlockEncoder("totals", 1).add(0, IMAGE, encode_keys([], []), bytes(SECTION_SIZE_MAX + 1), 1)


def _ref(offset: int) -> BlockRef:
    return BlockRef(1, offset, f"block/1/1/totals/0/{offset}/1-0", 100, bytes(32))


def _header(checkpoint: int, kinds: dict[int, int]) -> BlockHeader:
    return BlockHeader("totals", checkpoint, tuple(Section(group, kind, 1, 1, 1) for group, kind in kinds.items()))


def _offsets(chain: Chain) -> list[int]:
    return [ref.offset for ref in chain.refs]


def _needed(chain: Chain, *groups: int) -> list[tuple[int, int]]:
    return [(block.ref.offset, some) for block, some in chain.needed(mask_of(groups))]


def test_a_block_goes_when_all_its_groups_have_newer_images() -> None:
    first = Chain().extended([(_ref(0), _header(1, {0: IMAGE, 1: IMAGE})), (_ref(1), _header(1, {2: IMAGE}))])
    second = first.extended([(_ref(2), _header(2, {0: INCREMENT, 2: IMAGE}))])
    third = second.extended([(_ref(3), _header(3, {0: IMAGE})), (_ref(4), _header(3, {0: IMAGE, 1: INCREMENT}))])
    fourth = third.extended([(_ref(5), _header(5, {1: IMAGE, 2: IMAGE}))])
    assert [_offsets(chain) for chain in (first, second, third, fourth)] == [[0, 1], [0, 2], [0, 2, 3, 4], [3, 4, 5]]
    assert fourth.size == 300


def test_a_group_needs_its_newest_image_and_what_came_later() -> None:
    chain = Chain().extended([(_ref(0), _header(1, {0: IMAGE, 1: IMAGE, 2: IMAGE}))])
    chain = chain.extended([(_ref(1), _header(2, {0: INCREMENT, 1: INCREMENT}))])
    chain = chain.extended([(_ref(2), _header(3, {1: IMAGE})), (_ref(3), _header(3, {1: IMAGE, 2: INCREMENT}))])
    assert _needed(chain, 0) == [(0, 1), (1, 1)]
    assert _needed(chain, 1) == [(2, 2), (3, 2)]
    assert _needed(chain, 2, 0) == [(0, 5), (1, 1), (3, 4)]
    assert _needed(chain) == []
