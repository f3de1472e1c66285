"""Window operators: they keep an accumulator for each key and window, and give its result when the watermark passes.

Invariants: whether a window takes a record depends on the record's time and floor alone, unless an input was idle. Its
result is given once, after every record that it takes, and in the order (window, key group, key). So results are a
function of the inputs, also those before and after the end of a window: each of `RevisedWindows` has the records that
count up to its slot. A window that is over leaves no state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import compress, repeat
from typing import Any, Generic, NamedTuple, TypeVar, cast

from exactlyonce.engines.runtime.batch import Batch, Origin, coordinates_of, origins_of
from exactlyonce.engines.runtime.faults import record_error
from exactlyonce.engines.runtime.operators import chunks
from exactlyonce.engines.runtime.timed_operators import (
    SLICE_KEYS,
    Due,
    KeyReader,
    TimedOperator,
    TimedParts,
    nothing_at,
)
from exactlyonce.pipeline.aggregates import Accumulator, Place, Placed
from exactlyonce.pipeline.errors import require_whole, users_errors
from exactlyonce.pipeline.event_time import END_OF_TIME, shown_time
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.pipeline.windows import Hopping, Revised, Session, Tumbling, Windowed, moment
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.state_type import StateType

W = TypeVar("W", Tumbling, Hopping, Session, Revised)


class WindowResults(NamedTuple):
    """Results of one key group in one slot, by columns."""

    group: int
    slot: int
    starts: Iterable[int]
    """The start of the window of each."""
    keys: Sequence[bytes]
    states: Sequence[Any]
    lasts: Sequence[int] | None = None
    """The last millisecond of that; None: it is the slot."""
    revisions: Sequence[int] | None = None
    """None: they are the first."""


@dataclass(slots=True)
class WindowOperator(TimedOperator[WindowResults], Generic[W]):
    """The common part of the operators, one for each kind of window."""

    window: W
    accumulator: Accumulator
    read_keys: KeyReader
    """Gives the user's keys for canonical ones."""
    clone: Callable[[Any], Any] | None = None
    """Copies an accumulator that a function may change in place; None: it cannot."""
    function: Callable[[Any], Iterable[Any]] | None = None
    """Gives the outputs for a result; None: that is the output."""
    _moved: list[tuple[int, bytes, Any]] = field(default_factory=list, init=False)
    """The (slot, key, state) of sessions that a firing has taken out of earlier slots, and not yet put there."""

    @classmethod
    def made(cls, parts: TimedParts) -> WindowOperator[W]:
        node = parts.node
        assert node.accumulator is not None
        accumulators = StateType[Any](node.id, VersionedState(node.accumulator.state))
        return cls(
            *parts.shared,
            cast("W", node.timed),
            node.accumulator,
            parts.read_keys,
            accumulators.clone if accumulators.mutable else None,
            parts.function,
        )

    def __call__(self, batch: Batch, *, right: bool = False) -> None:
        """Take *batch*, of the first or *right* input."""
        entered_s, count = self.activity.enter(self.id), len(batch.records)
        batch, slots = self._accept(batch, right=right)
        if batch.records:
            self._add(batch, slots, self._given(batch, right=right))
        self.activity.leave(self.id, entered_s, count)

    def _give(self, results: Sequence[WindowResults]) -> None:
        columns = _Columns()
        for some in results:
            columns.add(some)
        origins = origins_of(self.id, columns.groups, columns.slots)
        batch = Batch(self._windowed(columns), origins, times=columns.slots)
        if (function := self.function) is not None:
            batch, outputs = self.apply(lambda windowed: list(function(windowed)), batch, again=True)
            batch = batch.expanded(outputs)
        self.push(batch)

    def _accept(self, batch: Batch, *, right: bool) -> tuple[Batch, list[int]]:
        """*batch* without the records that no window takes, and the slot of each that is left."""
        raise NotImplementedError

    def _add(self, batch: Batch, slots: list[int], given: Sequence[Any]) -> None:
        """Add the records of *batch*, as *given* to the accumulator, to the states in *slots*."""
        assert batch.keys is not None
        self._update(self.accumulator.add, slots, batch.keys, given, batch.origins.__getitem__)

    def _update(
        self, add: Callable[[Any, Any], Any], slots: Sequence[int], keys: Sequence[bytes], given: Sequence[Any],
        origin_of: Callable[[int], Origin],
    ) -> None:  # fmt: skip
        """Bring what is *given* into the table by *add*; *origin_of* tells the origin of one by its place."""
        for chunk in chunks(len(given)):
            try:
                self.table.update(add, slots[chunk], keys[chunk], given[chunk])
            except ApplyFailed as failed:
                cause = failed.__cause__ or failed
                raise self.error(origin_of(chunk.start + failed.index), cause) from cause
            self.activity.breathe()

    def _added(self, state: Any, given: Any) -> Any:
        """*state* with what is *given*, for operators that keep more than that in the table: if it is the record
        itself, a copy of that, for other windows and branches have it, too."""
        state = self.accumulator.add(state, given)
        return self.clone(state) if state is given and self.clone is not None else state

    def _merge(
        self, keys: Sequence[bytes], states: Sequence[Any], parts: Sequence[Any], start: int, last: int
    ) -> list[Any]:
        """The *states* of *keys* in the window from *start* to *last*, each merged with its part."""
        merge, merged = self.accumulator.merge, list[Any]()
        assert merge is not None
        try:
            merged += map(merge, states, parts)  # keeps the results before an error
            require_whole(merged, len(keys))
        except users_errors() as error:
            key = self.read_keys.one(keys[len(merged)])
            on = f"two parts of the window of {key!r} from {shown_time(start)} to {shown_time(last + 1)}"
            raise record_error(f"merge() of operator {self.id!r}", self.id, None, error, on=on) from error
        return merged

    def _given(self, batch: Batch, *, right: bool) -> Sequence[Any]:
        """The records as the accumulator takes them."""
        if not self.accumulator.placed:
            return batch.records
        assert batch.times is not None
        return list(map(Placed, map(Place, batch.times, *coordinates_of(batch.origins)), batch.records))

    def _slices(
        self, last: int, group: int, starts: Sequence[int], keys: Sequence[bytes], states: Sequence[Any]
    ) -> Iterator[Due[WindowResults]]:
        """The results of *keys*, whose windows are over."""
        for some in self._steps(len(keys)):
            results = WindowResults(group, last, starts[some], keys[some], self._given_out(states[some]))
            yield Due(last, len(results.keys), results, len(results.keys), group, results.keys)

    def _given_out(self, states: Sequence[Any]) -> Sequence[Any]:
        """*states*, copied if they are the results: what comes after may change these, and a snapshot that is still
        being written has the states of the table."""
        if self.clone is None or self.accumulator.result is not None:
            return states
        return list(map(self.clone, states))

    def _windowed(self, columns: _Columns) -> list[Any]:
        result = self.accumulator.result
        values = columns.states if result is None else map(result, columns.states)
        starts, ends = columns.starts, [last + 1 for last in columns.lasts]
        moments = {time: moment(time) for time in set(starts).union(ends)}
        keys, at = self.read_keys(columns.keys), moments.__getitem__
        return list(map(Windowed, keys, map(at, starts), map(at, ends), values, columns.revisions))


@dataclass(slots=True)
class _Columns:
    """Results of all groups and slots, by columns."""

    groups: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    revisions: list[int] = field(default_factory=list)

    def add(self, results: WindowResults) -> None:
        count = len(results.keys)
        self.groups += repeat(results.group, count)
        self.slots += repeat(results.slot, count)
        self.starts += results.starts
        self.keys += results.keys
        self.states += results.states
        self.lasts += repeat(results.slot, count) if results.lasts is None else results.lasts
        self.revisions += repeat(0, count) if results.revisions is None else results.revisions


@dataclass(slots=True)
class TumblingWindows(WindowOperator[Tumbling]):
    """A slot is the last millisecond of a window."""

    def _accept(self, batch: Batch, *, right: bool) -> tuple[Batch, list[int]]:
        assert batch.times is not None
        lasts = self.window.lasts(batch.times)
        if not lasts or self.are_in_time(batch, min(lasts)):
            return batch, lasts
        kept = [last > floor for last, floor in zip(lasts, self.floors(batch), strict=True)]
        return self.without_late(batch, kept, right=right), list(compress(lasts, kept))

    def _due(self) -> Iterator[Due[WindowResults]]:
        table = self.table
        for last in table.slots(self.watermark):
            start = self.window.start(last)
            for group in table.groups(last):
                keys, states = table.read(last, group)
                yield from self._slices(last, group, [start] * len(keys), keys, states)
                table.drop(last, (group,))


@dataclass(slots=True)
class HoppingWindows(WindowOperator[Hopping]):
    """A slot is the last millisecond of a pane, which all of its windows share.

    A late record may be in time for the later windows of its pane alone. If it misses *n* windows, its slot is *n*
    before that of the pane: there is room, for a pane has more milliseconds than windows.

    A window that has had its result leaves its panes, which others share. So the table has the place that a firing was
    at in each key group.
    """

    def _accept(self, batch: Batch, *, right: bool) -> tuple[Batch, list[int]]:
        assert batch.times is not None
        window, every = self.window, self.window.every_ms
        panes = window.lasts(batch.times)
        if not panes or self.are_in_time(batch, window.first_window(min(panes))):
            return batch, panes
        floors = self.floors(batch)
        missed = [
            max(0, (floor - window.first_window(pane)) // every + 1) for pane, floor in zip(panes, floors, strict=True)
        ]
        kept = [window.last_window(pane) > floor for pane, floor in zip(panes, floors, strict=True)]
        slots = [pane - count for pane, count in zip(panes, missed, strict=True)]
        return self.without_late(batch, kept, right=right), list(compress(slots, kept))

    def _due(self) -> Iterator[Due[WindowResults]]:
        window, table, watermark = self.window, self.table, self.watermark
        slots = table.slots(watermark)
        panes = dict(zip(slots, window.lasts(slots), strict=True))
        before = {group: table.watermark(group) for group in self.groups}
        begun = {group: place for group in self.groups if (place := table.begun(group)) is not None}
        fired = min(before.values())
        due = {last for pane in set(panes.values()) for last in window.windows(pane) if fired < last <= watermark}
        for last in sorted(due):
            start, groups = window.start(last), self._parts(last, panes)
            ended = [slot for slot, pane in panes.items() if window.last_window(pane) <= last]
            for group in sorted(groups):
                if before[group] < last:
                    keys, states = self._merged(group, groups[group], start, last)
                    slot, key = begun.get(group, (last, b""))
                    first = bisect_right(keys, key) if slot == last else 0
                    keys, states = keys[first:], states[first:]
                    yield from self._slices(last, group, [start] * len(keys), keys, states)
                    table.advance(last, (group,))
            if ended:
                table.drop(ended[-1], groups)

    def settle(self) -> None:
        due = self._under_way
        if due is not None and due.group is not None and self._had:
            self.table.begin(due.group, due.slot, self._had[-1])
            del self._had[:-1]

    def _parts(self, last: int, panes: dict[int, int]) -> dict[int, list[int]]:
        """By key group, the slots with parts of the window that ends with *last*."""
        window, groups = self.window, dict[int, list[int]]()
        for slot, pane in panes.items():
            number = (last - window.first_window(pane)) // window.every_ms
            if pane - slot <= number and last <= window.last_window(pane):
                for group in self.table.groups(slot):
                    groups.setdefault(group, []).append(slot)
        return groups

    def _merged(self, group: int, slots: Sequence[int], start: int, last: int) -> tuple[list[bytes], list[Any]]:
        """The keys of all *slots* of *group*, sorted, with their merged states of the window from *start* to *last*."""
        (keys, states), *others = [self._copied(*self.table.read(slot, group)) for slot in slots]
        differing = []
        for more, parts in others:
            if more == keys:  # as in most panes: far cheaper than key by key
                states = self._merge(keys, states, parts, start, last)
            else:
                differing.append((more, parts))
        if not differing:
            return keys, states
        merged = dict(zip(keys, states, strict=True))
        for more, parts in differing:
            new = dict(zip(more, parts, strict=True))
            both = [key for key in more if key in merged]
            states = self._merge(both, [merged[key] for key in both], [new[key] for key in both], start, last)
            merged |= new | dict(zip(both, states, strict=True))
        keys = sorted(merged)
        return keys, [merged[key] for key in keys]

    def _given_out(self, states: Sequence[Any]) -> Sequence[Any]:
        return states  # they are merged copies

    def _copied(self, keys: list[bytes], states: list[Any]) -> tuple[list[bytes], list[Any]]:
        """*keys* with states that a merge may change."""
        return keys, states if self.clone is None else list(map(self.clone, states))


@dataclass(slots=True, eq=False)
class _Open:
    """A session that is not over."""

    slot: int | None
    """None: it is in no slot yet."""
    first: int
    last: int
    """The times of its first and last record."""
    state: Any
    changed: bool = False


@dataclass(slots=True)
class SessionWindows(WindowOperator[Session]):
    """A state is (time of the first record, of the last, accumulator).

    A slot is when the session was due as it was put there: *wait* after its last millisecond. Where a session has grown
    since, it moves on as that slot is due: no record moves it. A record is taken if its time is above its floor less
    *wait*, so none that is taken comes close to a session that was given. Results have the time at which they are due,
    for that is above the watermark before them.
    """

    def _accept(self, batch: Batch, *, right: bool) -> tuple[Batch, list[int]]:
        batch = self.in_time(batch, right=right)
        assert batch.times is not None
        return batch, batch.times

    def floors(self, batch: Batch) -> list[int]:
        floors, wait = WindowOperator.floors(self, batch), self.window.wait_ms
        return [floor - wait for floor in floors] if wait else floors

    def _add(self, batch: Batch, slots: list[int], given: Sequence[Any]) -> None:
        keys = batch.keys
        assert keys is not None
        due_ms, sessions = self.window.due_ms, dict[bytes, list[_Open]]()
        for chunk in chunks(len(given)):
            for place, key, time in zip(range(chunk.start, len(keys)), keys[chunk], slots[chunk], strict=False):
                of_key = sessions.get(key)
                if of_key is None:
                    of_key = sessions[key] = self._open(key)
                try:
                    self._take(key, of_key, time, given[place])
                except users_errors() as error:
                    raise self.error(batch.origins[place], error) from error
            self.activity.breathe()
        changed = [
            (session.last + due_ms if session.slot is None else session.slot, key, session)
            for key, of_key in sessions.items()
            for session in of_key
            if session.changed
        ]
        self._put([(slot, key, (one.first, one.last, one.state)) for slot, key, one in changed])

    def _take(self, key: bytes, sessions: list[_Open], time: int, given: Any) -> None:
        """Add a record of *key* to its *sessions*, and unite those that it connects."""
        gap, add = self.window.gap_ms, self._added
        for session in sessions:
            if session.first - gap < time < session.last + gap:
                break
        else:
            sessions.append(_Open(None, time, time, add(None, given), changed=True))
            return
        session.state, session.changed = add(session.state, given), True
        if time > session.last:
            session.last = time
        elif time < session.first:
            session.first = time
        else:
            return
        if len(sessions) > 1:
            self._unite(key, session, sessions)

    def _unite(self, key: bytes, session: _Open, sessions: list[_Open]) -> None:
        """Add to *session* the *sessions* of *key* that it has come close to."""
        gap, merge = self.window.gap_ms, self.accumulator.merge
        assert merge is not None
        for other in list(sessions):
            if other is not session and other.first - gap < session.last and session.first < other.last + gap:
                session.state = merge(session.state, other.state)
                session.first, session.last = min(session.first, other.first), max(session.last, other.last)
                sessions.remove(other)
                if other.slot is not None:
                    self.table.put(other.slot, key, None)

    def _open(self, key: bytes) -> list[_Open]:
        sessions = []
        for slot in self.table.slots_of(key):
            first, last, state = cast("tuple[int, int, Any]", self.table.get(slot, key))
            sessions.append(_Open(slot, first, last, state if self.clone is None else self.clone(state)))
        return sessions

    def _put(self, sessions: Sequence[tuple[int, bytes, Any]]) -> None:
        """Keep (slot, key, state) of each."""
        if sessions:
            slots, keys, states = zip(*sessions, strict=True)
            self.table.update(_replaced, slots, keys, states)

    def interrupt(self) -> None:
        self._put(self._moved)
        self._moved = []

    def _due(self) -> Iterator[Due[WindowResults]]:
        table, due_ms, watermark = self.table, self.window.due_ms, self.watermark
        due = table.slots(watermark)
        known, moved_first = set(due), END_OF_TIME
        while due:
            if due[0] >= moved_first:  # it may have sessions that were in an earlier slot
                self.interrupt()
                moved_first = END_OF_TIME
            slot = heappop(due)
            for group in table.groups(slot):
                over: list[tuple[bytes, Any]] = []
                moved: list[tuple[int, bytes, Any]] = []
                for key, state in zip(*table.read(slot, group), strict=True):
                    later = state[1] + due_ms
                    if later == slot:
                        over.append((key, state))
                        continue
                    moved.append((later, key, state))
                    if later <= watermark:
                        moved_first = min(moved_first, later)
                        if later not in known:
                            known.add(later)
                            heappush(due, later)
                self._moved += moved
                if over:
                    for _, key, _ in moved:
                        table.put(slot, key, None)
                    own, ended_states = zip(*over, strict=True)
                    firsts, _, accumulators = zip(*ended_states, strict=True)
                    yield from self._slices(slot, group, firsts, own, accumulators)
                table.drop(slot, (group,))
            if len(self._moved) >= SLICE_KEYS:
                self.interrupt()
        self.interrupt()

    def _windowed(self, columns: _Columns) -> list[Any]:
        if wait := self.window.wait_ms:
            columns.lasts = [last - wait for last in columns.lasts]
        return WindowOperator._windowed(self, columns)


def _replaced(before: Any, state: Any) -> Any:
    return state


Part = tuple[bytes, int, Any, tuple[int, Any] | None]
"""(key, last millisecond of a window, what is new in it, its result before that as a number and an accumulator)."""


@dataclass(slots=True)
class RevisedWindows(WindowOperator[Revised]):
    """A slot is the last millisecond before a result; see `Revised.slot` and `kept_state`.

    New records wait in the slot of the result that has them first. The last result of a window is kept in the slot in
    which its lateness ends.
    """

    def _accept(self, batch: Batch, *, right: bool) -> tuple[Batch, list[int]]:
        """*batch* without the records that no window takes, and the time since which each that is left counts."""
        assert batch.times is not None
        if not batch.times or self.are_in_time(batch, min(batch.times)):
            return batch, batch.times
        lateness, floors = self.window.lateness_ms, self.floors(batch)
        kept = [
            lasts[-1] + lateness > floor for lasts, floor in zip(self.window.lasts(batch.times), floors, strict=True)
        ]
        since = [max(time, floor + 1) for time, floor in zip(batch.times, floors, strict=True)]
        return self.without_late(batch, kept, right=right), list(compress(since, kept))

    def _add(self, batch: Batch, slots: list[int], given: Sequence[Any]) -> None:
        assert batch.keys is not None
        assert batch.times is not None
        window, lateness, add = self.window, self.window.lateness_ms, self._added
        places: list[int] = []
        into: list[int] = []
        parts: list[tuple[int, Any]] = []
        for place, (lasts, since) in enumerate(zip(window.lasts(batch.times), slots, strict=True)):
            for last in lasts:
                if since <= last + lateness:
                    places.append(place)
                    into.append(window.slot(last, since))
                    parts.append((last, given[place]))

        def added(entry: Any, part: tuple[int, Any]) -> Any:
            last, record = part
            if entry is None:
                return None, {last: add(None, record)}
            entry[1][last] = add(entry[1].get(last), record)
            return entry

        keys, origins = batch.keys, batch.origins
        self._update(added, into, [keys[place] for place in places], parts, lambda at: origins[places[at]])

    def _due(self) -> Iterator[Due[WindowResults]]:
        table, lateness = self.table, self.window.lateness_ms
        slots = table.slots(self.watermark)
        known = set(slots)
        while slots:
            slot = heappop(slots)
            for group in table.groups(slot):
                keys, entries = table.read(slot, group)
                parts: list[Part] = [
                    (key, last, part, given if last + lateness == slot else None)
                    for key, (given, new) in zip(keys, entries, strict=True)
                    for last, part in sorted(new.items())
                ]
                for some in self._steps(len(parts)):
                    results, ends = self._revised(slot, group, parts[some])
                    for end in ends.difference(known):
                        known.add(end)
                        heappush(slots, end)
                    of_next = parts[some.stop][0] if some.stop < len(parts) else b""
                    whole = results.keys[-1] != of_next
                    yield Due(slot, len(results.keys), results, len(results.keys), group, results.keys, whole)
                table.drop(slot, (group,))
            yield nothing_at(slot, 0)

    def _revised(self, slot: int, group: int, parts: Sequence[Part]) -> tuple[WindowResults, set[int]]:
        """The results of *parts*, which are kept for later ones; the slots up to the watermark that these are in."""
        table, window, clone = self.table, self.window, self.clone or _same
        revisions: list[int] = []
        states: list[Any] = []
        kept: list[tuple[int, bytes, tuple[int, Any]]] = []
        for key, last, part, given in parts:
            end = last + window.lateness_ms
            entry = table.get(end, key) if end > slot else None
            before = given if entry is None else cast("tuple[int, Any] | None", entry[0])
            count, state = before or (0, part)
            if before is not None:
                (state,) = self._merge([key], [clone(state)], [clone(part)], window.start(last), last)
            revisions.append(count)
            states.append(clone(state))
            if end > slot:
                kept.append((end, key, (count + 1, state)))
        ends = [end for end, *_ in kept]
        table.update(_given, ends, [key for _, key, _ in kept], [given for *_, given in kept])
        lasts = [last for _, last, *_ in parts]
        start = {last: window.start(last) for last in set(lasts)}.__getitem__
        results = WindowResults(group, slot, map(start, lasts), [key for key, *_ in parts], states, lasts, revisions)
        return results, {end for end in ends if end <= self.watermark}


def _same(state: Any) -> Any:
    return state


def _given(entry: Any, given: tuple[int, Any]) -> Any:
    return given, {} if entry is None else entry[1]


OPERATORS: dict[type[Timed], type[WindowOperator[Any]]] = {
    Tumbling: TumblingWindows, Hopping: HoppingWindows, Session: SessionWindows, Revised: RevisedWindows,
}  # fmt: skip
