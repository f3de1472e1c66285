"""A chain: the blocks that make up the state of one subtask of one operator at one checkpoint.

A chain never changes. The next one has its blocks and a later checkpoint's, without blocks whose key groups all have a
later image. It knows which key groups need each block, so that any of them can be restored without the others, whose
blocks are carried over by reference, unread. Sets of key groups are masks (`key_groups.mask_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

import msgspec

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.blocks import BlockHeader


class ChainBlock(msgspec.Struct, frozen=True, gc=False):
    ref: BlockRef
    checkpoint: int
    groups: int
    """Its key groups, among those of the chain."""
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
