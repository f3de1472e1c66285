"""The tiered table: newest states within a budget of memory, the others in the local store, or still in blocks.

A state is looked for in `_states`, the layers of the intervals that are not settled, newest first, `_cold`, and the
local store, into which a key group is read from its blocks before anything of it is looked for. Invariants: whatever is
in an earlier place is at least as new; a change is in a layer until it is in the store. So `_states` may become
`_cold`, and `_cold` may go, whenever there is too much of them: what was used of late stays. A key group comes into the
store whole and at one moment, though it is read in slices; until then no record of it has been applied, so nothing that
is read hides a change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.batches import BatchTable
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.index import index_digest
from exactlyonce.state.merging import Merging
from exactlyonce.state.snapshot import Snapshot
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import StoredState
from exactlyonce.state.tiered.errors import DiskFull
from exactlyonce.state.tiered.files import VERSION, LocalFiles, Marker
from exactlyonce.state.tiered.interval import SLICE_ENTRIES, Shelf, TieredInterval
from exactlyonce.state.tiered.memory import LARGE_BYTES, Memory

S = TypeVar("S")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741 - the output

CACHED_SHARE = 0.375
"""Of a table's memory, what `_states` may take, and what `_cold` may take."""
CHANGES_SHARE = 0.25
"""Likewise, layers that are not settled."""
TOGETHER_SHARE = 0.25
"""Of the states that may be cached, what a batch may want at once; a larger one is applied in parts."""
TOGETHER_MIN, TOGETHER_AT_FIRST = 16, 64
"""The second before anybody knows how large a state is."""
WEIGHED_EVERY = 64
"""Batches between two looks at what an entry takes."""
DISCARDED_PER_BATCH = 2048
ITEMS_SLICE = 1024
FETCHED_SHARE = 1 / 32
"""Of a table's memory, what blocks may take that are read together."""
_DONE = object()


class TieredTable(BatchTable[S]):
    """A `Table`; see the module."""

    def __init__(self, stored: StoredState[S], folder: Path, memory: Memory, worker: str = "") -> None:
        self.operator = stored.operator
        self.max_parallelism = stored.max_parallelism
        self.state_type = StateType(stored.operator, stored.type)
        self._stored = stored
        self._groups = frozenset(stored.groups)
        self._memory = memory
        memory.joined()
        self._files = LocalFiles(folder, _wanted(stored, self.state_type), memory, worker)
        self._store = self._files.store
        self._shelf = self._restored(stored)
        self._fetched: Generator[None, None, None] | None = None
        """Of the key groups in `_fetching`, which are read between batches, the slices that are left."""
        self._fetching: tuple[int, ...] = ()
        self._loading: int | None = None
        """The key group of which a part is written, that is not there yet."""
        self._states: dict[bytes, S | None] = {}
        self._cold: dict[bytes, S | None] = {}
        self._discarded: list[dict[bytes, S | None]] = []
        """Let go of in slices: that takes its time."""
        self._absent: list[tuple[bytes, int]] = []
        """Keys of the batch that are nowhere, with their key groups."""
        self._interval: TieredInterval[S] = TieredInterval(self._shelf, 1)
        self._intervals: list[TieredInterval[S]] = []
        """Since the base of the last snapshot, oldest first."""
        self._unsettled: list[TieredInterval[S]] = []
        """Those that have a barrier, and changes that are not in the store, oldest first."""
        self._frozen_latest = stored.checkpoint
        self._anew = stored.anew
        self._chains = {stored.checkpoint: stored.chain}
        self._batches = self._batch_keys = 0
        self._limit()

    def _restored(self, stored: StoredState[S]) -> Shelf[S]:
        present, marker = stored.present, self._files.marker
        merging = Merging(stored.credit, stored.share)
        shelf = Shelf(
            store=self._store, files=self._files, state_type=self.state_type, groups=tuple(stored.groups),
            max_parallelism=stored.max_parallelism, merging=merging, counts=dict.fromkeys(stored.groups, 0),
            unread=set(present), read=self._read, written=set(present),
        )  # fmt: skip
        if marker is not None:
            shelf.unread.clear()
            shelf.counts.update(marker.counts)
            merging.entries.update(marker.entries)
            merging.oldest.update(marker.oldest)
        return shelf

    # --- records ------------------------------------------------------------------------------------------------------

    def apply(
        self, fn: Callable[[S | None, R], tuple[S | None, O]], keys: Sequence[bytes], records: Sequence[R]
    ) -> list[O]:
        """See `Table.apply`."""
        return self._in_parts(partial(super().apply, fn), keys, records)

    def reduce(self, fn: Callable[[S, S], S], keys: Sequence[bytes], records: Sequence[S]) -> list[S]:
        """See `Table.reduce`."""
        return self._in_parts(partial(super().reduce, fn), keys, records)

    def _in_parts(
        self, go: Callable[[Sequence[bytes], Sequence[R]], list[O]], keys: Sequence[bytes], records: Sequence[R]
    ) -> list[O]:
        """What *go* returns, which is given no more keys at once than there is memory for their states."""
        require(len(keys) == len(records), "every record has a key")
        if len(keys) <= self._together_max:
            return go(keys, records)
        outputs = list[O]()
        while (start := len(outputs)) < len(keys):
            end = start + self._together_max
            try:
                outputs += go(keys[start:end], records[start:end])
            except ApplyFailed as error:
                raise ApplyFailed(start + error.index) from error.__cause__
        return outputs

    @property
    def _together_max(self) -> int:
        return max(TOGETHER_MIN, int(self._cached_max * TOGETHER_SHARE)) if self._batches else TOGETHER_AT_FIRST

    def _touch(self, keys: Sequence[bytes]) -> dict[bytes, S | None]:
        states, self._batch_keys = self._states, len(keys)
        missing = [key for key in keys if key not in states]
        if missing:
            self._find(list(dict.fromkeys(missing)))
        if self.state_type.mutable:
            self._protect(keys)
        return self._interval.layers[-1]

    def _touched(self, added: int) -> None:
        changes = self._interval.layers[-1]
        for key, group in self._absent:
            if self._states[key] is None:
                changes.pop(key, None)
            else:
                self._shelf.counts[group] += 1
        self._absent = []
        self._batches += 1
        if self._batches % WEIGHED_EVERY == 0 or self._batches & (self._batches - 1) == 0:  # at first more often
            self._weigh()
        if len(self._states) > self._cached_max:
            self._cool()
        if self._discarded:
            self._discard()
        if len(changes) > self._changes_max or len(self._interval.layers) > 1 or self._unsettled:
            self._relieve()

    def _find(self, keys: list[bytes]) -> None:
        """Put the states of *keys* into `_states`; None where there is none."""
        states = self._states
        for layer in (*self._layers(), self._cold):
            found = [key for key in keys if key in layer]
            if found:
                states.update((key, layer[key]) for key in found)
                keys = [key for key in keys if key not in layer]
        if not keys:
            return
        groups = key_groups(keys, self.max_parallelism)
        require(self._groups.issuperset(groups), f"all keys are of the key groups {sorted(self._groups)}")
        if self._shelf.unread:
            self._read(self._shelf.unread.intersection(groups))
        unpack, large = self.state_type.unpack, list[tuple[S | None, bytes]]()
        for key, group, packed in zip(keys, groups, self._store.get(keys, groups), strict=True):
            if packed is None:
                states[key] = None
                self._absent.append((key, group))
            else:
                states[key] = unpack(packed)
                if len(packed) > LARGE_BYTES:
                    large.append((states[key], packed))
        self._shelf.weights.passed(large, len(keys))
        if large:
            self._limit()

    def _layers(self) -> Iterator[dict[bytes, S | None]]:
        """Changes that are not in the store, the newest first."""
        yield from reversed(self._interval.layers)
        for interval in reversed(self._unsettled):
            yield from reversed(interval.layers)

    def _protect(self, keys: Sequence[bytes]) -> None:
        """Records may change the states of *keys* in place: clone those that are in a layer which is not theirs."""
        current, *older = self._layers()
        if not older:
            return
        states, clone = self._states, self.state_type.clone
        for key in set(keys):
            state = states[key]
            if state is not None and key not in current and any(key in layer for layer in older):
                states[key] = clone(state)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _weigh(self) -> None:
        if self._states:
            self._shelf.weights.sample(self._states)
            self._memory.look()
            self._limit()

    def _limit(self) -> None:
        entries = self._memory.table_bytes / self._shelf.weights.mean
        self._cached_max = max(1, int(entries * CACHED_SHARE))
        self._changes_max = max(1, int(entries * CHANGES_SHARE))

    def _cool(self) -> None:
        """What was used of late may go next; what was not goes."""
        self._weigh()
        self._discarded.append(self._cold)
        self._cold, self._states = self._states, {}

    def _discard(self) -> None:
        oldest = self._discarded[0]
        for _ in range(min(DISCARDED_PER_BATCH, len(oldest))):
            oldest.popitem()
        if not oldest:
            self._discarded.pop(0)

    def _relieve(self) -> None:
        """Settle a part of what is not settled, if that is too much, and more than the batch can have added; while the
        disk is full it stays."""
        self._unsettled = [interval for interval in self._unsettled if not interval.settled]
        unsettled = self._interval.unsettled + sum(interval.unsettled for interval in self._unsettled)
        if unsettled <= self._changes_max and len(self._interval.layers) == 1:
            return
        with suppress(DiskFull):
            for _ in range(2 + self._batch_keys // min(SLICE_ENTRIES, self._shelf.slice_entries)):
                if self._unsettled:
                    self._unsettled[0].advance()
                    self._unsettled = [interval for interval in self._unsettled if not interval.settled]
                else:
                    self._store.require_room()
                    self._interval.spill()

    @property
    def full(self) -> str:
        """Why no record should be taken now; empty where they may."""
        return self._store.no_room()

    # --- state from blocks --------------------------------------------------------------------------------------------

    def fetch(self) -> bool:
        """Read a slice more of what was stored."""
        if not self._shelf.unread or self.full:
            return False
        self._fetch_slice()
        return True

    def _fetch_slice(self) -> None:
        if self._fetched is None:
            self._fetching = self._together(self._shelf.unread)
            self._fetched = self._read_slices(self._fetching)
        if next(self._fetched, _DONE) is _DONE:
            self._fetched = None

    def _read(self, groups: Iterable[int]) -> None:
        """Read key groups that records want, and that cannot wait for room on the disk."""
        wanted = set(groups)
        while self._loading in wanted and self._loading in self._shelf.unread:
            self._fetch_slice()  # to load one twice would undo what changes between
        wanted &= self._shelf.unread
        if self._fetched is not None and self._loading is None and not wanted.isdisjoint(self._fetching):
            self._fetched.close()  # what it has yet to fetch of these may soon be needed by nobody, and go
            self._fetched = None
        while wanted := wanted & self._shelf.unread:
            for _ in self._read_slices(self._together(wanted)):
                pass

    def _together(self, groups: Iterable[int]) -> tuple[int, ...]:
        """The first of *groups*, as many as there is memory for their blocks."""
        return self._stored.together(groups, self._memory.table_bytes * FETCHED_SHARE)

    def _read_slices(self, groups: tuple[int, ...]) -> Generator[None, None, None]:
        """A key group is there once all of it is, at one moment; one that a record has wanted meanwhile is left out."""
        for found in self._stored.reading(groups):
            if found is not None and found[0] in self._shelf.unread:
                group, read = found
                begun, self._loading = self._loading, group  # while a record wants another, one may be begun already
                yield from self._store.load(group, read.states)
                self._shelf.counts[group] = len(read.states)
                for checkpoint, entries in read.increments:
                    self._shelf.merging.incremented(group, checkpoint, entries)
                self._shelf.unread.discard(group)
                self._loading = begun
            yield

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def freeze(self, checkpoint: int, base: int, *, whole: bool = False) -> TieredSnapshot:
        """The synchronous part of a snapshot; see `Table.freeze`."""
        require(checkpoint > self._frozen_latest, f"checkpoint {checkpoint} is later than {self._frozen_latest}")
        require(base in self._chains, f"checkpoint {base} is a base of {self.operator!r}")
        whole, self._anew = whole or self._anew, False
        for older in [each for each in self._chains if each < base]:
            del self._chains[older]
        self._intervals = [interval for interval in self._intervals if interval.checkpoint > base]
        self._unsettled = [interval for interval in self._unsettled if not interval.settled]
        self._intervals.append(self._interval)
        self._unsettled.append(self._interval)
        self._interval, self._frozen_latest = self._interval.freeze(checkpoint, whole=whole), checkpoint
        return TieredSnapshot(tuple(self._intervals), self._chains[base], self._chains, self, whole=whole)

    def sealed(self, checkpoint: int, parts: tuple[bytes, ...]) -> None:
        """The index of *checkpoint* is known."""
        self._files.completed(min(self._chains))
        self._files.name(checkpoint, index_digest(parts) if parts else b"")

    # --- what is there ------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> S | None:
        """The newest state of *key*."""
        if key not in self._states:
            self._find([key])
            self._absent = []
        return self._states[key]

    def items(self) -> Iterator[tuple[bytes, S]]:
        """The newest state of every key, while no record is applied."""
        self._read(self._shelf.unread)
        newest: dict[bytes, S | None] = {}
        for layer in reversed([*self._layers()]):
            newest.update(layer)
        view = self._store.view()
        for group in self._shelf.groups:
            for some in self._store.group(view, group, ITEMS_SLICE):
                for key, packed in some:
                    if key not in newest:
                        yield key, self.state_type.unpack(packed)
        for key, state in newest.items():
            if state is not None:
                yield key, state

    def close(self) -> None:
        """At a clean end: let go of the local files, but for those that were saved."""
        self._intervals, self._unsettled = [], []  # and of views, with which a database stays open
        self._files.close()


class TieredSnapshot(Snapshot):
    """Made by `TieredTable.freeze`."""

    def __init__(
        self,
        intervals: Sequence[TieredInterval[Any]],
        base: Chain,
        chains: dict[int, Chain],
        table: TieredTable[Any],
        *,
        whole: bool,
    ) -> None:
        super().__init__(intervals, base, chains, table.state_type, table.max_parallelism, whole=whole)
        self._table = table

    def seal(self, refs: Sequence[BlockRef]) -> tuple[bytes, ...]:
        """See `TableSnapshot.seal`."""
        parts = super().seal(refs)
        self._table.sealed(self.checkpoint, parts)
        return parts


def _wanted(stored: StoredState[Any], state_type: StateType[Any]) -> Marker:
    """The marker of the files that are those of what is *stored*, but for what a table knows beside it."""
    return Marker(
        version=VERSION, operator=stored.operator, groups=tuple(stored.groups),
        max_parallelism=stored.max_parallelism, checkpoint=stored.checkpoint, digest=stored.digest,
        schema=state_type.form, files={}, counts={}, entries={}, oldest={},
    )  # fmt: skip
