"""The blocks of one interval of the tiered table, of which only the newest stay in memory.

An interval's blocks may be wanted again until a checkpoint behind it is a base; all of its images may be larger than
memory. So, beyond `KEPT_BYTES`, a block is made again of what it was made of: sections that were read from the store
are read from the same view once more, and so give the same bytes. What came from memory stays there.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, NamedTuple

from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import IMAGE, BlockEncoder, BlockHeader, EncodedBlock, EncodedKeys, encode_keys
from exactlyonce.state.state_type import StateType, joined
from exactlyonce.state.tiered.store import Entry, LocalStore

KEPT_BYTES = 4 << 20
"""Of blocks that can be made again, what an interval keeps."""


class SectionOrigin(NamedTuple):
    """Where the entries of a section were read in the store."""

    first: bytes
    """The first key."""
    interval: int | None
    """They were noted as changes of this one; None: they are the key group's."""


class _Released(NamedTuple):
    """A block that was let go of."""

    header: BlockHeader
    origins: tuple[SectionOrigin, ...]


class IntervalBlocks:
    """Packs sections into blocks, and has them by number."""

    def __init__(self, store: LocalStore, view: Any, state_type: StateType[Any], checkpoint: int) -> None:
        """What is read again is read from *view*."""
        self._store, self._view = store, view
        self._format = state_type.operator, checkpoint, state_type.version
        self._writer = BlockEncoder(*self._format)
        self._origins: list[SectionOrigin | None] = []
        """Of the sections of the block that is not finished."""
        self._blocks: list[EncodedBlock | _Released] = []
        self._kept: deque[tuple[int, _Released]] = deque()
        """Those in memory that can be made again, oldest first."""
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> EncodedBlock:
        block = self._blocks[number]
        return block if isinstance(block, EncodedBlock) else self._again(block)

    def begin_group(self, raw_bytes: int) -> None:
        """Finish the block if it should not hold a key group of some *raw_bytes*, too."""
        self._keep(self._writer.begin_group(raw_bytes))

    def add(
        self, group: int, kind: int, encoded: tuple[EncodedKeys, bytes], entries: int, origin: SectionOrigin | None
    ) -> None:
        """Take a section, its keys and states *encoded*; without *origin* it cannot be read again."""
        self._keep(self._writer.add(group, kind, *encoded, entries))
        self._origins.append(origin)

    def end(self) -> None:
        """Nothing more is added."""
        self._keep(self._writer.flush())
        if all(isinstance(each, EncodedBlock) for each in self._blocks):
            self._view = None  # a view that is kept would keep deleted files on the disk

    def _keep(self, finished: EncodedBlock | None) -> None:
        if finished is None:
            return
        origins = tuple(origin for origin in self._origins if origin is not None)
        if len(origins) == len(finished.header.sections):
            self._kept.append((len(self._blocks), _Released(finished.header, origins)))
            self._kept_bytes += len(finished.body)
        self._origins.clear()
        self._blocks.append(finished)
        while self._kept_bytes > KEPT_BYTES:
            number, released = self._kept.popleft()
            self._kept_bytes -= len(self[number].body)
            self._blocks[number] = released

    def _again(self, released: _Released) -> EncodedBlock:
        encoder = BlockEncoder(*self._format)
        for section, origin in zip(released.header.sections, released.origins, strict=True):
            found = self._store.entries(self._view, section.group, origin.interval, origin.first)
            present = (each for each in found if each[1] or section.kind != IMAGE)
            encoded = encoded_section(list(islice(present, section.entries)))
            require(encoder.add(section.group, section.kind, *encoded, section.entries) is None, "they fit one block")
        block = encoder.flush()
        require(block is not None and block.header == released.header, "a view shows the same whenever it is read")
        assert block is not None
        return block


def encoded_section(entries: list[Entry]) -> tuple[EncodedKeys, bytes]:
    """The keys' half of a section of *entries*, and the states'."""
    keys, packed = [key for key, each in entries if each], [each for _, each in entries if each]
    deleted = [key for key, each in entries if not each] if len(keys) < len(entries) else []
    return encode_keys(keys, deleted), joined(packed)
