"""Planted defects of event time: floors, watermarks, idle partitions, firings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planting import WRONG, in_place_of, mutant, replaced, unfitting

from exactlyonce.engines.local.channels import LocalChannel, SocketChannel
from exactlyonce.engines.local.inputs import SourceInput
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.expiry import Latest
from exactlyonce.engines.runtime.operators import WithTime
from exactlyonce.engines.runtime.order_log import RECORDS, OrderRuns
from exactlyonce.engines.runtime.source_decoder import SourceTimes
from exactlyonce.engines.runtime.timed_operators import Due, TimedOperator
from exactlyonce.engines.runtime.timer_operators import HandlerOperator
from exactlyonce.engines.runtime.watermarks import MergedPorts, Watermark
from exactlyonce.engines.runtime.window_operators import TumblingWindows, WindowOperator, WindowResults
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR
from exactlyonce.state.slots import TableTimes

TORN = r"is in a result of \w+ of"
"""A result does not have all records of its key and time, or others."""
TOO_SOON = r"before it is due"
SOONER_MS = 40
ELSEWHERE = rf"does not come to|{TORN}|{TOO_SOON}|{WRONG}"
"""A late record is on time, or the other way round, or a result comes too soon."""


@mutant("floors are not restored", ELSEWHERE, luck="windows", shape="windows", first=12)
@in_place_of(SourceTimes, "__init__")
def _no_floors(real: Any, self: SourceTimes, event_time: Any, before: Any, rules: int) -> None:
    real(self, event_time, (), rules)


@mutant("a partition counts once it has spoken", ELSEWHERE, luck="windows", shape="windows-of-two", first=50)
@in_place_of(SourceTimes, "advanced")
def _unregistered(real: Any, self: SourceTimes, now_s: float) -> Any:
    splits, self._splits = self._splits, [split for split in self._splits if self.floor_of(split) != NO_FLOOR]
    told = real(self, now_s)
    self._splits = splits
    return told


@mutant("a partition is idle while its records are unread", ELSEWHERE, luck="windows", shape="windows-idle")
@in_place_of(SourceTimes, "rest")
def _idle_while_held(real: Any, self: SourceTimes, positions: Any, quiet: Any, now_s: float, **_: Any) -> None:
    real(self, positions, [position.partition for position in positions], now_s, behind=False)


@mutant("a watermark goes on before the results that it makes due", ELSEWHERE, luck="windows", shape="windows-twice")
@in_place_of(TaskOperators, "fire")
def _watermark_first(real: Any, self: TaskOperators, most: int, room: int) -> int:
    operator = self.firings[0]
    operator.pass_on(operator.watermark, idle=operator.idle)
    taken: int = real(self, most, room)
    return taken


@mutant("of several inputs the furthest decides", ELSEWHERE, luck="windows", shape="windows-of-two")
@in_place_of(MergedPorts, "changed")
def _furthest(real: Any, self: MergedPorts) -> None:
    ports = self._ports
    self._ports = [max(ports, key=lambda port: port.watermark)]
    real(self)
    self._ports = ports


@mutant("a watermark overtakes the frame before it", ELSEWHERE, luck="windows", shape="windows", first=7)
def _overtaking() -> Iterable[Any]:
    def in_memory(real: Any, self: LocalChannel, signal: Any) -> None:
        real(self, signal)
        frames = self._arrivals.frames
        if isinstance(signal, Watermark) and len(frames) > 1:
            frames.insert(len(frames) - 2, frames.pop())

    def over_socket(real: Any, self: SocketChannel, signal: Any) -> None:
        overtaken = isinstance(signal, Watermark) and len(self._outbox) > 1
        last = self._outbox.pop() if overtaken else None
        real(self, signal)
        if last is not None:
            self._outbox.append(last)

    yield replaced(LocalChannel, "send_signal", in_memory)
    yield replaced(SocketChannel, "send_signal", over_socket)


@mutant("restored records wait for others", ELSEWHERE, luck="unaligned windows", shape="windows-of-two", first=20)
@in_place_of(Subtask, "step")
def _fires_before_captured(real: Any, self: Subtask, **hurried: bool) -> bool:
    restored, self.restored = self.restored, None
    moved: bool = real(self, **hurried)
    self.restored = restored
    return moved or real(self, **hurried)


@mutant("an older block counts below the floor", ELSEWHERE, luck="windows", shape="windows", first=2)
@in_place_of(TableTimes, "first_place")
def _no_floor(real: Any, self: TableTimes, group: int) -> bytes:
    return b""


@mutant("the end of a run is the end of time", ELSEWHERE, luck="windows", shape="windows", first=4)
@in_place_of(SourceInput, "next")
def _always_drains(real: Any, self: SourceInput, room: int, **hurried: bool) -> Any:
    if self.triggers and self.triggers[0].final:
        self.triggers[0] = self.triggers[0]._replace(drains=True)
    return real(self, room, **hurried)


@mutant(
    "what a record has refreshed goes with its old slot",
    r"has \(\d+,\) in \w+, not",
    luck="windows",
    shape="expiring",
    first=46,
)
@in_place_of(Latest, "settle")
def _old_slots(real: Any, self: Latest[Any]) -> None:
    for key, entry in [*self._entries.items()]:
        if entry is not None and (slots := self._table.slots_of(key)):
            self._table.put(slots[0], key, entry)
            del self._entries[key]
    real(self)


@mutant("a barrier leaves what a firing has given", r"has \d+ records, not \d+", luck="windows", shape="windows")
@in_place_of(TimedOperator, "settle")
def _given_again(real: Any, self: TimedOperator[Any]) -> None:
    pass


@mutant("a window gives a result for each of its records", TORN, luck="windows", shape="windows")
@in_place_of(WindowOperator, "_give")
def _torn(real: Any, self: WindowOperator[Any], results: Sequence[WindowResults]) -> None:
    real(
        self,
        [
            some._replace(starts=[start], keys=[key], states=[[record]])
            for some in results
            for start, key, records in zip(some.starts, some.keys, some.states, strict=True)
            for record in records
        ],
    )


@mutant("a window gives its result before it is over", TOO_SOON, luck="windows", shape="windows")
@in_place_of(TumblingWindows, "_due")
def _too_soon(real: Any, self: TumblingWindows) -> Iterator[Due[WindowResults]]:
    for last in self.table.slots(self.watermark + SOONER_MS):
        for group in self.table.groups(last):
            keys, states = self.table.read(last, group)
            yield from self._slices(last, group, [self.window.start(last)] * len(keys), keys, states)
            self.table.drop(last, (group,))


@mutant("a timer goes off with the record that sets it", TORN, luck="windows", shape="timers")
@in_place_of(HandlerOperator, "_called")
def _with_its_record(real: Any, self: HandlerOperator, *call: Any) -> Any:
    return real(self, *call[:-1], END_OF_TIME)


@mutant("a timer goes off before its time", TOO_SOON, luck="windows", shape="timers")
@in_place_of(HandlerOperator, "_due")
def _timers_too_soon(real: Any, self: HandlerOperator) -> Any:
    watermark, self.watermark = self.watermark, self.watermark + SOONER_MS
    due = real(self)
    self.watermark = watermark
    return due


# --- order logs -----------------------------------------------------------------------------------------------------

OTHERWISE = "Nor can it be made again by a replay: a replay gives"


@mutant("the order log has no watermarks", OTHERWISE, luck="window replays", shape="windows", first=2)
@in_place_of(OrderRuns, "watermark", unfitting())
def _no_watermarks(real: Any, self: OrderRuns, name: str, watermark: Watermark) -> None:
    pass


@mutant(
    "the order log does not have what followed the clock",
    OTHERWISE,
    luck="window replays",
    shape="windows-idle",
    first=6,
)
@in_place_of(OrderRuns, "watermark", unfitting())
def _no_clock(real: Any, self: OrderRuns, name: str, watermark: Watermark) -> None:
    if not watermark.idle:
        real(self, name, watermark)


@mutant(
    "a replay takes watermarks first",
    rf"{ELSEWHERE}|{OTHERWISE}",
    luck="window replays",
    shape="windows-twice",
    first=2,
)
@in_place_of(OrderRuns, "cut", unfitting())
def _sooner(real: Any, self: OrderRuns, **given: Any) -> Any:
    kinds = [each.kind for each in self.inputs]
    pairs = sorted(zip(self.runs[::2], self.runs[1::2], strict=True), key=lambda pair: kinds[pair[0]] == RECORDS)
    self.runs = [each for pair in pairs for each in pair]
    return real(self, **given)


@mutant("the order log has no clock", OTHERWISE, luck="window replays", shape="clocked")
@in_place_of(OrderRuns, "clock", unfitting())
def _no_times(real: Any, self: OrderRuns, now_ms: int) -> None:
    pass


@mutant("a watermark passes records that get an earlier time", ELSEWHERE, luck="windows", shape="windows-earlier")
@in_place_of(WithTime, "advance")
def _in_spite_of_disorder(real: Any, self: WithTime, watermark: int, *, idle: bool = False) -> None:
    self.pass_on(watermark, idle=idle)
