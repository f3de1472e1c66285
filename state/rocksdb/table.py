"""The tiered tables: newest states within a budget of memory, the others in the local store, or still in blocks.

A state is looked up in `_states`, the layers of the intervals that are not settled, newest first, `_cold`, and the
local store, into which a key group is read from its blocks before any lookup in it. Invariants: an earlier place is at
least as new as a later one; a change is in a layer until it is in the store. So `_states` may become `_cold`, and
`_cold` may be dropped, whenever either is too large: recently used states stay.

The timed table keeps states by place, so that RocksDB has those of a key group in the order of their slots. Every slot
and key group with a state is known, though its keys need not be in memory; a key group is read from its blocks before
one of its slots fires. A slot is read from the local store, and from the layers over it, whose keys are listed by slot
and key group. A drop is a range: the store deletes it once the changes before it are settled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import TypeVar, cast

from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.batches import BatchTable, SlotsByKey, StatesTable, TimedStates, exhaust
from exactlyonce.state.chain import index_digest
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.rocksdb.files import VERSION, LocalFiles, Marker
from exactlyonce.state.rocksdb.groups import TableGroups
from exactlyonce.state.rocksdb.interval import SLICE_ENTRIES, TableResources, TieredInterval
from exactlyonce.state.rocksdb.memory import LARGE_BYTES, Memory, TableMemory
from exactlyonce.state.rocksdb.store import DiskFull
from exactlyonce.state.slots import Slots, TableTimes, key_of, packed_slot, slot_of, unpacked_slot
from exactlyonce.state.snapshot import Snapshot, SnapshotHistory
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import StoredState

S = TypeVar("S")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741 - the output

WEIGHED_EVERY = 64
"""Batches between two samples of the size of an entry."""
DISCARDED_PER_BATCH = 2048
ITEMS_SLICE = 1024


class TieredStates(StatesTable[S]):
    """The common part of tiered tables; see the module."""

    def __init__(
        self,
        stored: StoredState[S],
        folder: Path,
        memory: Memory,
        worker: str = "",
        new_layer: Callable[[], dict[bytes, S | None]] = dict,
    ) -> None:
        self.operator = stored.operator
        self._layout = stored.layout
        self.state_type = StateType(stored.operator, stored.type)
        self._memory = TableMemory(memory)
        wanted = Marker(
            version=VERSION, operator=stored.operator, groups=tuple(stored.groups),
            max_parallelism=stored.max_parallelism, checkpoint=stored.checkpoint, digest=stored.digest,
            schema=self.state_type.form, files={}, counts={}, entries={}, oldest={},
        )  # fmt: skip
        self._files = LocalFiles(folder, wanted, memory, worker)
        self._groups = TableGroups(stored, self._files, self._memory)
        self._resources: TableResources[S] = TableResources(
            self._files, self.state_type, self._groups, self._layout, self._memory, stored.times, new_layer
        )
        self._states: dict[bytes, S | None] = {}
        self._cold: dict[bytes, S | None] = {}
        self._discarded: list[dict[bytes, S | None]] = []
        """Former `_cold`, which are emptied in slices, since that takes time."""
        self._absent: list[tuple[bytes, int]] = []
        """Keys of the batch without a state, with their key groups."""
        self._interval: TieredInterval[S] = TieredInterval(self._resources, 1)
        self._history: SnapshotHistory[TieredInterval[S]] = SnapshotHistory(stored)
        self._unsettled: list[TieredInterval[S]] = []
        """Intervals that have a barrier, and changes that are not in the store, oldest first."""
        self._batches = self._batch_keys = 0

    # --- records ------------------------------------------------------------------------------------------------------

    def _in_parts(
        self, go: Callable[[Sequence[bytes], Sequence[R]], None], keys: Sequence[bytes], records: Sequence[R]
    ) -> None:
        """Call *go* with no more keys at once than there is memory for their states."""
        require(len(keys) == len(records), "every record has a key")
        start = 0
        while start < len(keys):
            end = start + self._memory.together_max
            try:
                go(keys[start:end], records[start:end])
            except ApplyFailed as error:
                raise ApplyFailed(start + error.index) from error.__cause__
            start = end

    def _touch(self, keys: Sequence[bytes], *, replaced: bool = False) -> dict[bytes, S | None]:
        states, self._batch_keys = self._states, len(keys)
        missing = [key for key in keys if key not in states]
        if missing:
            self._find(list(dict.fromkeys(missing)))
        if self.state_type.mutable and not replaced:
            self._protect(keys)
        return self._interval.layers[-1]

    def _touched(self, added: int) -> None:
        changes = self._interval.layers[-1]
        for key, group in self._absent:
            if self._states[key] is None:
                changes.pop(key, None)
            else:
                self._groups.counts[group] += 1
        self._absent = []
        self._batches += 1
        if self._batches % WEIGHED_EVERY == 0 or self._batches & (self._batches - 1) == 0:  # at first more often
            self._memory.weigh(self._states)
        if len(self._states) > self._memory.cached_max:
            self._memory.weigh(self._states)
            self._discarded.append(self._cold)
            self._cold, self._states = self._states, {}
        if self._discarded:
            self._discard()
        if len(changes) > self._memory.changes_max or len(self._interval.layers) > 1 or self._unsettled:
            self._relieve()

    def _find(self, keys: list[bytes]) -> None:
        """Put the states of *keys* into `_states`; None where there is none."""
        states = self._states
        for layer in (*self._layers(), self._cold):
            present = [key for key in keys if key in layer]
            if present:
                states.update((key, layer[key]) for key in present)
                keys = [key for key in keys if key not in layer]
        if not keys:
            return
        groups = self._layout.groups(keys)
        own = self._groups.counts.keys()
        foreign = set(groups) - own
        require(not foreign, f"no key is of another table, as those of the key groups {foreign} are")
        if self._groups.unread:
            self._groups.read(self._groups.unread.intersection(groups))
        unpack, large = self.state_type.unpack, list[tuple[S | None, bytes]]()
        for key, group, packed in zip(keys, groups, self._files.store.get(keys, groups), strict=True):
            if packed is None:
                states[key] = None
                self._absent.append((key, group))
            else:
                states[key] = unpack(packed)
                if len(packed) > LARGE_BYTES:
                    large.append((states[key], packed))
        self._memory.note_large(large, len(keys))
        if large:
            self._memory.limit()

    def _layers(self) -> Iterator[dict[bytes, S | None]]:
        """Changes that are not in the store, newest first."""
        yield from reversed(self._interval.layers)
        for interval in reversed(self._unsettled):
            yield from reversed(interval.layers)

    def _protect(self, keys: Sequence[bytes]) -> None:
        """Clone the states of *keys* that are in an older layer: records may change them in place."""
        current, *older = self._layers()
        if not older:
            return
        states, clone = self._states, self.state_type.clone
        for key in set(keys):
            state = states[key]
            if state is not None and key not in current and any(key in layer for layer in older):
                states[key] = clone(state)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _discard(self) -> None:
        oldest = self._discarded[0]
        for _ in range(min(DISCARDED_PER_BATCH, len(oldest))):
            oldest.popitem()
        if not oldest:
            self._discarded.pop(0)

    def _relieve(self) -> None:
        """Settle more than the batch can have added, if too much is unsettled; nothing while the disk is full."""
        self._forget_settled()
        unsettled = self._interval.unsettled + sum(interval.unsettled for interval in self._unsettled)
        if unsettled <= self._memory.changes_max and len(self._interval.layers) == 1:
            return
        with suppress(DiskFull):
            for _ in range(2 + self._batch_keys // min(SLICE_ENTRIES, self._resources.slice_entries)):
                if self._unsettled:
                    self._unsettled[0].advance()
                    self._forget_settled()
                else:
                    self._files.store.require_room()
                    self._interval.spill()

    def _forget_settled(self) -> None:
        self._unsettled = [interval for interval in self._unsettled if not interval.settled]

    @property
    def full(self) -> str:
        """See `KeyedState.full`."""
        return self._files.store.no_room()

    def fetch(self) -> bool:
        """See `KeyedState.fetch`."""
        if not self._groups.unread or self.full:
            return False
        self._groups.read_slice()
        return True

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def freeze(self, checkpoint: int, base: int, *, whole: bool = False) -> Snapshot:
        """See `KeyedState.freeze`."""
        whole = self._history.begin(checkpoint, base, whole=whole)
        self._forget_settled()
        self._history.intervals.append(self._interval)
        self._unsettled.append(self._interval)
        self._interval = self._interval.freeze(checkpoint, whole=whole)
        return Snapshot(
            self._history, base, self.state_type, self._layout.max_parallelism, whole=whole, sealed=self._sealed
        )

    def _sealed(self, checkpoint: int, parts: tuple[bytes, ...]) -> None:
        self._files.completed(min(self._history.chains))
        self._files.name(checkpoint, index_digest(parts) if parts else b"")

    # --- reading ------------------------------------------------------------------------------------------------------

    def _get(self, key: bytes) -> S | None:
        if key not in self._states:
            self._find([key])
            self._absent = []
        return self._states[key]

    def _get_all(self, keys: Sequence[bytes]) -> list[S | None]:
        states, found = self._states, list[S | None]()
        for start in range(0, len(keys), self._memory.together_max):
            some = keys[start : start + self._memory.together_max]
            if missing := [key for key in dict.fromkeys(some) if key not in states]:
                self._find(missing)
                self._absent = []
            found += map(states.__getitem__, some)
        return found

    def _items(self) -> Iterator[tuple[bytes, S]]:
        self._groups.read(self._groups.unread)
        newest: dict[bytes, S | None] = {}
        for layer in reversed([*self._layers()]):
            newest.update(layer)
        store = self._files.store
        view = store.view()
        for group in self._groups.all:
            for entries in store.group(view, group, ITEMS_SLICE):
                for key, packed in entries:
                    if key not in newest:
                        yield key, self.state_type.unpack(packed)
        for key, state in newest.items():
            if state is not None:
                yield key, state

    def close(self) -> None:
        """At a clean end: delete the local files, except saved ones."""
        self._history.intervals, self._unsettled = [], []  # their views would keep the database open
        self._files.close()


class TieredTable(TieredStates[S], BatchTable[S]):
    """A `Table`; see the module."""

    def apply(
        self, fn: Callable[[S | None, R], tuple[S | None, O]], keys: Sequence[bytes], records: Sequence[R]
    ) -> list[O]:
        """See `Table.apply`."""
        outputs, apply = list[O](), super().apply
        self._in_parts(lambda keys, records: outputs.extend(apply(fn, keys, records)), keys, records)
        return outputs

    def reduce(self, fn: Callable[[S, S], S], keys: Sequence[bytes], records: Sequence[S]) -> list[S]:
        """See `Table.reduce`."""
        outputs, reduce = list[S](), super().reduce
        self._in_parts(lambda keys, records: outputs.extend(reduce(fn, keys, records)), keys, records)
        return outputs

    def get(self, key: bytes) -> S | None:
        return self._get(key)

    def items(self) -> Iterator[tuple[bytes, S]]:
        return self._items()


class TimedLayer(dict[bytes, S | None]):
    """Changes by place."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = 0
        """So many of the first are in `places`."""
        self.places: defaultdict[tuple[bytes, int], list[bytes]] = defaultdict(list)
        """By packed slot and key group."""


class TieredTimedTable(TieredStates[S], TimedStates[S]):
    """A `TimedTable`; see the module."""

    def __init__(self, stored: StoredState[S], folder: Path, memory: Memory, worker: str = "", *, by_key: bool) -> None:
        require(stored.times is not None, "a timed table is made of timed state")
        self._times = stored.times or TableTimes()
        self._by_key = SlotsByKey() if by_key else None
        self._slots: Slots[list[int]] = Slots()
        """About how many keys were added."""
        if by_key:  # saved files do not list the slots of each key
            stored = replace(stored, digest=b"")
        super().__init__(stored, folder, memory, worker, TimedLayer)
        self._groups.reads = self._note
        if self._files.marker is not None:
            for group in self._groups.all:
                self._note(group, [*self._files.store.slots(group)])

    # --- records ------------------------------------------------------------------------------------------------------

    def _update(self, fn: Callable[[S | None, R], S], keys: Sequence[bytes], records: Sequence[R]) -> None:
        update = super()._update
        self._in_parts(lambda keys, records: update(fn, keys, records), keys, records)
        if self._by_key is not None:
            self._by_key.add(set(keys))

    def _put(self, states: dict[bytes, S]) -> None:
        put = super()._put
        self._in_parts(lambda keys, new: put(dict(zip(keys, new, strict=True))), [*states], [*states.values()])
        if self._by_key is not None:
            self._by_key.add(states.keys())

    def _touched(self, added: int) -> None:
        layer = self._interval.layers[-1]
        assert isinstance(layer, TimedLayer)
        super()._touched(added)
        if len(layer) > layer.listed:
            keys = list(islice(reversed(layer), len(layer) - layer.listed))
            groups = self._layout.groups(keys)
            self._require_open(keys, groups)
            for key, group in zip(keys, groups, strict=True):
                layer.places[slot_of(key), group].append(key)
            layer.listed = len(layer)
            self._index(keys, groups)

    def _note(self, group: int, keys: Collection[bytes]) -> None:
        """*group* was read, which has *keys*."""
        first = self._times.first_place(group)
        present = [key for key in keys if key >= first]
        self._index(present, [group] * len(present))
        if self._by_key is not None:
            self._by_key.add(present)

    def _index(self, keys: Sequence[bytes], groups: Sequence[int]) -> None:
        for added in self._slots.of_places(keys, groups, lambda: [0], self._times):
            added[0] += 1

    def _remove(self, place: bytes, changes: dict[bytes, S | None]) -> None:
        if self._states[place] is not None:
            self._states[place] = changes[place] = None
            if self._by_key is not None:
                self._by_key.remove([place])
        self._touched(0)

    # --- slots --------------------------------------------------------------------------------------------------------

    def get(self, slot: int, key: bytes) -> S | None:
        return self._get(packed_slot(slot) + key)

    def get_all(self, slot: int, keys: Sequence[bytes]) -> list[S | None]:
        """See `TimedTable.get_all`."""
        return self._get_all(list(map(packed_slot(slot).__add__, keys)))

    def slots_of(self, key: bytes) -> Sequence[int]:
        """See `TimedTable.slots_of`."""
        self._read_groups([key])
        return super().slots_of(key)

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """See `TimedTable.present`."""
        self._read_groups(keys)
        return super().present(keys)

    def _read_groups(self, keys: Iterable[bytes]) -> None:
        if self._groups.unread:
            self._groups.read(self._groups.unread.intersection(key_groups([*keys], self._layout.max_parallelism)))

    def slots(self, limit: int) -> list[int]:
        """See `TimedTable.slots`."""
        earliest = self._times.earliest
        self._groups.read([group for group in self._groups.unread if earliest.get(group, limit) <= limit])
        return self._slots.upto(limit)

    def groups(self, slot: int) -> list[int]:
        """See `TimedTable.groups`."""
        return self._slots.groups(slot)

    def read(self, slot: int, group: int) -> tuple[list[bytes], list[S]]:
        """See `TimedTable.read`."""
        states, packed = dict[bytes, S | None](), packed_slot(slot)
        if packed < self._times.first_place(group):
            return [], []
        unpack = self.state_type.unpack
        for entries in self._files.store.slot(group, packed, SLICE_ENTRIES):
            keys, packed_states = zip(*entries, strict=True)
            states.update(zip(keys, map(unpack, packed_states), strict=True))
        for layer in reversed([*self._layers()]):
            assert isinstance(layer, TimedLayer)
            states.update((key, layer[key]) for key in layer.places.get((packed, group), ()) if key in layer)
        present = sorted(key for key, state in states.items() if state is not None)
        return list(map(key_of, present)), cast("list[S]", list(map(states.__getitem__, present)))

    def take(self, slot: int, group: int) -> tuple[list[bytes], list[S]]:
        """See `TimedTable.take`."""
        read = self.read(slot, group)
        self.drop(slot, (group,))
        return read

    def drop(self, slot: int, groups: Collection[int]) -> None:
        """See `TimedTable.drop`."""
        for earlier, group, added in self._slots.popped(slot, groups):
            packed = packed_slot(earlier)
            if self._by_key is not None:
                self._by_key.remove([packed + key for key in self.read(earlier, group)[0]])
            self._groups.counts[group] = max(0, self._groups.counts[group] - added[0])
            layer = self._interval.layers[-1]
            assert isinstance(layer, TimedLayer)
            keys = layer.places.pop((packed, group), ())
            exhaust(map(layer.pop, keys, repeat(None)))
            exhaust(map(self._states.pop, keys, repeat(None)))
            layer.listed = len(layer)
        self._times.drop(slot, groups)
        self._interval.dropped.update(groups)

    def items(self) -> Iterator[tuple[int, bytes, S]]:
        for place, state in self._items():
            if place >= self._times.first_place(self._layout.groups([place])[0]):
                yield unpacked_slot(place), key_of(place), state
