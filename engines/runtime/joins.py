"""Join operators: they keep the records of two sides by key, and give those that belong together.

Invariants: the results are a function of times and floors, whatever came first, unless an input was idle. A pair is
given once, when the later of both arrives; a record without a partner, once the watermark says that none can come.
`LookupJoiner` goes by arrival.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import Origins
from exactlyonce.engines.runtime.operators import BatchOperator, Sides, chunks
from exactlyonce.engines.runtime.timed import Due, KeyReader, TimedOperator, TimedParts, slices
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.graph import Node
from exactlyonce.pipeline.joins import AsOf, IntervalJoin, Joined, Lookup
from exactlyonce.pipeline.timed import Timed
from exactlyonce.state.backend import Table

J = TypeVar("J", IntervalJoin, AsOf)

LEFT, RIGHT = 0, 1
VERSIONS = END_OF_TIME
"""The slot of a key's versions, which is never due."""

State = tuple[list[Any], list[Any]]
"""The entries of the left side and of the right side, in one slot of one key; see `kept_state` of the joins."""


class Results(NamedTuple):
    """Results by columns."""

    records: Sequence[Any]
    times: Sequence[int]
    floors: Sequence[int] | None = None


_NONE = Results((), ())


@dataclass(slots=True)
class Joiner(Sides, TimedOperator[Results], Generic[J]):
    """The common part of the joins by time."""

    join: J
    read_keys: KeyReader

    @classmethod
    def made(cls, parts: TimedParts) -> Joiner[J]:
        node = parts.node
        return cls(node.id, parts.table, parts.groups, parts.max_parallelism, cast("J", node.timed), parts.read_keys)

    def _give(self, results: Sequence[Results]) -> None:
        records = list(chain.from_iterable(some.records for some in results))
        times = list(chain.from_iterable(some.times for some in results))
        floors = list(chain.from_iterable(some.floors or repeat(NO_FLOOR, len(some.times)) for some in results))
        none = bytes(4 * len(times))
        origins = Origins([self.id], [""], array("H", none[::2]), array("i", none), array("q", times))
        self.push(Batch(records, origins, times=times, floors=_or_none(floors)))


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
        entered_s = self.activity.enter(self.id)
        batch = self.in_time(batch, right=side == RIGHT)
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
        slots_of, get, key_of = self.table.slots_of, self.table.get, self.read_keys.one
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

    def _due(self) -> Iterator[Due[Results]]:
        for slot in self.table.slots(self.watermark):
            groups = self.table.groups(slot)
            for group in groups if any(self._alone) else ():
                keys, states = self.table.read(slot, group)
                for some in slices(len(keys)):
                    alone = [*self._without_partner(keys[some], states[some])]
                    yield Due(slot, len(alone), Results(alone, [slot] * len(alone)))
            self.table.drop(slot, groups)
            yield Due(slot, 0, _NONE)

    def _without_partner(self, keys: Sequence[bytes], states: Sequence[State]) -> Iterator[Joined[Any, Any, Any]]:
        (left_alone, right_alone), key_of = self._alone, self.read_keys.one
        for key, (lefts, rights) in zip(keys, states, strict=True):
            for _, has_partner, record in lefts if left_alone else ():
                if not has_partner:
                    yield Joined(key_of(key), record, None)
            for _, has_partner, record in rights if right_alone else ():
                if not has_partner:
                    yield Joined(key_of(key), None, record)


_place: Callable[[Any], Any] = itemgetter(0, 1, 2, 3)


Waiting = tuple[int, bytes, tuple[int, str, int, int, int, Any]]
"""(time, key, entry) of a left record."""
_SLOT_MS = (1 << 13) - 1
"""The bits of a time that the slot of a left record has all set: it ends some seconds later."""


def _bucket(time: int) -> int:
    """A quarter of a second, about."""
    return time >> 8


def _turn(waiting: Waiting) -> tuple[int, bytes, str, int, int]:
    """By time and key, then by topic, partition and offset, whatever the order of arrival."""
    time, key, (_, topic, partition, offset, _, _) = waiting
    return time, key, topic, partition, offset


def _waits(state: State | None, entry: tuple[int, str, int, int, int, Any]) -> State:
    state = ([], []) if state is None else state
    state[LEFT].append(entry)
    return state


def _versioned(state: State | None, versions: Sequence[Any]) -> State:
    return [] if state is None else state[LEFT], [*versions]


@dataclass(slots=True)
class AsOfJoiner(Joiner[AsOf]):
    """Left records wait in memory, by their times. For a restore, the table has them in slots of some seconds, which
    are cheap; those up to its watermark are over. A key's versions have a slot, by (time, topic, partition,
    offset).

    A late version counts for records above its floor alone, for the others may have gone. A version is dropped once a
    later one counts for every record that may still come, and a deletion once no earlier version may come.
    """

    _waiting: dict[int, list[Waiting]] = field(default_factory=dict, init=False)
    """By `_bucket` of their times."""

    def __post_init__(self) -> None:
        Joiner.__post_init__(self)
        table = self.table
        for slot in table.slots(VERSIONS - 1):
            for group in table.groups(slot):
                over = table.watermark(group)
                for key, (lefts, _) in zip(*table.read(slot, group), strict=True):
                    self._wait([key] * len(lefts), [entry for entry in lefts if entry[0] > over])

    def _wait(self, keys: Iterable[bytes], entries: Iterable[Any]) -> None:
        waiting = self._waiting
        for key, entry in zip(keys, entries, strict=False):
            time = entry[0]
            bucket = _bucket(time)
            if bucket in waiting:
                waiting[bucket].append((time, key, entry))
            else:
                waiting[bucket] = [(time, key, entry)]

    def left(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        batch, floors = self._in_time(batch, LEFT)
        times, keys = cast("list[int]", batch.times), cast("list[bytes]", batch.keys)
        count = len(times)
        late: tuple[Batch, list[bytes]] | None = None
        if times and not self.are_in_time(batch, min(times)):
            over = [time <= passed for time, passed in zip(times, self.passed(keys), strict=True)]
            gone = batch.where(over)
            late = gone.unkeyed(gone.records), cast("list[bytes]", gone.keys)
            stays = [not is_over for is_over in over]
            batch, floors = batch.where(stays), list(compress(floors, stays))
            times, keys = cast("list[int]", batch.times), cast("list[bytes]", batch.keys)
        entries = [
            (time, origin.topic() or "", origin.partition() or 0, origin.offset() or 0, floor, record)
            for time, origin, floor, record in zip(times, batch.origins, floors, batch.records, strict=True)
        ]
        for chunk in chunks(len(entries)):
            slots = [time | _SLOT_MS for time in times[chunk]]
            self.table.update(_waits, slots, keys[chunk], entries[chunk])
            self.activity.breathe()
        self._wait(keys, entries)
        self.activity.leave(self.id, entered_s, count)
        if late is not None:
            self._answer(*late)

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
            place = origin.topic() or "", origin.partition() or 0, origin.offset() or 0
            version = (time, *place, max(time, floor + 1), value)
            versions.insert(bisect_right(versions, _place(version), key=_place), version)
            if value is None:  # a slot without records, in which it is dropped
                ends[max(version[4] + keep_ms, self.watermark) + 1 | _SLOT_MS, key] = None
        needed = [_needed(versions, oldest) for versions in by_key.values()]
        self.table.update(_versioned, [VERSIONS] * len(needed), [*by_key], needed)
        self.table.update(_versioned, [slot for slot, _ in ends], [key for _, key in ends], [()] * len(ends))
        self.activity.leave(self.id, entered_s, len(times))

    def _in_time(self, batch: Batch, side: int) -> tuple[Batch, list[int]]:
        """*batch* without the records that are too late, and the floor of each late one that is left."""
        assert batch.times is not None
        if not batch.times or self.are_in_time(batch, min(batch.times)):
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
            Joined(key, record, value)
            for key, record, value in zip(self.read_keys(keys), late.records, values, strict=True)
        ]
        batch = late.of(answers)
        self.push(batch if self.join.how == "left" else batch.where([value is not None for value in values]))

    def _due(self) -> Iterator[Due[Results]]:
        watermark, versions = min(self.watermark, VERSIONS - 1), dict[bytes, list[Any]]()
        last = _bucket(watermark)
        for bucket in sorted(bucket for bucket in self._waiting if bucket <= last):
            due = self._waiting.pop(bucket)
            if rest := [entry for entry in due if entry[0] > watermark]:
                self._waiting[bucket] = rest
                due = [entry for entry in due if entry[0] <= watermark]
            due.sort(key=_turn)
            for some in slices(len(due)):
                results = self._answered(due[some], versions)
                yield Due(due[some][-1][0], len(results.records), results)
        # after a drain, a later run goes on after the last result, in the slot of that
        for slot in self.table.slots(self._last if self.drains else watermark):
            groups = self.table.groups(slot)
            for group in groups:
                for key in self.table.read(slot, group)[0]:
                    self._forget(key, watermark)
                yield Due(slot, 0, _NONE)
            self.table.drop(slot, groups)

    def _answered(self, due: Sequence[Waiting], versions: dict[bytes, list[Any]]) -> Results:
        """The results of records that are *due*; *versions* are those of keys, as far as they were read."""
        key_of, all_come = self.read_keys.one, self.join.how == "left"
        results: list[Any] = []
        times: list[int] = []
        floors: list[int] = []
        for time, key, (*_, floor, record) in due:
            if (known := versions.get(key)) is None:
                known = versions[key] = self._versions(key)
            value = _at(known, time)
            if all_come or value is not None:
                results.append(Joined(key_of(key), record, value))
                times.append(time)
                floors.append(floor)
        return Results(results, times, floors)

    def _forget(self, key: bytes, watermark: int) -> None:
        """Drop a deletion of *key* if no earlier version may come."""
        versions = self._versions(key)
        if versions and versions[-1][-1] is None and not _needed(versions, self._oldest(watermark)):
            self.table.put(VERSIONS, key, None)


def _at(versions: Sequence[Any], time: int) -> Any:
    """The value that counts at *time*."""
    for *_, since, value in reversed(versions):
        if since <= time:
            return value
    return None


def _needed(versions: list[Any], oldest: int) -> list[Any]:
    """The versions that count for any record from *oldest* on."""
    first = next((place for place in range(len(versions) - 1, -1, -1) if versions[place][4] <= oldest), 0)
    is_over = bool(versions) and versions[first][4] < oldest and versions[first][5] is None
    return versions[first + is_over :]


def _values(batch: Batch, *, changelog: bool) -> list[Any]:
    return [record.value for record in batch.records] if changelog else batch.records


@dataclass(slots=True)
class LookupJoiner(Sides, BatchOperator):
    """`lookup`: the last version of each key."""

    join: Lookup
    table: Table[Any]
    read_keys: KeyReader

    @classmethod
    def made(cls, node: Node, join: Lookup, table: Table[Any]) -> LookupJoiner:
        return cls(node.id, join, table, KeyReader(node.id, node.key_type))

    def left(self, batch: Batch) -> None:
        assert batch.keys is not None
        entered_s = self.activity.enter(self.id)
        values = list(map(self.table.get, batch.keys))
        joined = batch.unkeyed(list(map(Joined, self.read_keys(batch.keys), batch.records, values)))
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
