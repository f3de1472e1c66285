"""The operators of handlers with state and timers, of one input and of two.

Invariants: in order of time, the calls for a key are a function of its records; see `pipeline.timers`. What is due at a
watermark is called in the order (slot, key group, key). A key's state and its timers are in one table, so that a
checkpoint has both or neither.

An entry of the table is (state, whether a timer is set, and for each input: held records). In order of arrival it ends
before these. Its slot is a time: that of the records and of a timer of event time, or `CLOCK` more than that of a timer
by the clock. The state of a key is in the slot `FOREVER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import repeat
from operator import itemgetter
from typing import Any

from exactlyonce.engines.runtime.batch import Batch, Coordinates, coordinates_of, origins_of
from exactlyonce.engines.runtime.faults import record_error
from exactlyonce.engines.runtime.operators import Emitted, Sides, chunks
from exactlyonce.engines.runtime.timed_operators import Due, KeyReader, TimedOperator, TimedParts
from exactlyonce.pipeline.errors import RecordError, Unavailable
from exactlyonce.pipeline.event_time import LATEST_MS, NO_WATERMARK, shown_time
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.timers import CLOCK, FOREVER, Batches, CoHandling, Handling, Timers
from exactlyonce.pipeline.windows import moment
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.state_type import StateType

Held = tuple[str, int, int, Any]
"""The topic, partition and offset of a record, and the record."""
_held_turn: Callable[[Held], Any] = itemgetter(0, 1, 2)
"""By topic, partition and offset."""
Taken = tuple[str, int, int, Any, Callable[..., Any]]
"""A held record, as in `Held`, and the method that takes it."""
CALLED_KEYS_MAX = 500
"""The most keys in a slice of a firing: each may take a user's time."""


@dataclass(slots=True)
class HandlerOperator(TimedOperator[Emitted]):
    """Calls the methods of a handler, of one input."""

    drains_in_one = True  # a timer that a timer sets after all others waits for the next run

    handling: Handling
    handler: Any
    read_keys: KeyReader
    """Gives the user's keys for canonical ones."""
    state_type: StateType[Any]
    """The type of a key's state alone."""
    has_times: bool = True
    """Whether records have event times."""
    _takers: tuple[Callable[..., Any], ...] = field(init=False)
    """The methods that take records, one for each input."""
    _none_held: tuple[tuple[()], ...] = field(init=False)
    """Those held of each input, if they are held: none."""
    _taker: Callable[..., Any] = field(init=False)
    """The one of the call under way."""
    _timers: Timers = field(default_factory=Timers, init=False)
    _emitted: Emitted = field(init=False)
    """The outputs of the calls for one batch or slice."""
    _given: list[Any] = field(default_factory=list, init=False)
    """The values that the call under way has emitted."""
    _calling: tuple[str, Any, int] | None = field(default=None, init=False)
    """The method, key and time of the call under way, unless it is of a record."""
    _set: dict[tuple[int, bytes], bool] = field(default_factory=dict, init=False)
    """By slot and key: timers to set, or to delete."""
    _emptied: dict[bytes, bool] = field(default_factory=dict, init=False)
    """By key: whether the last call left it without a state."""
    _waiting: list[int] = field(default_factory=list, init=False)
    """The slots that the firing under way has still to take, a heap."""
    _limit: int = field(default=NO_WATERMARK, init=False)
    """The last slot that the firing under way takes."""
    _clock: list[int] | None = field(default=None, init=False)
    """The slots of timers by the clock, a heap; None: not read yet."""
    _unfired: dict[bytes, list[int]] | None = field(default=None, init=False)
    """By key: the slots in which the firing under way has timers to call for. Once a record has come meanwhile, in
    order of arrival."""
    _called_early: set[tuple[int, bytes]] = field(default_factory=set, init=False)
    """The slots and keys of those that were called before a record."""

    @classmethod
    def made(cls, parts: TimedParts) -> HandlerOperator:
        node, handling = parts.node, parts.node.timed
        assert isinstance(handling, Handling)
        state_type = StateType[Any](node.id, handling.state_of(node.state_type))
        return cls(
            *parts.shared,
            handling,
            parts.function,
            parts.read_keys,
            state_type,
            parts.has_times,
        )

    def __post_init__(self) -> None:
        TimedOperator.__post_init__(self)
        self._takers = tuple(getattr(self.handler, name) for name in self.handling.takers)
        self._none_held = ((),) * len(self._takers) if self.handling.order == "time" else ()

    # --- records ------------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch, *, right: bool = False) -> None:
        """Take *batch*, of the first or *right* input."""
        entered_s = self.activity.enter(self.id)
        if self.handling.order == "time":
            self._hold(self.in_time(batch, right=right), self._holds_right if right else self._holds)
        else:
            if any(operator is self for operator in self.firings):
                self.begin()
                self._call_early(batch)
            self._taker = self._takers[right]
            self._take(batch)
        self.activity.leave(self.id, entered_s, len(batch.records))

    def _hold(self, batch: Batch, add: Callable[[Any, Held], Any]) -> None:
        """Keep the records of *batch* in the slots of their times, each by *add* to what is kept there of its key."""
        assert batch.times is not None
        assert batch.keys is not None
        held = list(zip(*coordinates_of(batch.origins), batch.records, strict=True))
        for chunk in chunks(len(held)):
            self.table.update(add, batch.times[chunk], batch.keys[chunk], held[chunk])
            self.activity.breathe()

    def _holds(self, entry: Any, held: Held, side: int = 0) -> Any:
        entry = self._new_entry() if entry is None else entry
        entry[2 + side].append(held)
        return entry

    def _holds_right(self, entry: Any, held: Held) -> Any:
        return self._holds(entry, held, 1)

    def _new_entry(self, state: Any = None, *, timer: bool = False) -> Any:
        """An entry without held records."""
        return (state, timer, *map(list, self._none_held))

    def _take(self, batch: Batch) -> None:
        """Call the handler for the records as they come."""
        assert batch.keys is not None
        self._begin(batch)
        times: Any = repeat(None) if batch.times is None else batch.times
        calls = list(
            zip(batch.keys, self.read_keys(batch.keys), range(len(batch.keys)), batch.records, times, strict=False)
        )
        for chunk in chunks(len(calls)):
            self._apply(batch, self._on_record, batch.keys[chunk], calls[chunk])
            self.activity.breathe()
        self._emitted.push()

    def _on_record(self, entry: Any, call: tuple[bytes, Any, int, Any, int | None]) -> Any:
        key, own, self._emitted.place, record, time = call
        state = None if entry is None else entry[0]
        state = self._called(key, own, state, record, time, self._passed(key))
        return self._entry(key, state)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        self._emitted = Emitted(batch, self.sides, main=self.downstream)

    def _emit(self, value: Any, output: Any = None) -> None:
        self._emitted.emit(value, output)
        self._given.append(value)

    def _called(self, key: bytes, own: Any, state: Any, record: Any, time: int | None, passed: int) -> Any:
        """The state after the call for *record*, and for timers that it has set at *passed* or before."""
        self._calling = None
        self._timers.event.now_ms = time
        state = self._taker(own, state, record, self._timers, self._emit)
        if self._mutable_is(state, record):
            state = self.state_type.clone(state)
        return self._settled(key, own, self._unshared(state), passed)

    def _passed(self, key: bytes) -> int:
        """The watermark of the key group of *key*."""
        return self.passed((key,))[0] if self.ahead else self.watermark

    def _went_off(self, key: bytes, own: Any, state: Any, at: int, passed: int, *, clock: bool = False) -> Any:
        """The state after the call for a timer, and for those that it has set at *passed* or before."""
        return self._settled(key, own, self._timer(own, state, at, clock=clock), passed)

    def _timer(self, own: Any, state: Any, at: int, *, clock: bool) -> Any:
        self._calling = ("on_clock" if clock else "on_time", own, at)
        if not clock:
            self._timers.event.now_ms = at
        elif self.has_times:
            self._timers.event.now_ms = self._result_time
        method = self.handler.on_clock if clock else self.handler.on_time
        return self._unshared(method(own, state, moment(at), self._timers, self._emit))

    def _unshared(self, state: Any) -> Any:
        """The state that a call has returned; a copy, if what it has emitted may have a part of it: that keeps its
        value."""
        if self._given:
            if state is not None and self.state_type.mutable and any(map(self.state_type.shares, self._given)):
                state = self.state_type.clone(state)
            self._given.clear()
        return state

    def _settled(self, key: bytes, own: Any, state: Any, passed: int) -> Any:
        """Note the timers that the last call has set; those at *passed* or before go off at once."""
        due = set[tuple[bool, int]]()
        while True:
            self._note(key, passed, due)
            if not due:
                return state
            clock, at = min(due)
            due.discard((clock, at))
            state = self._timer(own, state, at, clock=clock)

    def _note(self, key: bytes, passed: int, due: set[tuple[bool, int]]) -> None:
        for clock, timers in ((False, self._timers.event), (True, self._timers.clock)):
            if not timers.changes:
                continue
            if not (self.handling.on_clock if clock else self.handling.on_time):
                method = "on_clock" if clock else "on_time"
                raise TypeError(f"a timer is set, and the handler has no {method}(): add it")
            now = self._clock_ms if clock else passed
            for at, is_set in timers.changes.items():
                if at > now:
                    self._set[at + CLOCK if clock else at, key] = is_set
                    if self.drains and is_set and self._calling is None:
                        self._limit = max(self._limit, at)
                elif is_set:
                    due.add((clock, at))
                else:
                    due.discard((clock, at))
            timers.changes.clear()

    def _entry(self, key: bytes, state: Any) -> Any:
        """The entry of *state*."""
        self._emptied[key] = state is None
        return self._new_entry(state)

    def _mutable_is(self, state: Any, record: Any) -> bool:
        return state is record and state is not None and self.state_type.mutable

    def _apply(self, batch: Batch, fn: Any, keys: Sequence[bytes], calls: Sequence[Any]) -> None:
        """Call *fn* with the entry of each key and each of *calls*, then keep the timers that it has set."""
        try:
            self.table.update(fn, [FOREVER] * len(keys), keys, calls)
        except ApplyFailed as failed:
            cause = failed.__cause__ or failed
            raise self._error(batch, cause) from cause
        for key, emptied in self._emptied.items():
            if emptied:
                self.table.put(FOREVER, key, None)
        self._emptied.clear()
        self._keep_timers()

    def _error(self, batch: Batch, cause: BaseException) -> RecordError | Unavailable:
        if self._calling is None:
            return self.error(batch.origins[self._emitted.place], cause)
        method, own, at = self._calling
        on = f"the timer of {own!r} at {shown_time(at)}"
        return record_error(f"{method}() of operator {self.id!r}", self.id, None, cause, on=on)

    def _keep_timers(self) -> None:
        if not self._set:
            return
        added = [place for place, is_set in self._set.items() if is_set]
        for slot, key in (place for place, is_set in self._set.items() if not is_set):
            if (entry := self.table.get(slot, key)) is None:
                continue
            if any(entry[2:]):
                self.table.update(_without_timer, [slot], [key], [None])
            else:
                self.table.put(slot, key, None)
        self._set.clear()
        self.table.update(self._with_timer, [slot for slot, _ in added], [key for _, key in added], added)
        if self._unfired is not None:
            for slot, key in added:
                self._unfired.setdefault(key, []).append(slot)
        for slot in {slot for slot, _ in added}:
            if slot > CLOCK:
                heappush(self._clock_slots(), slot)
            elif slot <= self._limit:
                heappush(self._waiting, slot)

    def _with_timer(self, entry: Any, place: Any) -> Any:
        return self._new_entry(timer=True) if entry is None else (None, True, *entry[2:])

    # --- firings ------------------------------------------------------------------------------------------------------

    def _due(self) -> Iterator[Due[Emitted]]:
        self._limit = min(self.watermark, CLOCK - 1)
        self._waiting = self.table.slots(self._limit)
        if self.drains:  # a timer that `on_time` sets after all others waits for the next run
            self._limit = max(self._waiting, default=NO_WATERMARK)
        return self._calls()

    def _calls(self) -> Iterator[Due[Emitted]]:
        table, last = self.table, NO_WATERMARK
        while self._waiting:
            if (slot := heappop(self._waiting)) == last:
                continue
            last = slot
            for group in table.groups(slot):
                keys, entries = table.read(slot, group)
                for some in self._steps(len(keys), CALLED_KEYS_MAX):
                    yield self._step(slot, group, keys[some], entries[some])
                table.drop(slot, [group])
        self._limit = NO_WATERMARK
        yield from self._due_by_clock()
        self._unfired = None
        self._called_early.clear()

    def _give(self, results: Sequence[Emitted]) -> None:
        for emitted in results:
            emitted.push()

    def _step(self, slot: int, group: int, keys: Sequence[bytes], entries: Sequence[Any]) -> Due[Emitted]:
        early = self._called_early
        places = [place for place, key in enumerate(keys) if (slot, key) not in early] if early else range(len(keys))
        own = [keys[place] for place in places]
        emitted = self._call_all(slot, group, own, [entries[place] for place in places])
        return Due(slot, emitted.count, emitted, len(own), group, own)

    def _call_all(self, slot: int, group: int, keys: Sequence[bytes], entries: Sequence[Any]) -> Emitted:
        """What the calls for *keys*, which have *entries* in *slot*, emit."""
        calls: list[tuple[bytes, Any, int, Sequence[Taken], bool, int]] = []
        origins: list[Coordinates] = []
        (timer_origin,) = origins_of(self.id, [group], [slot])
        for key, own, entry in zip(keys, self.read_keys(keys), entries, strict=True):
            held = [(*one, taker) for taker, side in zip(self._takers, entry[2:], strict=False) for one in side]
            held.sort(key=_held_turn)  # of one place, the record of the first input comes first
            calls.append((key, own, slot, held, entry[1], len(origins)))
            origins += [Coordinates(topic, partition, offset) for topic, partition, offset, _, _ in held]
            origins.append(timer_origin)
        return self._slice(keys, calls, origins, slot)

    def _slice(self, keys: Sequence[bytes], calls: Sequence[Any], origins: list[Coordinates], time: int) -> Emitted:
        """What *calls* for *keys* emit."""
        batch = Batch([None] * len(origins), origins, times=[time] * len(origins) if self.has_times else None)
        self._begin(batch)
        self._apply(batch, self._on_slot, keys, calls)
        self.activity.breathe()
        return self._emitted

    def _on_slot(self, entry: Any, call: tuple[bytes, Any, int, Sequence[Taken], bool, int]) -> Any:
        key, own, slot, held, timer, place = call
        state = None if entry is None else entry[0]
        if slot > CLOCK:
            self._emitted.place = place
            return self._entry(key, self._went_off(key, own, state, slot - CLOCK, self._passed(key), clock=True))
        for number, (*_, record, self._taker) in enumerate(held):
            self._emitted.place = place + number
            state = self._called(key, own, state, record, slot, slot - 1)
        self._emitted.place = place + len(held)
        if self._set.pop((slot, key), timer):
            state = self._went_off(key, own, state, slot, slot)
        return self._entry(key, state)

    # --- the clock ----------------------------------------------------------------------------------------------------

    def rings(self, now_ms: int) -> bool:
        slots = self._clock_slots()
        return bool(slots) and slots[0] - CLOCK <= now_ms

    def tell_time(self, now_ms: int) -> None:
        self._timers.clock.now_ms = now_ms
        if self.rings(now_ms):
            self.is_due()

    @property
    def _clock_ms(self) -> int:
        return self._timers.clock.now_ms or 0

    def _clock_slots(self) -> list[int]:
        if self._clock is None:
            self._clock = [slot for slot in self.table.slots(FOREVER - 1) if slot > CLOCK]
            heapify(self._clock)
        return self._clock

    @property
    def _result_time(self) -> int:
        """The event time of what a timer by the clock gives: one that is not late."""
        return max(0, min(self.watermark + 1, LATEST_MS))

    def _due_by_clock(self) -> Iterator[Due[Emitted]]:
        """Fire timers by the clock. They do not end a slot, below which are those of event time."""
        slots, table = self._clock_slots(), self.table
        while slots and slots[0] - CLOCK <= self._clock_ms:
            slot = slots[0]
            for group in table.groups(slot):
                keys, _ = table.read(slot, group)
                for part in self._steps(len(keys), CALLED_KEYS_MAX):
                    some = [key for key in keys[part] if (slot, key) not in self._called_early]
                    emitted = self._call_by_clock(slot, group, some)
                    yield Due(NO_WATERMARK, emitted.count, emitted, len(some))
            heappop(slots)

    def _call_by_clock(self, slot: int, group: int, keys: Sequence[bytes]) -> Emitted:
        for key in keys:
            self.table.put(slot, key, None)
        origins = [*origins_of(self.id, [group], [slot - CLOCK])] * len(keys)
        own = self.read_keys(keys)
        calls = [(key, own[place], slot, (), True, place) for place, key in enumerate(keys)]
        return self._slice(keys, calls, origins, self._result_time)

    # --- records in order of arrival, during a firing -----------------------------------------------------------------

    def _call_early(self, batch: Batch) -> None:
        """Call for the due timers of the keys of *batch*: a key's timers go before the records after them."""
        if self._unfired is None:
            self._unfired = self._find_unfired()
        assert batch.keys is not None
        for key in dict.fromkeys(batch.keys):
            while (slot := self._next_unfired(key)) is not None:
                self._called_early.add((slot, key))
                (group,) = key_groups((key,), self.max_parallelism)
                if slot > CLOCK:
                    self._call_by_clock(slot, group, [key]).push()
                else:
                    entry = self.table.get(slot, key)
                    self.table.put(slot, key, None)
                    self._call_all(slot, group, [key], [entry]).push()

    def _find_unfired(self) -> dict[bytes, list[int]]:
        unfired, table, due = dict[bytes, list[int]](), self.table, self._under_way
        begun = [] if due is None or due.group is None else [due.slot]
        for slot in sorted({*begun, *self._waiting, *self._clock_slots()}):
            for group in table.groups(slot):
                for key in table.read(slot, group)[0]:
                    unfired.setdefault(key, []).append(slot)
        return unfired

    def _next_unfired(self, key: bytes) -> int | None:
        """The slot of the first timer of *key* that is due and was not called, of event time, then by the clock."""
        assert self._unfired is not None
        slots, due, clock = self._unfired.get(key, []), self._under_way, CLOCK + self._clock_ms
        begun = due.slot if due is not None and due.group is not None else None
        called = begun if begun in slots and key in self._had else None
        left = [slot for slot in slots if slot != called and self.table.get(slot, key) is not None]
        self._unfired[key] = left
        return next((slot for slot in sorted(left) if slot <= self._limit or CLOCK < slot <= clock), None)


def _without_timer(entry: Any, place: Any) -> Any:
    return (None, False, *entry[2:])


@dataclass(slots=True)
class CoHandlerOperator(Sides, HandlerOperator):
    """Calls the methods of a handler of two inputs."""

    def left(self, batch: Batch) -> None:
        self(batch)

    def right(self, batch: Batch) -> None:
        self(batch, right=True)


OPERATORS: dict[type[Timed], type[HandlerOperator]] = {
    Handling: HandlerOperator, Batches: HandlerOperator, CoHandling: CoHandlerOperator,
}  # fmt: skip
