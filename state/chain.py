"""A chain: the blocks that make up the state of one subtask of one operator at one checkpoint.

A chain never changes. The next one is its blocks and those of a later checkpoint, without the blocks in which every key
group has since got an image. It knows of every block which key groups it is needed for, so that any of them can be
restored without the others; and as no block was read to know it, those of the others are carried over by reference.
Sets of key groups are masks (`key_groups.mask_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

import msgspec

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.blocks import BlockHeader


class ChainBlock(msgspec.Struct, frozen=True, gc=False):
    """A block of a chain."""

    ref: BlockRef
    checkpoint: int
    groups: int
    """The key groups in it, of those that the chain is for."""
    images: int
    """Those of `groups` of which it is an image, or a part of one."""
    key_forms: int = 0
    """`BlockHeader.key_forms`; 0 also of a block of before these were noted."""

    def within(self, groups: int) -> ChainBlock:
        """The same block in a chain that is for *groups* only."""
        return ChainBlock(self.ref, self.checkpoint, self.groups & groups, self.images & groups, self.key_forms)


class Chain:
    """Blocks, oldest first; of those given, the ones that are needed."""

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
        found: dict[BlockRef, ChainBlock] = {}
        for block in blocks:
            before, own = found.get(block.ref), block.within(groups)
            if before is not None:
                groups_of, images_of = before.groups | own.groups, before.images | own.images
                own = ChainBlock(block.ref, block.checkpoint, groups_of, images_of, block.key_forms)
            found[block.ref] = own
        return Chain(sorted(found.values(), key=attrgetter("checkpoint")))

    def extended(self, written: Iterable[tuple[BlockRef, BlockHeader]]) -> Chain:
        """The chain with the blocks of later checkpoints, oldest first."""
        added = [
            ChainBlock(ref, header.checkpoint, header.groups, header.images, header.key_forms)
            for ref, header in written
        ]
        if any(block.images for block in added):
            return Chain((*self.blocks, *added))
        chain = Chain()  # an increment makes nothing superfluous, and a chain may be long
        chain._needed = (*self._needed, *((block, block.groups) for block in added))
        return chain

    @property
    def blocks(self) -> tuple[ChainBlock, ...]:
        """All blocks."""
        return tuple(block for block, _ in self._needed)

    @property
    def refs(self) -> tuple[BlockRef, ...]:
        """Where they lie."""
        return tuple(block.ref for block, _ in self._needed)

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(block.ref.size for block, _ in self._needed)

    def needed(self, groups: int) -> Iterator[tuple[ChainBlock, int]]:
        """The blocks that *groups* are restored from, and for which of them each is needed."""
        return ((block, some & groups) for block, some in self._needed if some & groups)
