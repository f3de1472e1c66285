"""Join operators: they keep the records of two sides by key, and give those that belong together.

Invariants: the results are a function of times and floors, whatever came first, unless an input was idle. A pair is
given once, when the later of both arrives; a record without a partner, once the watermark says that none can come.
`LookupJoiner` goes by arrival. The pairs of a window and key come in the order of their left records, then of their
right ones, each by (time, topic, partition, offset).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice, product, repeat
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

from exactlyonce.engines.runtime.batch import Batch, coordinates_of, origins_of
from exactlyonce.engines.runtime.operators import BatchOperator, Sides, chunks
from exactlyonce.engines.runtime.ordering import UNWRITTEN_MAX, HeldEntries
from exactlyonce.engines.runtime.timed_operators import (
    SLICE_KEYS,
    Due,
    KeyReader,
    TimedOperator,
    TimedParts,
    nothing_at,
)
from exactlyonce.engines.runtime.window_operators import (
    HoppingWindows,
    SessionWindows,
    TumblingWindows,
    WindowOperator,
    WindowResults,
)
from exactlyonce.pipeline.aggregates import Accumulator
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.graph import Node
from exactlyonce.pipeline.joins import AsOf, IntervalJoin, Joined, Lookup, Pair, WindowJoin
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.windows import Hopping, Session, Tumbling
from exactlyonce.state.backend import Table
from exactlyonce.state.batches import append_each

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


@dataclass(slots=True)
class Joiner(Sides, TimedOperator[Results], Generic[J]):
    """The common part of the joins by time."""

    join: J
    read_keys: KeyReader

    @classmethod
    def made(cls, parts: TimedParts) -> Joiner[J]:
        return cls(*parts.shared, cast("J", parts.node.timed), parts.read_keys)

    def _give(self, results: Sequence[Results]) -> None:
        records = list(chain.from_iterable(some.records for some in results))
        times = list(chain.from_iterable(some.times for some in results))
        floors = list(chain.from_iterable(some.floors or repeat(NO_FLOOR, len(some.times)) for some in results))
        origins = origins_of(self.id, [0] * len(times), times)
        self.push(Batch(records, origins, times=times, floors=_or_none(floors)))


def _or_none(floors: list[int]) -> list[int] | None:
    return None if floors.count(NO_FLOOR) == len(floors) else floors


Entry = tuple[int, bool, Any]
"""(time, whether it has a partner, record)."""
Partner = tuple[int, Any]
"""(time, record)."""
_time: Callable[[Partner], int] = itemgetter(0)
Segments = defaultdict[int, list[bytes]]


def _between(entries: Any, earliest: int, latest: int) -> list[Partner]:
    """Those of *entries*, of a value of `IntervalJoiner._unwritten` or None, from *earliest* to *latest*."""
    if entries is None:
        return []
    several: list[Partner] = [entries] if type(entries) is tuple else entries
    begin = bisect_left(several, earliest, key=_time)
    return several[begin : bisect_right(several, latest, begin, key=_time)]


def _with_left(state: State | None, entry: Entry) -> State:
    if state is None:
        return [entry], []
    state[LEFT].append(entry)
    return state


def _with_right(state: State | None, entry: Entry) -> State:
    if state is None:
        return [], [entry]
    state[RIGHT].append(entry)
    return state


def _with_partner(state: State | None, place: tuple[int, int]) -> State:
    """The entry at *place*, (side, index), has a partner."""
    side, index = place
    entries = cast("State", state)[side]
    time, _, record = entries[index]
    entries[index] = time, True, record
    return cast("State", state)


@dataclass(slots=True)
class IntervalJoiner(Joiner[IntervalJoin]):
    """The slot of an entry is the last moment at which a partner may come.

    It is exact for entries that come out alone then. The others share slots of a quarter of the interval: it makes no
    difference how much longer they are kept. These are in memory alone at first, by key and by segments of time, and
    most have gone before the next barrier. The table has them once there is one, or there are too many.
    """

    _bounds: tuple[tuple[int, int], tuple[int, int]] = field(init=False)
    """By side: the bounds of a partner's time less the own."""
    _after: tuple[int, int] = field(init=False)
    """By side: the time after an entry at which the last partner may come."""
    _alone: tuple[bool, bool] = field(init=False)
    """By side: whether entries without a partner come out."""
    _width: tuple[int, int] = field(init=False)
    """By side: the width of slots."""
    _unwritten: tuple[dict[bytes, Any], dict[bytes, Any]] = field(init=False)
    """By side and key: the entry that the table does not have, or a list of several, by time."""
    _segments: tuple[Segments, Segments] = field(init=False)
    """By side: the keys of these, by the time divided by `_segment_ms`."""
    _segment_ms: int = field(init=False)
    _count_unwritten: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        Joiner.__post_init__(self)
        join = self.join
        self._bounds = (join.earliest_ms, join.latest_ms), (-join.latest_ms, -join.earliest_ms)
        self._after = join.left_ms, join.right_ms
        self._alone = join.how in ("left", "full"), join.how in ("right", "full")
        shared = max(1, (join.latest_ms - join.earliest_ms) // 4)
        left, right = self._alone
        self._width = 1 if left else shared, 1 if right else shared
        self._segment_ms = max(1, shared // 8)
        self._clear()

    def _clear(self) -> None:
        self._unwritten, self._segments, self._count_unwritten = ({}, {}), (Segments(list), Segments(list)), 0

    def left(self, batch: Batch) -> None:
        self._take(batch, LEFT)

    def right(self, batch: Batch) -> None:
        self._take(batch, RIGHT)

    def _take(self, batch: Batch, side: int) -> None:
        entered_s, count = self.activity.enter(self.id), len(batch.records)
        batch = self.in_time(batch, right=side == RIGHT)
        assert batch.keys is not None
        assert batch.times is not None
        places: list[int] = []
        partners: list[Partner] = []
        for chunk in chunks(len(batch.records)):
            self._match(batch.keys[chunk], batch.times[chunk], side, chunk.start, places, partners)
            self.activity.breathe()
        if self._alone[side]:
            self._write(side, batch.keys, batch.times, batch.records, set(places))
        else:
            self._keep(batch.keys, batch.times, batch.records, side)
        self.activity.leave(self.id, entered_s, count)
        if places:
            self.push(self._pairs(batch, places, partners, side))

    def _match(
        self, keys: Sequence[bytes], times: Sequence[int], side: int, start: int, places: list[int],
        partners: list[Partner],
    ) -> None:  # fmt: skip
        """Add each partner of the records of *side* to *partners*, and the place of the record, from *start* on, to
        *places*."""
        other, (low, high) = 1 - side, self._bounds[side]
        unwritten, written = self._unwritten[other], self.table.present(keys)
        for place, (key, time, entries) in enumerate(zip(keys, times, map(unwritten.get, keys), strict=True), start):
            if key in written:
                found = self._in_table(key, time, other) + _between(entries, time + low, time + high)
                found.sort(key=_time)  # within one time in order of arrival, wherever they were
                places += repeat(place, len(found))
                partners += found
            elif type(entries) is tuple:
                if low <= entries[0] - time <= high:
                    places.append(place)
                    partners.append(entries)
            elif entries is not None:
                found = _between(entries, time + low, time + high)
                places += repeat(place, len(found))
                partners += found

    def _in_table(self, key: bytes, time: int, side: int) -> list[Partner]:
        """The entries of *side* in the table that are partners of a record of the other side."""
        low, high = self._bounds[1 - side]
        first, last = time + low + self._after[side], time + high + self._after[side] + self._width[side] - 1
        slots, found = self.table.slots_of(key), list[Partner]()
        for slot in slots[bisect_left(slots, first) : bisect_right(slots, last)]:
            found += self._match_in_slot(slot, key, side, time + low, time + high)
        return found

    def _match_in_slot(self, slot: int, key: bytes, side: int, earliest: int, latest: int) -> list[Partner]:
        """The entries of *side* in a slot from *earliest* to *latest*; they have a partner now."""
        entries = cast("State", self.table.get(slot, key))[side]
        near = [index for index, entry in enumerate(entries) if earliest <= entry[0] <= latest]
        partners = [(entries[index][0], entries[index][2]) for index in near]
        if self._alone[side] and (alone := [index for index in near if not entries[index][1]]):
            self.table.update(_with_partner, [slot] * len(alone), [key] * len(alone), [(side, at) for at in alone])
        return partners

    def _keep(self, keys: Sequence[bytes], times: Sequence[int], records: Sequence[Any], side: int) -> None:
        unwritten, segments, segment_ms = self._unwritten[side], self._segments[side], self._segment_ms
        kept = unwritten.setdefault
        for key, entry in zip(keys, zip(times, records, strict=True), strict=True):
            entries = kept(key, entry)
            if entries is entry:
                continue
            if type(entries) is tuple:
                entries = unwritten[key] = [entries]
            if entries[-1][0] <= entry[0]:
                entries.append(entry)
            else:
                insort(entries, entry, key=_time)
        append_each(segments, [time // segment_ms for time in times], keys)
        self._count_unwritten += len(keys)
        if self._count_unwritten > UNWRITTEN_MAX:
            self._flush()

    def _over(self, side: int) -> int:
        """Entries up to here are over: no partner of theirs can come any more."""
        return (self._fired if self.drains else self.watermark) - self._after[side]

    def _drop_over(self) -> None:
        """Drop the unwritten entries of the segments that are over. A key may have later ones since it was named."""
        for side, segments in enumerate(self._segments):
            over, unwritten = self._over(side), self._unwritten[side]
            for number in [number for number in segments if (number + 1) * self._segment_ms <= over]:
                keys = segments.pop(number)
                gone = list(map(unwritten.pop, keys, repeat(None)))
                self._count_unwritten -= len(gone) - gone.count(None)
                may_stay = [one is not None and (type(one) is list or one[0] > over) for one in gone]
                for key, entries in compress(zip(keys, gone, strict=True), may_stay):
                    several = entries if type(entries) is list else [entries]
                    left = several[bisect_right(several, over, key=_time) :]
                    self._count_unwritten -= len(several) - 1 - len(left)
                    if left:
                        unwritten[key] = left

    def settle(self) -> None:
        Joiner.settle(self)
        self._flush()

    def _flush(self) -> None:
        """Bring the entries into the table that it does not have."""
        self._drop_over()
        for side, unwritten in enumerate(self._unwritten):
            over = self._over(side)
            pairs = [
                (key, entry)
                for key, entries in unwritten.items()
                for entry in ((entries,) if type(entries) is tuple else entries)
                if entry[0] > over
            ]
            entries = [entry for _, entry in pairs]
            self._write(side, [key for key, _ in pairs], [time for time, _ in entries], [one for _, one in entries], ())
        self._clear()

    def _write(
        self, side: int, keys: Sequence[bytes], times: Sequence[int], records: Sequence[Any], paired: Collection[int]
    ) -> None:
        """Bring entries into the table; those at the places *paired* have a partner."""
        after, width = self._after[side], self._width[side]
        slots = [-(-(time + after) // width) * width for time in times]
        entries = list(zip(times, map(paired.__contains__, range(len(times))), records, strict=True))
        self.table.update(_with_right if side else _with_left, slots, keys, entries)

    def _pairs(self, batch: Batch, places: Sequence[int], partners: Sequence[Partner], side: int) -> Batch:
        """The pairs of the records of *batch* at *places*, one with each of the *partners*."""
        assert batch.keys is not None
        assert batch.times is not None
        keys = self.read_keys([batch.keys[place] for place in places])
        own, (ats, theirs) = [batch.records[place] for place in places], zip(*partners, strict=True)
        times = [max(batch.times[place], at) for place, at in zip(places, ats, strict=True)]
        pairs = list(map(Joined, keys, *((theirs, own) if side else (own, theirs))))
        return Batch(pairs, [batch.origins[place] for place in places], times=times)

    def _due(self) -> Iterator[Due[Results]]:
        if self.drains:  # a later run goes on after the last record
            self._flush()
        self._drop_over()
        for slot in self.table.slots(self.watermark):
            groups = self.table.groups(slot)
            for group in groups if any(self._alone) else ():
                keys, states = self.table.read(slot, group)
                for some in self._steps(len(keys)):
                    own, alone = keys[some], [*self._without_partner(keys[some], states[some])]
                    yield Due(slot, len(alone), Results(alone, [slot] * len(alone)), len(own), group, own)
                self.table.drop(slot, (group,))
            self.table.drop(slot, groups)
            yield nothing_at(slot, 0 if any(self._alone) else 1)

    def _without_partner(self, keys: Sequence[bytes], states: Sequence[State]) -> Iterator[Joined[Any, Any, Any]]:
        (left_alone, right_alone), key_of = self._alone, self.read_keys.one
        for key, (lefts, rights) in zip(keys, states, strict=True):
            for _, has_partner, record in lefts if left_alone else ():
                if not has_partner:
                    yield Joined(key_of(key), record, None)
            for _, has_partner, record in rights if right_alone else ():
                if not has_partner:
                    yield Joined(key_of(key), None, record)


_version_turn: Callable[[Any], Any] = itemgetter(0, 1, 2, 3)
"""By time, topic, partition and offset."""
EarlyLeft = tuple[int, bytes, str, int, int, int, Any]
"""(time, key, topic, partition, offset, floor, record) of a left record."""
_turn: Callable[[EarlyLeft], Any] = itemgetter(0, 1, 2, 3, 4)
"""By time and key, then by topic, partition and offset, whatever the order of arrival."""
_SLOT_MS = (1 << 13) - 1
"""The bits of a time that the slot in which a deletion is dropped has all set: it ends some seconds later."""


def _lefts(state: State) -> list[EarlyLeft]:
    return state[LEFT]


def _with_lefts(state: State | None, lefts: list[EarlyLeft]) -> State:
    return [*lefts], [] if state is None else state[RIGHT]


def _versioned(state: State | None, versions: Sequence[Any]) -> State:
    return [] if state is None else state[LEFT], [*versions]


@dataclass(slots=True)
class AsOfJoiner(Joiner[AsOf]):
    """Left records are `HeldEntries`. A key's versions have a slot, by (time, topic, partition, offset).

    A late version counts for records above its floor alone, for the others may have gone. A version is dropped once a
    later one counts for every record that may still come, and a deletion once no earlier version may come.
    """

    _held: HeldEntries[EarlyLeft] = field(init=False)

    def __post_init__(self) -> None:
        Joiner.__post_init__(self)
        self._held = HeldEntries(self.table, self.max_parallelism, _turn, _lefts, _with_lefts)

    def left(self, batch: Batch) -> None:
        entered_s, count = self.activity.enter(self.id), len(batch.records)
        batch, floors = self._in_time(batch, LEFT)
        late: tuple[Batch, list[bytes]] | None = None
        times, keys = cast("list[int]", batch.times), cast("list[bytes]", batch.keys)
        if times and not self.are_in_time(batch, min(times)):
            over = [time <= passed for time, passed in zip(times, self.passed(keys), strict=True)]
            gone = batch.where(over)
            late = gone.unkeyed(gone.records), cast("list[bytes]", gone.keys)
            stays = [not is_over for is_over in over]
            batch, floors = batch.where(stays), list(compress(floors, stays))
        self._wait(batch, floors)
        self.activity.leave(self.id, entered_s, count)
        if late is not None:
            self._answer(*late)

    def _wait(self, batch: Batch, floors: Sequence[int]) -> None:
        assert batch.times is not None
        assert batch.keys is not None
        columns = batch.times, batch.keys, *coordinates_of(batch.origins), floors, batch.records
        self._held.add(list(zip(*columns, strict=True)))

    def settle(self) -> None:
        self._held.settle()

    def right(self, batch: Batch) -> None:
        entered_s, count = self.activity.enter(self.id), len(batch.records)
        batch, floors = self._in_time(batch, RIGHT)
        times, keys = cast("list[int]", batch.times), cast("list[bytes]", batch.keys)
        values = _values(batch, changelog=self.join.changelog)
        keep_ms, oldest = self.join.keep_ms, self._oldest(self._fired)
        by_key = {key: [*versions] for key, versions in self._versions(keys).items()}
        ends: dict[tuple[int, bytes], None] = {}
        since = [max(time, floor + 1) for time, floor in zip(times, floors, strict=True)]
        arrived = zip(times, *coordinates_of(batch.origins), since, values, strict=True)
        for key, version in zip(keys, arrived, strict=True):
            versions = by_key[key]
            versions.insert(bisect_right(versions, _version_turn(version), key=_version_turn), version)
            if version[5] is None:  # a slot without records, in which it is dropped
                ends[max(version[4] + keep_ms, self.watermark) + 1 | _SLOT_MS, key] = None
        needed = [_needed(versions, oldest) for versions in by_key.values()]
        self.table.update(_versioned, [VERSIONS] * len(needed), [*by_key], needed)
        self.table.update(_versioned, [slot for slot, _ in ends], [key for _, key in ends], [()] * len(ends))
        self.activity.leave(self.id, entered_s, count)

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

    def _versions(self, keys: Iterable[bytes]) -> dict[bytes, Sequence[Any]]:
        """The versions of each of *keys*, once."""
        own = [*dict.fromkeys(keys)]
        states = self.table.get_all(VERSIONS, own)
        return dict(zip(own, [() if state is None else state[RIGHT] for state in states], strict=True))

    def _oldest(self, watermark: int) -> int:
        """The earliest time of a record that may still come, at *watermark*."""
        return max(watermark, NO_WATERMARK + self.join.keep_ms) - self.join.keep_ms + 1

    def _answer(self, late: Batch, keys: Sequence[bytes]) -> None:
        """Give results for *late* records, whose time is over."""
        assert late.times is not None
        values = list(map(_at, map(self._versions(keys).__getitem__, keys), late.times))
        answers = [
            Joined(key, record, value)
            for key, record, value in zip(self.read_keys(keys), late.records, values, strict=True)
        ]
        batch = late.of(answers)
        self.push(batch if self.join.how == "left" else batch.where([value is not None for value in values]))

    def _due(self) -> Iterator[Due[Results]]:
        watermark, known = min(self.watermark, VERSIONS - 1), dict[bytes, tuple[Any, Sequence[Any]]]()
        for due in self._held.due(watermark, self._steps):
            results = self._answered(due, known)
            yield Due(due[-1][0], len(results.records), results, len(due))
        # after a drain, a later run goes on after the last result, in the slot of that
        over = self._last if self.drains else watermark
        self.table.advance(over)
        for slot in self.table.slots(over):
            groups = self.table.groups(slot)
            for group in groups:
                for key in self.table.read(slot, group)[0]:
                    self._forget(key, watermark)
                self.table.drop(slot, (group,))
                yield nothing_at(slot)

    def _answered(self, due: Sequence[EarlyLeft], known: dict[bytes, tuple[Any, Sequence[Any]]]) -> Results:
        """The results of records that are *due*. *known* are keys that were read, each with its versions."""
        times, keys, *_, floors, records = zip(*due, strict=True)
        versions = self._versions(set(keys).difference(known))
        known.update(zip(versions, zip(self.read_keys([*versions]), versions.values(), strict=True), strict=True))
        own, versions_of = zip(*map(known.__getitem__, keys), strict=True)
        values = list(map(_at, versions_of, times))
        results = list(map(Joined, own, records, values))
        if self.join.how == "left":
            return Results(results, times, floors)
        has_version = [value is not None for value in values]
        return Results(*(list(compress(column, has_version)) for column in (results, times, floors)))

    def _forget(self, key: bytes, watermark: int) -> None:
        """Drop a deletion of *key* if no earlier version may come."""
        versions = self._versions([key])[key]
        if versions and versions[-1][-1] is None and not _needed(versions, self._oldest(watermark)):
            self.table.put(VERSIONS, key, None)


def _at(versions: Sequence[Any], time: int) -> Any:
    """The value that counts at *time*."""
    for version in reversed(versions):
        if version[4] <= time:
            return version[5]
    return None


def _needed(versions: Sequence[Any], oldest: int) -> Sequence[Any]:
    """The versions that count for any record from *oldest* on."""
    first = next((place for place in range(len(versions) - 1, -1, -1) if versions[place][4] <= oldest), 0)
    is_over = bool(versions) and versions[first][4] < oldest and versions[first][5] is None
    return versions[first + is_over :]


def _values(batch: Batch, *, changelog: bool) -> list[Any]:
    return [record.value for record in batch.records] if changelog else batch.records


class Lookups(Sides, BatchOperator):
    """`lookup`: the last version of each key."""

    __slots__ = ()
    join: Lookup
    read_keys: KeyReader

    def left(self, batch: Batch) -> None:
        assert batch.keys is not None
        entered_s = self.activity.enter(self.id)
        values = self._found(batch)
        joined = batch.unkeyed(list(map(Joined, self.read_keys(batch.keys), batch.records, values)))
        self.activity.leave(self.id, entered_s, len(values))
        self.push(joined if self.join.how == "left" else joined.where([value is not None for value in values]))

    def right(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        self._keep(batch, _values(batch, changelog=self.join.changelog))
        self.activity.leave(self.id, entered_s, 0)

    def _found(self, batch: Batch) -> Sequence[Any]:
        """The version of the key of each left record."""
        raise NotImplementedError

    def _keep(self, batch: Batch, values: Sequence[Any]) -> None:
        """Keep *values*, the versions that the right records of *batch* bring."""
        raise NotImplementedError


@dataclass(slots=True)
class LookupJoiner(Lookups):
    """`lookup` without ``ttl=``."""

    join: Lookup
    table: Table[Any]
    read_keys: KeyReader

    @classmethod
    def made(cls, node: Node, join: Lookup, table: Table[Any]) -> LookupJoiner:
        return cls(node.id, join, table, KeyReader(node.id, node.key_type))

    def _found(self, batch: Batch) -> Sequence[Any]:
        assert batch.keys is not None
        return list(map(self.table.get, batch.keys))

    def _keep(self, batch: Batch, values: Sequence[Any]) -> None:
        assert batch.keys is not None
        self.table.apply(replaced, batch.keys, values)


def replaced(_: Any, value: Any) -> tuple[Any, None]:
    """*value* in place of what was there, without an output."""
    return value, None


WindowEntry = tuple[int, str, int, int, Any]
"""(time, topic, partition, offset, record)."""
WindowState = tuple[list[WindowEntry], list[WindowEntry]]
"""The entries of the left side and of the right side, in order of arrival."""
_window_turn = itemgetter(0, 1, 2, 3)
_record_of = itemgetter(4)


def _with(state: WindowState | None, given: tuple[int, WindowEntry]) -> WindowState:
    side, entry = given
    state = ([], []) if state is None else state
    state[side].append(entry)
    return state


def _merged(one: WindowState, other: WindowState) -> WindowState:
    return [*one[LEFT], *other[LEFT]], [*one[RIGHT], *other[RIGHT]]


def _copied(state: WindowState) -> WindowState:
    return [*state[LEFT]], [*state[RIGHT]]


_NOTHING = WindowResults(0, 0, (), (), ())
_BOTH_SIDES = Accumulator(state=WindowState, value=Pair, add=_with, merge=_merged)


@dataclass(slots=True)
class WindowJoiner(Sides, WindowOperator[Any]):
    """The common part of the operators, one for each kind of window."""

    how: str = field(kw_only=True)

    @classmethod
    def made(cls, parts: TimedParts) -> WindowJoiner:
        join = parts.node.timed
        assert isinstance(join, WindowJoin)
        return _OF_WINDOW[type(join.window)](
            *parts.shared,
            join.window,
            _BOTH_SIDES,
            parts.read_keys,
            _copied,
            how=join.how,
        )

    def left(self, batch: Batch) -> None:
        self(batch)

    def right(self, batch: Batch) -> None:
        self(batch, right=True)

    def _given(self, batch: Batch, *, right: bool) -> Sequence[Any]:
        assert batch.times is not None
        entries = zip(batch.times, *coordinates_of(batch.origins), batch.records, strict=True)
        return list(zip(repeat(RIGHT if right else LEFT), entries, strict=False))

    def _slices(
        self, last: int, group: int, starts: Sequence[int], keys: Sequence[bytes], states: Sequence[WindowState]
    ) -> Iterator[Due[WindowResults]]:
        pairs = (
            (start, key, pair)
            for start, key, state in zip(starts, keys, states, strict=True)
            for pair in self._pairs(state)
        )
        ahead = next(pairs, None)
        while ahead is not None:
            some = [ahead, *islice(pairs, min(SLICE_KEYS, self._size) - 1)]
            ahead = next(pairs, None)
            own = [key for _, key, _ in some]
            results = WindowResults(group, last, *zip(*some, strict=True))
            yield Due(last, len(some), results, len(some), group, own, ahead is None or ahead[1] != own[-1])
        yield Due(last, 0, _NOTHING, 0, group)

    def _pairs(self, state: WindowState) -> Iterator[Pair[Any, Any]]:
        lefts, rights = (list(map(_record_of, sorted(entries, key=_window_turn))) for entries in state)
        if not rights and self.how in ("left", "full"):
            rights = [None]
        if not lefts and self.how in ("right", "full"):
            lefts = [None]
        return (Pair(left, right) for left, right in product(lefts, rights))


@dataclass(slots=True)
class TumblingJoiner(WindowJoiner, TumblingWindows):
    """See `TumblingWindows`."""


@dataclass(slots=True)
class HoppingJoiner(WindowJoiner, HoppingWindows):
    """See `HoppingWindows`."""


@dataclass(slots=True)
class SessionJoiner(WindowJoiner, SessionWindows):
    """See `SessionWindows`."""


_OF_WINDOW: dict[type[Timed], type[WindowJoiner]] = {
    Tumbling: TumblingJoiner, Hopping: HoppingJoiner, Session: SessionJoiner,
}  # fmt: skip

OPERATORS: dict[type[Timed], type[TimedOperator[Any]]] = {
    IntervalJoin: IntervalJoiner, AsOf: AsOfJoiner, WindowJoin: WindowJoiner,
}  # fmt: skip
