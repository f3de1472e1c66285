"""What changed between two barriers, and its way into blocks.

From `freeze` on, an interval is never changed by records. `advance` works through it in slices of `SLICE_ENTRIES`
entries at most. Group by group it folds the changes into the tables, which hold the state at the last barrier encoded,
and encodes them; so a group's table is its exact state at this barrier when its image is written, however far the
records have gone on. Intervals are encoded in order, each once; a later checkpoint that needs the same changes sends
the same blocks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar

from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import IMAGE, INCREMENT, BlockWriter, EncodedBlock, encode_keys
from exactlyonce.state.merging import Merging
from exactlyonce.state.state_type import StateType

S = TypeVar("S")

SLICE_ENTRIES = 2048
_SECTION_TARGET = 128 * 1024
_ENTRIES_AT_FIRST = 64
_DONE = object()


class Interval(Generic[S]):
    """The changes up to the barrier of `checkpoint`; None stands for a deleted key."""

    def __init__(
        self,
        checkpoint: int,
        changes: dict[bytes, S | None],
        touched: dict[int, list[bytes]],
        tables: Mapping[int, dict[bytes, S]],
        state_type: StateType[S],
        merging: Merging,
    ) -> None:
        self.checkpoint = checkpoint
        self.changes = changes
        """Those that are not in the tables yet."""
        self.blocks: list[EncodedBlock] = []
        self.encoded = False
        self._touched = touched
        self._tables = tables
        self._state_type = state_type
        self._merging = merging
        self._writer = BlockWriter(state_type.operator, checkpoint)
        self._bytes_per_entry = 0.0
        self._slices = self._encode()

    def advance(self) -> None:
        """Encode one slice more."""
        if next(self._slices, _DONE) is _DONE:
            require(self.encoded, "an interval whose encoding failed is not encoded further")

    def _encode(self) -> Iterator[None]:
        merged = self._merging.choose(self.checkpoint, len(self.changes), self._tables)
        for group in sorted(self._touched.keys() | merged):
            table = self._tables[group]
            keys: list[bytes] = []
            states: list[S] = []
            deleted: list[bytes] = []
            yield from self._fold(self._touched.pop(group, []), table, keys, states, deleted)
            if group in merged or ((keys or deleted) and len(keys) == len(table)):
                self._merging.imaged(group)
                yield from self._add_sections(group, IMAGE, iter(table), iter(table.values()), [], len(table))
            elif keys or deleted:
                entries = len(keys) + len(deleted)
                self._merging.incremented(group, self.checkpoint, entries)
                yield from self._add_sections(group, INCREMENT, iter(keys), iter(states), deleted, entries)
        self._keep(self._writer.flush())
        self.changes = {}
        self.encoded = True

    def _fold(
        self, touched: list[bytes], table: dict[bytes, S], keys: list[bytes], states: list[S], deleted: list[bytes]
    ) -> Iterator[None]:
        """Move changes to *table*; *keys*, *states* and *deleted* receive what differs from the barrier before."""
        for start in range(0, len(touched), SLICE_ENTRIES):
            some = touched[start : start + SLICE_ENTRIES]
            changed = list(map(self.changes.pop, some))
            absent = {key for key, state in zip(some, changed, strict=True) if state is None}
            if absent:
                deleted += [key for key in absent if table.pop(key, None) is not None]
                some = [key for key in some if key not in absent]
            present = [state for state in changed if state is not None]
            table.update(zip(some, present, strict=True))
            keys += some
            states += present
            yield

    def _add_sections(
        self, group: int, kind: int, keys: Iterator[bytes], states: Iterator[S], deleted: list[bytes], entries: int
    ) -> Iterator[None]:
        """Write *entries* entries, and at least one section, since an empty image says that a group is empty."""
        self._keep(self._writer.make_room(int(entries * self._bytes_per_entry)))
        gone = iter(deleted)
        while True:
            limit = self._entries_per_section()
            some, some_states = list(islice(keys, limit)), list(islice(states, limit))
            some_gone = list(islice(gone, limit - len(some)))
            self._add(group, kind, some, some_states, some_gone)
            yield
            entries -= len(some) + len(some_gone)
            if entries <= 0:
                return

    def _add(self, group: int, kind: int, keys: list[bytes], states: list[S], deleted: list[bytes]) -> None:
        encoded_keys, encoded_states = encode_keys(keys, deleted), self._state_type.encode(states)
        size, entries = len(encoded_keys) + len(encoded_states), len(keys) + len(deleted)
        self._bytes_per_entry = size / max(1, entries)
        if size > _SECTION_TARGET and len(keys) > 1:
            middle = len(keys) // 2
            self._add(group, kind, keys[:middle], states[:middle], [])
            self._add(group, kind, keys[middle:], states[middle:], deleted)
        else:
            self._keep(self._writer.add(group, kind, encoded_keys, encoded_states, entries))

    def _entries_per_section(self) -> int:
        if not self._bytes_per_entry:
            return _ENTRIES_AT_FIRST
        return max(1, min(SLICE_ENTRIES, int(_SECTION_TARGET / self._bytes_per_entry)))

    def _keep(self, finished: EncodedBlock | None) -> None:
        if finished is not None:
            self.blocks.append(finished)
