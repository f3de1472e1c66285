"""A chain: the blocks that make up the state of one subtask of one operator at one checkpoint, and the index of them.

A chain never changes. The next one is its blocks and those of a later checkpoint, without the blocks in which every key
group has since got an image. An index lists a chain; the manifest refers to the index alone. It is

    "EOX1", bytes of the rest when decompressed (4 bytes, big-endian), zlib(msgpack array: the fields of `Index`)

in as many parts as it takes to keep each under `BLOCK_SIZE_MAX` bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from exactlyonce.checkpoint.manifest import BLOCK_SIZE_MAX, BlockRef
from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import BlockHeader
from exactlyonce.state.errors import UNDECODABLE, DamagedState

_MAGIC = b"EOX1"
_PREFIX = len(_MAGIC) + 4
_PART_ENTRIES = 4000
_PART_SIZE_MAX = 8 * 1024 * 1024


class ChainBlock(msgspec.Struct, frozen=True):
    """A block of a chain, with the key groups that this chain needs it for."""

    ref: BlockRef
    checkpoint: int
    groups: frozenset[int]


class Chain:
    """Blocks, oldest first, and for every key group the checkpoint of its newest image."""

    def __init__(self, blocks: Iterable[ChainBlock] = (), images: Mapping[int, int] | None = None) -> None:
        self.images: Mapping[int, int] = images or {}
        self.blocks = tuple(block for block in blocks if self._needs(block))

    def extended(self, written: Iterable[tuple[BlockRef, BlockHeader]]) -> Chain:
        """The chain with the blocks of later checkpoints, oldest first."""
        written = tuple(written)
        images = dict(self.images)
        for _, header in written:
            images.update(dict.fromkeys(header.images, header.checkpoint))
        added = (ChainBlock(ref, header.checkpoint, header.groups) for ref, header in written)
        return Chain((*self.blocks, *added), images)

    @property
    def refs(self) -> tuple[BlockRef, ...]:
        """All blocks."""
        return tuple(block.ref for block in self.blocks)

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(block.ref.size for block in self.blocks)

    def _needs(self, block: ChainBlock) -> bool:
        return any(self.images.get(group, 0) <= block.checkpoint for group in block.groups)


class IndexEntry(msgspec.Struct, frozen=True, array_like=True):
    """A block, and the span of key groups that it is needed for."""

    ref: BlockRef
    first_group: int
    last_group: int


class Index(msgspec.Struct, frozen=True, array_like=True):
    """One part of the index of a chain."""

    operator: str
    checkpoint: int
    max_parallelism: int
    schema: Any
    """Of the states, as `pipeline.schema.describe` gives it."""
    entries: tuple[IndexEntry, ...]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Index)


def encode_index(chain: Chain, operator: str, checkpoint: int, max_parallelism: int, schema: Any) -> tuple[bytes, ...]:
    """The parts of the index of *chain*; none if it is empty."""
    entries = tuple(IndexEntry(block.ref, min(block.groups), max(block.groups)) for block in chain.blocks)
    return tuple(
        _encode_part(Index(operator, checkpoint, max_parallelism, schema, entries[start : start + _PART_ENTRIES]))
        for start in range(0, len(entries), _PART_ENTRIES)
    )


def decode_index(body: bytes) -> Index:
    """Raises `DamagedState` for bytes that are no index."""
    size = int.from_bytes(body[len(_MAGIC) : _PREFIX], "big")
    if body[: len(_MAGIC)] != _MAGIC or not 0 < size <= _PART_SIZE_MAX:
        raise DamagedState("An index of state is damaged: it does not start with EOX1 and a possible size.")
    try:
        unpack = zlib.decompressobj()
        return _decoder.decode(unpack.decompress(memoryview(body)[_PREFIX:], size))
    except (zlib.error, *UNDECODABLE) as error:
        raise DamagedState(f"An index of state is damaged: {error}.") from error


def _encode_part(part: Index) -> bytes:
    raw = _encode(part)
    body = b"".join((_MAGIC, len(raw).to_bytes(4, "big"), zlib.compress(raw, 1)))
    require(len(body) < BLOCK_SIZE_MAX, f"a part of an index is under {BLOCK_SIZE_MAX} bytes, not {len(body)}")
    return body
