"""The operators of a join of tables by a foreign key, in its three steps; see `pipeline.foreign_keys`.

Invariants: the versions of a key group come to `Resolver` in ascending order, each once, and the answers of a foreign
key in the order of its right rows: every channel keeps its order, and key groups move whole, with records in flight. A
result is given for the present version of its row alone, and a tombstone only where a result stands. What a step gives
is a function of the order of its records, not of its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.operators import Sides
from exactlyonce.engines.runtime.timed_operators import Due, KeyReader, TimedOperator, TimedParts
from exactlyonce.pipeline.foreign_keys import (
    BUCKET_ROWS,
    COUNTS,
    EARLY,
    RIGHT,
    ROW_VERSIONS,
    ROWS,
    Answer,
    Answering,
    Resolving,
    RowVersion,
    Subscribing,
    Subscription,
    bucket_of,
    parent_of,
)
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.joins import Joined
from exactlyonce.pipeline.keys import canonical_key, explained_key, heads_of, key_groups, key_schema
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import type_name
from exactlyonce.pipeline.timed import Timed
from exactlyonce.state.backend import TimedTable

ANSWERS_TOGETHER = 2_000
"""The most answers in a batch: a right row may have any number."""
BUCKET_ROWS_LEAST = 8
"""A foreign key gives up a bucket if the others have no more rows than so many each."""


@dataclass(slots=True)
class TableJoiner(TimedOperator[None]):
    """The common part of the steps. Nothing is ever due: a watermark goes on at once."""

    def _due(self) -> Iterator[Due[None]]:
        return iter(())

    def _give(self, results: Sequence[None]) -> None:
        """Nothing is due."""


class VersionCounts:
    """The last version of each key group. The table has them at a barrier, each under a key of its group."""

    def __init__(self, table: TimedTable[int], count_of: Callable[[Any], int], state_of: Callable[[int], Any]) -> None:
        """*count_of* a state in the table is the number in it, *state_of* a number is the state."""
        self.last: dict[int, int] = {}
        self._table, self._count_of, self._state_of = table, count_of, state_of
        self._keys: dict[int, bytes] = {}
        self._written: dict[int, int] = {}

    def read(self, keys: Sequence[bytes], groups: Sequence[int]) -> None:
        """Read the numbers of *groups*, those of *keys*. The table has been asked for the states of these."""
        if self.last.keys() >= set(groups):
            return
        for key, group in zip(keys, groups, strict=True):
            if group not in self.last:
                own, states = self._table.read(COUNTS, group)
                self.last[group] = self._written[group] = self._count_of(states[0]) if own else 0
                self._keys[group] = own[0] if own else key

    def settle(self) -> None:
        """At a barrier: bring them into the table."""
        new = {self._keys[group]: count for group, count in self.last.items() if count != self._written[group]}
        self._table.put_all(COUNTS, {key: self._state_of(count) for key, count in new.items()})
        self._written = {**self.last}


@dataclass(slots=True)
class Subscriber(TableJoiner):
    """Gives each change of a left row a version, and tells the owners of its foreign key, and of the one before."""

    by: Callable[[Any], Any]
    right_key: Any = UNKNOWN
    """The type of the keys of the right table."""
    _heads: list[bool] | None = field(init=False)
    _counts: VersionCounts = field(init=False)

    @classmethod
    def made(cls, parts: TimedParts) -> Subscriber:
        step = parts.node.timed
        assert isinstance(step, Subscribing)
        return cls(*parts.shared, parts.function, step.right_key)

    def __post_init__(self) -> None:
        TableJoiner.__post_init__(self)
        self._heads = heads_of(key_schema(self.right_key))
        self._counts = VersionCounts(self.table, int, int)

    def settle(self) -> None:
        TableJoiner.settle(self)
        self._counts.settle()

    def _foreign_key(self, record: Record[Any]) -> bytes | None:
        key = None if record.value is None else self.by(record.value)
        if key is None:
            return None
        try:
            foreign_key = canonical_key(key)
        except (TypeError, OverflowError):
            return explained_key(key)  # which raises with an explanation, for which each call is slower
        if self._heads is not None and not self._heads[foreign_key[0]]:
            raise TypeError(
                f"by= gives {key!r:.100}, of type {type(key).__name__}, and the keys of the right table are "
                f"{type_name(self.right_key)}: none would ever be equal. Convert the key in by=, or declare that of "
                f"the table by its source's key="
            )
        return foreign_key

    def __call__(self, batch: Batch) -> None:
        batch, foreign_keys = self.apply(self._foreign_key, batch)
        if not batch.records:
            return
        assert batch.keys is not None
        entered_s = self.activity.enter(self.id)
        rows, groups = batch.keys, key_groups(batch.keys, self.max_parallelism)
        own = list(set(rows))
        before = dict(zip(own, self.table.get_all(ROWS, own), strict=True))
        self._counts.read(rows, groups)
        last, changed = self._counts.last, dict[bytes, bytes | None]()
        versions, subscriptions, places = list[RowVersion[Any]](), list[Subscription](), list[int]()
        tell, send, stem = versions.append, subscriptions.append, places.append
        for place, (row, group, foreign_key, record) in enumerate(
            zip(rows, groups, foreign_keys, batch.records, strict=True)
        ):
            last[group] = version = last[group] + 1
            if foreign_key != (left := before[row]):
                before[row] = changed[row] = foreign_key
                if left is not None:
                    send(Subscription(row, version, left, True))
                    stem(place)
            if foreign_key is not None:
                send(Subscription(row, version, foreign_key))
                stem(place)
            tell(RowVersion(row, version, record.value, foreign_key is not None))
        self.table.put_all(ROWS, changed)
        self.activity.leave(self.id, entered_s, 0)
        for push in self.sides[ROW_VERSIONS]:
            push(batch.unkeyed(versions))
        if subscriptions:
            self.push(batch.stemming(subscriptions, places))


Bucket = tuple[Any, dict[bytes, int], int]
"""(right row, version by subscribed row, in the first of several buckets the number of rows in all)."""


@dataclass(slots=True)
class Answerer(Sides, TableJoiner):
    """Answers the left rows that refer to a foreign key: when one subscribes, and when the right row changes.

    Buckets of a foreign key have the slots from 1 on, without a gap.
    """

    @classmethod
    def made(cls, parts: TimedParts) -> Answerer:
        return cls(*parts.shared)

    def left(self, batch: Batch) -> None:
        """Take subscriptions."""
        entered_s, subscriptions = self.activity.enter(self.id), batch.records
        assert batch.keys is not None
        self._subscribe(subscriptions)
        places = [place for place, subscription in enumerate(subscriptions) if not subscription.ends]
        begun = subscriptions if len(places) == len(subscriptions) else [subscriptions[place] for place in places]
        states = self.table.get_all(RIGHT, [subscription.foreign_key for subscription in begun])
        answers = [
            Answer(subscription.row, subscription.version, None if state is None else state[0])
            for subscription, state in zip(begun, states, strict=True)
        ]
        self.activity.leave(self.id, entered_s, len(subscriptions))
        if answers:
            self.push(batch.stemming(answers, places))

    def right(self, batch: Batch) -> None:
        """Take right rows."""
        entered_s, keys = self.activity.enter(self.id), batch.keys
        assert keys is not None
        values = [record.value for record in batch.records]
        newest: dict[bytes, Bucket | None] = {
            key: None if value is None else (value, {}, 0) for key, value in zip(keys, values, strict=True)
        }
        self.table.put_all(RIGHT, newest)
        subscribed = {key: self._rows(key) for key in self.table.present(newest)}
        answers, places = list[Any](), list[int]()
        for place, (key, value) in enumerate(zip(keys, values, strict=True)):
            rows = subscribed.get(key, ())
            for start in range(0, len(rows), ANSWERS_TOGETHER):
                some = rows[start : start + ANSWERS_TOGETHER]
                answers += [Answer(row, version, value) for row, version in some]
                places += repeat(place, len(some))
                if len(answers) >= ANSWERS_TOGETHER:
                    self.activity.leave(self.id, entered_s, 0)
                    self.push(batch.stemming(answers, places))
                    answers, places = [], []
                    self.activity.breathe()
                    entered_s = self.activity.enter(self.id)
        self.activity.leave(self.id, entered_s, len(keys))
        if answers:
            self.push(batch.stemming(answers, places))

    def _rows(self, key: bytes) -> list[tuple[bytes, int]]:
        """The subscribed rows of *key*, with their versions, sorted: in which bucket each is depends on the batches."""
        buckets = [self.table.get(slot, key) for slot in self.table.slots_of(key) if slot != RIGHT]
        return sorted(chain.from_iterable(bucket[1].items() for bucket in buckets if bucket is not None))

    def _subscribe(self, subscriptions: Sequence[Subscription]) -> None:
        """Keep *subscriptions*, of which some end, in buckets."""
        own = list({subscription.foreign_key for subscription in subscriptions})
        firsts = dict(zip(own, self.table.get_all(1, own), strict=True))
        several = {key: first[2] for key, first in firsts.items() if first is not None and first[2]}
        counts = {key: self.table.slots_of(key)[-1] for key in several}
        changed: dict[int, dict[bytes, Bucket]] = {1: {}}
        more = dict.fromkeys(own, 0)
        for subscription in subscriptions:
            key, row = subscription.foreign_key, subscription.row
            slot = bucket_of(row, counts[key]) if key in counts else 1
            buckets = changed.setdefault(slot, {})
            if (bucket := buckets.get(key)) is None:
                before = firsts[key] if slot == 1 else self.table.get(slot, key)
                bucket = buckets[key] = (None, {}, 0) if before is None else (None, {**before[1]}, before[2])
            rows = bucket[1]
            more[key] -= len(rows)
            if subscription.ends:
                rows.pop(row, None)
            else:
                rows[row] = subscription.version
            more[key] += len(rows)
        for slot, buckets in changed.items():
            self.table.put_all(slot, buckets)
        for key, added in more.items():
            if key in counts:
                if added:
                    self._resize(key, counts[key], several[key] + added)
            elif not (rows := changed[1][key][1]) or len(rows) > BUCKET_ROWS:
                self._resize(key, 1, len(rows))

    def _bucket(self, slot: int, key: bytes) -> Bucket:
        bucket: Bucket | None = self.table.get(slot, key)
        return (None, {}, 0) if bucket is None else bucket

    def _resize(self, key: bytes, buckets: int, rows: int) -> None:
        """Give *key*, which has so many *buckets* and *rows*, as many buckets as these need."""
        while rows > buckets * BUCKET_ROWS:
            buckets += 1
            parent = parent_of(buckets)
            _, own, count = self._bucket(parent, key)
            moved = {row: version for row, version in own.items() if bucket_of(row, buckets) != parent}
            left = {row: version for row, version in own.items() if row not in moved}
            self.table.put_all(parent, {key: (None, left, count)})
            self.table.put_all(buckets, {key: (None, moved, 0)})
        while buckets > 1 and rows <= (buckets - 1) * BUCKET_ROWS_LEAST:
            parent = parent_of(buckets)
            (_, own, count), (_, more, _) = self._bucket(parent, key), self._bucket(buckets, key)
            self.table.put_all(parent, {key: (None, own | more, count)})
            self.table.put(buckets, key, None)
            buckets -= 1
        if rows == 0:
            self.table.put(1, key, None)
        else:
            _, own, _ = self._bucket(1, key)
            self.table.put_all(1, {key: (None, own, rows if buckets > 1 else 0)})


State = tuple[int, Any, Any, bool]
"""(version, left row, right row of an early answer, whether a result stands)."""


@dataclass(slots=True)
class Resolver(Sides, TableJoiner):
    """Brings versions of left rows and answers together."""

    join: Resolving
    read_keys: KeyReader
    _heard: VersionCounts = field(init=False)

    @classmethod
    def made(cls, parts: TimedParts) -> Resolver:
        join = parts.node.timed
        assert isinstance(join, Resolving)
        return cls(*parts.shared, join, parts.read_keys)

    def __post_init__(self) -> None:
        TableJoiner.__post_init__(self)
        self._heard = VersionCounts(self.table, itemgetter(0), lambda count: (count, None, None, False))

    def settle(self) -> None:
        TableJoiner.settle(self)
        self._heard.settle()

    def left(self, batch: Batch) -> None:
        """Take versions of left rows."""
        entered_s, rows = self.activity.enter(self.id), batch.keys
        assert rows is not None
        groups = key_groups(rows, self.max_parallelism)
        states, early = self._read(rows, groups), self._early(rows, groups)
        heard, is_left = self._heard.last, self.join.how == "left"
        changed, taken = dict[bytes, State | None](), dict[bytes, None]()
        pairs, places = list[tuple[Any, Any] | None](), list[int]()
        for place, (row, group, version) in enumerate(zip(rows, groups, batch.records, strict=True)):
            heard[group] = version.version
            state = states[row]
            stands, left = state is not None and state[3], version.left
            if left is not None and version.has_partner:
                state = (version.version, left, None, stands)
                if early and (answer := early.get(row)) is not None and answer[0] <= version.version:
                    del early[row]
                    taken[row] = None
                    if answer[0] == version.version:
                        state = self._resolved(state, answer[2], place, pairs, places)
            elif left is not None and is_left:
                pairs.append((left, None))
                places.append(place)
                state = (version.version, None, None, True)
            else:
                if stands:
                    pairs.append(None)
                    places.append(place)
                state = None
            states[row] = changed[row] = state
        self.table.put_all(ROWS, changed)
        self.table.put_all(EARLY, dict.fromkeys(taken))
        self.activity.leave(self.id, entered_s, len(rows))
        self._push(batch, pairs, places)

    def right(self, batch: Batch) -> None:
        """Take answers."""
        entered_s, rows = self.activity.enter(self.id), batch.keys
        assert rows is not None
        groups = key_groups(rows, self.max_parallelism)
        states, heard = self._read(rows, groups), self._heard.last
        changed, early = dict[bytes, State | None](), list[tuple[bytes, State]]()
        pairs, places = list[tuple[Any, Any] | None](), list[int]()
        for place, (row, group, answer) in enumerate(zip(rows, groups, batch.records, strict=True)):
            state = states[row]
            if state is not None and state[0] == answer.version:  # it was heard of
                resolved = self._resolved(state, answer.right, place, pairs, places)
                if resolved is not state:
                    states[row] = changed[row] = resolved
            elif answer.version > heard[group]:
                early.append((row, (answer.version, None, answer.right, False)))
        self.table.put_all(ROWS, changed)
        if early:
            keys, answers = zip(*early, strict=True)
            self.table.update(_newer, [EARLY] * len(keys), keys, answers)
        self.activity.leave(self.id, entered_s, len(rows))
        self._push(batch, pairs, places)

    def _read(self, rows: Sequence[bytes], groups: Sequence[int]) -> dict[bytes, State | None]:
        """The states of *rows*; reads the last versions of *groups*, too."""
        own = list(set(rows))
        states = dict(zip(own, self.table.get_all(ROWS, own), strict=True))
        self._heard.read(rows, groups)
        return states

    def _early(self, rows: Sequence[bytes], groups: Sequence[int]) -> dict[bytes, State]:
        """The early answers of *rows*."""
        having = set(self.table.groups(EARLY))
        if having.isdisjoint(groups):
            return {}
        own = list({row for row, group in zip(rows, groups, strict=True) if group in having})
        answers = zip(own, self.table.get_all(EARLY, own), strict=True)
        return {row: answer for row, answer in answers if answer is not None}

    def _resolved(
        self, state: State, right: Any, place: int, pairs: list[tuple[Any, Any] | None], places: list[int]
    ) -> State:
        """The state of a row, of *state*, once it is known that *right* is its partner; None: it has none. Adds its
        result, if there is one, to *pairs*, and the *place* that it stems from to *places*."""
        version, left, _, stands = state
        if right is not None or self.join.how == "left":
            pairs.append((left, right))
            places.append(place)
            return state if stands else (version, left, None, True)
        if stands:
            pairs.append(None)
            places.append(place)
            return version, left, None, False
        return state

    def _push(self, batch: Batch, pairs: Sequence[tuple[Any, Any] | None], places: Sequence[int]) -> None:
        """Give results, each of a pair of rows, or a tombstone for None; they stem from the records at *places*."""
        if not places:
            return
        assert batch.keys is not None
        keys = self.read_keys([batch.keys[place] for place in places])
        records = [
            Record(None if pair is None else Joined(key, *pair), key) for key, pair in zip(keys, pairs, strict=True)
        ]
        self.push(batch.stemming(records, places))


def _newer(before: State | None, answer: State) -> State:
    """The answer that is of the later version; of one version the later answer."""
    return answer if before is None or answer[0] >= before[0] else before


OPERATORS: dict[type[Timed], type[TableJoiner]] = {
    Subscribing: Subscriber, Answering: Answerer, Resolving: Resolver,
}  # fmt: skip
