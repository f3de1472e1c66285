"""Slots: the times of timed states, which lead their keys in tables, blocks and local files.

    place = slot + 2^63 (8 bytes, big-endian), canonical key

So the places of a key group sort by slot, then by key, and everything up to a slot is one range. The key group is that
of the key alone. A slot is an int64 in ms.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add, itemgetter
from typing import Generic, NamedTuple, TypeVar

import msgspec

from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.keys import key_groups

T = TypeVar("T")

SLOT_BYTES = 8
slot_of: Callable[[bytes], bytes] = itemgetter(slice(SLOT_BYTES))
key_of: Callable[[bytes], bytes] = itemgetter(slice(SLOT_BYTES, None))
_pack, _unpack = struct.Struct(">Q").pack, struct.Struct(">Q").unpack_from
_ZERO = 1 << 63


def packed_slot(slot: int) -> bytes:
    """The first bytes of the places of *slot*."""
    return _pack(slot + _ZERO)


def unpacked_slot(place: bytes) -> int:
    """The slot of a place, or of its first bytes.

    >>> unpacked_slot(packed_slot(-5) + b"key"), packed_slot(-5) < packed_slot(3)
    (-5, True)
    """
    return int(_unpack(place)[0]) - _ZERO


def places(slots: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
    """The place of each key in its slot."""
    packed = {slot: packed_slot(slot) for slot in set(slots)}
    return list(map(add, map(packed.__getitem__, slots), keys))


class KeyLayout(NamedTuple):
    """The keys of a table: the user's alone, or places."""

    max_parallelism: int
    timed: bool = False

    def own(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The user's keys in *keys*."""
        return list(map(key_of, keys)) if self.timed else keys

    def groups(self, keys: Sequence[bytes]) -> list[int]:
        """The key group of each of *keys*."""
        return key_groups(self.own(keys), self.max_parallelism)


class GroupTimes(msgspec.Struct, frozen=True, array_like=True):
    """The times of the key groups of a timed table, by columns; an index holds them."""

    groups: list[int] = []
    watermarks: list[int] = []
    floors: list[int] = []
    """States at or below the floor are gone, whatever blocks hold."""
    earliest: list[int] = []
    """No state has an earlier slot."""
    meaning: str = ""
    """What the states stand for: a window, with sizes in ms, and aggregates. Others are not read as these."""
    begun: list[tuple[int, int, bytes]] = []
    """(key group, slot, key) where a firing was under way: the keys up to this one have had the result of the slot."""


@dataclass
class TableTimes:
    """The times of a timed table and of its key groups; a group without one has none."""

    groups: Sequence[int] = ()
    """The key groups of the table."""
    watermark: int = NO_WATERMARK
    """The last one of this run, for all groups. Before a restore, groups may have had later ones."""
    watermarks: dict[int, int] = field(default_factory=dict)
    """Those at the restore, or of groups that a firing has come to."""
    floors: dict[int, int] = field(default_factory=dict)
    earliest: dict[int, int] = field(default_factory=dict)
    meaning: str = ""
    begun: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """See `GroupTimes.begun`."""

    @staticmethod
    def of(written: Iterable[GroupTimes], groups: Sequence[int], meaning: str = "") -> TableTimes:
        """The times of *groups* as the indexes of all old subtasks hold them; see `GroupTimes.meaning`."""
        times, wanted = TableTimes(groups, meaning=meaning), set(groups)
        for some in written:
            for group, *values in zip(some.groups, some.watermarks, some.floors, some.earliest, strict=True):
                if group in wanted:
                    for column, value, best in zip(times._columns, values, (max, max, min), strict=True):
                        column[group] = best(column.get(group, value), value)
            times.begun |= {group: (slot, key) for group, slot, key in some.begun if group in wanted}
        return times

    def written(self) -> GroupTimes:
        """What an index holds of them."""
        groups = sorted(set().union(*self._columns, self.groups if self.watermark > NO_WATERMARK else ()))
        floors = [self.floors.get(group, NO_WATERMARK) for group in groups]
        earliest = [self.earliest.get(group, END_OF_TIME) for group in groups]
        begun = [(group, *place) for group in groups if (place := self.begun_in(group)) is not None]
        return GroupTimes(groups, list(map(self.watermark_of, groups)), floors, earliest, self.meaning, begun)

    def watermark_of(self, group: int) -> int:
        """The last watermark of *group*; what was dropped was due."""
        return max(
            self.watermark, self.watermarks.get(group, NO_WATERMARK), self.floors.get(group, NO_WATERMARK)
        )  # fmt: skip

    def begun_in(self, group: int) -> tuple[int, bytes] | None:
        """The slot and the key in `begun`, unless all of the slot has fired since."""
        place = self.begun.get(group)
        return None if place is None or place[0] <= self.watermark_of(group) else place

    def drop(self, slot: int, groups: Iterable[int]) -> None:
        """Forget the slots of *groups* up to *slot*."""
        for group in groups:
            self.floors[group] = max(slot, self.floors.get(group, slot))
            if group in self.earliest:
                self.earliest[group] = max(self.earliest[group], min(slot + 1, END_OF_TIME))

    def note(self, slot: int, group: int) -> None:
        """There are states of *group* in *slot*."""
        self.earliest[group] = min(slot, self.earliest.get(group, slot))

    def first_place(self, group: int) -> bytes:
        """The places of *group* that are not forgotten begin here."""
        floor = self.floors.get(group)
        return b"" if floor is None else b"\xff" * SLOT_BYTES if floor >= END_OF_TIME else packed_slot(floor + 1)

    @property
    def _columns(self) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        return self.watermarks, self.floors, self.earliest


class Slots(Generic[T]):
    """The slots of a table in order, with a value for each key group in a slot."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._groups: dict[int, set[int]] = {}
        self._values: dict[tuple[bytes, int], T] = {}

    def upto(self, limit: int) -> list[int]:
        return self._order[: bisect_right(self._order, limit)]

    def groups(self, slot: int) -> list[int]:
        return sorted(self._groups.get(slot, ()))

    def get(self, slot: int, group: int) -> T | None:
        return self._values.get((packed_slot(slot), group))

    def of_places(
        self, keys: Sequence[bytes], groups: Sequence[int], new: Callable[[], T], times: TableTimes
    ) -> list[T]:
        """The value for each place, which is in its key group; *new* makes it where there is none, for *times* to
        note."""
        values = self._values
        pairs = list(zip(map(slot_of, keys), groups, strict=True))
        for pair in set(pairs).difference(values):
            values[pair] = new()
            slot = unpacked_slot(pair[0])
            if slot not in self._groups:
                insort(self._order, slot)
                self._groups[slot] = set()
            self._groups[slot].add(pair[1])
            times.note(slot, pair[1])
        return list(map(values.__getitem__, pairs))

    def popped(self, limit: int, groups: Collection[int]) -> Iterator[tuple[int, int, T]]:
        """Take out the slots of *groups* up to *limit*: each with its key group and value."""
        for slot in self.upto(limit):
            for group in self._groups[slot].intersection(groups):
                value = self.pop(slot, group)
                assert value is not None
                yield slot, group, value

    def pop(self, slot: int, group: int) -> T | None:
        value = self._values.pop((packed_slot(slot), group), None)
        if value is not None:
            self._groups[slot].discard(group)
            if not self._groups[slot]:
                del self._groups[slot]
                del self._order[bisect_right(self._order, slot) - 1]
        return value
