"""A chain, the blocks that make up the state of one subtask of one operator at one checkpoint, and its index.

A chain never changes. The next one has its blocks and those of a later checkpoint, without blocks whose key groups all
have a later image. It knows which key groups need each block, so that any of them can be restored without the others,
whose blocks are carried over by reference, unread. Sets of key groups are masks (`key_groups.mask_of`).

The image of a large key group comes in parts. Several checkpoints write some of its unchanged keys in their increments;
the last one adds an empty image with the number of the first, since no block before that is needed now.

The manifest refers only to the index, and the chain is made of it without reading a block:

    "EOX2", zlib(msgpack array: the fields of `_Columns`), the SHA-256 of every block end to end

in as many parts as keep each under `BLOCK_SIZE_MAX` bytes. Every checkpoint writes one for each subtask, so the size of
an entry counts. A digest does not compress; the rest takes some twelve bytes, by columns, and by steps where values
grow.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX, BlockRef
from exactlyonce.state.blocks import BlockHeader
from exactlyonce.state.errors import UNDECODABLE, DamagedState
from exactlyonce.state.slots import GroupTimes


class ChainBlock(msgspec.Struct, frozen=True, gc=False):
    ref: BlockRef
    checkpoint: int
    groups: int
    """Its key groups, among the chain's."""
    images: int
    """The number of `groups` with an image, or a part of one, in it."""
    key_forms: int = 0
    """`BlockHeader.key_forms`; 0 also in checkpoints of older releases."""

    def within(self, groups: int) -> ChainBlock:
        """The same block in a chain of *groups* only."""
        return ChainBlock(self.ref, self.checkpoint, self.groups & groups, self.images & groups, self.key_forms)


class Chain:
    """The needed ones of the given blocks, oldest first."""

    def __init__(self, blocks: Iterable[ChainBlock] = ()) -> None:
        needed: list[tuple[ChainBlock, int]] = []
        imaged_later = 0
        for _, same in groupby(reversed(tuple(blocks)), key=attrgetter("checkpoint")):
            images = 0
            for block in same:
                if groups := block.groups & ~imaged_later:
                    needed.append((block, groups))
                images |= block.images
            imaged_later |= images
        self._needed = tuple(reversed(needed))

    @staticmethod
    def of(blocks: Iterable[ChainBlock], groups: int) -> Chain:
        """The chain of *groups*, given the blocks of the chains of all subtasks that had some of them."""
        by_ref: dict[BlockRef, ChainBlock] = {}
        for block in blocks:
            before, own = by_ref.get(block.ref), block.within(groups)
            if before is not None:
                groups_of, images_of = before.groups | own.groups, before.images | own.images
                own = ChainBlock(block.ref, block.checkpoint, groups_of, images_of, block.key_forms)
            by_ref[block.ref] = own
        return Chain(sorted(by_ref.values(), key=attrgetter("checkpoint")))

    def extended(self, written: Iterable[tuple[BlockRef, BlockHeader]]) -> Chain:
        """The chain with the blocks of later checkpoints, oldest first, but for the ends of images in parts."""
        added = [
            ChainBlock(ref, header.checkpoint, header.groups, header.images, header.key_forms)
            for ref, header in written
        ]
        if any(block.images for block in added):
            return Chain(sorted((*self.blocks, *added), key=attrgetter("checkpoint")))
        chain = Chain()  # an increment makes nothing superfluous, and a chain may be long
        chain._needed = (*self._needed, *((block, block.groups) for block in added))
        return chain

    @property
    def blocks(self) -> tuple[ChainBlock, ...]:
        return tuple(block for block, _ in self._needed)

    @property
    def refs(self) -> tuple[BlockRef, ...]:
        return tuple(block.ref for block, _ in self._needed)

    @property
    def size(self) -> int:
        return sum(block.ref.size for block, _ in self._needed)

    def needed(self, groups: int) -> Iterator[tuple[ChainBlock, int]]:
        """The blocks to restore *groups* from, each with the *groups* that need it."""
        return ((block, some & groups) for block, some in self._needed if some & groups)


_MAGIC = b"EOX2"
_PART_BLOCKS = 1000
_PART_SIZE_MAX = 16 * 1024 * 1024
_DIGEST_SIZE = 32


class IndexHead(msgspec.Struct, frozen=True, array_like=True):
    """The part of an index about all blocks."""

    operator: str
    checkpoint: int
    max_parallelism: int
    schema: Any
    """`VersionedState.schema` of the states."""
    credit: float = 0.0
    """`Merging.credit` at this checkpoint."""
    version: int = 1
    """The version of the states; in checkpoints of older releases, older blocks may have older versions."""
    keys: Any = None
    """`VersionedState.keys`, the schema of the keys."""
    times: GroupTimes | None = None
    """The times of the key groups of a timed table, whose keys are places (`slots`)."""


class Index(msgspec.Struct, frozen=True):
    """One part of the index of a chain."""

    head: IndexHead
    blocks: tuple[ChainBlock, ...]


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    head: IndexHead
    partitions: list[int]
    offsets: list[int]
    """Steps within the partition."""
    keys: list[str]
    sizes: list[int]
    checkpoints: list[int]
    """Steps."""
    groups: bytes
    """Masks, each little-endian, of `max_parallelism` bits."""
    images: bytes
    """Masks, too."""
    key_forms: bytes = b""
    """A byte each; empty if none is known."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Columns)


def index_digest(parts: Sequence[bytes]) -> bytes:
    """Identifies the state of the index in *parts*, down to the bytes of its blocks."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def encode_index(chain: Chain, head: IndexHead) -> tuple[bytes, ...]:
    """The parts of the index of *chain*; none if there is nothing to tell."""
    blocks = chain.blocks
    told = head.times is not None and bool(head.times.groups)
    starts = range(0, max(len(blocks), told), _PART_BLOCKS)
    return tuple(part for start in starts for part in _parts(blocks[start : start + _PART_BLOCKS], head))


def decode_index(body: bytes) -> Index:
    """Raises `DamagedState` for bytes that are no index."""
    if body[: len(_MAGIC)] != _MAGIC:
        raise DamagedState("An index of state is damaged: it does not start with EOX2: it is of another version.")
    unpack = zlib.decompressobj()
    try:
        raw = unpack.decompress(memoryview(body)[len(_MAGIC) :], _PART_SIZE_MAX)
        if not unpack.eof:
            raise DamagedState("An index of state is damaged: it is cut off, or larger than an index can be.")
        columns = _decoder.decode(raw)
        return Index(columns.head, tuple(_blocks(columns, unpack.unused_data)))
    except (zlib.error, *UNDECODABLE) as error:
        raise DamagedState(f"An index of state is damaged: {error}.") from error


def _parts(blocks: Sequence[ChainBlock], head: IndexHead) -> list[bytes]:
    body = b"".join((_MAGIC, zlib.compress(_encode(_fields(blocks, head)), 6), *(block.ref.sha256 for block in blocks)))
    if len(body) < BLOCK_SIZE_MAX:
        return [body]
    middle = len(blocks) // 2
    return [*_parts(blocks[:middle], head), *_parts(blocks[middle:], head)]


def _fields(blocks: Sequence[ChainBlock], head: IndexHead) -> tuple[Any, ...]:
    """The columns, as they have always been written: without trailing fields that have their defaults."""
    columns, first = msgspec.structs.astuple(_columns(blocks, head)), msgspec.structs.astuple(head)
    trailing = head.times is not None, head.keys is not None, head.version > 1, True
    left_out = trailing.index(True)
    noted = columns[1:] if any(columns[-1]) else columns[1:-1]
    return (first[: len(first) - left_out], *noted)


def _columns(blocks: Sequence[ChainBlock], head: IndexHead) -> _Columns:
    refs = [block.ref for block in blocks]
    width = _mask_bytes(head.max_parallelism)
    offsets, latest = [], dict.fromkeys((ref.partition for ref in refs), 0)
    for ref in refs:
        offsets.append(ref.offset - latest[ref.partition])
        latest[ref.partition] = ref.offset
    return _Columns(
        head,
        [ref.partition for ref in refs],
        offsets,
        [ref.key for ref in refs],
        [ref.size for ref in refs],
        [after - before for before, after in pairwise((0, *(block.checkpoint for block in blocks)))],
        b"".join(block.groups.to_bytes(width, "little") for block in blocks),
        b"".join(block.images.to_bytes(width, "little") for block in blocks),
        bytes(block.key_forms for block in blocks),
    )


def _blocks(columns: _Columns, digests: bytes) -> Iterator[ChainBlock]:
    width = _mask_bytes(columns.head.max_parallelism)
    latest = dict.fromkeys(columns.partitions, 0)
    key_forms = columns.key_forms or bytes(len(columns.keys))
    for partition, step, key, size, digest, checkpoint, groups, images, forms in zip(
        columns.partitions,
        columns.offsets,
        columns.keys,
        columns.sizes,
        _cut(digests, _DIGEST_SIZE),
        accumulate(columns.checkpoints),
        _cut(columns.groups, width),
        _cut(columns.images, width),
        key_forms,
        strict=True,
    ):
        latest[partition] += step
        yield ChainBlock(
            BlockRef(partition, latest[partition], key, size, digest),
            checkpoint,
            int.from_bytes(groups, "little"),
            int.from_bytes(images, "little"),
            forms,
        )


def _mask_bytes(max_parallelism: int) -> int:
    return (max_parallelism + 7) // 8


def _cut(column: bytes, width: int) -> list[bytes]:
    """The values in *column*, each of *width* bytes. Raises ValueError for another length."""
    pieces = [column[start : start + width] for start in range(0, len(column), width)]
    if pieces and len(pieces[-1]) != width:
        raise ValueError("a column is cut off")
    return pieces
