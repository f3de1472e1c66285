"""The blocks of one interval of the tiered table; only the newest stay in memory.

An interval's blocks may be needed until a later checkpoint is a base, and its images may be larger than memory. So,
beyond `KEPT_BYTES`, blocks are released, and encoded again when they are needed. Sections that were read from the store
are read from the same view once more, and so give the same bytes. Blocks with changes from memory are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import IMAGE, BlockEncoder, BlockHeader, EncodedBlock, EncodedKeys, encode_keys
from exactlyonce.state.slots import KeyLayout
from exactlyonce.state.state_type import StateType, joined
from exactlyonce.state.tiered.store import Entry, LocalStore

KEPT_BYTES = 4 << 20
"""The most that an interval keeps of blocks that can be encoded again."""
_SECTION_TARGET = 128 * 1024


class SectionSource(NamedTuple):
    """The entries of one key group that make up its sections."""

    slices: Iterator[list[Entry]]
    expected: int
    """About how many entries there are."""
    in_store: bool = True
    """Whether they are read from the store, and can be read again."""
    interval: int | None = None
    """The interval that noted them as its changes; None: they are the key group's states."""


class _SectionOrigin(NamedTuple):
    """The place in the store from which a section was read."""

    first_key: bytes
    interval: int | None


class _Released(NamedTuple):
    """A block that is no longer in memory."""

    header: BlockHeader
    origins: tuple[_SectionOrigin, ...]


class IntervalBlocks:
    """Cuts entries into sections, packs them into blocks, and has these by number."""

    def __init__(
        self, store: LocalStore, view: Any, state_type: StateType[Any], layout: KeyLayout, checkpoint: int
    ) -> None:
        """Sections are read again from *view*."""
        self.entries_written = 0
        self._store, self._view = store, view
        self._layout = layout
        self._format = state_type.operator, checkpoint, state_type.version
        self._encoder = BlockEncoder(*self._format)
        self._bytes_per_entry = 0.0
        self._origins: list[_SectionOrigin | None] = []
        """The origins of the sections in the unfinished block."""
        self._blocks: list[EncodedBlock | _Released] = []
        self._kept: deque[tuple[int, _Released]] = deque()
        """The blocks in memory that can be encoded again, oldest first."""
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> EncodedBlock:
        block = self._blocks[number]
        return block if isinstance(block, EncodedBlock) else self._encoded_again(block)

    def write(self, group: int, kind: int, source: SectionSource) -> Iterator[None]:
        """Write all of *source*, in slices; at least one section, since an image may be empty."""
        self._keep(self._encoder.begin_group(int(source.expected * self._bytes_per_entry)))
        for entries in chain([next(source.slices, [])], source.slices):
            self._write_section(group, kind, entries, source)
            yield

    def _write_section(self, group: int, kind: int, entries: list[Entry], source: SectionSource) -> None:
        """Write *entries* as a section, or as several if they are large."""
        (keys, states), count = self._encoded_section(entries), len(entries)
        size = len(keys.body) + len(states)
        if size > _SECTION_TARGET and count > 1:
            self._write_section(group, kind, entries[: count // 2], source)
            self._write_section(group, kind, entries[count // 2 :], source)
            return
        self._bytes_per_entry = size / max(1, count)
        self.entries_written += count
        self._keep(self._encoder.add(group, kind, keys, states, count))
        first_key = entries[0][0] if entries else b""
        self._origins.append(_SectionOrigin(first_key, source.interval) if source.in_store else None)

    def end(self) -> None:
        """Finish the last block."""
        self._keep(self._encoder.flush())
        if all(isinstance(block, EncodedBlock) for block in self._blocks):
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

    def _encoded_again(self, released: _Released) -> EncodedBlock:
        encoder = BlockEncoder(*self._format)
        for section, origin in zip(released.header.sections, released.origins, strict=True):
            entries = self._store.entries(self._view, section.group, origin.interval, origin.first_key)
            present = (entry for entry in entries if entry[1] or section.kind != IMAGE)
            encoded = self._encoded_section(list(islice(present, section.entries)))
            require(encoder.add(section.group, section.kind, *encoded, section.entries) is None, "they fit one block")
        block = encoder.flush()
        require(block is not None and block.header == released.header, "a view shows the same whenever it is read")
        assert block is not None
        return block

    def _encoded_section(self, entries: list[Entry]) -> tuple[EncodedKeys, bytes]:
        keys, packed = [key for key, state in entries if state], [state for _, state in entries if state]
        deleted = [key for key, state in entries if not state] if len(keys) < len(entries) else []
        return encode_keys(keys, deleted, self._layout.own(keys)), joined(packed)
