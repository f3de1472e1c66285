"""The timed tiered table: states by place, so that RocksDB has those of a key group in the order of their slots.

Invariants: every slot and key group with a state is known, though its keys need not be in memory; a key group is read
from its blocks before one of its slots fires. A slot is read from the local store, and from the layers over it, whose
keys are listed by slot and key group. A drop is a range: the store deletes it once the changes before it are settled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import TypeVar, cast

from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.interval import exhaust
from exactlyonce.state.rocksdb.interval import SLICE_ENTRIES
from exactlyonce.state.rocksdb.memory import Memory
from exactlyonce.state.rocksdb.table import TieredStates
from exactlyonce.state.slots import Slots, TableTimes, key_of, packed_slot, slot_of, unpacked_slot
from exactlyonce.state.stored import StoredState
from exactlyonce.state.timed import SlotsByKey, TimedStates

S = TypeVar("S")
R = TypeVar("R")


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
