"""The hash map's table: keyed state of one subtask, which records read and change.

The newest state of every key lies in one dict, and what changed since the last barrier in that of the interval as well.
So freezing only sets an interval aside, and what is encoded of it never changes: states of mutable types are cloned
where a record first touches them while an older interval is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.batches import BatchTable
from exactlyonce.state.chain import Chain
from exactlyonce.state.interval import Interval
from exactlyonce.state.merging import Merging
from exactlyonce.state.snapshot import Snapshot
from exactlyonce.state.state_type import StateType

S = TypeVar("S")


@dataclass
class Contents(Generic[S]):
    """The state at a checkpoint, as it was restored; by default the empty state at checkpoint 0.

    The chain may hold key groups that the tables do not: those that were not restored.
    """

    checkpoint: int = 0
    tables: dict[int, dict[bytes, S]] = field(default_factory=dict)
    chain: Chain = field(default_factory=Chain)
    merging: Merging = field(default_factory=Merging)
    anew: bool = False
    """See `StoredState`."""


class KeyedTable(BatchTable[S]):
    """The states of *operator* for the keys in *groups*; keys are canonical bytes (`pipeline.keys`).

    A record of another group is a defect: of another subtask's, or of one that was not restored.
    """

    def __init__(
        self,
        operator: str,
        type_: Any,
        groups: Sequence[int],
        max_parallelism: int,
        contents: Contents[S] | None = None,
    ) -> None:
        contents = contents or Contents()
        self.operator = operator
        self.groups = groups
        self.max_parallelism = max_parallelism
        self.state_type: StateType[S] = StateType(operator, type_)
        self._states: dict[bytes, S | None] = {}
        """None: deleted, and a record of the interval that did so is not distributed yet."""
        self._keys: Mapping[int, dict[bytes, None]] = {group: {} for group in groups}
        """By key group, at least the keys that had a state at the last barrier that was distributed."""
        for group, table in contents.tables.items():
            self._states.update(table)
            self._keys[group].update(dict.fromkeys(table))
        self._interval: Interval[S] = Interval(
            self._states, self._keys, max_parallelism, self.state_type, contents.merging
        )
        self._intervals: list[Interval[S]] = []
        self._frozen_latest = contents.checkpoint
        self._anew = contents.anew
        self._chains = {contents.checkpoint: contents.chain}

    def freeze(self, checkpoint: int, base: int, *, whole: bool = False) -> Snapshot:
        """The synchronous part of a snapshot: constant time. *whole*: all key groups are written, changed or not.

        *base* is 0, or a completed checkpoint that this table sealed or was restored from; bases only grow.
        """
        require(checkpoint > self._frozen_latest, f"checkpoint {checkpoint} is later than {self._frozen_latest}")
        require(base in self._chains, f"checkpoint {base} is a base of {self.operator!r}")
        whole, self._anew = whole or self._anew, False
        for older in [each for each in self._chains if each < base]:
            del self._chains[older]
        self._intervals = [interval for interval in self._intervals if interval.checkpoint > base]
        self._intervals.append(self._interval)
        self._interval, self._frozen_latest = self._interval.freeze(checkpoint, whole=whole), checkpoint
        intervals, groups = tuple(self._intervals), self.max_parallelism
        return Snapshot(intervals, self._chains[base], self._chains, self.state_type, groups, whole=whole)

    def get(self, key: bytes) -> S | None:
        """The newest state of *key*."""
        return self._states.get(key)

    def items(self) -> Iterator[tuple[bytes, S]]:
        """The newest state of every key, while no record is applied."""
        return ((key, state) for key, state in self._states.items() if state is not None)

    def _touch(self, keys: Sequence[bytes]) -> dict[bytes, S | None]:
        if self._intervals and self._intervals[-1].open:
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
            groups = key_groups(keys, self.max_parallelism)
            require(self._keys.keys() >= set(groups), f"all keys are of the key groups {self.groups}")
            for key, group in zip(keys, groups, strict=True):
                self._interval.added[group].append(key)
