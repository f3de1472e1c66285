"""Keyed state of one subtask: what records read and change.

`_tables` hold the state at the last barrier that was encoded, by key group; the frozen intervals lie over them, and
over these the changes of the current interval, which holds every key that a record has touched since the last barrier.
So records work on one small dict, freezing only sets it aside, and nothing that is being encoded ever changes: states
of mutable types are cloned when an interval first touches them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.interval import Interval
from exactlyonce.state.merging import Merging
from exactlyonce.state.snapshot import Snapshot
from exactlyonce.state.state_type import StateType

S = TypeVar("S")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741 - the output


@dataclass
class Contents(Generic[S]):
    """The state at a checkpoint, as it was restored; by default the empty state at checkpoint 0."""

    checkpoint: int = 0
    tables: dict[int, dict[bytes, S]] = field(default_factory=dict)
    chain: Chain = field(default_factory=Chain)
    merging: Merging = field(default_factory=Merging)


class KeyedTable(Generic[S]):
    """The states of *operator* for the keys in *groups*; keys are canonical bytes (`pipeline.keys`)."""

    def __init__(
        self, operator: str, type_: Any, groups: range, max_parallelism: int, contents: Contents[S] | None = None
    ) -> None:
        contents = contents or Contents()
        self.operator = operator
        self.groups = groups
        self.max_parallelism = max_parallelism
        self.state_type: StateType[S] = StateType(operator, type_)
        self._tables: Mapping[int, dict[bytes, S]] = {group: contents.tables.get(group, {}) for group in groups}
        self._changes: dict[bytes, S | None] = {}
        self._touched: dict[int, list[bytes]] = defaultdict(list)
        self._intervals: list[Interval[S]] = []
        self._frozen_latest = contents.checkpoint
        self._chains = {contents.checkpoint: contents.chain}
        self._merging = contents.merging

    def apply(
        self, fn: Callable[[S | None, R], tuple[S | None, O]], keys: Sequence[bytes], records: Sequence[R]
    ) -> list[O]:
        """The outputs of ``fn(state or None, record) -> (state, output)``; the state None deletes the key.

        Raises `ApplyFailed` where *fn* raises. An output that is the state itself is cloned if it could change later.
        """
        changes = self._touch(keys)
        outputs: list[O] = []
        append = outputs.append
        try:
            if self.state_type.mutable:
                clone: Callable[[Any], Any] = self.state_type.clone
                for key, record in zip(keys, records, strict=True):
                    changes[key], output = state, _ = fn(changes[key], record)
                    append(clone(output) if output is state and state is not None else output)
            else:
                for key, record in zip(keys, records, strict=True):
                    changes[key], output = fn(changes[key], record)
                    append(output)
        except Exception as error:
            raise ApplyFailed(len(outputs)) from error
        return outputs

    def reduce(self, fn: Callable[[S, S], S], keys: Sequence[bytes], records: Sequence[S]) -> list[S]:
        """The accumulators after each record: the first record of a key, then ``fn(accumulator, record)``.

        Raises `ApplyFailed` where *fn* raises. Mutable ones are clones: *fn* may change its accumulator in place.
        """
        changes = self._touch(keys)
        outputs: list[S] = []
        append = outputs.append
        try:
            if self.state_type.mutable:
                clone = self.state_type.clone
                for key, record in zip(keys, records, strict=True):
                    state = changes[key]
                    changes[key] = state = clone(record) if state is None else fn(state, record)
                    append(clone(state))
            else:
                for key, record in zip(keys, records, strict=True):
                    state = changes[key]
                    changes[key] = state = record if state is None else fn(state, record)
                    append(state)
        except Exception as error:
            raise ApplyFailed(len(outputs)) from error
        return outputs

    def freeze(self, checkpoint: int, base: int) -> Snapshot:
        """The synchronous part of a snapshot: constant time.

        *base* is 0, or a completed checkpoint that this table sealed or was restored from; bases only grow.
        """
        require(checkpoint > self._frozen_latest, f"checkpoint {checkpoint} is later than {self._frozen_latest}")
        require(base in self._chains, f"checkpoint {base} is a base of {self.operator!r}")
        for older in [each for each in self._chains if each < base]:
            del self._chains[older]
        self._intervals = [interval for interval in self._intervals if interval.checkpoint > base]
        self._intervals.append(
            Interval(checkpoint, self._changes, self._touched, self._tables, self.state_type, self._merging)
        )
        self._changes, self._touched, self._frozen_latest = {}, defaultdict(list), checkpoint
        return Snapshot(
            tuple(self._intervals), self._chains[base], self._chains, self.state_type, self.max_parallelism
        )

    def get(self, key: bytes) -> S | None:
        """The newest state of *key*."""
        for changes in (self._changes, *(interval.changes for interval in reversed(self._intervals))):
            if key in changes:
                return changes[key]
        return self._tables[key_groups((key,), self.max_parallelism)[0]].get(key)

    def items(self) -> Iterator[tuple[bytes, S]]:
        """The newest state of every key, while no record is applied."""
        newest: dict[bytes, S | None] = {}
        for table in self._tables.values():
            newest.update(table)
        for changes in (*(interval.changes for interval in self._intervals), self._changes):
            newest.update(changes)
        return ((key, state) for key, state in newest.items() if state is not None)

    def _touch(self, keys: Iterable[bytes]) -> dict[bytes, S | None]:
        """The current interval's changes, in which all *keys* are then found."""
        changes = self._changes
        if fresh := list(dict.fromkeys([key for key in keys if key not in changes])):
            self._load(fresh)
        return changes

    def _load(self, keys: Sequence[bytes]) -> None:
        changes, touched, tables = self._changes, self._touched, self._tables
        groups = key_groups(keys, self.max_parallelism)
        require(tables.keys() >= set(groups), f"all keys are of the key groups {self.groups}")
        changes.update(zip(keys, map(dict.get, map(tables.__getitem__, groups), keys), strict=True))
        for key, group in zip(keys, groups, strict=True):
            touched[group].append(key)
        for interval in self._intervals:
            if frozen := interval.changes:
                changes.update((key, frozen[key]) for key in keys if key in frozen)
        if self.state_type.mutable:
            clone = self.state_type.clone
            changes.update((key, clone(state)) for key in keys if (state := changes[key]) is not None)
