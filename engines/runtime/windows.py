"""Window operators: they keep an accumulator for each key and window, and give its result when the watermark passes.

Invariants: whether a window takes a record depends on the record's time and floor alone, unless an input was idle. Its
result is given once, after every record that it takes, and in the order (window, key group, key). So results are a
function of the inputs. A window that is over leaves no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import compress, repeat
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import Coordinates
from exactlyonce.engines.runtime.operators import TimedOperator, TimedParts, chunks
from exactlyonce.pipeline.aggregates import Accumulator, Place, Placed
from exactlyonce.pipeline.errors import USERS_ERRORS, GraphError
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.schema import type_name
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.pipeline.windows import Hopping, Session, Tumbling, Windowed, moment
from exactlyonce.state.backend import TimedTable
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.state_type import StateType

SLICE_KEYS = 2_000
"""The most results between two looks at the room."""

W = TypeVar("W", Tumbling, Hopping, Session)


class Over(NamedTuple):
    """Some keys, of one key group, whose window is over."""

    group: int
    start: int
    last: int
    keys: Sequence[bytes]
    states: Sequence[Any]


@dataclass(slots=True)
class WindowOperator(TimedOperator, Generic[W]):
    """The common part of the operators, one for each kind of window."""

    window: W
    accumulator: Accumulator
    table: TimedTable[Any]
    groups: Sequence[int]
    """The key groups of the table."""
    key_type: Any
    """The type of the user's keys."""
    clone: Callable[[Any], Any] | None = None
    """Copies an accumulator that a function may change in place; None: it cannot."""
    _key_of: Callable[[bytes], Any] = field(init=False)
    """The user's key from its canonical bytes."""
    _firing: Iterator[Over] | None = field(default=None, init=False)
    _last: int = field(default=NO_WATERMARK, init=False)
    """The end of the last window that was over. A later run goes on from there after a drain, which ends time."""

    @classmethod
    def made(cls, parts: TimedParts) -> WindowOperator[W]:
        node = parts.node
        assert node.accumulator is not None
        accumulators = StateType[Any](node.id, VersionedState(node.accumulator.state))
        return cls(
            node.id,
            cast("W", node.timed),
            node.accumulator,
            parts.table,
            parts.groups,
            Any if node.key_type is UNKNOWN else node.key_type,
            accumulators.clone if accumulators.mutable else None,
        )

    def __post_init__(self) -> None:
        self._key_of = msgspec.msgpack.Decoder(self.key_type).decode
        self.watermark = max(map(self.table.watermark, self.groups), default=NO_WATERMARK)

    def __call__(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        batch, slots = self._accept(batch)
        if batch.records:
            self._add(batch, slots, self._given(batch))
        self.activity.leave(self.id, entered_s, len(batch.records))

    def fire(self, room: int) -> bool:
        entered_s = self.activity.enter(self.id)
        if self._firing is None:
            self._firing = self._over(self.watermark)
        records: list[Any] = []
        origins: list[Coordinates] = []
        times: list[int] = []
        for over in self._firing:
            self._last = max(self._last, over.last)
            records += self._results(over)
            origins += repeat(Coordinates(self.id, over.group, over.last, ""), len(over.keys))
            times += repeat(over.last, len(over.keys))
            if len(records) >= room:
                break
        else:
            self._firing = None
            reached = self.watermark if self.watermark < END_OF_TIME else self._last
            self.table.advance(reached)
        self.activity.leave(self.id, entered_s, 0)
        if records:
            self.push(Batch(records, origins, times=times))
        return self._firing is None

    def _accept(self, batch: Batch) -> tuple[Batch, list[int]]:
        """*batch* without the records that no window takes, and the slot of each that is left."""
        raise NotImplementedError

    def _add(self, batch: Batch, slots: list[int], given: Sequence[Any]) -> None:
        """Add the records of *batch*, as *given* to the accumulator, to the states in *slots*."""
        assert batch.keys is not None
        for chunk in chunks(len(given)):
            try:
                self.table.update(self.accumulator.add, slots[chunk], batch.keys[chunk], given[chunk])
            except ApplyFailed as failed:
                cause = failed.__cause__ or failed
                raise self.error(batch.origins[chunk.start + failed.index], cause) from cause
            self.activity.breathe()

    def _over(self, watermark: int) -> Iterator[Over]:
        """The windows that are over at *watermark*, in order; their states go when the next is asked for."""
        raise NotImplementedError

    def _given(self, batch: Batch) -> Sequence[Any]:
        """The records as the accumulator takes them."""
        if not self.accumulator.placed:
            return batch.records
        assert batch.times is not None
        return [
            Placed(Place(time, origin.topic() or "", origin.partition() or 0, origin.offset() or 0), record)
            for time, origin, record in zip(batch.times, batch.origins, batch.records, strict=True)
        ]

    def _results(self, over: Over) -> list[Any]:
        start, end, result = moment(over.start), moment(over.last + 1), self.accumulator.result
        values = over.states if result is None else map(result, over.states)
        try:
            keys = list(map(self._key_of, over.keys))
        except msgspec.ValidationError as error:
            raise GraphError(
                f"Operator {self.id!r}: a key is not {type_name(self.key_type)}, as the function of key_by says that "
                f"it gives: {error}. Nothing is lost: annotate the function with what it returns, and run again."
            ) from error
        return [Windowed(key, start, end, value) for key, value in zip(keys, values, strict=True)]


def _slices(group: int, start: int, last: int, keys: Sequence[bytes], states: Sequence[Any]) -> Iterator[Over]:
    for first in range(0, len(keys), SLICE_KEYS):
        some = slice(first, first + SLICE_KEYS)
        yield Over(group, start, last, keys[some], states[some])


@dataclass(slots=True)
class TumblingWindows(WindowOperator[Tumbling]):
    """A slot is the last millisecond of a window."""

    def _accept(self, batch: Batch) -> tuple[Batch, list[int]]:
        assert batch.times is not None
        lasts = self.window.lasts(batch.times)
        if batch.floors is None and min(lasts, default=self.watermark + 1) > self.watermark:
            return batch, lasts
        kept = [last > floor for last, floor in zip(lasts, self.floors(batch), strict=True)]
        return self.without_late(batch, kept), list(compress(lasts, kept))

    def _over(self, watermark: int) -> Iterator[Over]:
        for last in self.table.slots(watermark):
            start = self.window.start(last)
            for group in self.table.groups(last):
                yield from _slices(group, start, last, *self.table.read(last, group))
                self.table.drop(last, group)


@dataclass(slots=True)
class HoppingWindows(WindowOperator[Hopping]):
    """A slot is the last millisecond of a pane, which all of its windows share.

    A late record may be in time for the later windows of its pane alone. If it misses *n* windows, its slot is *n*
    before that of the pane: there is room, for a pane has more milliseconds than windows.
    """

    def _accept(self, batch: Batch) -> tuple[Batch, list[int]]:
        assert batch.times is not None
        window, every = self.window, self.window.every_ms
        panes = window.lasts(batch.times)
        if batch.floors is None and (not panes or window.first_window(min(panes)) > self.watermark):
            return batch, panes
        floors = self.floors(batch)
        missed = [
            max(0, (floor - window.first_window(pane)) // every + 1) for pane, floor in zip(panes, floors, strict=True)
        ]
        kept = [window.last_window(pane) > floor for pane, floor in zip(panes, floors, strict=True)]
        slots = [pane - count for pane, count in zip(panes, missed, strict=True)]
        return self.without_late(batch, kept), list(compress(slots, kept))

    def _over(self, watermark: int) -> Iterator[Over]:
        window, table = self.window, self.table
        slots = table.slots(watermark)
        panes = dict(zip(slots, window.lasts(slots), strict=True))
        before = {group: table.watermark(group) for group in self.groups}
        fired = min(before.values())
        due = {last for pane in set(panes.values()) for last in window.windows(pane) if fired < last <= watermark}
        for last in sorted(due):
            groups = self._parts(last, panes)
            ended = [slot for slot, pane in panes.items() if window.last_window(pane) <= last]
            for group in sorted(groups):
                if before[group] < last:
                    merged = self._merged(group, groups[group])
                    keys = sorted(merged)
                    yield from _slices(group, window.start(last), last, keys, [merged[key] for key in keys])
                if ended:
                    table.drop(ended[-1], group)

    def _parts(self, last: int, panes: dict[int, int]) -> dict[int, list[int]]:
        """By key group, the slots with parts of the window that ends with *last*."""
        window, groups = self.window, dict[int, list[int]]()
        for slot, pane in panes.items():
            number = (last - window.first_window(pane)) // window.every_ms
            if pane - slot <= number and last <= window.last_window(pane):
                for group in self.table.groups(slot):
                    groups.setdefault(group, []).append(slot)
        return groups

    def _merged(self, group: int, slots: Sequence[int]) -> dict[bytes, Any]:
        """The states by key of all *slots* of *group*, merged."""
        merge, clone = self.accumulator.merge, self.clone
        assert merge is not None
        merged: dict[bytes, Any] = {}
        for slot in slots:
            for key, state in zip(*self.table.read(slot, group), strict=True):
                part = state if clone is None else clone(state)
                merged[key] = merge(merged[key], part) if key in merged else part
        return merged


@dataclass(slots=True, eq=False)
class _Open:
    """A session that is not over."""

    slot: int | None
    """None: it is in no slot yet."""
    first: int
    last: int
    """The times of its first and last record."""
    state: Any


@dataclass(slots=True)
class SessionWindows(WindowOperator[Session]):
    """A state is (time of the first record, of the last, accumulator).

    A slot is the end that the session had when it was put there. Where a session has grown since, it moves on as that
    slot is due: no record moves it.
    """

    def _accept(self, batch: Batch) -> tuple[Batch, list[int]]:
        times = batch.times
        assert times is not None
        if batch.floors is None and min(times, default=self.watermark + 1) > self.watermark:
            return batch, times
        kept = [time > floor for time, floor in zip(times, self.floors(batch), strict=True)]
        return self.without_late(batch, kept), list(compress(times, kept))

    def _add(self, batch: Batch, slots: list[int], given: Sequence[Any]) -> None:
        assert batch.keys is not None
        by_key: dict[bytes, list[int]] = {}
        for place, key in enumerate(batch.keys):
            by_key.setdefault(key, []).append(place)
        changed: list[tuple[int, bytes, Any]] = []
        for key, places in by_key.items():
            changed += self._grown(batch, slots, given, key, places)
            self.activity.breathe()
        into, keys, states = zip(*changed, strict=True)
        self.table.update(lambda _, state: state, into, keys, states)

    def _grown(
        self, batch: Batch, times: Sequence[int], given: Sequence[Any], key: bytes, places: Sequence[int]
    ) -> Iterator[tuple[int, bytes, Any]]:
        """The sessions of *key* that records at *places* make or make longer; others that these unite are removed."""
        gap, add, merge = self.window.gap_ms, self.accumulator.add, self.accumulator.merge
        assert merge is not None
        sessions = self._open(key)
        grown: dict[int, _Open] = {}
        for place in places:
            time = times[place]
            try:
                joined = [one for one in sessions if one.first - gap < time < one.last + gap]
                if joined:
                    session = joined[0]
                    for other in joined[1:]:
                        session.state = merge(session.state, other.state)
                        session.first, session.last = min(session.first, other.first), max(session.last, other.last)
                        sessions.remove(other)
                        grown.pop(id(other), None)
                        if other.slot is not None:
                            self.table.put(other.slot, key, None)
                    session.state = add(session.state, given[place])
                    session.first, session.last = min(session.first, time), max(session.last, time)
                else:
                    session = _Open(None, time, time, add(None, given[place]))
                    sessions.append(session)
            except USERS_ERRORS as error:
                raise self.error(batch.origins[place], error) from error
            grown[id(session)] = session
        for session in grown.values():
            slot = session.last + gap - 1 if session.slot is None else session.slot
            yield slot, key, (session.first, session.last, session.state)

    def _open(self, key: bytes) -> list[_Open]:
        sessions = []
        for slot in self.table.slots_of(key):
            first, last, state = cast("tuple[int, int, Any]", self.table.get(slot, key))
            sessions.append(_Open(slot, first, last, state if self.clone is None else self.clone(state)))
        return sessions

    def _over(self, watermark: int) -> Iterator[Over]:
        table, gap = self.table, self.window.gap_ms
        due = table.slots(watermark)
        known = set(due)
        while due:
            slot = heappop(due)
            for group in table.groups(slot):
                for key, state in zip(*table.read(slot, group), strict=True):
                    last = state[1] + gap - 1
                    if last == slot:
                        yield Over(group, state[0], last, [key], [state[2]])
                        continue
                    table.put(last, key, state)
                    if last <= watermark and last not in known:
                        known.add(last)
                        heappush(due, last)
                table.drop(slot, group)


OPERATORS: dict[type[Timed], type[WindowOperator[Any]]] = {
    Tumbling: TumblingWindows, Hopping: HoppingWindows, Session: SessionWindows,
}  # fmt: skip
