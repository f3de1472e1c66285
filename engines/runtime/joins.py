"""Join operators: they keep the records of two sides by key, and give those that belong together.

Invariants: the results are a function of times and floors, whatever came first, unless an input was idle. A pair is
given once, when the later of both arrives; a record without a partner, once the watermark says that none can come.
`LookupJoiner` goes by arrival.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import Coordinates
from exactlyonce.engines.runtime.operators import BatchOperator, Sides, TimedOperator, TimedParts, chunks
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.graph import Node
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.joins import AsOf, IntervalJoin, Joined, Lookup
from exactlyonce.pipeline.schema import type_name
from exactlyonce.pipeline.timed import Timed
from exactlyonce.state.backend import Table, TimedTable

J = TypeVar("J", IntervalJoin, AsOf)

LEFT, RIGHT = 0, 1
VERSIONS = END_OF_TIME
"""The slot of a key's versions, which is never due."""
SLICE_KEYS = 2_000
"""The most keys of a slot between two looks at the room."""

State = tuple[list[Any], list[Any]]
"""The entries of the left side and of the right side, in one slot of one key; see `kept_state` of the joins."""
Keys = Callable[[bytes], Any]
"""The user's key from its canonical bytes."""


def _keys(operator: str, key_type: Any) -> Keys:
    type_ = Any if key_type is UNKNOWN else key_type
    decode = msgspec.msgpack.Decoder(type_).decode

    def key_of(key: bytes) -> Any:
        try:
            return decode(key)
        except msgspec.ValidationError as error:
            raise GraphError(
                f"Operator {operator!r}: a key is not {type_name(type_)}, as those of both sides must be: {error}. "
                f"Nothing is lost: correct the functions of key_by, or annotate what they return, and run again."
            ) from error

    return key_of


class Due(NamedTuple):
    """The results of one slot and key group. Their time is the slot."""

    slot: int
    group: int
    records: Sequence[Any]
    floors: Sequence[int] | None = None


@dataclass(slots=True)
class Joiner(Sides, TimedOperator, Generic[J]):
    """The common part of the joins by time."""

    join: J
    table: TimedTable[State]
    groups: Sequence[int]
    """The key groups of the table."""
    key_of: Keys
    _firing: Iterator[Due] | None = field(default=None, init=False)
    _last: int = field(default=NO_WATERMARK, init=False)
    """The last slot that was due. A later run goes on from there after a drain, which ends time."""

    @classmethod
    def made(cls, parts: TimedParts) -> Joiner[J]:
        node = parts.node
        return cls(node.id, cast("J", node.timed), parts.table, parts.groups, _keys(node.id, node.key_type))

    def __post_init__(self) -> None:
        self.watermark = max(map(self.table.watermark, self.groups), default=NO_WATERMARK)

    def fire(self, room: int) -> bool:
        entered_s = self.activity.enter(self.id)
        if self._firing is None:
            self._firing = self._due(min(self.watermark, END_OF_TIME - 1))
        records: list[Any] = []
        origins: list[Coordinates] = []
        times: list[int] = []
        floors: list[int] = []
        for due in self._firing:
            count = len(due.records)
            self._last = max(self._last, due.slot)
            records += due.records
            origins += repeat(Coordinates(self.id, due.group, due.slot, ""), count)
            times += repeat(due.slot, count)
            floors += repeat(NO_FLOOR, count) if due.floors is None else due.floors
            if len(records) >= room:
                break
        else:
            self._firing = None
            self.table.advance(self.watermark if self.watermark < END_OF_TIME else self._last)
        self.activity.leave(self.id, entered_s, 0)
        if records:
            self.push(Batch(records, origins, times=times, floors=_or_none(floors)))
        return self._firing is None

    def _due(self, watermark: int) -> Iterator[Due]:
        """What is due at *watermark*, in order; its states go when the next is asked for."""
        for slot in self.table.slots(watermark):
            for group in self.table.groups(slot):
                keys, states = self.table.read(slot, group)
                for first in range(0, len(keys), SLICE_KEYS):
                    some = slice(first, first + SLICE_KEYS)
                    yield self._results(slot, group, keys[some], states[some])
                self.table.drop(slot, [group])

    def _results(self, slot: int, group: int, keys: Sequence[bytes], states: Sequence[State]) -> Due:
        raise NotImplementedError


def _or_none(floors: list[int]) -> list[int] | None:
    return floors if any(floor != NO_FLOOR for floor in floors) else None


class Change(NamedTuple):
    """*entry* is added to *side*; or, without one, that at *place* has a partner."""

    side: int
    entry: tuple[int, bool, Any] | None
    place: int = 0


def _changed(state: State | None, change: Change) -> State:
    state = ([], []) if state is None else state
    entries = state[change.side]
    if change.entry is not None:
        entries.append(change.entry)
    else:
        time, _, record = entries[change.place]
        entries[change.place] = time, True, record
    return state


@dataclass(slots=True)
class IntervalJoiner(Joiner[IntervalJoin]):
    """The slot of an entry is the last moment at which a partner may come.

    It is exact for entries that come out alone then. The others share slots of a quarter of the interval: it makes no
    difference how much longer they are kept.
    """

    _bounds: tuple[tuple[int, int], tuple[int, int]] = field(init=False)
    """By side: the bounds of a partner's time less the own."""
    _after: tuple[int, int] = field(init=False)
    """By side: so long after an entry a partner may come."""
    _alone: tuple[bool, bool] = field(init=False)
    """By side: whether entries without a partner come out."""
    _width: tuple[int, int] = field(init=False)
    """By side: the width of slots."""

    def __post_init__(self) -> None:
        Joiner.__post_init__(self)
        join = self.join
        self._bounds = (join.earliest_ms, join.latest_ms), (-join.latest_ms, -join.earliest_ms)
        self._after = max(0, join.latest_ms), max(0, -join.earliest_ms)
        self._alone = join.how in ("left", "full"), join.how in ("right", "full")
        shared = max(1, (join.latest_ms - join.earliest_ms) // 4)
        left, right = self._alone
        self._width = 1 if left else shared, 1 if right else shared

    def left(self, batch: Batch) -> None:
        self._take(batch, LEFT)

    def right(self, batch: Batch) -> None:
        self._take(batch, RIGHT)

    def _take(self, batch: Batch, side: int) -> None:
        assert batch.times is not None
        entered_s = self.activity.enter(self.id)
        if batch.floors is not None or min(batch.times, default=self.watermark + 1) <= self.watermark:
            batch = self.without_late(
                batch,
                [time > floor for time, floor in zip(batch.times, self.floors(batch), strict=True)],
                right=side == RIGHT,
            )
        pairs: list[Batch] = []
        for chunk in chunks(len(batch.records)):
            pairs.append(self._pairs(batch.part(chunk.start, chunk.stop), side))
            self.activity.breathe()
        self.activity.leave(self.id, entered_s, len(batch.records))
        for some in pairs:
            if some.records:
                self.push(some)

    def _pairs(self, batch: Batch, side: int) -> Batch:
        """The pairs of the records of *batch*, which are added to *side*, with those of the other."""
        assert batch.keys is not None
        assert batch.times is not None
        other, (low, high) = 1 - side, self._bounds[side]
        first, last = low + self._after[other], high + self._after[other] + self._width[other] - 1
        after, width, alone = self._after[side], self._width[side], self._alone[other]
        slots_of, get, key_of = self.table.slots_of, self.table.get, self.key_of
        pairs: list[Any] = []
        places: list[int] = []
        times: list[int] = []
        partners: dict[tuple[int, bytes, int], None] = {}
        slots: list[int] = []
        changes: list[Change] = []
        for place, (key, time, record) in enumerate(zip(batch.keys, batch.times, batch.records, strict=True)):
            before = len(pairs)
            kept = slots_of(key)
            for slot in kept[bisect_left(kept, time + first) : bisect_right(kept, time + last)]:
                for index, (at, has_partner, partner) in enumerate(cast("State", get(slot, key))[other]):
                    if low <= at - time <= high:
                        sides = (record, partner) if side == LEFT else (partner, record)
                        pairs.append(Joined(key_of(key), *sides))
                        times.append(max(time, at))
                        if alone and not has_partner:
                            partners[slot, key, index] = None
            places += repeat(place, len(pairs) - before)
            end = time + after
            slots.append(end + -end % width)
            changes.append(Change(side, (time, len(pairs) > before, record)))
        changes += [Change(other, None, index) for _, _, index in partners]
        self.table.update(
            _changed,
            [*slots, *(slot for slot, _, _ in partners)],
            [*batch.keys, *(key for _, key, _ in partners)],
            changes,
        )
        return Batch(pairs, [batch.origins[place] for place in places], times=times)

    def _results(self, slot: int, group: int, keys: Sequence[bytes], states: Sequence[State]) -> Due:
        """The entries that have no partner."""
        results: list[Any] = []
        left_alone, right_alone = self._alone
        for key, (lefts, rights) in zip(keys, states, strict=True):
            if left_alone:
                results += [Joined(self.key_of(key), record, None) for _, paired, record in lefts if not paired]
            if right_alone:
                results += [Joined(self.key_of(key), None, record) for _, paired, record in rights if not paired]
        return Due(slot, group, results)


_place: Callable[[Any], Any] = itemgetter(0, 1, 2)


def _added(state: State | None, change: tuple[int, Any]) -> State:
    state = ([], []) if state is None else state
    side, entry = change
    if side == LEFT:
        state[LEFT].append(entry)
    else:
        state[RIGHT][:] = entry
    return state


@dataclass(slots=True)
class AsOfJoiner(Joiner[AsOf]):
    """A left record waits in the slot of its time. The versions of a key are in one slot, by (time, partition, offset).

    A late version counts for records above its floor alone, for the others may have gone. A version is dropped once a
    later one counts for every record that may still come, and a deletion once no earlier version may come.
    """

    def left(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        batch, floors = self._in_time(batch, LEFT)
        times, keys = cast("list[int]", batch.times), cast("list[bytes]", batch.keys)
        waiting = [
            (LEFT, (origin.partition() or 0, origin.offset() or 0, floor, record))
            for origin, floor, record in zip(batch.origins, floors, batch.records, strict=True)
        ]
        gone = [place for place, time in enumerate(times) if time <= self.watermark]
        if gone:
            late = batch.stemming([batch.records[place] for place in gone], gone)
            late_keys = [keys[place] for place in gone]
            stay = [time > self.watermark for time in times]
            waiting = [entry for entry, stays in zip(waiting, stay, strict=True) if stays]
            batch = batch.where(stay)
        for chunk in chunks(len(waiting)):
            assert batch.times is not None
            assert batch.keys is not None
            self.table.update(_added, batch.times[chunk], batch.keys[chunk], waiting[chunk])
            self.activity.breathe()
        self.activity.leave(self.id, entered_s, len(times))
        if gone:
            self._answer(late, late_keys)

    def right(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        batch, floors = self._in_time(batch, RIGHT)
        times, keys = cast("list[int]", batch.times), cast("list[bytes]", batch.keys)
        values = _values(batch, changelog=self.join.changelog)
        keep_ms, oldest = self.join.keep_ms, self._oldest(self.watermark)
        by_key: dict[bytes, list[Any]] = {}
        ends: dict[tuple[int, bytes], None] = {}
        for key, time, floor, origin, value in zip(keys, times, floors, batch.origins, values, strict=True):
            if (versions := by_key.get(key)) is None:
                versions = by_key[key] = self._versions(key)
            version = (time, origin.partition() or 0, origin.offset() or 0, max(time, floor + 1), value)
            versions.insert(bisect_right(versions, _place(version), key=_place), version)
            if value is None:  # a slot without records, in which it is dropped
                ends[max(version[3] + keep_ms, self.watermark) + 1, key] = None
        changes = [(RIGHT, _needed(versions, oldest)) for versions in by_key.values()]
        self.table.update(_added, [VERSIONS] * len(changes), [*by_key], changes)
        self.table.update(_added, [slot for slot, _ in ends], [key for _, key in ends], [(RIGHT, ())] * len(ends))
        self.activity.leave(self.id, entered_s, len(times))

    def _in_time(self, batch: Batch, side: int) -> tuple[Batch, list[int]]:
        """*batch* without the records that are too late, and the floor of each late one that is left."""
        assert batch.times is not None
        if batch.floors is None and min(batch.times, default=self.watermark + 1) > self.watermark:
            return batch, [NO_FLOOR] * len(batch.records)
        keep_ms = self.join.keep_ms
        pairs = [*zip(batch.times, self.floors(batch), strict=True)]
        kept = [time + keep_ms > floor for time, floor in pairs]
        floors = [floor if time <= floor else NO_FLOOR for time, floor in pairs if time + keep_ms > floor]
        return self.without_late(batch, kept, right=side == RIGHT), floors

    def _versions(self, key: bytes) -> list[Any]:
        state = self.table.get(VERSIONS, key)
        return [] if state is None else [*state[RIGHT]]

    def _oldest(self, watermark: int) -> int:
        """The earliest time of a record that may still come, at *watermark*."""
        return max(watermark, NO_WATERMARK + self.join.keep_ms) - self.join.keep_ms + 1

    def _answer(self, late: Batch, keys: Sequence[bytes]) -> None:
        """Give results for *late* records, whose time is over."""
        assert late.times is not None
        values = [_at(self._versions(key), time) for key, time in zip(keys, late.times, strict=True)]
        answers = [
            Joined(self.key_of(key), record, value)
            for key, record, value in zip(keys, late.records, values, strict=True)
        ]
        batch = late.of(answers)
        self.push(batch if self.join.how == "left" else batch.where([value is not None for value in values]))

    def _results(self, slot: int, group: int, keys: Sequence[bytes], states: Sequence[State]) -> Due:
        results: list[Any] = []
        floors: list[int] = []
        all_come = self.join.how == "left"
        for key, (lefts, _) in zip(keys, states, strict=True):
            versions = self._versions(key)
            value = _at(versions, slot)
            if lefts and (all_come or value is not None):
                user_key = self.key_of(key)
                for _, _, floor, record in sorted(lefts, key=itemgetter(0, 1)):
                    results.append(Joined(user_key, record, value))
                    floors.append(floor)
            if value is None:
                self._forget(key, versions, slot)
        return Due(slot, group, results, floors)

    def _forget(self, key: bytes, versions: list[Any], slot: int) -> None:
        """Drop the versions of *key* that no record at *slot* or later needs."""
        needed = _needed(versions, self._oldest(slot - 1))
        if not needed:
            self.table.put(VERSIONS, key, None)
        elif len(needed) < len(versions):
            self.table.update(_added, [VERSIONS], [key], [(RIGHT, needed)])


def _at(versions: Sequence[Any], time: int) -> Any:
    """The value that counts at *time*."""
    return next((value for _, _, _, since, value in reversed(versions) if since <= time), None)


def _needed(versions: list[Any], oldest: int) -> list[Any]:
    """The versions that count for any record from *oldest* on."""
    first = next((place for place in range(len(versions) - 1, -1, -1) if versions[place][3] <= oldest), 0)
    is_over = bool(versions) and versions[first][3] < oldest and versions[first][4] is None
    return versions[first + is_over :]


def _values(batch: Batch, *, changelog: bool) -> list[Any]:
    return [record.value for record in batch.records] if changelog else batch.records


@dataclass(slots=True)
class LookupJoiner(Sides, BatchOperator):
    """`lookup`: the last version of each key."""

    join: Lookup
    table: Table[Any]
    key_of: Keys

    @classmethod
    def made(cls, node: Node, join: Lookup, table: Table[Any]) -> LookupJoiner:
        return cls(node.id, join, table, _keys(node.id, node.key_type))

    def left(self, batch: Batch) -> None:
        assert batch.keys is not None
        entered_s = self.activity.enter(self.id)
        values = list(map(self.table.get, batch.keys))
        keys = map(self.key_of, batch.keys)
        joined = batch.unkeyed(list(map(Joined, keys, batch.records, values)))
        self.activity.leave(self.id, entered_s, len(values))
        self.push(joined if self.join.how == "left" else joined.where([value is not None for value in values]))

    def right(self, batch: Batch) -> None:
        assert batch.keys is not None
        entered_s = self.activity.enter(self.id)
        self.table.apply(_replaced, batch.keys, _values(batch, changelog=self.join.changelog))
        self.activity.leave(self.id, entered_s, 0)


def _replaced(_: Any, value: Any) -> tuple[Any, None]:
    return value, None


OPERATORS: dict[type[Timed], type[Joiner[Any]]] = {IntervalJoin: IntervalJoiner, AsOf: AsOfJoiner}
