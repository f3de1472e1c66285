"""Readers of the output. The words of the topology's steps say what may be visible, and in which order."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from topologies import (
    CYCLE,
    HOLDING,
    PERIOD,
    RESULTS,
    ROUND,
    TTL_MS,
    WINDOW_MS,
    Event,
    Input,
    Step,
    Topology,
    deletes_rule,
    floor_at,
    is_late,
    marked,
    rule_of,
    time_at,
    time_of,
)
from watched import Broken, demand

Place = tuple[str, int]
"""A source and a partition of its topic."""


def ways_of(topology: Topology, origin: str, offset: int, begin: str = "") -> dict[str, list[str]]:
    """The `way` by step of each record of input record *offset* that came to *origin* by *begin* alone."""
    ways: dict[str, list[str]] = {step.inputs[0]: [] for step in topology.of("loop")}
    before: dict[str, list[str]] | None = None
    while ways != before:  # once more round each loop
        before = ways.copy()
        _walk(topology, ways, origin, offset, begin)
    return ways


def _walk(topology: Topology, ways: dict[str, list[str]], origin: str, offset: int, begin: str) -> None:
    for step in topology.steps:
        inputs = step.inputs[:1] if step.kind in ("as_of", "rules") else step.inputs
        come = [way for each in inputs for way in ways[each]]
        come += [begin] if step.id == origin else []
        match step.kind:
            case "branch":
                ways[step.id] = [f"{way}{step.id}/" for way in come]
            case "twice":
                ways[step.id] = [f"{way}{step.id}{mark}/" for way in come for mark in "12"]
            case "keep":
                ways[step.id] = come if offset % 3 != 1 else []
            case "split":
                ways[step.id] = come if offset % 4 else []
                ways[f"{step.id}~"] = [] if offset % 4 else come
            case "again":
                mark = marked(step.id)
                ways[step.id] = [way for way in come if way.count(mark) >= offset % 4]
                ways[f"{step.id}~"] = [f"{way}{mark}" for way in come if way.count(mark) < offset % 4]
            case "window" | "timer" | "as_of":
                ways[step.id] = [] if is_late(offset) else come
                ways[f"{step.id}~"] = come if is_late(offset) else []
            case "called":
                ways[step.id], ways[f"{step.id}~"] = come, []
            case _:
                ways[step.id] = come


class Ways:
    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._known: dict[tuple[str, int, str], dict[str, list[str]]] = {}

    def of(self, origin: str, offset: int, begin: str = "") -> dict[str, list[str]]:
        place = (origin, offset % PERIOD, begin)
        if place not in self._known:
            self._known[place] = ways_of(self._topology, *place)
        return self._known[place]


class Together(NamedTuple):
    """A step on the way to a sink that gives the records of a key and a time together."""

    step: Step
    place: int
    """The place in `totals` of the result's time; the number of its records comes after it."""
    earlier_ms: int
    """How much earlier than its records' own times it takes them."""

    def time(self, event_time: int) -> int:
        """The time of the result that has the records of *event_time*."""
        time = event_time - self.earlier_ms
        return time + WINDOW_MS if self.step.kind == "timer" else time - time % WINDOW_MS

    def due(self, event_time: int) -> int:
        """The least watermark at which a record of *event_time* may be given."""
        return event_time + (WINDOW_MS if self.step.kind == "timer" else WINDOW_MS - 1 - event_time % WINDOW_MS)


def results_before(topology: Topology, sink: Step) -> list[Together]:
    """The windows and timers on the way to *sink*, the first first."""
    steps, path = {step.id: step for step in topology.steps}, list[Step]()
    step = steps.get(sink.inputs[0])
    while step is not None and step.inputs and step.kind != "loop":
        path.insert(0, step)
        step = steps.get(step.inputs[0])
    found, place, earlier_ms = list[Together](), 0, 0
    for step in path:
        earlier_ms += WINDOW_MS if step.kind == "earlier" else 0
        if step.kind in RESULTS:
            found.append(Together(step, place, earlier_ms))
        place += 2 if step.kind in RESULTS else step.kind in ("count", "tally")
    return found


@lru_cache
def all_ways(topology: Topology) -> Ways:
    """The results for one history hold for all of its topology."""
    return Ways(topology)


class Readers:
    """One of every sink; `seen` counts what it has read."""

    def __init__(self, topology: Topology, inputs: dict[str, Input], ways: Ways, decided: dict[Place, int]) -> None:
        """*decided*: Sn of the newest manifest, as it grows."""
        self._inputs, self._ways, self._decided = inputs, ways, decided
        self.seen: Counter[str] = Counter()
        """Records seen, by sink."""
        self.doubled = 0
        """How many were visible before, where that may be."""
        self.rescaled = False
        """Whether there were more or fewer subtasks before: what went round then comes in any order."""
        self._retried = bool(topology.of("called"))
        """Whether records wait for a service, and others pass them."""
        steps = {step.id: step for step in topology.steps}
        self._step_before = {step.id: steps.get(step.inputs[0]) for step in topology.of("sink", "store")}
        """The step of which each sink gets the main output."""
        self._together = {step.id: results_before(topology, step) for step in topology.of("sink", "store")}
        """The windows and timers before each sink."""
        self._sizes: dict[str, Counter[tuple[str, int]]] = {}
        """The number of records in each result of the whole input, by step, and by key and time."""
        self._lasts: dict[tuple[str, str], tuple[int, int]] = {}
        """The time of the last record and the total of each key, by sink."""
        self._held = {step.id for step in topology.of("sink") if step.inputs[0] in _held(topology)}
        """Sinks that records come to window by window."""
        self._count_before = {
            step.id: next((e for e in topology.of("count", "tally") if e.id == step.inputs[0]), None)
            for step in topology.of("sink", "store")
        }
        """The count right before each sink, if it is one."""
        self._ordered = {
            step.id
            for step in topology.of("sink", "store")
            if (count := self._count_before[step.id]) is not None and (count.key == step.key or step.kind == "store")
        }
        """Sinks that have all updates of a key in one partition; a store has what one subtask writes in its order."""
        every = [*topology.sinks, *topology.stores]
        self._shown: dict[str, set[tuple[str, int, int, str]]] = {sink: set() for sink in every}
        self._inputs_of = {step.id: step.inputs for step in topology.of("sink", "store")}
        self._newest: dict[tuple[Any, ...], int] = {}
        """The offset of the newest visible record, by sink, place, way and keys."""
        self._totals: dict[str, Counter[str]] = {sink: Counter() for sink in every}
        """The number of visible updates, by sink and key."""
        self._updates: dict[tuple[str, str, int], tuple[str, int, int, str]] = {}
        """The record that an update stems from, by count, key and number: the same in every sink."""
        self._given: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """The totals of a record, by count: the same in every sink."""
        self._begins: dict[Place, list[int]] = {place: [] for place in decided}
        """Sn of each manifest."""
        self._rules: list[dict[str, int]] = []
        """The offset of the newest record of each rule, of each manifest: at least that high."""

    def rules_decided(self, rows: dict[str, int]) -> None:
        """A manifest is decided with these *rows*, by rule the offset of the record that each is."""
        for place, begins in self._begins.items():
            begins.append(self._decided[place])
        before = self._rules[-1] if self._rules else {}
        deleted = {rule: self._deleted(rule, newest) for rule, newest in before.items() if rule not in rows}
        self._rules.append(deleted | rows)

    def _deleted(self, rule: str, newest: int) -> int:
        """The offset of the first record at *newest* or after it that deletes *rule*."""
        partition, _, first = rule.partition("/")
        records = self._inputs["more"].partitions[int(partition)]
        gone = [at for at, (key, _) in enumerate(records) if key == first and at >= newest and deletes_rule(at)]
        demand(gone, f"rule {rule} is gone, which nothing has deleted")
        return gone[0]

    def read(self, sink: str, value: bytes) -> None:
        event = _decode(value)
        place, offset = (event.source, event.partition), event.offset
        if place not in self._decided or offset >= len(self._inputs[event.source].partitions[event.partition]):
            raise Broken(f"{_it(event)} in {sink} stems from nothing")
        if self._inputs[event.source].partitions[event.partition][offset] != (event.first, event.second):
            raise Broken(f"{_it(event)} in {sink} has other keys")
        if event.way not in self._ways.of(event.source, offset)[sink]:
            raise Broken(f"{_it(event)} does not come to {sink}")
        self.judge(sink, event)

    def judge(self, sink: str, event: Event) -> None:
        place, offset = (event.source, event.partition), event.offset
        name = (*place, offset, event.way)
        if offset >= self._decided[place]:
            raise Broken(f"{_it(event)} is visible in {sink} before its manifest")
        if name in self._shown[sink]:
            raise Broken(f"{_it(event)} is visible twice in {sink}")
        stream = (sink, *place, event.way, event.first, event.second)
        any_order = self._retried or sink in self._held or (self.rescaled and ROUND in event.way)
        if offset <= self._newest.get(stream, -1) and not any_order:
            raise Broken(f"{_it(event)} comes out of order in {sink}")
        count = self._count_before[sink]
        if count is not None:
            self._judge_totals(sink, count, event, name)
        for result in self._together[sink]:
            self._judge_result(sink, result, event)
        self._judge_times(sink, event)
        self._shown[sink].add(name)
        self._newest[stream] = offset
        self.seen[sink] += 1

    def _judge_totals(self, sink: str, count: Step, event: Event, name: tuple[str, int, int, str]) -> None:
        given = self._given.setdefault((count.id, *name), event.totals)
        if event.totals != given:
            raise Broken(f"{_it(event)} has {event.totals} in {sink}, and {given} in another sink")
        if sink not in self._ordered:
            return
        key = event.first if count.key == "first" else event.second
        number = self._totals[sink][key] = self._totals[sink][key] + 1
        total = (number - 1) % CYCLE + 1
        if event.totals[-1] != total:
            raise Broken(f"update {event.totals[-1]} of {key} in {sink} comes instead of {total}")
        if self._updates.setdefault((count.id, key, number), name) != name:
            raise Broken(f"update {number} of {key} stems from another record in {sink}")

    def _judge_result(self, sink: str, result: Together, event: Event) -> None:
        """It is the only one of its key and time, and has all of their records; and it comes once it is over."""
        key = event.first if result.step.key == "first" else event.second
        time = result.time(time_of(event))
        wanted = time, self._sizes_of(result)[key, time]
        given = event.totals[result.place : result.place + 2]
        demand(given == wanted, f"{_it(event)} is in a result of {key} of {given} in {sink}, not of {wanted}")
        due = result.due(time_of(event))
        for (source, partition), decided in self._decided.items():
            at_end = decided == len(self._inputs[source].partitions[partition])
            demand(at_end or floor_at(decided) >= due, f"{_it(event)} comes to {sink} before it is due")

    def _sizes_of(self, result: Together) -> Counter[tuple[str, int]]:
        if (sizes := self._sizes.get(result.step.id)) is None:
            sizes = self._sizes[result.step.id] = Counter()
            for place in self._decided:
                for offset, (first, second) in enumerate(self._inputs[place[0]].partitions[place[1]]):
                    key = first if result.step.key == "first" else second
                    sizes[key, result.time(time_at(offset))] += len(self._ways.of(place[0], offset)[result.step.id])
        return sizes

    def _judge_times(self, sink: str, event: Event) -> None:
        """What `totals` must be, by definition: a function of the input's times and floors."""
        step = self._step_before[sink]
        if step is not None and step.kind == "expiring":
            now = max(time_of(event), floor_at(event.offset))
            last, total = self._lasts.get((sink, event.first), (now, 0))
            total = 1 if now >= last + TTL_MS else total + 1
            self._lasts[sink, event.first] = max(last, now), total
            wanted: tuple[int, ...] = (total,)
        elif step is not None and step.kind == "rules":
            self._judge_rules(sink, step, event)
            return
        elif step is not None and step.kind == "as_of":
            wanted = self._version(step.inputs[1], event.first, time_of(event))
        else:
            return
        demand(event.totals == wanted, f"{_it(event)} has {event.totals} in {sink}, not {wanted}")

    def _judge_rules(self, sink: str, step: Step, event: Event) -> None:
        """It has rules of decided records, and none older than those of the manifest before it was read."""
        numbers = event.totals[1:] if step.inputs[0] != event.source else event.totals
        rules = {rule_of(p, f"k{key}"): (p, at) for p, at, key in batched(numbers, 3)}
        demand(len(rules) == len(numbers) // 3, f"{_it(event)} has a rule twice in {sink}")
        for rule, (partition, at) in rules.items():
            first, _ = self._inputs["more"].partitions[partition][at]
            demand(rule == rule_of(partition, first) and not deletes_rule(at), f"{_it(event)} has no rule, {rule}")
            demand(at < self._decided["more", partition], f"{_it(event)} has rule {rule} before its manifest in {sink}")
        known = bisect_right(self._begins[event.source, event.partition], event.offset)
        for rule, least in self._rules[known - 1].items() if known else ():
            if rule in rules:
                newest = rules[rule][1]
            elif not deletes_rule(newest := least):
                newest = self._deleted(rule, least)
            demand(newest >= least, f"{_it(event)} has {rule} of {newest} in {sink}, and {least} was decided before it")
            decided = self._decided["more", int(rule.partition("/")[0])]
            demand(newest < decided, f"{_it(event)} lacks {rule} in {sink} before the manifest of its deletion")

    def _version(self, source: str, key: str, time: int) -> tuple[int, ...]:
        """The partition and offset of the newest record of *source* with *key* at *time*."""
        versions = [
            (time_at(offset), partition, offset)
            for partition, records in enumerate(self._inputs[source].partitions)
            for offset, (first, _) in enumerate(records)
            if first == key and time_at(offset) <= time and not is_late(offset)
        ]
        return max(versions, default=(0,))[1:]

    def alike(self) -> None:
        shown: dict[tuple[str, ...], tuple[str, set[tuple[str, int, int, str]]]] = {}
        for sink, inputs in self._inputs_of.items():
            other, there = shown.setdefault(inputs, (sink, self._shown[sink]))
            demand(self._shown[sink] == there, f"{sink} does not show what {other} shows")


def batched(numbers: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    return (numbers[start : start + count] for start in range(0, len(numbers), count))


def _held(topology: Topology) -> set[str]:
    """The steps after a window."""
    held: set[str] = set()
    for step in topology.steps:
        if step.kind in HOLDING or held & {*step.inputs}:
            held.add(step.id)
    return held


def _it(event: Event) -> str:
    """The record, in words: for most nobody asks."""
    return f"record {event.offset} of {event.source}[{event.partition}] by way of {event.way or 'nothing'}"


_decode = msgspec.json.Decoder(Event).decode
