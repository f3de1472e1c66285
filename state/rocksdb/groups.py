"""The key groups of a tiered table: their reading from blocks, and the bookkeeping for each.

A key group comes into the store whole and at one moment, though it is read in slices. No record of it has been applied
until then, so nothing that is read hides a change.

A record that wants a key group waits for its blocks. Small blocks hold many key groups, so a table of `WHOLE_BYTES` at
most is read whole for the first record: its blocks are fetched once, not again for each key group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any

from exactlyonce.state.key_groups import Merging
from exactlyonce.state.rocksdb.files import LocalFiles
from exactlyonce.state.rocksdb.memory import TableMemory
from exactlyonce.state.stored import StoredState

_DONE = object()
WHOLE_BYTES = 1 << 20
"""The bytes of blocks up to which all that is unread is read for one record; some tenths of a second."""


class TableGroups:
    def __init__(self, stored: StoredState[Any], files: LocalFiles, memory: TableMemory) -> None:
        present = stored.present
        self.all = tuple(stored.groups)
        self.unread = present.copy()
        """Key groups whose state lies in blocks alone."""
        self.written = present.copy()
        """Key groups that may have older blocks."""
        self.counts = dict.fromkeys(self.all, 0)
        """About how many keys each has that was read; exact after an image."""
        self.merging = Merging(stored.credit, stored.share)
        self.reads: Callable[[int, Collection[bytes]], None] = _unnoted
        """Called with each key group that was read, and its keys."""
        self._stored = stored
        self._store = files.store
        self._memory = memory
        self._between_batches: Generator[None, None, None] | None = None
        """The remaining slices of the key groups in `_reading`."""
        self._reading: tuple[int, ...] = ()
        self._partly_read: int | None = None
        """The key group of which some slices are written, which is not there yet."""
        if files.marker is not None:
            self.unread.clear()
            self.counts.update(files.marker.counts)
            self.merging.entries.update(files.marker.entries)
            self.merging.oldest.update(files.marker.oldest)

    def read_slice(self) -> None:
        """Read a slice more of what no record has wanted yet."""
        if self._between_batches is None:
            self._reading = self._together(self.unread)
            self._between_batches = self._slices(self._reading)
        if next(self._between_batches, _DONE) is _DONE:
            self._between_batches = None

    def read(self, groups: Iterable[int]) -> None:
        """Read key groups that records want, and that cannot wait for room on the disk; all others, too, if small."""
        wanted = set(groups)
        if not wanted.isdisjoint(self.unread) and self._stored.size(self.unread) <= WHOLE_BYTES:
            wanted |= self.unread
        while self._partly_read in wanted and self._partly_read in self.unread:
            self.read_slice()  # to load one twice would undo what changes between
        wanted &= self.unread
        reading = self._between_batches
        if reading is not None and self._partly_read is None and not wanted.isdisjoint(self._reading):
            reading.close()  # its blocks that are not fetched yet may soon be needed by nobody, and be dropped
            self._between_batches = None
        while wanted := wanted & self.unread:
            for _ in self._slices(self._together(wanted)):
                pass

    def _together(self, groups: Iterable[int]) -> tuple[int, ...]:
        """The first of *groups*, as many as there is memory for their blocks."""
        return self._stored.together(groups, self._memory.fetched_bytes)

    def _slices(self, groups: tuple[int, ...]) -> Generator[None, None, None]:
        """Read *groups*, but for those that a record has wanted meanwhile."""
        for read in self._stored.reading(groups):
            if read is not None and read[0] in self.unread:
                group, state = read
                # While a record wants this one, another may be partly read.
                other, self._partly_read = self._partly_read, group
                yield from self._store.load(group, state.states)
                self.counts[group] = len(state.states)
                self.reads(group, state.states)
                for checkpoint, entries in state.increments:
                    self.merging.incremented(group, checkpoint, entries)
                self.unread.discard(group)
                self._partly_read = other
            yield


def _unnoted(group: int, keys: Collection[bytes]) -> None:
    """The default for `TableGroups.reads`."""
