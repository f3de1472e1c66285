"""Operators that hold records until no earlier one can come: `in_order`, and `deduplicate` in order of time.
`deduplicate` in order of arrival holds none.

Invariants: in order of time, the results are a function of the inputs: whether a record is held depends on its time and
floor alone, and held records are given once, by (time, key group, key, topic, partition, offset). What has expired
leaves no state, and no word about it in a checkpoint. Held records, and the times of given ones, are in memory; what a
barrier finds new is written in blocks, a few for each key group, which are only read by a restore.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, Generic, TypeVar, cast

import msgspec

from exactlyonce.engines.runtime.batch import Batch, coordinates_of, origins_at
from exactlyonce.engines.runtime.timed_operators import Due, TimedOperator, TimedParts
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.pipeline.timed import Deduplicate, InOrder, Timed
from exactlyonce.state.backend import TimedTable
from exactlyonce.state.batches import append_each

T = TypeVar("T", bound=tuple[Any, ...])

UNWRITTEN_MAX = 40_000
"""The most records that the table does not have, but for those of a batch: a barrier waits until they are written."""
GIVEN_MAX = 8_000
"""Likewise, of the keys of records that were given."""
STATE_BYTES_MAX, STATE_KEYS_MAX = 200_000, 2_000
"""The size of a state of several entries, and the keys of one of given records: a table takes 900,000 bytes."""
_BUCKET_BITS = 8
_BLOCK_BITS = 13
_SLOTS_MAX = 1_000
"""The states of a block that may begin with the same key, each in a slot after the last entry of the block."""


def bucket_end(time: int) -> int:
    """The last ms of the bucket of *time*, which has about a quarter of a second.

    >>> bucket_end(0), bucket_end(255), bucket_end(256), bucket_end(-1)
    (255, 255, 511, -1)
    """
    return time | (1 << _BUCKET_BITS) - 1


class Buckets(Generic[T]):
    """Entries that begin with their time, in ms."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[T]] = {}
        """By the end of the bucket; in order of arrival."""
        self._ends: list[int] = []
        """Ascending."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

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


class HeldEntries(Generic[T]):
    """Entries of (time in ms, key, and more) that wait for the watermark.

    The table has those that a barrier has found, too, in blocks: the entries of some seconds and a key group that it
    found new are one state, or more if they are large, below the key of the first, in the slot of the last of them or a
    later one. Those up to the watermark of the table are over.
    """

    def __init__(
        self,
        table: TimedTable[Any],
        max_parallelism: int,
        turn: Callable[[T], Any],
        entries_of: Callable[[Any], list[T]],
        with_entries: Callable[[Any, list[T]], Any],
        restored: Callable[[int, Any], None] = lambda slot, state: None,
    ) -> None:
        """Entries are given by their *turn*, which begins with the time; those of one turn in order of arrival.
        *entries_of* a state are those in it; *with_entries* is a state, or None, with other ones; None: it is empty.
        *restored* gets each slot and state of the table, by slot."""
        self._table, self._max_parallelism, self._turn = table, max_parallelism, turn
        self._entries_of, self._with_entries = entries_of, with_entries
        self._new, self._written = Buckets[T](), Buckets[T]()
        self._begun: list[T] = []
        """The entries of the bucket that a firing is at, in their order."""
        self._begun_new: list[T] = []
        """Those of them that the table does not have."""
        self._count_given = 0
        """How many of these were given."""
        for slot in table.slots(END_OF_TIME - 1):
            for group in table.groups(slot):
                over = table.watermark(group)
                for state in table.read(slot, group)[1]:
                    self._written.add([entry for entry in entries_of(state) if entry[0] > over])
                    restored(slot, state)

    @property
    def last(self) -> int:
        """The latest time; `NO_WATERMARK`: nothing waits."""
        return max([NO_WATERMARK, *self._new.last, *self._written.last])

    def add(self, entries: Collection[T]) -> None:
        self._new.add(entries)
        if len(self._new) > UNWRITTEN_MAX:
            self._flush()

    def due(self, limit: int, steps: Callable[[int], Iterator[slice]]) -> Iterator[list[T]]:
        """The entries up to *limit*, by buckets in slices: *steps* gives those of so many. A slice is given once it is
        taken from here."""
        for end in sorted({*self._written.ends(limit), *self._new.ends(limit)}):
            self._begun_new = self._new.take(end)
            self._begun = self._written.take(end) + self._begun_new
            self._begun.sort(key=self._turn)
            for some in steps(len(self._begun)):
                self._count_given = some.stop
                yield self._begun[some]
            self._begun, self._begun_new, self._count_given = [], [], 0

    def settle(self) -> None:
        """At a barrier: the table has exactly what waits, from now on."""
        if self._count_given:
            self._settle_begun()
        self._flush()

    def _flush(self) -> None:
        """Bring the entries into the table that it does not have, but for those of the bucket that was begun."""
        new = self._new.take_all()
        self._write(new)
        self._written.add(new)

    def _settle_begun(self) -> None:
        """Write the entries of the last given time that were not given; everything earlier is over."""
        table, left, last = self._table, self._begun[self._count_given :], self._begun[self._count_given - 1][0]
        for slot in table.slots((last | (1 << _BLOCK_BITS) - 1) + _SLOTS_MAX):
            for group in table.groups(slot) if slot >= last else ():
                for key, state in zip(*table.read(slot, group), strict=True):
                    entries = self._entries_of(state)
                    others = [entry for entry in entries if entry[0] != last]
                    if len(others) < len(entries):
                        table.put(slot, key, self._with_entries(state, others))
        new = set(map(id, self._begun_new))
        self._write([entry for entry in left if entry[0] == last or id(entry) in new])
        self._begun_new = []
        table.advance(last - 1)

    def _write(self, entries: Sequence[T]) -> None:
        """Bring *entries* into the table."""
        blocks: dict[tuple[int, int], list[T]] = {}
        latest: dict[int, int] = {}
        groups = key_groups([entry[1] for entry in entries], self._max_parallelism)
        for group, entry in zip(groups, entries, strict=True):
            time, block = entry[0], entry[0] >> _BLOCK_BITS
            latest[block] = max(time, latest.get(block, time))
            blocks.setdefault((block, group), []).append(entry)
        places: dict[tuple[int, bytes], list[T]] = {}
        for (block, _), own in blocks.items():
            for part in self._parts(own):
                slot, key, last = latest[block], part[0][1], latest[block] + _SLOTS_MAX
                while slot < last and ((slot, key) in places or self._table.get(slot, key) is not None):
                    slot += 1  # another part begins with this key
                places.setdefault((slot, key), []).extend(part)
        self._table.update(self._extended, [slot for slot, _ in places], [key for _, key in places], [*places.values()])

    def _parts(self, entries: list[T]) -> Iterator[list[T]]:
        """*entries* in parts that may each be a state."""
        if len(entries) == 1 or self._table.size(self._with_entries(None, entries)) <= STATE_BYTES_MAX:
            yield entries
        else:
            half = len(entries) // 2
            yield from self._parts(entries[:half])
            yield from self._parts(entries[half:])

    def _extended(self, state: Any, entries: list[T]) -> Any:
        return self._with_entries(state, entries if state is None else self._entries_of(state) + entries)


Early = tuple[int, bytes, int, str, int, int, Any]
"""The time, key, key group, topic, partition and offset of a record, and the record."""
_turn: Callable[[Early], Any] = itemgetter(0, 2, 1, 3, 4, 5)
"""By time, key group, key, topic, partition and offset."""


@dataclass(slots=True)
class Sorter(TimedOperator[Sequence[Early]]):
    """`in_order`: a state is a block of held records."""

    _held: HeldEntries[Early] = field(init=False)

    @classmethod
    def made(cls, parts: TimedParts) -> Sorter:
        return cls(*parts.shared)

    def __post_init__(self) -> None:
        TimedOperator.__post_init__(self)
        self._held = HeldEntries(
            self.table, self.max_parallelism, _turn, self._entries_of, self._with_entries, self._restored
        )

    def __call__(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        self._take(self.in_time(batch))
        self.activity.leave(self.id, entered_s, len(batch.records))

    def _take(self, batch: Batch) -> None:
        assert batch.times is not None
        assert batch.keys is not None
        groups = key_groups(batch.keys, self.max_parallelism)
        columns = batch.times, batch.keys, groups, *coordinates_of(batch.origins), batch.records
        self._held.add(list(zip(*columns, strict=True)))

    def settle(self) -> None:
        self._held.settle()

    def _due(self) -> Iterator[Due[Sequence[Early]]]:
        limit = self._held.last if self.drains else self.watermark  # the next run remembers what was given before
        for early in self._held.due(limit, self._steps):
            given = self._given_of(early)
            yield Due(early[-1][0], len(given), given, len(early))
        for slot in self.table.slots(limit):
            self.table.drop(slot, self.table.groups(slot))
        self._end(limit)

    def _give(self, results: Sequence[Sequence[Early]]) -> None:
        times, _, _, *places, records = zip(*chain.from_iterable(results), strict=True)
        self.push(Batch(list(records), origins_at(*places), times=list(times)))

    @staticmethod
    def _entries_of(state: Any) -> list[Early]:
        """The held records in a state."""
        return state  # type: ignore[no-any-return]  # it is

    @staticmethod
    def _with_entries(state: Any, early: list[Early]) -> Any:
        """*state*, or None, with *early* as its held records; None: it is empty."""
        return [*early] or None

    def _restored(self, slot: int, state: Any) -> None:
        """Take what a restored *state* has beside held records."""

    def _given_of(self, early: list[Early]) -> list[Early]:
        """The records to give of those that are due next."""
        return early

    def _end(self, limit: int) -> None:
        """A firing has ended, and all slots up to *limit*."""


Given = tuple[bytes, bytes]
"""A block of the keys of records that were given, an array in msgpack, and of their times, an int64 each."""
_encode = msgspec.msgpack.Encoder().encode
_decode_keys = msgspec.msgpack.Decoder(list[bytes]).decode


@dataclass(slots=True)
class Deduplicator(Sorter):
    """`deduplicate`: a state is `Given`, and a block of held records."""

    spec: Deduplicate = field(kw_only=True)
    _times: dict[bytes, Any] = field(default_factory=dict, init=False)
    """By key, the time of the last record that was given; see `ArrivalDeduplicator`. Some are over."""
    _new: tuple[list[int], list[bytes], list[int]] = field(default_factory=lambda: ([], [], []), init=False)
    """The key groups, keys and times of given records that the table does not have."""
    _written: dict[int, list[list[bytes]]] = field(default_factory=dict, init=False)
    """The keys of those that it has, by slot."""
    _over: int = field(default=NO_WATERMARK, init=False)
    """The slots up to here are over."""

    @classmethod
    def made(cls, parts: TimedParts) -> Deduplicator:
        spec = parts.node.timed
        assert isinstance(spec, Deduplicate)
        class_ = cls if spec.order == "time" else ArrivalDeduplicator
        return class_(*parts.shared, spec=spec)

    def settle(self) -> None:
        Sorter.settle(self)
        self._write_given()

    @staticmethod
    def _entries_of(state: Any) -> list[Early]:
        return state[2]  # type: ignore[no-any-return]  # it is

    @staticmethod
    def _with_entries(state: Any, early: list[Early]) -> Any:
        given = (b"", b"") if state is None else state[:2]
        return (*given, early) if given[0] or early else None

    def _given_of(self, early: list[Early]) -> list[Early]:
        times, within, first = self._times, self.spec.within_ms, list[Early]()
        last_of = times.get
        for one in early:
            time, key = one[0], one[1]
            last = last_of(key)
            if last is None or time - last >= within:
                times[key] = time
                first.append(one)
        self._note([one[2] for one in first], [one[1] for one in first], [one[0] for one in first])
        return first

    def _note(self, groups: Iterable[int], keys: Iterable[bytes], times: Iterable[int]) -> None:
        """Records of *keys*, which are in *groups*, are given, at *times*."""
        for own, column in zip(self._new, (groups, keys, times), strict=True):
            cast("list[Any]", own).extend(column)
        if len(self._new[0]) > GIVEN_MAX:
            self._write_given()

    def _restored(self, slot: int, state: Any) -> None:
        packed, packed_times, *_ = state
        if packed:
            keys = _decode_keys(packed)
            self._written.setdefault(slot, []).append(keys)
            self._remember(keys, array("q", packed_times))

    def _remember(self, keys: Sequence[bytes], times: Iterable[int]) -> None:
        """Records of *keys* were given before the restore at *times*; slots come in their order."""
        self._times.update(zip(keys, times, strict=True))

    def _write_given(self) -> None:
        groups, keys, times = self._new
        places = list(zip(self.spec.slots(times), groups, strict=True))
        keys_of, times_of = (defaultdict[tuple[int, int], list[Any]](list) for _ in range(2))
        append_each(keys_of, places, keys)
        append_each(times_of, places, times)
        for slot, group in keys_of:
            self._written.setdefault(slot, []).append(keys_of[slot, group])
        parts = [
            (place, slice(start, start + STATE_KEYS_MAX))
            for place in keys_of
            for start in range(0, len(keys_of[place]) if place[0] > self._over else 0, STATE_KEYS_MAX)
        ]
        blocks = [(_encode(keys_of[place][some]), array("q", times_of[place][some]).tobytes()) for place, some in parts]
        slots, firsts = [slot for (slot, _), _ in parts], [keys_of[place][some.start] for place, some in parts]
        self.table.update(self._with_given, slots, firsts, blocks)
        for column in self._new:
            column.clear()

    def _with_given(self, state: Any, given: Given) -> Any:
        if state is None:
            return (*given, [])
        keys = _decode_keys(state[0]) + _decode_keys(given[0]) if state[0] else _decode_keys(given[0])
        return (_encode(keys), state[1] + given[1], *state[2:])

    def _end(self, limit: int) -> None:
        self._over = max(self._over, limit)  # the last that waits in a drain may be below
        for slot in sorted(slot for slot in self._written if slot <= limit):
            for keys in self._written.pop(slot):
                self._forget(keys, slot - self.spec.within_ms + 1)

    def _forget(self, keys: Sequence[bytes], last: int) -> None:
        """Forget the records of *keys* that were given up to *last*."""
        times = self._times
        for key in keys:
            given = times.get(key, END_OF_TIME)
            if type(given) is int:
                if given <= last:
                    del times[key]
            elif left := [time for time in given if time > last]:
                times[key] = tuple(left) if len(left) > 1 else left[0]
            else:
                del times[key]


@dataclass(slots=True)
class ArrivalDeduplicator(Deduplicator):
    """`deduplicate` in order of arrival: a state is `Given`. Of a key with several records, `_times` has a tuple."""

    def _take(self, batch: Batch) -> None:
        assert batch.times is not None
        assert batch.keys is not None
        within, times, kept = self.spec.within_ms, self._times, list[bool]()
        before_of, keep = times.get, kept.append
        for key, time in zip(batch.keys, batch.times, strict=True):
            before = before_of(key)
            if before is None:
                times[key] = time
                keep(True)
            elif type(before) is int:
                if is_first := abs(time - before) >= within:
                    times[key] = before, time
                keep(is_first)
            else:
                if is_first := all(abs(time - other) >= within for other in before):
                    times[key] = *before, time
                keep(is_first)
        given = batch.where(kept)
        if given.records:
            assert given.times is not None
            assert given.keys is not None
            self._note(key_groups(given.keys, self.max_parallelism), given.keys, given.times)
            self.push(given.unkeyed(given.records))

    @staticmethod
    def _entries_of(state: Any) -> list[Early]:
        return []

    def _with_given(self, state: Any, given: Given) -> Any:
        return Deduplicator._with_given(self, state, given)[:2]

    def _remember(self, keys: Sequence[bytes], times: Iterable[int]) -> None:
        for key, time in zip(keys, times, strict=True):
            before = self._times.get(key)
            self._times[key] = time if before is None else (*_tuple(before), time)


def _tuple(times: int | tuple[int, ...]) -> tuple[int, ...]:
    return (times,) if isinstance(times, int) else times


OPERATORS: dict[type[Timed], type[Sorter]] = {InOrder: Sorter, Deduplicate: Deduplicator}
