"""Pipelines of the simulator, drawn from a seed, as a `Pipeline` of the public API and as plain data.

A record names its input record, the branches that it took, and its totals, so that a reader can tell whether it is
right. Functions from `Event` to `Event` are the steps for the engine; the words in `Step` are those for the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import msgspec

from exactlyonce import Emit, EventTime, Joined, Pipeline, Record, Timers, Tumbling, Windowed
from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.pipeline.event_time import ms_of
from exactlyonce.pipeline.functions import Output
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.stream import Table
from exactlyonce.sinks.kafka.sink import KafkaSink

PIPELINE = "p"
ROUND = "@"
CYCLE = 7
"""A key's total begins again after so many: its state is deleted then."""
MAX_PARALLELISM = 8
KEYS_UNDER_LOAD = 20
F = TypeVar("F", bound=Callable[..., Any])


class Event(msgspec.Struct, frozen=True):
    source: str
    partition: int
    offset: int
    first: str
    second: str
    """Two keys."""
    way: str = ""
    """The branches that it took."""
    totals: tuple[int, ...] = ()
    """The totals given by the counts on its way, and the numbers that other steps add."""


class Tally(msgspec.Struct):
    total: int


@dataclass(frozen=True)
class Step:
    """One node, and what it does.

    - source: gives every record of its topic.
    - branch: passes on every record, with its id in `way`.
    - twice: passes on every record two times, with its id and a mark in `way`.
    - keep: passes on the records whose offset is not 1 modulo 3.
    - split: passes those whose offset is 0 modulo 4 to its side output, "<id>~", all others on.
    - union: passes on what its inputs give.
    - again: passes records to its side output, "<id>~", until its mark is in `way` as often as the offset modulo 4
      says, each time with its id and the mark; then on.
    - called: calls a service: passes records on, or, while that is away, to its side output, "<id>~", as they are.
    - loop: passes on what its input gives, which comes after it: a back edge. That of id "back" rests a while.
    - count: appends to `totals` how many records of the same key it has had, 1 to `CYCLE` and again.
    - tally: likewise; its state is a mutable one.
    - expiring: appends to `totals` how many records its key has had without a pause of `TTL_MS`.
    - window: holds records until their window is over, then passes them on, with the window's start and the number of
      records in its result in `totals`; late ones to its side output, "<id>~".
    - earlier: gives each record, of a window, an event time in the window before its own.
    - timer: likewise, until a timer of event time; `totals` then have its time, and how many records it gives.
    - clocked: holds records until a timer by the clock; none is late.
    - as_of: holds records until their time, with the late ones as for a window; `totals` are then the partition and
      offset of the newest record of its second input with the same key, at that time or before.
    - pairs: each pair of a record of its first input and one of its second with the same key, whose time is at most
      `EARLIER_MS` before the first one's or `LATER_MS` after it: `totals` end with the partition and offset of the
      second, and `way` with `PAIR`.
    - full_pairs: likewise; a record of either input without a partner comes alone, with `LEFT` or `RIGHT` as its way.
    - rules: passes on every record of its first input, with the rows of a table in `totals`: for each row the partition
      and offset of the record of its second input that it is, and the number of its key. Its key is the partition and
      `first`; a record whose offset is 2 modulo 4 deletes it.
    - join: the rows of its first input, a source, by their first key, each with the row of its second input whose first
      key is its second: `totals` are that row's partition and offset. A row that is gone has `GONE` as its way.
    - left_join: likewise, also without a row of the second input: `totals` are empty.
    - sink: writes every record, keyed.
    - store: writes every record, to a store that keeps a ledger.
    """

    kind: str
    id: str
    inputs: tuple[str, ...] = ()
    key: str = "first"
    """The key field of an operator by key or a sink: the field that is the key."""


HOLDING = ("window", "timer", "clocked", "as_of")
"""The kinds that hold records."""
JOINING = ("join", "left_join")
"""The kinds of joins of tables, whose sources give rows: see `is_gone`."""
PAIRING = ("pairs", "full_pairs")
"""The kinds of joins within an interval."""
KEEPING = ("count", "tally", "expiring", *HOLDING, *PAIRING)
"""The kinds with state."""


@dataclass(frozen=True)
class Topology:
    """Steps in an order in which each comes after its inputs, but for a loop."""

    name: str
    steps: tuple[Step, ...]
    simple: bool = False
    idle: str | None = None
    """After which time partitions are idle. Then all input is there from the beginning, so that none is it early."""

    def of(self, *kinds: str) -> list[Step]:
        return [each for each in self.steps if each.kind in kinds]

    @property
    def is_stateless(self) -> bool:
        """Whether it is made of chains without state: no subtask has a second input."""
        return not self.of("count", "tally", "union", *JOINING)

    @property
    def has_times(self) -> bool:
        return bool(self.of("window", "timer", "as_of", "expiring", *PAIRING))

    @property
    def tables(self) -> set[str]:
        """The sources of rows."""
        return {source for step in self.of(*JOINING) for source in step.inputs}

    @property
    def loops(self) -> list[str]:
        return [each.id for each in self.of("loop")]

    @property
    def sources(self) -> list[str]:
        return [each.id for each in self.of("source")]

    @property
    def sinks(self) -> list[str]:
        return [each.id for each in self.of("sink")]

    @property
    def stores(self) -> list[str]:
        return [each.id for each in self.of("store")]


def topic_of(source: str) -> str:
    return f"topic-{source}"


DISORDER_MS, WINDOW_MS, TTL_MS = 100, 50, 100
RESULTS = ("window", "timer")
"""The kinds that give all records of a key and a time together."""


def time_of(event: Event) -> int:
    return time_at(event.offset)


def time_at(offset: int) -> int:
    """A record is late or in disorder by its offset alone, whatever the partition; see `is_late`."""
    delay_ms = {LATE_OFFSET: 200, LATE_OFFSET + 2: 60}.get(offset % PERIOD, 0)
    return 1_000 + 10 * offset - delay_ms


def floor_at(offset: int) -> int:
    """The time of the latest record before it, less the disorder and 1 ms."""
    return max(map(time_at, range(max(0, offset - PERIOD), offset)), default=0) - DISORDER_MS - 1


EARLIER_MS, LATER_MS = 40, 60
"""How much earlier or later the second record of a pair may be."""
PAIR, LEFT, RIGHT = "pair/", "left/", "right/"
"""The ways of results of a join within an interval."""
CLOCK_MS = 30
"""How long records wait by the clock."""
PERIOD = 12
"""The modulus of the offset on which the steps depend."""
LATE_OFFSET = 5


def is_late(offset: int) -> bool:
    """Whether its time, and the last millisecond of its window, are not above its floor."""
    return offset % PERIOD == LATE_OFFSET


GONE = "gone/"
"""The way of a result that no longer stands."""


def is_gone(offset: int) -> bool:
    """Whether a message of a table deletes its row."""
    return offset % 5 == 3


# --- for the engine -------------------------------------------------------------------------------------------------


def _branch(id: str) -> Callable[[Event], Event]:
    def branch(event: Event) -> Event:
        return Event(
            event.source, event.partition, event.offset, event.first, event.second, f"{event.way}{id}/", event.totals
        )

    return branch


def _twice(id: str) -> Callable[[Event], Iterator[Event]]:
    one, other = _branch(f"{id}1"), _branch(f"{id}2")

    def twice(event: Event) -> Iterator[Event]:
        yield one(event)
        yield other(event)

    return twice


def _keep(event: Event) -> bool:
    return event.offset % 3 != 1


def marked(id: str) -> str:
    """The mark that step *id* adds to `way` of a record that it sends round."""
    return f"{id}{ROUND}/"


def _aside(step: Step, calls: Callable[[str], bool]) -> Callable[[Event], Event | None]:
    """The record for the side output of *step* instead of its main one; None: the record goes on."""
    round_again = _branch(f"{step.id}{ROUND}")

    def split(event: Event) -> Event | None:
        return event if event.offset % 4 == 0 else None

    def again(event: Event) -> Event | None:
        return round_again(event) if event.way.count(marked(step.id)) < event.offset % 4 else None

    def called(event: Event) -> Event | None:
        return None if calls(step.id) else event

    return {"split": split, "again": again, "called": called}[step.kind]


def _routed(output: Output[Event], aside: Callable[[Event], Event | None]) -> Callable[[Event, Any], None]:
    def route(event: Event, emit: Any) -> None:
        side = aside(event)
        if side is None:
            emit(event)
        else:
            emit(side, output)

    return route


def _answers(step: str) -> bool:
    """Any service: none is ever away."""
    return True


def _counted(event: Event, total: int) -> Event:
    return Event(
        event.source, event.partition, event.offset, event.first, event.second, event.way, (*event.totals, total)
    )


def _count(total: int | None, event: Event) -> tuple[int | None, Event]:
    total = (total or 0) + 1
    return (None if total == CYCLE else total), _counted(event, total)


def _tally(tally: Tally | None, event: Event) -> tuple[Tally | None, Event]:
    tally = tally or Tally(0)
    tally.total += 1
    return (None if tally.total == CYCLE else tally), _counted(event, tally.total)


def _expiring(total: int | None, event: Event) -> tuple[int, Event]:
    return (total or 0) + 1, _counted(event, (total or 0) + 1)


class Holds:
    """Gives each record when a timer of event time goes off."""

    def on_record(
        self, key: str, held: list[Event] | None, event: Event, timers: Timers, emit: Emit[Event]
    ) -> list[Event] | None:
        timers.event.set(time_of(event) + WINDOW_MS)
        return [*(held or []), event]

    def on_time(
        self, key: str, held: list[Event] | None, at: datetime, timers: Timers, emit: Emit[Event]
    ) -> list[Event] | None:
        for event in _together([event for event in held or [] if time_of(event) + WINDOW_MS <= ms_of(at)], at):
            emit(event)
        return [event for event in held or [] if time_of(event) + WINDOW_MS > ms_of(at)] or None


class HoldsByClock:
    """Gives the records of a key some ms after the first of them."""

    def on_record(
        self, key: str, held: list[Event] | None, event: Event, timers: Timers, emit: Emit[Event]
    ) -> list[Event] | None:
        if held is None:
            timers.clock.set(timers.clock.now + timedelta(milliseconds=CLOCK_MS))
        return [*(held or []), event]

    def on_clock(
        self, key: str, held: list[Event] | None, at: datetime, timers: Timers, emit: Emit[Event]
    ) -> list[Event] | None:
        for event in held or []:
            emit(event)
        return None


def _with_version(joined: Joined[str, Event, Event | None]) -> Event:
    left, right = joined.left, joined.right
    return left if right is None else _counted(_counted(left, right.partition), right.offset)


def _with_partner(joined: Joined[str, Event | None, Event | None]) -> Event:
    left, right = joined.left, joined.right
    if left is None or right is None:
        alone = left or right
        assert alone is not None
        return msgspec.structs.replace(alone, way=LEFT if right is None else RIGHT)
    return _counted(_counted(msgspec.structs.replace(left, way=PAIR), right.partition), right.offset)


def _itself(event: Event) -> Event:
    return event


def deletes_rule(offset: int) -> bool:
    """Whether a record of a table deletes the row of its key."""
    return offset % 4 == 2


def rule_of(partition: int, first: str) -> str:
    """The key of the row that a record is."""
    return f"{partition}/{first}"


def _rule(event: Event) -> Record[Event | None]:
    return Record(None if deletes_rule(event.offset) else event, rule_of(event.partition, event.first))


def _ruled(event: Event, rules: Mapping[str, Event]) -> Event:
    for rule in rules.values():
        for number in (rule.partition, rule.offset, int(rule.first[1:])):
            event = _counted(event, number)
    return event


def _result(result: Record[Joined[str, Event, Event | None] | None]) -> Event:
    return Event("", -1, -1, result.key, "", GONE) if result.value is None else _with_version(result.value)


def _appended(events: list[Event], event: Event) -> list[Event]:
    return [*events, event]


def _together(events: list[Event], at: datetime) -> list[Event]:
    """*events* of one result, each with the result's time and their number."""
    return [_counted(_counted(event, ms_of(at)), len(events)) for event in events]


def _value(windowed: Windowed[str, list[Event]]) -> list[Event]:
    return _together(windowed.value, windowed.start)


def _window_before(event: Event) -> int:
    return time_of(event) - WINDOW_MS


def _key(name: str) -> Callable[[Event], str]:
    def first(event: Event) -> str:
        return event.first

    def second(event: Event) -> str:
        return event.second

    return first if name == "first" else second


@lru_cache
def graph_of(topology: Topology) -> LogicalGraph:
    return built(topology, lambda id: None)


def under_load(topology: Topology, calls: Callable[[str], bool]) -> LogicalGraph:
    """*calls* is told of each record that comes to a step, and says whether the service called there has answered."""
    return built(topology, lambda id: None, calls)


def built(topology: Topology, stored: Callable[[str], Any], calls: Callable[[str], bool] = _answers) -> LogicalGraph:
    """*stored* gives the sinks of stores; *calls*: see `under_load`."""

    def told(step: str, function: F) -> F:
        if calls is _answers:
            return function

        @wraps(function)
        def telling(*given: Any) -> Any:
            calls(step)
            return function(*given)

        return cast(F, telling)

    pipeline = Pipeline(PIPELINE, max_parallelism=MAX_PARALLELISM)
    streams: dict[str, Any] = {}
    for step in topology.steps:
        inputs = [streams[each] for each in step.inputs] if step.kind != "loop" else []
        match step.kind:
            case "source" if step.id in topology.tables:
                rows = KafkaSource.records(topic_of(step.id), key=str, value=Event)
                streams[step.id] = pipeline.table(step.id, rows)
            case "source":
                timed: EventTime[Event] | None = None
                if topology.has_times:
                    timed = EventTime(time_of, disorder=f"{DISORDER_MS}ms", idle=topology.idle, ahead=None)
                streams[step.id] = pipeline.source(step.id, KafkaSource(topic_of(step.id), value=Event, time=timed))
            case "branch":
                streams[step.id] = inputs[0].map(told(step.id, _branch(step.id)), id=step.id)
            case "twice":
                streams[step.id] = inputs[0].flat_map(_twice(step.id), id=step.id, output=Event)
            case "keep":
                streams[step.id] = inputs[0].filter(_keep, id=step.id)
            case "split" | "again" | "called":
                output = Output("side", Event)
                routed = _routed(output, _aside(step, calls))
                streams[step.id] = inputs[0].split(routed, id=step.id, outputs=[output], output=Event)
                streams[f"{step.id}~"] = streams[step.id].side(output)
            case "loop":
                streams[step.id] = pipeline.feedback(step.id, Event, pause="30ms" if step.id == "back" else "0ms")
            case "union":
                streams[step.id] = inputs[0].union(*inputs[1:], id=step.id)
            case "count":
                streams[step.id] = inputs[0].key_by(_key(step.key)).stateful_map(step.id, told(step.id, _count))
            case "tally":
                streams[step.id] = inputs[0].key_by(_key(step.key)).stateful_map(step.id, told(step.id, _tally))
            case "expiring":
                keyed = inputs[0].key_by(_key(step.key))
                streams[step.id] = keyed.stateful_map(step.id, _expiring, ttl=f"{TTL_MS}ms")
            case "earlier":
                streams[step.id] = inputs[0].with_time(_window_before, disorder=f"{2 * WINDOW_MS}ms", id=step.id)
            case "rules":
                changes = pipeline._builder._as_table(inputs[1].map(_rule, id=f"{step.id}-changes")._origin, str)
                streams[step.id] = inputs[0].with_broadcast(step.id, Table(pipeline._builder, changes), _ruled)
            case "join" | "left_join":
                how = "inner" if step.kind == "join" else "left"
                joined = inputs[0].join_table(step.id, inputs[1], by=_key("second"), how=how)
                streams[step.id] = joined.changes().map(_result, id=f"{step.id}-records")
            case "clocked":
                streams[step.id] = inputs[0].key_by(_key(step.key)).process(step.id, HoldsByClock, order="arrival")
            case "pairs" | "full_pairs":
                right, within = inputs[1].key_by(_key(step.key)), (f"-{EARLIER_MS}ms", f"{LATER_MS}ms")
                how = "inner" if step.kind == "pairs" else "full"
                pairs = inputs[0].key_by(_key(step.key)).join(step.id, right, within=within, how=how)
                streams[step.id] = pairs.map(told(step.id, _with_partner), id=f"{step.id}-records")
            case "window" | "timer" | "as_of":
                output = Output("late", Event)
                shown = any(f"{step.id}~" in each.inputs for each in topology.steps)
                late = output if shown else None
                keyed = inputs[0].key_by(_key(step.key))
                if step.kind == "window":
                    windows = keyed.window(Tumbling(f"{WINDOW_MS}ms"))
                    held = windows.fold(step.id, list[Event], _appended, state=list[Event], late=late)
                    streams[step.id] = held.flat_map(_value, id=f"{step.id}-records", output=Event)
                elif step.kind == "timer":
                    streams[step.id] = held = keyed.process(step.id, Holds, late=late)
                    if calls is not _answers:
                        streams[step.id] = held.map(told(step.id, _itself), id=f"{step.id}-records")
                else:
                    held = keyed.as_of(step.id, inputs[1].key_by(_key(step.key)), late=late)
                    streams[step.id] = held.map(_with_version, id=f"{step.id}-records")
                if shown:
                    streams[f"{step.id}~"] = held.side(output)
            case "sink":
                inputs[0].sink(step.id, KafkaSink(step.id, key=_key(step.key)))
            case "store":
                inputs[0].sink(step.id, stored(step.id))
    for step in topology.of("loop"):
        streams[step.inputs[0]].feed(streams[step.id])
    return pipeline.build()


# --- drawn ----------------------------------------------------------------------------------------------------------


SHAPES = {
    "chain": "in: source, totals: COUNT in, out: sink totals",
    "sinks": """
        in: source, seen: sink in, some: keep in, few: sink some,
        totals: COUNT in, out: sink totals, copy: sink totals by second""",
    "diamond": """
        in: source, left: branch in, some: keep in, right: twice some, both: union left right,
        totals: COUNT both, out: sink totals""",
    "union": """
        in: source, more: source, other: branch more, both: union in other, totals: COUNT both, out: sink totals""",
    "shuffles": """
        in: source, inner: count in, between: sink inner, totals: COUNT inner by second, out: sink totals by second""",
    "sides": """
        in: source, parted: split in, late: sink parted~, totals: COUNT parted, lates: COUNT parted~ by second,
        out: sink totals, counted: sink lates by second""",
    "sources": """
        in: source, more: source, totals: COUNT in, others: count more by second, both: union totals others,
        out: sink both, alone: sink others by second""",
}
"""Steps by name, each with its kind, its inputs and its key. COUNT is a count or a tally, as drawn."""
COMPLEX = [*SHAPES][1:]
STORE_SHAPES = {
    "store-chain": f"{SHAPES['chain']}, rows: store totals",
    "store-alone": "in: source, totals: COUNT in, rows: store totals, raw: store in",
    "store-diamond": f"{SHAPES['diamond']}, rows: store totals, lefts: store left, rights: store right",
    "store-shuffles": f"{SHAPES['shuffles']}, inners: store inner, rows: store totals",
}
"""Shapes with sinks that write to a store; "store-alone" has no transaction of any sink."""
LOOP_SHAPES = {
    "cycle": """
        in: source, back: loop around~, both: union in back, totals: COUNT both, every: sink totals,
        around: again totals, out: sink around""",
    "nested": """
        in: source, outer: loop far~, all: union in outer, firsts: count all, inner: loop near~,
        both: union firsts inner, totals: COUNT both by second, near: again totals, far: again near, out: sink far""",
    "mutual": """
        in: source, more: source, left: loop right-again~, firsts: count in by second, lefts: union firsts left,
        totals: COUNT lefts, left-again: again totals, out: sink left-again, right: loop left-again~,
        rights: union more right, others: count rights by second, right-again: again others,
        copy: sink right-again by second""",
}
"""Counted records come round, up to three times: in a loop, in a loop in a loop, in two loops that feed each other."""
LOAD_SHAPES = {
    "one-shuffle": "in: source, read: branch in, totals: COUNT read, out: sink totals",
    "two-shuffles": "in: source, read: branch in, inner: count read by second, totals: COUNT inner, out: sink totals",
    "three-shuffles": """
        in: source, read: branch in, inner: count read, outer: count inner by second, totals: COUNT outer,
        out: sink totals""",
    "retry": """
        in: source, read: branch in, totals: COUNT read, back: loop called~, both: union totals back,
        called: called both, out: sink called""",
}
"""Shapes for constant load: one to three shuffles, and a loop in which records wait for a service."""
WINDOW_SHAPES = {
    "windows": "in: source, held: window in, out: sink held, late: sink held~",
    "windows-twice": """
        in: source, read: branch in, held: window read, again: window held by second, out: sink again by second,
        late: sink held~""",
    "windows-earlier": """
        in: source, held: window in, back: earlier held, again: window back by second, out: sink again by second,
        late: sink held~""",
    "windows-of-two": """
        in: source, more: source, both: union in more, held: window both, totals: COUNT held, late: sink held~,
        out: sink totals""",
    "windows-idle": """
        in: source, more: source, both: union in more, held: window both, out: sink held, late: sink held~""",
    "timers": "in: source, held: timer in, out: sink held, late: sink held~",
    "clocked": "in: source, held: clocked in, out: sink held",
    "expiring": "in: source, totals: expiring in, out: sink totals",
    "as-of": "in: source, more: source, joined: as_of in more, out: sink joined, late: sink joined~",
}
"""State by time: no record of an earlier window is late for a later one."""
PAIR_SHAPES = {
    "pairs": "in: source, more: source, paired: pairs in more, out: sink paired",
    "pairs-full": "in: source, more: source, paired: full_pairs in more, out: sink paired",
    "pairs-shuffled": """
        in: source, inner: count in by second, more: source, paired: pairs inner more, out: sink paired""",
}
"""Joins within an interval, whose left records have been shuffled before or not."""
TIMED_LOAD_SHAPES = {
    "load-timers": "in: source, read: branch in, held: timer read, out: sink held",
    "load-pairs": "in: source, more: source, read: branch in, paired: pairs read more, out: sink paired",
}
"""Shapes with event time for constant load."""
BROADCAST_SHAPES = {
    "rules": "in: source, more: source, ruled: rules in more, out: sink ruled",
    "rules-shuffled": """
        in: source, more: source, totals: COUNT in by second, ruled: rules totals more, lasts: count ruled,
        out: sink ruled, copy: sink lasts""",
}
"""A table whose rows all subtasks have."""
JOIN_SHAPES = {
    "foreign-key": "lefts: source, rights: source, joined: join lefts rights, out: sink joined",
    "foreign-key-left": "lefts: source, rights: source, joined: left_join lefts rights, out: sink joined",
}
"""Tables joined by a foreign key."""
STATELESS = "in: source, mapped: branch in, some: keep mapped, doubled: twice some, out: sink doubled"
NAMED_SHAPES = {
    **STORE_SHAPES, "stateless": STATELESS, **LOOP_SHAPES, **LOAD_SHAPES, **WINDOW_SHAPES, **BROADCAST_SHAPES,
    **JOIN_SHAPES, **PAIR_SHAPES, **TIMED_LOAD_SHAPES,
}  # fmt: skip
"""Reached by name only: what a seed draws without is what it always drew."""
SIMPLE = {"chain", "store-chain", "store-alone", "stateless"}
"""Those that have more input."""
ANY_STORE = "stores"
"""The name of any of them, as drawn."""
ANY_LOAD = "load"
"""Likewise."""


@dataclass
class Input:
    """The records of a source's topic: the two keys of each record, by partition."""

    partitions: list[list[tuple[str, str]]] = field(default_factory=list)
    at_first: int = 0
    """How many of the partitions are there from the beginning."""


def drawn(rng: random.Random, name: str | None = None) -> Topology:
    """Half of all are chains, which are cheap."""
    count = rng.choice(("count", "tally"))
    if name == ANY_STORE:
        name = rng.choice([*STORE_SHAPES])
    elif name == ANY_LOAD:
        name = rng.choice([*LOAD_SHAPES])
    elif name is None:
        name = "chain" if rng.random() < 0.5 else rng.choice(COMPLEX)
    steps = (SHAPES | NAMED_SHAPES)[name].replace("COUNT", count).split(",")
    idle = "100ms" if name == "windows-idle" else None
    return Topology(name, tuple(_step(*each.split(":")) for each in steps), name in SIMPLE, idle)


def _step(id: str, text: str) -> Step:
    words, _, key = text.partition(" by ")
    kind, *inputs = words.split()
    return Step(kind, id.strip(), tuple(inputs), key or "first")


def load_for(topology: Topology, rng: random.Random, records: int) -> dict[str, Input]:
    """*records* of each source, of many keys."""
    keys = [f"k{i}" for i in range(KEYS_UNDER_LOAD)]
    partitions = rng.randint(2, 4)
    return {
        source: Input(
            [[(rng.choice(keys), rng.choice(keys)) for _ in range(records // partitions)] for _ in range(partitions)],
            partitions,
        )
        for source in topology.sources
    }


def tables_for(topology: Topology, rng: random.Random) -> dict[str, Input]:
    """Rows, whose first keys each have one partition; the second key of a left row may be that of no right row."""
    keys = {
        source: [[f"{source}{p}.{i}" for i in range(rng.randint(2, 4))] for p in range(rng.randint(1, 3))]
        for source in topology.sources
    }
    ((lefts, rights),) = (step.inputs for step in topology.of(*JOINING))
    referred = {lefts: [*(key for own in keys[rights] for key in own), "nobody"], rights: [""]}
    return {
        source: Input(
            [[(rng.choice(own), rng.choice(referred[source])) for _ in range(rng.randint(12, 50))] for own in parts],
            len(parts),
        )
        for source, parts in keys.items()
    }


def inputs_for(topology: Topology, rng: random.Random) -> dict[str, Input]:
    if topology.tables:
        return tables_for(topology, rng)
    keys = [f"k{i}" for i in range(rng.randint(2, 5))]
    most = 100 if topology.simple else 50
    found = {}
    for source in topology.sources:
        partitions = [
            [(rng.choice(keys), rng.choice(keys)) for _ in range(rng.randint(12, most))]
            for _ in range(rng.randint(1, 3))
        ]
        added = len(partitions) > 1 and rng.random() < 0.25 and not topology.of(*HOLDING, *PAIRING, "expiring")
        at_first = len(partitions) - added
        found[source] = Input(partitions, at_first)
    return found
