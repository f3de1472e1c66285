"""A batch of records on states in a dict: the loops of every table whose newest states are Python objects.

Invariant: before the loop, `_touch` has put the existing states of the batch's keys into `_states`; the loop leaves
each new state there and in the interval's changes; after it, `_touched` may take states out again. A timed table has
its states by places (`slots`): none lies at or below the floor of its key group; a slot index knows every slot and key
group with a state, so the pane of a window is its own timer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import ge
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.errors import require, users_errors
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.slots import TableTimes, key_of, packed_slot, places, slot_of, unpacked_slot
from exactlyonce.state.state_type import StateType

_append: Callable[[Any, Any], None] = list.append
exhaust = deque[Any](maxlen=0).extend


def append_each(lists: Any, places: Iterable[Any], items: Iterable[Any]) -> None:
    """Append each of *items* to that of *lists* which is at its place, of *places*."""
    exhaust(map(_append, map(lists.__getitem__, places), items))


S = TypeVar("S")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741 - the output


class StatesTable(Generic[S]):
    """The common part of tables, which differ in where states come from, and where changes go."""

    state_type: StateType[S]
    _states: dict[bytes, S | None]
    """None: there is no state."""

    @property
    def full(self) -> str:
        """See `Table.full`."""
        return ""

    def fetch(self) -> bool:
        """See `Table.fetch`."""
        return False

    def _touch(self, keys: Sequence[bytes], *, replaced: bool = False) -> dict[bytes, S | None]:
        """Load the states of *keys*; returns the dict for the changes of the current interval. If they will be
        *replaced*, none changes in place."""
        raise NotImplementedError

    def _touched(self, added: int) -> None:
        """After the batch, which has *added* keys at the end of `_states`."""
        raise NotImplementedError


class BatchTable(StatesTable[S]):
    """The loops of a `Table`."""

    def apply(
        self, fn: Callable[[S | None, R], tuple[S | None, O]], keys: Sequence[bytes], records: Sequence[R]
    ) -> list[O]:
        """The outputs of ``fn(state or None, record) -> (state, output)``; the state None deletes the key.

        Raises `ApplyFailed` if *fn* raises. Later records never change an output or a record: if one may hold a part of
        the state, or is the state, a clone is kept.
        """
        changes, states = self._touch(keys), self._states
        get, count = states.get, len(states)
        outputs: list[O] = []
        append = outputs.append
        try:
            if self.state_type.mutable:
                clone: Callable[[Any], Any] = self.state_type.clone
                shares, known = self.state_type.shares, self.state_type.sharing.get
                for key, record in zip(keys, records, strict=True):
                    state, output = fn(get(key), record)
                    shared = known(type(output))
                    if shared is None:
                        shared = shares(output)
                    kept = clone(state) if (shared or state is record) and state is not None else state
                    states[key] = changes[key] = kept
                    append(output)
            else:
                for key, record in zip(keys, records, strict=True):
                    state, output = fn(get(key), record)
                    states[key] = changes[key] = state
                    append(output)
        except users_errors() as error:
            raise ApplyFailed(len(outputs)) from error
        self._touched(len(states) - count)
        return outputs

    def reduce(self, fn: Callable[[S, S], S], keys: Sequence[bytes], records: Sequence[S]) -> list[S]:
        """The accumulators after each record: the first record of a key, then ``fn(accumulator, record)``.

        Raises `ApplyFailed` if *fn* raises. Mutable ones are clones: *fn* may change its accumulator in place, and may
        return the record.
        """
        changes, states = self._touch(keys), self._states
        get, count = states.get, len(states)
        outputs: list[S] = []
        append = outputs.append
        try:
            if self.state_type.mutable:
                clone = self.state_type.clone
                for key, record in zip(keys, records, strict=True):
                    before = get(key)
                    state = record if before is None else fn(before, record)
                    states[key] = changes[key] = clone(state)
                    append(state)
            else:
                for key, record in zip(keys, records, strict=True):
                    before = get(key)
                    states[key] = changes[key] = state = record if before is None else fn(before, record)
                    append(state)
        except users_errors() as error:
            raise ApplyFailed(len(outputs)) from error
        self._touched(len(states) - count)
        return outputs


class TimedStates(StatesTable[S]):
    """The common part of timed tables."""

    _times: TableTimes
    _by_key: SlotsByKey | None

    def size(self, state: S) -> int:
        """See `TimedTable.size`."""
        return len(self.state_type.encode([state], checked=False))

    def update(
        self, fn: Callable[[S | None, R], S], slots: Sequence[int], keys: Sequence[bytes], records: Sequence[R]
    ) -> None:
        """See `TimedTable.update`."""
        self._update(fn, places(slots, keys), records)

    def _update(self, fn: Callable[[S | None, R], S], keys: Sequence[bytes], records: Sequence[R]) -> None:
        changes, states = self._touch(keys), self._states
        get, count, index = states.get, len(states), 0
        try:
            if self.state_type.mutable:
                clone: Callable[[Any], Any] = self.state_type.clone
                for index, (key, record) in enumerate(zip(keys, records, strict=True)):  # noqa: B007 - of the error
                    state = fn(get(key), record)
                    states[key] = changes[key] = clone(state) if state is record else state
            else:
                for index, (key, record) in enumerate(zip(keys, records, strict=True)):  # noqa: B007 - of the error
                    states[key] = changes[key] = fn(get(key), record)
        except users_errors() as error:
            raise ApplyFailed(index) from error
        self._touched(len(states) - count)

    def put(self, slot: int, key: bytes, state: S | None) -> None:
        """See `TimedTable.put`."""
        self.put_all(
            slot, {key: state if state is None or not self.state_type.mutable else self.state_type.clone(state)}
        )

    def put_all(self, slot: int, states: Mapping[bytes, S | None]) -> None:
        """See `TimedTable.put_all`."""
        prefix = packed_slot(slot)
        self._put({prefix + key: state for key, state in states.items() if state is not None})
        for key, state in states.items():
            if state is None:
                self._remove(place := prefix + key, self._touch([place], replaced=True))

    def _put(self, states: dict[bytes, S]) -> None:
        """Put *states*, by place."""
        if states:
            changes, before = self._touch([*states], replaced=True), self._states
            count = len(before)
            before.update(states)
            changes.update(states)
            self._touched(len(before) - count)

    def _remove(self, place: bytes, changes: dict[bytes, S | None]) -> None:
        """Remove the state at *place*, if there is one, and note it in *changes*."""
        raise NotImplementedError

    def slots_of(self, key: bytes) -> Sequence[int]:
        """See `TimedTable.slots_of`."""
        assert self._by_key is not None, "a table made with by_key=True is asked for the slots of a key"
        return self._by_key.slots(key)

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """See `TimedTable.present`."""
        assert self._by_key is not None, "a table made with by_key=True is asked for the slots of keys"
        return self._by_key.present(keys)

    def watermark(self, group: int) -> int:
        """See `TimedTable.watermark`."""
        return self._times.watermark_of(group)

    def advance(self, watermark: int, groups: Iterable[int] | None = None) -> None:
        """See `TimedTable.advance`."""
        times = self._times
        if groups is None:
            times.watermark = max(watermark, times.watermark)
            return
        for group in groups:
            times.watermarks[group] = max(watermark, times.watermarks.get(group, watermark))

    def begin(self, group: int, slot: int, key: bytes) -> None:
        """See `TimedTable.begin`."""
        self._times.begun[group] = slot, key

    def begun(self, group: int) -> tuple[int, bytes] | None:
        """See `TimedTable.begun`."""
        return self._times.begun_in(group)

    def _require_open(self, keys: Sequence[bytes], groups: Sequence[int]) -> None:
        """New *keys* are in slots that were not dropped."""
        floors = self._times.floors.values()
        if floors and unpacked_slot(min(keys)) <= max(floors):
            firsts = map(self._times.first_place, groups)
            require(all(map(ge, keys, firsts)), "states are put only into slots that were not dropped")


class SlotsByKey:
    """The slots of each key."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int | list[int]] = {}
        """A number: the key has one."""

    def add(self, keys: Collection[bytes]) -> None:
        by_key, own = self._slots, list(map(key_of, keys))
        packed = list(map(slot_of, keys))
        unpacked = {slot: unpacked_slot(slot) for slot in set(packed)}
        slots = list(map(unpacked.__getitem__, packed))
        new = dict(zip(own, slots, strict=True))
        if len(new) == len(own) and by_key.keys().isdisjoint(new):  # as most often
            by_key.update(new)
            return
        for key, slot in zip(own, slots, strict=True):
            before = by_key.setdefault(key, slot)
            if isinstance(before, list):
                if slot not in before:
                    insort(before, slot)
            elif before != slot:
                by_key[key] = sorted((before, slot))

    def remove(self, keys: Iterable[bytes]) -> None:
        by_key = self._slots
        for place in keys:
            key = key_of(place)
            slots = by_key[key]
            if isinstance(slots, int):
                del by_key[key]
                continue
            del slots[bisect_left(slots, unpacked_slot(place))]
            if len(slots) == 1:
                by_key[key] = slots[0]

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        return set(filter(self._slots.__contains__, keys))

    def slots(self, key: bytes) -> Sequence[int]:
        slots = self._slots.get(key, ())
        return (slots,) if isinstance(slots, int) else slots
