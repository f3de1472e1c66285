"""The bytes of blocks."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX
from exactlyonce.state.blocks import (
    IMAGE,
    INCREMENT,
    RAW_TARGET,
    SECTION_SIZE_MAX,
    BlockDecoder,
    BlockEncoder,
    EncodedBlock,
    encode_keys,
)
from exactlyonce.state.errors import DamagedState, StateUnstorable


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
