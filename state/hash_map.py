"""The backend that keeps all states in memory: a dict for each table.

The newest state of every key lies in one dict, and the changes since the last barrier in the interval's dict as well.
So freezing only sets an interval aside, and its states never change: mutable ones are cloned when a record touches them
while an older interval is open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

from exactlyonce.pipeline.errors import require
from exactlyonce.state.backend import Table, TimedTable
from exactlyonce.state.batches import BatchTable, SlotsByKey, StatesTable, TimedStates, append_each, exhaust
from exactlyonce.state.interval import Interval, TableContents
from exactlyonce.state.key_groups import Merging
from exactlyonce.state.slots import Slots, TableTimes, key_of, packed_slot, unpacked_slot
from exactlyonce.state.snapshot import Snapshot, SnapshotHistory
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import StoredState

S = TypeVar("S")
_note: Callable[[Any, Any], None] = dict.setdefault


class HashMapBackend:
    """A `StateBackend` that reads all stored state at once."""

    def table(self, stored: StoredState[S]) -> Table[S]:
        return KeyedTable(stored)

    def timed_table(self, stored: StoredState[S], *, by_key: bool = False) -> TimedTable[S]:
        return TimedKeyedTable(stored, by_key=by_key)

    def close(self) -> None:
        """Memory goes with the process."""


class HashMapStates(StatesTable[S]):
    """The common part of tables in memory."""

    def __init__(self, stored: StoredState[S]) -> None:
        self.operator = stored.operator
        self.state_type: StateType[S] = StateType(stored.operator, stored.type)
        self._states: dict[bytes, S | None] = {}
        """None: deleted, and a record of the interval that did so is not distributed yet."""
        self._keys: dict[int, dict[bytes, None]] = {group: {} for group in stored.groups}
        """At least the keys that had a state at the last distributed barrier, by key group."""
        merging = Merging(stored.credit, stored.share)
        for group, read in stored.read(stored.groups).items():
            self._states.update(read.states)
            self._keys[group].update(dict.fromkeys(read.states))
            for checkpoint, entries in read.increments:
                merging.incremented(group, checkpoint, entries)
        self._contents = TableContents(self._states, self._keys, stored.layout, self.state_type, merging)
        self._interval: Interval[S] = Interval(self._contents)
        self._history: SnapshotHistory[Interval[S]] = SnapshotHistory(stored)

    def freeze(self, checkpoint: int, base: int, *, whole: bool = False) -> Snapshot:
        """See `KeyedState.freeze`."""
        whole = self._history.begin(checkpoint, base, whole=whole)
        self._history.intervals.append(self._interval)
        self._interval = self._interval.freeze(checkpoint, whole=whole)
        return Snapshot(self._history, base, self.state_type, self._contents.layout.max_parallelism, whole=whole)

    def _touch(self, keys: Sequence[bytes], *, replaced: bool = False) -> dict[bytes, S | None]:
        if self._is_open:
            before = self._interval.before
            self._keep([key for key in keys if key not in before], replaced=replaced)
        return self._interval.changes()

    @property
    def _is_open(self) -> bool:
        """Whether the states at the last barrier are still being read."""
        return bool(self._history.intervals) and self._history.intervals[-1].open

    def _keep(self, keys: Sequence[bytes], *, replaced: bool) -> None:
        """Keep the states that *keys* have, which are those at the last barrier."""
        before, states = self._interval.before, self._states
        before.update(zip(keys, map(states.get, keys), strict=True))
        if self.state_type.mutable and not replaced:
            clone = self.state_type.clone
            states.update((key, clone(state)) for key in set(keys) if (state := before[key]) is not None)

    def _touched(self, added: int) -> None:
        if added:
            keys = list(islice(reversed(self._states), added))
            groups = self._contents.layout.groups(keys)
            foreign = set(groups) - self._keys.keys()
            require(not foreign, f"no key is of another table, as those of the key groups {foreign} are")
            self._take(keys, groups)

    def _take(self, keys: Sequence[bytes], groups: Sequence[int]) -> None:
        """Note new *keys*, which are in *groups*."""
        append_each(self._interval.added, groups, keys)


class KeyedTable(HashMapStates[S], BatchTable[S]):
    """A `Table`; see the module."""

    def get(self, key: bytes) -> S | None:
        return self._states.get(key)

    def items(self) -> Iterator[tuple[bytes, S]]:
        return ((key, state) for key, state in self._states.items() if state is not None)


class TimedKeyedTable(HashMapStates[S], TimedStates[S]):
    """A `TimedTable`: the states of a slot and key group are one short list of keys."""

    def __init__(self, stored: StoredState[S], *, by_key: bool) -> None:
        super().__init__(stored)
        require(stored.times is not None, "a timed table is made of timed state")
        self._times = stored.times or TableTimes()
        self._by_key = SlotsByKey() if by_key else None
        self._slots: Slots[dict[bytes, None]] = Slots()
        """The keys with a state."""
        for group, keys in self._keys.items():
            self._index([*keys], [group] * len(keys))

    def _take(self, keys: Sequence[bytes], groups: Sequence[int]) -> None:
        self._require_open(keys, groups)
        super()._take(keys, groups)
        self._index(keys, groups)

    def _index(self, keys: Sequence[bytes], groups: Sequence[int]) -> None:
        exhaust(map(_note, self._slots.of_places(keys, groups, dict, self._times), keys))
        if self._by_key is not None:
            self._by_key.add(keys)

    def _remove(self, place: bytes, changes: dict[bytes, S | None]) -> None:
        if self._states.pop(place, None) is None:
            return
        changes[place] = None
        slot, (group,) = unpacked_slot(place), self._contents.layout.groups([place])
        present = self._slots.get(slot, group)
        assert present is not None
        del present[place]
        if not present:
            self._slots.pop(slot, group)
        if self._by_key is not None:
            self._by_key.remove([place])

    def get(self, slot: int, key: bytes) -> S | None:
        return self._states.get(packed_slot(slot) + key)

    def get_all(self, slot: int, keys: Sequence[bytes]) -> list[S | None]:
        """See `TimedTable.get_all`."""
        return list(map(self._states.get, map(packed_slot(slot).__add__, keys)))

    def slots(self, limit: int) -> list[int]:
        """See `TimedTable.slots`."""
        return self._slots.upto(limit)

    def groups(self, slot: int) -> list[int]:
        """See `TimedTable.groups`."""
        return self._slots.groups(slot)

    def read(self, slot: int, group: int) -> tuple[list[bytes], list[S]]:
        """See `TimedTable.read`."""
        keys = sorted(self._slots.get(slot, group) or ())
        states = cast("list[S]", list(map(self._states.__getitem__, keys)))
        return list(map(key_of, keys)), states

    def take(self, slot: int, group: int) -> tuple[list[bytes], list[S]]:
        """See `TimedTable.take`."""
        keys = sorted(self._slots.pop(slot, group) or ())
        states = self._forget(group, keys)
        self.drop(slot, (group,))
        return list(map(key_of, keys)), states

    def drop(self, slot: int, groups: Collection[int]) -> None:
        """See `TimedTable.drop`."""
        self._times.drop(slot, groups)
        for _, group, keys in self._slots.popped(slot, groups):
            self._forget(group, keys)

    def _forget(self, group: int, keys: Collection[bytes]) -> list[S]:
        """The states of *keys*, which are gone now, without a word about each."""
        states = cast("list[S]", list(map(self._states.pop, keys)))
        if self._is_open:
            before = self._interval.before
            before.update([pair for pair in zip(keys, states, strict=True) if pair[0] not in before])
        self._interval.forget(group, keys)
        if self._by_key is not None:
            self._by_key.remove(keys)
        return states

    def items(self) -> Iterator[tuple[int, bytes, S]]:
        return (
            (unpacked_slot(place), key_of(place), state) for place, state in self._states.items() if state is not None
        )
