"""The backend that keeps all states in memory: a dict for each table.

The newest state of every key lies in one dict, and the changes since the last barrier in that of the interval as well.
So freezing only sets an interval aside, and its states never change: mutable ones are cloned when a record touches them
while an older interval is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.backend import Table
from exactlyonce.state.batches import BatchTable
from exactlyonce.state.interval import Interval, TableContents
from exactlyonce.state.merging import Merging
from exactlyonce.state.snapshot import Snapshot, SnapshotHistory
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import StoredState

S = TypeVar("S")


class HashMapBackend:
    """A `StateBackend` that reads all stored state at once."""

    def table(self, stored: StoredState[S]) -> Table[S]:
        return KeyedTable(stored)

    def close(self) -> None:
        """Memory goes with the process."""


class KeyedTable(BatchTable[S]):
    """A `Table`; see the module."""

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
        self._contents = TableContents(self._states, self._keys, stored.max_parallelism, self.state_type, merging)
        self._interval: Interval[S] = Interval(self._contents)
        self._history: SnapshotHistory[Interval[S]] = SnapshotHistory(stored)

    def freeze(self, checkpoint: int, base: int, *, whole: bool = False) -> Snapshot:
        """See `Table.freeze`."""
        whole = self._history.begin(checkpoint, base, whole=whole)
        self._history.intervals.append(self._interval)
        self._interval = self._interval.freeze(checkpoint, whole=whole)
        return Snapshot(self._history, base, self.state_type, self._contents.max_parallelism, whole=whole)

    def get(self, key: bytes) -> S | None:
        return self._states.get(key)

    def items(self) -> Iterator[tuple[bytes, S]]:
        return ((key, state) for key, state in self._states.items() if state is not None)

    def _touch(self, keys: Sequence[bytes]) -> dict[bytes, S | None]:
        if self._history.intervals and self._history.intervals[-1].open:
            before = self._interval.before
            self._keep([key for key in keys if key not in before])
        return self._interval.changes()

    def _keep(self, keys: Sequence[bytes]) -> None:
        """Keep the states that *keys* have, which are those at the last barrier."""
        before, states = self._interval.before, self._states
        before.update(zip(keys, map(states.get, keys), strict=True))
        if self.state_type.mutable:
            clone = self.state_type.clone
            states.update((key, clone(state)) for key in set(keys) if (state := before[key]) is not None)

    def _touched(self, added: int) -> None:
        if added:
            keys = list(islice(reversed(self._states), added))
            groups = key_groups(keys, self._contents.max_parallelism)
            require(self._keys.keys() >= set(groups), f"all keys are of the key groups {sorted(self._keys)}")
            for key, group in zip(keys, groups, strict=True):
                self._interval.added[group].append(key)
