"""A judge of histories in the form of Jepsen's Kafka workload; it shares no code with the product.

    python tests/histories/rig/history_checker.py FOLDER

FOLDER has `history.edn`, an operation a line, and `test.edn`. The verdict is JSON; exit code 1: it is not valid.
Operations are those of `jepsen.tests.kafka`: `:send`, `:poll` and `:txn`, of micro-operations `[:send key [offset
value]]` and `[:poll {key [[offset value] ...]}]`. A key is a partition. `:ok` has happened, `:fail` has not, `:info`
may have. Values of a key are unique, so that each tells its writer. Offsets may have gaps: markers of transactions.

| anomaly | its meaning |
| --- | --- |
| inconsistent-offsets | two values at one offset |
| duplicate | one value at two offsets of a partition |
| G1a | aborted read: a value of a failed transaction was polled, or an offset that the log has as aborted |
| precommitted-read | a transaction polled what it sent itself |
| lost-write | a value that was sent, before one that was polled, was polled by nobody |
| unseen | a value that was sent, after all that was polled, was polled by nobody |
| int-poll-skip, int-nonmonotonic-poll | within an operation, polls skip a value, or go back |
| poll-skip, nonmonotonic-poll | the same from one operation of a process to its next |
| int-nonmonotonic-send, nonmonotonic-send | sends of an operation, or of a process, are in the log in another order |
| G1c | circular information flow: each transaction of a cycle polled a value of the one before |
| G1c-process, G1c-realtime | such a cycle, closed by a process's order, or since one ended before another began |

G0, a cycle of sends alone, is counted but allowed, as Jepsen does: Kafka's transactions interleave their sends. For the
same reason cycles of G1c have no edge from send to send.

`:pipeline` of `test.edn` names the partitions that a pipeline reads, and those of each of its outputs; `:by-user` are
the outputs whose key is the user. An output's value is the input's, or `[value number]`: the number counts the records
of a user, who is *value* modulo `:users`.

| anomaly | its meaning |
| --- | --- |
| output-lost | a visible input is missing in an output |
| output-duplicate | it is there twice, in whatever partitions |
| output-foreign | no visible input has this value |
| output-reordered | records of one user in one partition have another order than in the input |
| output-scattered | records of one user are in two partitions of an output whose key is the user |
| output-number | a number is not that of the record among its user's: the pipeline's state lacks or doubles something |

All rules take time that is linear in the history, but for sorting.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from edn import read

Value = Any
Anomaly = dict[str, Any]
EXAMPLES_MAX = 8
"""Anomalies of a kind that a verdict shows; it counts all."""


class Malformed(Exception):
    """The history breaks a rule of its form: it says nothing about a system."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One `:send`, `:poll` or `:txn`, from its invocation to its completion, if it has one."""

    began: int
    """The index of its invocation."""
    ended: int | None
    """The index of its completion; None: it has none, which is as :info."""
    process: int
    outcome: str
    """ok, fail or info"""
    sends: tuple[tuple[int, int | None, Value], ...]
    """(key, offset if known, value) of each, in order"""
    polls: Mapping[int, Sequence[tuple[int | None, Value]]]
    """(offset if known, value) of all that was polled of a key, in order"""
    unordered: frozenset[int] = frozenset()
    """Keys of its `:rebalance-log`, whose polls need not follow each other."""
    is_atomic: bool = True

    def __str__(self) -> str:
        return f"{self.outcome} operation {self.began} of process {self.process}"


@dataclass(frozen=True)
class History:
    operations: list[Operation]
    """in the order of their invocations"""
    aborted: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """For each key the offsets, from first to last, of aborted transactions, as the log has them."""
    reassigned: dict[int, list[tuple[int, frozenset[int]]]] = field(default_factory=dict)
    """For each process (index, keys kept from before) of each time that it chose other keys, or began anew."""


# --- reading ----------------------------------------------------------------------------------------------------------


def history_of(maps: Iterable[Mapping[str, Any]]) -> History:
    """The history of *maps*, one of each line. Raises `Malformed`."""
    open_: dict[int, tuple[int, Mapping[str, Any]]] = {}
    ended: set[int] = set()
    found: list[Operation] = []
    history = History(found, defaultdict(list), defaultdict(list))
    for place, line in enumerate(maps):
        process, kind, what = line.get("process"), line.get("type"), line.get("f")
        if not isinstance(process, int):
            continue  # the nemesis
        if kind == "invoke":
            if process in open_ or process in ended:
                raise Malformed(f"process {process} begins an operation at {place} though one of it has no known end")
            open_[process] = place, line
            continue
        if process not in open_:
            raise Malformed(f"process {process} ends an operation at {place} that has not begun")
        began, _ = open_.pop(process)
        if kind == "info":
            ended.add(process)
        if what in ("send", "poll", "txn"):
            found.append(_operation(began, place, line))
        elif what in ("assign", "subscribe") and kind == "ok":
            kept = frozenset() if line.get("seek-to-beginning?") else frozenset(line["value"])
            history.reassigned[process].append((place, kept))
        elif what == "log":
            for key, ranges in line["value"].items():
                history.aborted[key] += sorted(ranges)
    found += [_operation(began, None, line) for began, line in open_.values() if line["f"] in ("send", "poll", "txn")]
    found.sort(key=lambda operation: operation.began)
    return history


def _operation(began: int, ended: int | None, line: Mapping[str, Any]) -> Operation:
    sends: list[tuple[int, int | None, Value]] = []
    polls: dict[int, list[tuple[int | None, Value]]] = {}
    for name, *rest in line["value"]:
        if name == "send":
            key, value = rest
            sends.append((key, *value) if ended is not None and isinstance(value, tuple) else (key, None, value))
        elif rest:
            for key, pairs in rest[0].items():
                polls.setdefault(key, []).extend(pairs)
    outcome = "info" if ended is None else str(line["type"])
    unordered = frozenset(key for change in line.get("rebalance-log") or () for key in change["keys"])
    return Operation(began, ended, line["process"], outcome, tuple(sends), polls, unordered, line["f"] == "txn")


# --- what the history says of each partition --------------------------------------------------------------------------


class Orders:
    """The log of each partition, as those who sent and polled have seen it."""

    def __init__(self, history: History) -> None:
        self.operations = history.operations
        self.writer: dict[tuple[int, Value], Operation] = {}
        self.polled: dict[int, set[Value]] = defaultdict(set)
        for operation in self.operations:
            for key, _, value in operation.sends:
                self.writer.setdefault((key, value), operation)
            for key, pairs in operation.polls.items():
                self.polled[key].update(value for _, value in pairs)
        log: dict[int, dict[int, dict[Value, None]]] = defaultdict(dict)
        for operation in self.operations:
            for key, pairs in operation.polls.items():
                for offset, value in pairs:
                    if offset is not None:
                        log[key].setdefault(offset, {})[value] = None
            if self.has_happened(operation):
                for key, offset, value in operation.sends:
                    if offset is not None:
                        log[key].setdefault(offset, {})[value] = None
        self.log = {key: sorted((offset, [*values]) for offset, values in log[key].items()) for key in log}
        """For each key (offset, values seen there), ascending; more than one value is an anomaly."""
        self.values = {key: [values[0] for _, values in places] for key, places in self.log.items()}
        """For each key the values in the order of their offsets."""
        self.place: dict[int, dict[Value, int]] = {}
        """For each key the place of a value in `values`, the first if it has several."""
        for key, places in self.log.items():
            first = self.place[key] = {}
            for place, (_, values) in enumerate(places):
                for value in values:
                    first.setdefault(value, place)

    def has_happened(self, operation: Operation) -> bool:
        """Whether what *operation* has sent is visible: it is :ok, or :info and something of it was polled."""
        return operation.outcome == "ok" or (
            operation.outcome == "info" and any(value in self.polled[key] for key, _, value in operation.sends)
        )

    def step(self, key: int, before: Value, after: Value) -> int:
        """How many places of the log *after* is behind *before*; 1 if that is not known."""
        places = self.place.get(key, {})
        first, second = places.get(before), places.get(after)
        return 1 if first is None or second is None else second - first


class Checker:
    """The rules: each yields the anomalies of its name."""

    def __init__(self, history: History, pipeline: Mapping[str, Any] | None = None) -> None:
        self.history, self.orders = history, Orders(history)
        self.pipeline = pipeline
        self.anomalies: dict[str, list[Anomaly]] = defaultdict(list)

    def verdict(self) -> dict[str, Any]:
        """All anomalies, with their counts; valid if there is none that is not allowed."""
        for rule in (
            self._logs, self._aborted_reads, self._unread, self._within_operations, self._between_operations,
            self._cycles, self._outputs,
        ):  # fmt: skip
            for name, anomaly in rule():
                self.anomalies[name].append(anomaly)
        allowed = self.anomalies.pop("G0", [])
        return {
            "valid": not self.anomalies,
            "operations": len(self.history.operations),
            "outcomes": dict(Counter(operation.outcome for operation in self.history.operations)),
            "sent": sum(len(operation.sends) for operation in self.history.operations),
            "records": sum(map(len, self.orders.log.values())),
            "allowed": {"G0": len(allowed)},
            "anomalies": {
                name: {"count": len(found), "examples": found[:EXAMPLES_MAX]} for name, found in self.anomalies.items()
            },
        }

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _logs(self) -> Iterator[tuple[str, Anomaly]]:
        """inconsistent-offsets and duplicate"""
        for key, places in self.orders.log.items():
            offsets: dict[Value, list[int]] = defaultdict(list)
            for offset, values in places:
                if len(values) > 1:
                    yield "inconsistent-offsets", {"key": key, "offset": offset, "values": values}
                for value in values:
                    offsets[value].append(offset)
            for value, found in offsets.items():
                if len(found) > 1:
                    yield "duplicate", {"key": key, "value": value, "offsets": found}

    def _aborted_reads(self) -> Iterator[tuple[str, Anomaly]]:
        """G1a and precommitted-read"""
        starts = {key: [first for first, _ in ranges] for key, ranges in self.history.aborted.items()}
        for operation in self.history.operations:
            sent = {(key, value) for key, _, value in operation.sends}
            for key, pairs in operation.polls.items():
                for offset, value in pairs:
                    writer = self.orders.writer.get((key, value))
                    if (key, value) in sent:
                        yield "precommitted-read", {"key": key, "value": value, "reader": str(operation)}
                    elif writer is not None and writer.outcome == "fail":
                        anomaly = {"key": key, "value": value, "writer": str(writer), "reader": str(operation)}
                        yield "G1a", anomaly
                    elif offset is not None and key in starts:
                        place = bisect_right(starts[key], offset) - 1
                        if place >= 0 and offset <= self.history.aborted[key][place][1]:
                            yield "G1a", {"key": key, "value": value, "offset": offset, "reader": str(operation)}

    def _unread(self) -> Iterator[tuple[str, Anomaly]]:
        """lost-write and unseen"""
        last: dict[int, int] = {}
        for key, values in self.orders.polled.items():
            places = self.orders.place.get(key, {})
            last[key] = max((places[value] for value in values if value in places), default=-1)
        for operation in self.history.operations:
            if operation.outcome == "ok" or (operation.is_atomic and self.orders.has_happened(operation)):
                for key, offset, value in operation.sends:
                    if value not in self.orders.polled[key]:
                        place = None if offset is None else self.orders.place[key].get(value)
                        is_lost = place is not None and place < last.get(key, -1)
                        anomaly = {"key": key, "offset": offset, "value": value, "writer": str(operation)}
                        yield "lost-write" if is_lost else "unseen", anomaly

    # --- order --------------------------------------------------------------------------------------------------------

    def _within_operations(self) -> Iterator[tuple[str, Anomaly]]:
        """int-poll-skip, int-nonmonotonic-poll and int-nonmonotonic-send"""
        for operation in self.history.operations:
            for key, pairs in operation.polls.items():
                if key not in operation.unordered:
                    for (_, before), (_, after) in pairwise(pairs):
                        yield from self._step("int-", key, before, after, str(operation))
            if operation.outcome != "fail":
                last: dict[int, Value] = {}
                for key, _, value in operation.sends:
                    if key in last and (step := self.orders.step(key, last[key], value)) < 1:
                        anomaly = {"key": key, "values": [last[key], value], "step": step, "writer": str(operation)}
                        yield "int-nonmonotonic-send", anomaly
                    last[key] = value

    def _between_operations(self) -> Iterator[tuple[str, Anomaly]]:
        """poll-skip, nonmonotonic-poll and nonmonotonic-send"""
        by_process: dict[int, list[Operation]] = defaultdict(list)
        for operation in self.history.operations:
            by_process[operation.process].append(operation)
        for process, operations in by_process.items():
            choices = [*self.history.reassigned.get(process, ())]
            polled: dict[int, Value] = {}
            sent: dict[int, Value] = {}
            for operation in operations:
                while choices and choices[0][0] < operation.began:
                    kept = choices.pop(0)[1]
                    polled = {key: value for key, value in polled.items() if key in kept}
                for key, pairs in operation.polls.items():
                    if pairs and key in polled and key not in operation.unordered:
                        yield from self._step("", key, polled[key], pairs[0][1], str(operation))
                if operation.outcome == "ok":  # else its consumer goes back
                    polled.update((key, pairs[-1][1]) for key, pairs in operation.polls.items() if pairs)
                if operation.outcome != "fail":
                    first: dict[int, Value] = {}
                    for key, _, value in operation.sends:
                        first.setdefault(key, value)
                    for key, value in first.items():
                        if key in sent and (step := self.orders.step(key, sent[key], value)) < 1:
                            anomaly = {"key": key, "values": [sent[key], value], "step": step, "writer": str(operation)}
                            yield "nonmonotonic-send", anomaly
                    sent.update((key, value) for key, _, value in operation.sends)

    def _step(self, prefix: str, key: int, before: Value, after: Value, reader: str) -> Iterator[tuple[str, Anomaly]]:
        step = self.orders.step(key, before, after)
        if step != 1:
            name = f"{prefix}poll-skip" if step > 1 else f"{prefix}nonmonotonic-poll"
            yield name, {"key": key, "values": [before, after], "step": step, "reader": reader}

    # --- cycles -------------------------------------------------------------------------------------------------------

    @cached_property
    def _number(self) -> dict[Operation, int]:
        return {operation: number for number, operation in enumerate(self.history.operations)}

    def _cycles(self) -> Iterator[tuple[str, Anomaly]]:
        """G0, G1c, G1c-process and G1c-realtime; a cycle has the name of the first graph that shows it"""
        operations = self.history.operations
        flow = [*self._flow()]
        graphs = {
            "G0": [*self._writes()], "G1c": flow, "G1c-process": [*flow, *self._processes()],
            "G1c-realtime": [*flow, *self._realtime()],
        }  # fmt: skip
        known: set[int] = set()
        for name, edges in graphs.items():
            for cycle in cycles_of(edges):
                found = [number for number in cycle if number < len(operations)]
                if name == "G0" or known.isdisjoint(found):
                    yield name, {"cycle": [str(operations[number]) for number in found]}
                if name != "G0":
                    known.update(found)

    def _flow(self) -> Iterator[tuple[int, int]]:
        """wr: from the writer of a value to who polled it"""
        for operation in self.history.operations:
            writers = {
                writer for key, pairs in operation.polls.items() for _, value in pairs
                if (writer := self.orders.writer.get((key, value))) is not None
            }  # fmt: skip
            for writer in writers:
                if writer is not operation and writer.outcome != "fail":
                    yield self._number[writer], self._number[operation]

    def _writes(self) -> Iterator[tuple[int, int]]:
        """ww: from the writer of a value to the writer of the next one of its partition"""
        for key, values in self.orders.values.items():
            for before, after in pairwise(values):
                first, second = self.orders.writer.get((key, before)), self.orders.writer.get((key, after))
                if first is not None and second is not None and first is not second:
                    yield self._number[first], self._number[second]

    def _processes(self) -> Iterator[tuple[int, int]]:
        """From an operation to the next one of its process"""
        last: dict[int, int] = {}
        for number, operation in enumerate(self.history.operations):
            if operation.process in last:
                yield last[operation.process], number
            last[operation.process] = number

    def _realtime(self) -> Iterator[tuple[int, int]]:
        """From an operation to all that began after it had ended: by a chain of nodes, one for each end"""
        operations = self.history.operations
        ends = sorted((op.ended, number) for number, op in enumerate(operations) if op.ended is not None)
        ends = [(ended, number) for ended, number in ends if operations[number].outcome != "info"]
        node = len(operations) - 1
        pending = iter([*ends, (sys.maxsize, -1)])
        ended, number = next(pending)
        for later, operation in enumerate(operations):
            while ended < operation.began:
                if node >= len(operations):
                    yield node, node + 1
                node += 1
                yield number, node
                ended, number = next(pending)
            if node >= len(operations):
                yield node, later

    # --- the pipeline -------------------------------------------------------------------------------------------------

    def _outputs(self) -> Iterator[tuple[str, Anomaly]]:
        """output-lost, output-duplicate, output-foreign, output-reordered, output-scattered and output-number"""
        if self.pipeline is None:
            return
        users = self.pipeline["users"]
        place: dict[int, tuple[int, int]] = {}
        """For each visible input its number among its user's, from 1 on, and its partition."""
        counts: Counter[int] = Counter()
        for key in self.pipeline["inputs"]:
            for value in self.orders.values.get(key, ()):
                if value not in place:
                    counts[value % users] += 1
                    place[value] = counts[value % users], key
        for output in self.pipeline["outputs"]:
            found: dict[int, list[tuple[int, int]]] = defaultdict(list)
            home: dict[int, int] = {}
            """The partition of each user's first record."""
            for key in output:
                last: dict[int, int] = {}
                for offset, values in self.orders.log.get(key, ()):
                    for written in values:
                        value, *number = written if isinstance(written, tuple) else (written,)
                        found[value].append((key, offset))
                        if value not in place:
                            yield "output-foreign", {"key": key, "offset": offset, "value": written}
                            continue
                        due, _ = place[value]
                        if number and number != [due]:
                            yield "output-number", {"key": key, "offset": offset, "value": written, "due": due}
                        if last.get(value % users, 0) >= due:
                            yield "output-reordered", {"key": key, "offset": offset, "value": written}
                        last[value % users] = due
                        if output in self.pipeline["by-user"] and home.setdefault(value % users, key) != key:
                            yield "output-scattered", {"key": key, "offset": offset, "value": written}
            for value, places in found.items():
                if len(places) > 1:
                    yield "output-duplicate", {"value": value, "places": places}
            for value, (_, key) in place.items():
                if value not in found:
                    yield "output-lost", {"key": key, "value": value, "output": output}


# --- graphs -----------------------------------------------------------------------------------------------------------


def cycles_of(edges: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """A short cycle of each strongly connected component, in time linear in *edges* (Tarjan, 1972)."""
    graph: dict[int, list[int]] = defaultdict(list)
    for before, after in edges:
        graph[before].append(after)
    for component in _components(graph):
        yield _cycle(graph, component)


def _components(graph: Mapping[int, Sequence[int]]) -> Iterator[set[int]]:
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    for root in [*graph]:
        if root in order:
            continue
        work: list[tuple[int, Iterator[int]]] = []

        def enter(node: int, work: list[tuple[int, Iterator[int]]] = work) -> None:
            order[node] = low[node] = len(order)
            path.append(node)
            on_path.add(node)
            work.append((node, iter(graph.get(node, ()))))

        enter(root)
        while work:
            node, rest = work[-1]
            for after in rest:
                if after not in order:
                    enter(after)
                    break
                if after in on_path:
                    low[node] = min(low[node], order[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    component: set[int] = set()
                    while node not in component:
                        component.add(path.pop())
                    on_path.difference_update(component)
                    if len(component) > 1:
                        yield component


def _cycle(graph: Mapping[int, Sequence[int]], component: set[int]) -> list[int]:
    """A shortest cycle through the first node of *component*."""
    start = min(component)
    came: dict[int, int] = {}
    level = [start]
    while start not in came:
        reached = []
        for node in level:
            for after in graph.get(node, ()):
                if after in component and after not in came:
                    came[after] = node
                    reached.append(after)
        level = reached
    cycle = [start]
    while (before := came[cycle[-1]]) != start:
        cycle.append(before)
    return cycle[::-1]


# --- the command ------------------------------------------------------------------------------------------------------


def judged(folder: Path, change: Callable[[list[dict[str, Any]]], None] = lambda maps: None) -> dict[str, Any]:
    """The verdict on the history of *folder*, after *change* to its lines. Raises `Malformed`."""
    (test,) = read((folder / "test.edn").read_text())
    maps = read((folder / "history.edn").read_text())
    change(maps)
    return Checker(history_of(maps), test.get("pipeline")).verdict()


if __name__ == "__main__":
    verdict = judged(Path(sys.argv[1]))
    print(json.dumps(verdict, indent=1))
    sys.exit(not verdict["valid"])
