"""Operators with state by time: their watermark, late records, and firings.

Invariants: a firing gives everything that is due in a fixed order, as (slot, key group, key), in slices: results first,
then the watermark. Between two slices others get a turn: records, whose floors are at the watermark or above, and
barriers. At a barrier the table has what is not given yet, and its key groups have a watermark up to which nothing may
come. So the rest is due again after a restore, once the watermark comes again. After a drain, which ends time, the next
run goes on after the last result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import not_
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from exactlyonce.checkpoint.events import LeftOut
from exactlyonce.engines.runtime.batch import Batch, Origin, floors_of, shown_origin
from exactlyonce.engines.runtime.faults import Notes
from exactlyonce.engines.runtime.operators import BatchOperator
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.event_time import END_OF_TIME, LATEST_MS, NO_WATERMARK, shown_time
from exactlyonce.pipeline.graph import Node
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.pipeline.shape import type_name
from exactlyonce.state.backend import TimedTable

R = TypeVar("R")

SLICE_KEYS = 2_000
"""The most keys in a step of a firing."""


def _late_record(origin: Origin, time: int, floor: int, timed_by: str) -> str:
    over = f"its time was over at {shown_time(floor)}{_remedy(floor, time, timed_by)}"
    return f"{shown_origin(origin)}, of {shown_time(time)}: {over}"


def _remedy(floor: int, time: int, timed_by: str) -> str:
    """What would have kept a record of *time* that was late at *floor*; *timed_by*: see `TimedOperator`."""
    if floor > LATEST_MS:
        return ", for a run with --drain had ended time"
    return f"; disorder= of {timed_by}, larger by more than {shown_duration(floor - time)}, takes it; late= keeps it"


class Due(NamedTuple, Generic[R]):
    """A step of a firing: some keys of one slot and key group."""

    slot: int
    number: int
    """Of results."""
    results: R
    taken: int = 1
    """The keys, records or pairs that it has: order logs count them. After a barrier, a replay finds as many: what is
    over counts as 0."""
    group: int | None = None
    """None: there is nothing that is given in part."""
    keys: Sequence[bytes] = ()
    """The keys in *slot* and *group* that have had their results, though the table has them until the group is over."""
    whole: bool = True
    """Whether the last of *keys* has had all of its results."""


def nothing_at(slot: int, taken: int = 1) -> Due[Any]:
    """A step of a firing that gives nothing: *slot* is over, or others get a turn before the rest of it."""
    return Due(slot, 0, None, taken)


@dataclass(frozen=True, kw_only=True)
class TimedParts:
    """What the operator of a node with timed state is made of."""

    node: Node
    table: TimedTable[Any]
    groups: Sequence[int]
    """The key groups of the table."""
    max_parallelism: int
    function: Any
    """The user's function, opened; None: it has none."""
    has_times: bool = True
    """Whether records have event times."""

    @property
    def shared(self) -> tuple[str, TimedTable[Any], Sequence[int], int]:
        """The first fields of every `TimedOperator`."""
        return self.node.id, self.table, self.groups, self.max_parallelism

    @property
    def read_keys(self) -> KeyReader:
        return KeyReader(self.node.id, self.node.key_type)


@dataclass(slots=True)
class KeyReader:
    """Reads canonical keys as the user's, of one type."""

    operator: str
    type: Any
    _decode: Callable[[bytes], Any] = field(init=False)

    def __post_init__(self) -> None:
        self.type = Any if self.type is UNKNOWN else self.type
        self._decode = msgspec.msgpack.Decoder(self.type).decode

    def __call__(self, keys: Sequence[bytes]) -> list[Any]:
        try:
            return list(map(self._decode, keys))
        except msgspec.ValidationError as error:
            raise self._wrong(error) from error

    def one(self, key: bytes) -> Any:
        try:
            return self._decode(key)
        except msgspec.ValidationError as error:
            raise self._wrong(error) from error

    def _wrong(self, error: msgspec.ValidationError) -> GraphError:
        return GraphError(
            f"Operator {self.operator!r}: a key is not {type_name(self.type)}, as the function of key_by says that it "
            f"gives: {error}. Nothing is lost: annotate the function with what it returns, and run again."
        )


@dataclass(slots=True)
class TimedOperator(BatchOperator, Generic[R]):
    """An operator that gives results when its watermark moves: a firing.

    `TaskOperators` calls `fire` until all that is due is out. Only then the watermark goes on, and the next one counts.
    """

    drains_in_one: ClassVar[bool] = False
    """Whether nobody gets a turn while it drains: what is its last is known at the beginning of that alone."""

    table: TimedTable[Any]
    groups: Sequence[int]
    """The key groups of the table."""
    max_parallelism: int
    firings: list[TimedOperator[Any]] = field(default_factory=list, kw_only=True)
    """The operators of the subtask that have something due, in order: `TaskOperators.firings`."""
    notes: Notes = field(default_factory=Notes, kw_only=True)
    """Gets late records, if nobody else does."""
    timed_by: str = field(default="its source", kw_only=True)
    """What gives its records their times, for a person."""
    late_output: str | None = field(default=None, kw_only=True)
    """The side output that gets late records; None: they are left out."""
    late_right_output: str | None = field(default=None, kw_only=True)
    """Likewise, of records of the second input."""
    late: int = field(default=0, init=False)
    """The number of late records."""
    _left_out: int = field(default=0, init=False)
    """Of these, the number that no output gets."""
    watermark: int = field(default=NO_WATERMARK, init=False)
    """No earlier record comes: a record at or below it is late here, whatever its floor."""
    idle: bool = field(default=False, init=False)
    passed_on: Watermark = field(default=Watermark(NO_WATERMARK), init=False)
    """The last one that went to those downstream."""
    ahead: dict[int, int] = field(init=False)
    """The watermarks of key groups that were further than `watermark` before the restore: subtasks were at different
    ones. What was due at one of a group is not due again, nor taken."""
    _firing: Iterator[Due[R]] | None = field(default=None, init=False)
    """The rest of what is due; None: no firing is under way."""
    _size: int = field(default=SLICE_KEYS, init=False)
    """The most keys in the next step."""
    _under_way: Due[R] | None = field(default=None, init=False)
    """The last step."""
    _had: list[bytes] = field(default_factory=list, init=False)
    """The `Due.keys` of this slot and key group since the last barrier."""
    _next: Watermark | None = field(default=None, init=False)
    """The one that came last during the firing."""
    _fired: int = field(default=NO_WATERMARK, init=False)
    """The last watermark whose results are out."""
    _last: int = field(default=NO_WATERMARK, init=False)
    """The last slot that was due. A later run goes on from there after a drain, which ends time."""

    @classmethod
    def made(cls, parts: TimedParts) -> TimedOperator[R]:
        """The operator of `parts.node`; the assembler wires it."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        self.ahead = {group: self.table.watermark(group) for group in self.groups}
        self._last = max(self.ahead.values(), default=NO_WATERMARK)
        self._reach(min(self.ahead.values(), default=NO_WATERMARK))
        self._fired = self.watermark

    def _reach(self, watermark: int) -> None:
        self.watermark = max(self.watermark, watermark)
        self.ahead = {group: further for group, further in self.ahead.items() if further > self.watermark}

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        """During a firing, *watermark* waits for its end: of several, the last counts."""
        if self._firing is not None:
            own = Watermark(self.watermark, self.idle)
            newest = Watermark(max(watermark, (self._next or own).value), idle)
            self._next = newest if newest != own else None
            return
        self._reach(watermark)
        self.idle = idle
        self.is_due()

    def is_due(self) -> None:
        """Something may be due now."""
        if not any(operator is self for operator in self.firings):
            self.firings.append(self)

    def rings(self, now_ms: int) -> bool:
        """Whether something is due by the clock at *now_ms*, in ms since 1970."""
        return False

    def tell_time(self, now_ms: int) -> None:
        """Take the time by the clock, if it goes by that."""

    def begin(self) -> None:
        """A firing is under way from now on."""
        if self._firing is None:
            self._firing = self._due()

    @property
    def fires(self) -> bool:
        """Whether a firing is under way."""
        return self._firing is not None

    @property
    def due(self) -> list[Watermark]:
        """The watermark that was passed on, the newest one and, if a firing is under way, the firing's."""
        own = Watermark(self.watermark, self.idle)
        return [self.passed_on, self._next or own, *([own] if self.fires else ())]

    @property
    def whole(self) -> bool:
        """Whether others may get a turn: every key has had all or none of its results; see also `drains_in_one`."""
        within_drain = self.drains_in_one and self.drains and self.fires
        return not within_drain and (self._under_way is None or self._under_way.whole)

    def fire(self, most: int, room: int) -> int:
        """Take *most* of what is due at `watermark`, as `Due.taken` says, or until the results are about *room*, and
        give these. Returns how much was taken."""
        entered_s = self.activity.enter(self.id)
        self.begin()
        assert self._firing is not None
        results, number, taken = list[R](), 0, 0
        while taken < most and number < room:
            self._size = min(most - taken, SLICE_KEYS)
            due = next(self._firing, None)
            if due is None:
                self._firing, self._under_way = None, None
                self._had.clear()
                self.table.advance(self._last if self.drains else self.watermark)
                self._fired = self.watermark
                break
            self._took(due)
            taken += due.taken
            if due.number:
                results.append(due.results)
                number += due.number
        self.activity.leave(self.id, entered_s, 0)
        if results:
            self._give(results)
        return taken

    def _took(self, due: Due[R]) -> None:
        """*due* is given now."""
        before, self._under_way = self._under_way, due
        if before is None or (before.slot, before.group) != (due.slot, due.group):
            self._had.clear()
        self._had += due.keys
        self._last = max(self._last, due.slot)

    def begin_within(self, newest: Watermark, at: Watermark | None = None) -> None:
        """Go on with what is *due*, of an interval that begins with it."""
        if at is not None:
            self._reach(at.value)
            self.idle = at.idle
            self.begin()
        self.advance(newest.value, idle=newest.idle)

    def passes_on(self, watermark: Watermark) -> None:
        """Pass *watermark* on: everything up to it is out."""
        self.passed_on = watermark
        self.pass_on(watermark.value, idle=watermark.idle)

    def take_next(self) -> None:
        """The firing is over: go on with the watermark that has come meanwhile, if one has."""
        if self._next is not None:
            (watermark, idle), self._next = (self._next.value, self._next.idle), None
            self.advance(watermark, idle=idle)

    def interrupt(self) -> None:
        """Others get a turn now. They see no key that only the firing knows."""

    def settle(self) -> None:
        """A barrier has come: the table has exactly what is to be given, and no record may come to what was."""
        due = self._under_way
        if due is None or due.group is None:
            return
        self.table.advance(due.slot, (due.group,))
        for key in self._had:
            self.table.put(due.slot, key, None)
        self._had.clear()

    def _steps(self, count: int, size: int = SLICE_KEYS) -> Iterator[slice]:
        """So many keys in steps of `_size`, of *size* at most."""
        start = 0
        while start < count:
            end = min(start + min(size, self._size), count)
            yield slice(start, end)
            start = end

    @property
    def drains(self) -> bool:
        """Whether time has ended."""
        return self.watermark == END_OF_TIME

    def _due(self) -> Iterator[Due[R]]:
        """What is due at `watermark`, by (slot, key group, key). The states of a slice are gone when the next is asked
        for."""
        raise NotImplementedError

    def _give(self, results: Sequence[R]) -> None:
        """Push *results* in order. Which of them come together does not depend on the time that they took."""
        raise NotImplementedError

    def passed(self, keys: Sequence[bytes]) -> list[int]:
        """Of each of *keys*, the watermark of its key group."""
        watermark, ahead = self.watermark, self.ahead
        if not ahead:
            return [watermark] * len(keys)
        return [ahead.get(group, watermark) for group in key_groups(keys, self.max_parallelism)]

    def floors(self, batch: Batch) -> list[int]:
        """Of each record, the time up to which the operator takes none."""
        assert batch.keys is not None
        pairs = zip(floors_of(batch), self.passed(batch.keys), strict=True)
        return [floor if floor > passed else passed for floor, passed in pairs]

    def are_in_time(self, batch: Batch, earliest: int) -> bool:
        """Whether no record of *batch* can be late, since the first would be due at *earliest*."""
        return batch.floors is None and not self.ahead and earliest > self.watermark

    def in_time(self, batch: Batch, *, right: bool = False) -> Batch:
        """*batch*, of the first or *right* input, without the records at or below their floor, which are late."""
        times = batch.times
        assert times is not None
        if not times or self.are_in_time(batch, min(times)):
            return batch
        kept = [time > floor for time, floor in zip(times, self.floors(batch), strict=True)]
        return self.without_late(batch, kept, right=right)

    def without_late(self, batch: Batch, kept: Sequence[bool], *, right: bool = False) -> Batch:
        """*batch*, of the first or *right* input, with the records that are *kept*; the others are late."""
        if all(kept):
            return batch
        late = batch.where(list(map(not_, kept)))
        output = self.late_right_output if right else self.late_output
        if output is None:
            self._leave_out(late)
        else:
            for push in self.sides[output]:
                push(late.unkeyed(late.records))
        self.late += len(late.records)
        return batch.where(kept)

    @property
    def left_out(self) -> LeftOut:
        """The late records that no output gets, of all that have come."""
        return LeftOut(self.id, self._left_out, self.activity.records.get(self.id, 0))

    def _leave_out(self, late: Batch) -> None:
        """Count *late*, which no output gets, and note its last record."""
        assert late.times is not None
        self._left_out += len(late.records)
        last = partial(_late_record, late.origins[-1], late.times[-1], self.floors(late)[-1], self.timed_by)
        self.notes.repeat(f"late: operator {self.id!r} leaves out", last, len(late.records))
