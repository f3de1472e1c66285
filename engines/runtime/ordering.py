"""Operators that hold records until no earlier one can come: `in_order`, and `deduplicate`.

Invariants: in order of time, the results are a function of the inputs: whether a record is held depends on its time and
floor alone, and held records are given once, by (time, key group, key, topic, partition, offset). What has expired
leaves no state, and no word about it in a checkpoint. A held record is either in memory or in the table: there it is
since a barrier, or since there were too many. Most are due before the next barrier.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, Generic, TypeVar

from exactlyonce.engines.runtime.batch import Batch, Coordinates, coordinates_of
from exactlyonce.engines.runtime.operators import chunks
from exactlyonce.engines.runtime.timed_operators import Due, TimedOperator, TimedParts
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.pipeline.timed import Deduplicate, InOrder, Timed

T = TypeVar("T", bound=tuple[Any, ...])

UNWRITTEN_MAX = 40_000
"""The most records that are in memory alone, and not in the table, but for those of a batch: a barrier waits until they
are written."""
_BUCKET_BITS = 8


def bucket_end(time: int) -> int:
    """The last ms of the bucket of *time*, which has about a quarter of a second.

    >>> bucket_end(0), bucket_end(255), bucket_end(256), bucket_end(-1)
    (255, 255, 511, -1)
    """
    return time | (1 << _BUCKET_BITS) - 1


class Waiting(Generic[T]):
    """Entries that begin with their time, in ms."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[T]] = {}
        """By the end of the bucket; in order of arrival."""
        self._ends: list[int] = []
        """Ascending."""
        self._count = 0

    @property
    def too_many(self) -> bool:
        """Whether they are to be written before the next barrier."""
        return self._count > UNWRITTEN_MAX

    @property
    def last(self) -> list[int]:
        """The latest time, if there is any."""
        return [max(entry[0] for entry in self._buckets[end]) for end in self._ends[-1:]]

    def add(self, entries: Collection[T]) -> None:
        buckets, rest = self._buckets, (1 << _BUCKET_BITS) - 1
        for entry in entries:
            end = entry[0] | rest
            if end in buckets:
                buckets[end].append(entry)
            else:
                buckets[end] = [entry]
                insort(self._ends, end)
        self._count += len(entries)

    def ends(self, limit: int) -> list[int]:
        """The ends of the buckets that may have entries up to *limit*, each at most that."""
        return [min(end, limit) for end in self._ends[: bisect_right(self._ends, bucket_end(limit))]]

    def take(self, end: int) -> list[T]:
        """Take out the entries up to *end* of its bucket, in order of arrival."""
        bucket = bucket_end(end)
        entries = self._buckets.get(bucket, [])
        due = entries if end == bucket else [entry for entry in entries if entry[0] <= end]
        self._count -= len(due)
        if len(due) < len(entries):
            self._buckets[bucket] = [entry for entry in entries if entry[0] > end]
        elif entries:
            del self._buckets[bucket], self._ends[bisect_left(self._ends, bucket)]
        return due

    def take_all(self) -> list[T]:
        """Take out all entries; within a bucket they are in order of arrival."""
        entries = list(chain.from_iterable(self._buckets.values()))
        self._buckets, self._ends, self._count = {}, [], 0
        return entries


Held = tuple[str, int, int, Any]
"""The topic, partition and offset of a record, and the record."""
held_turn = itemgetter(0, 1, 2)
"""By topic, partition and offset."""
Early = tuple[int, bytes, str, int, int, Any]
"""The time, key, topic, partition and offset of a record, and the record."""


def hold(operator: TimedOperator[Any], batch: Batch, add: Callable[[Any, Held], Any]) -> None:
    """Keep the records of *batch* in the slots of their times, each by *add* to what is kept there of its key."""
    assert batch.times is not None
    assert batch.keys is not None
    held = list(zip(*coordinates_of(batch.origins), batch.records, strict=True))
    for chunk in chunks(len(held)):
        operator.table.update(add, batch.times[chunk], batch.keys[chunk], held[chunk])
        operator.activity.breathe()


@dataclass(slots=True)
class Sorter(TimedOperator[Sequence[Early]]):
    """`in_order`: an entry is a list of held records, whose time is the slot."""

    _waiting: Waiting[Early] = field(default_factory=Waiting, init=False)
    _begun: Sequence[Early] = field(default=(), init=False)
    """The records of the bucket that a firing is at, in their order."""
    _count_begun: int = field(default=0, init=False)
    """How many of them were given."""

    @classmethod
    def made(cls, parts: TimedParts) -> Sorter:
        return cls(*parts.shared)

    def __call__(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        self._take(self.in_time(batch))
        self.activity.leave(self.id, entered_s, len(batch.records))

    def _take(self, batch: Batch) -> None:
        assert batch.times is not None
        assert batch.keys is not None
        columns = batch.times, batch.keys, *coordinates_of(batch.origins), batch.records
        self._waiting.add(list(zip(*columns, strict=True)))
        if self._waiting.too_many:
            self.settle()

    def settle(self) -> None:
        if self._count_begun:
            self._settle_begun()
        self._hold(self._waiting.take_all())

    def _hold(self, early: Sequence[Early]) -> None:
        """Bring *early* into the table."""
        slots, keys = [one[0] for one in early], [one[1] for one in early]
        self.table.update(self._with, slots, keys, [one[2:] for one in early])

    def _settle_begun(self) -> None:
        """Of the bucket that was begun, the table holds those records that were not given."""
        table, left = self.table, self._begun[self._count_begun :]
        for slot, key in dict.fromkeys(one[:2] for one in self._begun):
            if (entry := table.get(slot, key)) is not None:
                table.put(slot, key, self._without_held(entry))
        self._hold(left)
        self.table.advance(self._begun[self._count_begun - 1][0] - 1)

    def _due(self) -> Iterator[Due[Sequence[Early]]]:
        table, waiting = self.table, self._waiting
        limit = self._last_held() if self.drains else self.watermark  # the next run remembers what was given before
        stored = {min(bucket_end(slot), limit) for slot in table.slots(limit)}
        for end in sorted({*stored, *waiting.ends(limit)}):
            early = self._in_turn([*chain.from_iterable(map(self._read, table.slots(end))), *waiting.take(end)])
            self._begun = early
            for some in self._steps(len(early)):
                given, self._count_begun = self._given_of(early[some]), some.stop
                yield Due(early[some][-1][0], len(given), given, some.stop - some.start)
            table.drop(end, {group for slot in table.slots(end) for group in table.groups(slot)})
            table.advance(end)
            self._begun, self._count_begun = (), 0
        self._end(limit)

    def _in_turn(self, early: Sequence[Early]) -> Sequence[Early]:
        """*early* by time, key group, key, topic, partition and offset; of one place, in order of arrival."""
        if not early:
            return early
        times, keys, topics, partitions, offsets, _ = zip(*early, strict=True)
        turns = list(zip(times, key_groups(keys, self.max_parallelism), keys, topics, partitions, offsets, strict=True))
        return [early[place] for place in sorted(range(len(early)), key=turns.__getitem__)]

    def _last_held(self) -> int:
        """The time of the last held record; `NO_WATERMARK`: there is none."""
        slots = self.table.slots(END_OF_TIME)
        while slots and not self._read(slots[-1]):
            slots.pop()
        return max([NO_WATERMARK, *slots[-1:], *self._waiting.last])

    def _read(self, slot: int) -> list[Early]:
        """The held records of *slot* in the table."""
        early: list[Early] = []
        for group in self.table.groups(slot):
            for key, entry in zip(*self.table.read(slot, group), strict=True):
                early += [(slot, key, *held) for held in self._held(entry)]
        return early

    def _give(self, results: Sequence[Sequence[Early]]) -> None:
        times, _, topics, partitions, offsets, records = zip(*chain.from_iterable(results), strict=True)
        origins = list(map(Coordinates, topics, partitions, offsets))
        self.push(Batch(list(records), origins, times=list(times)))

    @staticmethod
    def _with(entry: list[Held] | None, held: Held) -> Any:
        if entry is None:
            return [held]
        entry.append(held)
        return entry

    @staticmethod
    def _held(entry: Any) -> Iterable[Held]:
        """The held records of an entry."""
        return entry  # type: ignore[no-any-return]  # it is

    @staticmethod
    def _without_held(entry: Any) -> Any:
        """*entry* without held records; None: nothing is left."""
        return None

    def _given_of(self, early: Sequence[Early]) -> Sequence[Early]:
        """The records to give of those that are due next."""
        return early

    def _end(self, limit: int) -> None:
        """A firing has ended with the slot *limit*."""


@dataclass(slots=True)
class Deduplicator(Sorter):
    """`deduplicate`: an entry is (time of a record that was given, or None; held records)."""

    spec: Deduplicate = field(kw_only=True)
    _last_given: dict[bytes, int] = field(default_factory=dict, init=False)
    """The time of the last record that was given before this firing or in it, by key; of the keys that are due."""
    _given_times: dict[bytes, int] = field(default_factory=dict, init=False)
    """The same of this firing alone. The table has it at a barrier, and at the end of the firing."""

    @classmethod
    def made(cls, parts: TimedParts) -> Deduplicator:
        spec = parts.node.timed
        assert isinstance(spec, Deduplicate)
        class_ = cls if spec.order == "time" else ArrivalDeduplicator
        return class_(*parts.shared, spec=spec)

    @staticmethod
    def _with(entry: Any, held: Held) -> Any:
        if entry is None:
            return (None, [held])
        entry[1].append(held)
        return entry

    @staticmethod
    def _held(entry: Any) -> Iterable[Held]:
        return entry[1]  # type: ignore[no-any-return]  # it is

    @staticmethod
    def _without_held(entry: Any) -> Any:
        return None if entry[0] is None else (entry[0], [])

    def _settle_begun(self) -> None:
        self._remember(min(map(self.table.watermark, self.groups), default=NO_WATERMARK))
        Sorter._settle_begun(self)

    def _given_of(self, early: Sequence[Early]) -> Sequence[Early]:
        last, given, within = self._last_given, self._given_times, self.spec.within_ms
        new = {one[1] for one in early}.difference(last)
        last.update(dict.fromkeys(new, NO_WATERMARK))
        for key in self.table.present(new):
            last[key] = self._remembered(key)
        first: list[Early] = []
        for one in early:
            time, key = one[0], one[1]
            if time - last[key] >= within:
                last[key] = given[key] = time
                first.append(one)
        return first

    def _remembered(self, key: bytes) -> int:
        """The time of the last record of *key* that was given; `NO_WATERMARK`: none is remembered."""
        times = (entry[0] for entry in self._entries(key))
        return max((time for time in times if time is not None), default=NO_WATERMARK)

    def _entries(self, key: bytes) -> Iterator[Any]:
        """What the table keeps of *key*."""
        entries = (self.table.get(slot, key) for slot in self.table.slots_of(key))
        return (entry for entry in entries if entry is not None)

    def _end(self, limit: int) -> None:
        self._remember(limit)
        self._last_given.clear()

    def _remember(self, limit: int) -> None:
        """The table has from now on which records were given, unless their slots end with *limit*."""
        kept = [(slot, key, time) for key, time in self._given_times.items() if (slot := self.spec.slot(time)) > limit]
        self._given_times.clear()
        if kept:
            self.table.update(_remembering, *zip(*kept, strict=True))


def _remembering(entry: Any, time: int) -> Any:
    return (time, [] if entry is None else entry[1])


@dataclass(slots=True)
class ArrivalDeduplicator(Deduplicator):
    """`deduplicate` in order of arrival: an entry is the time of a record that was given."""

    def _take(self, batch: Batch) -> None:
        assert batch.times is not None
        assert batch.keys is not None
        within, table = self.spec.within_ms, self.table
        kept: list[bool] = []
        times: dict[bytes, list[int]] = {key: [*self._entries(key)] for key in table.present(set(batch.keys))}
        for key, time in zip(batch.keys, batch.times, strict=True):
            before = times.setdefault(key, [])
            first = all(abs(time - other) >= within for other in before)
            kept.append(first)
            if first:
                before.append(time)
        given = batch.where(kept)
        assert given.times is not None
        assert given.keys is not None
        table.update(_latest, list(map(self.spec.slot, given.times)), given.keys, given.times)
        if given.records:
            self.push(given.unkeyed(given.records))

    @staticmethod
    def _held(entry: Any) -> Iterable[Held]:
        return ()


def _latest(entry: int | None, time: int) -> int:
    return time


OPERATORS: dict[type[Timed], type[Sorter]] = {InOrder: Sorter, Deduplicate: Deduplicator}
