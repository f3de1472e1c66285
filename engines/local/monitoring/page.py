"""A page about a run, for a browser: is it well, what is slow, what happened. It needs nothing from the network.

`page.html` asks for `state.json` twice a second, and for `checkpoint.json?id=N` when a checkpoint is opened.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.engines.local.messages import Progress
from exactlyonce.engines.local.monitoring.health import Health
from exactlyonce.engines.local.monitoring.serving import Answer, Asked, Paths
from exactlyonce.engines.local.reporting import Reporter
from exactlyonce.engines.plan import Plan
from exactlyonce.pipeline import schema
from exactlyonce.pipeline.graph import Kind, LogicalGraph, Node

CHECKPOINTS, SAMPLES, NOTES = 60, 240, 100
"""How many of each are kept."""
WINDOW_S = 5.0
"""The time over which rates of operators are taken."""
RECENT_MS = 120_000
"""A note of the last minutes may be the reason of what is wrong."""
BUSY_SHARE = 0.8
"""An operator with this share of a worker's time is named."""
_CHECKPOINT = re.compile(r"\bcheckpoint (\d+)\b")


class Attempted(msgspec.Struct, omit_defaults=True):
    """A checkpoint that was triggered in this run. Times are in milliseconds since 1970."""

    id: int
    triggered_ms: int
    outcome: str = "running"
    """running, completed or aborted"""
    acknowledged: list[tuple[str, int, int, float, float]] = []
    """Task, subtask, time, and the milliseconds of the synchronous and the asynchronous part, by subtask."""
    visible_ms: int = 0
    finalized_ms: int = 0
    event: Mapping[str, Any] = {}
    """Its event, once it is completed."""
    notes: list[str] = []
    """What was said about it."""


class WorkerFigures:
    """The last figures of a worker, over `WINDOW_S`."""

    def __init__(self) -> None:
        self._kept = deque[tuple[float, Progress]]()

    def add(self, now_s: float, progress: Progress) -> None:
        self._kept.append((now_s, progress))
        while len(self._kept) > 2 and self._kept[1][0] < now_s - WINDOW_S:
            self._kept.popleft()

    @property
    def newest(self) -> Progress:
        return self._kept[-1][1]

    def rates(self) -> Iterator[tuple[str, float, float]]:
        """(operator, records a second, share of the worker's time)"""
        (begin_s, before), (end_s, now) = self._kept[0], self._kept[-1]
        for operator, (took_s, records) in now.operators.items():
            took_before_s, records_before = before.operators.get(operator, (0.0, 0))
            elapsed_s = max(end_s - begin_s, 0.001)
            yield operator, (records - records_before) / elapsed_s, (took_s - took_before_s) / elapsed_s


class Page(Reporter):
    """Gathers what the page shows. One thread reports, any thread asks."""

    def __init__(self, plan: Plan, health: Health, clock: Clock) -> None:
        self._pipeline, self._parallelism = plan.graph.pipeline_id, plan.parallelism
        self._health, self._clock = health, clock
        self._graph = list(drawn(plan))
        self._lock = threading.Lock()
        self._state = ""
        self._incarnation = self._restarts = self._deployments = 0
        self._figures: Mapping[str, Any] = {}
        self._samples = deque[tuple[int, int, int]](maxlen=SAMPLES)
        """The wall clock in milliseconds, records a second, lag."""
        self._checkpoints: dict[int, Attempted] = {}
        self._workers: dict[int, WorkerFigures] = {}
        self._notes = deque[tuple[int, str]](maxlen=NOTES)

    # --- gathered -----------------------------------------------------------------------------------------------

    def event(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            match event["event"], event.get("step"):
                case "started", _:
                    self._incarnation = event["incarnation"]
                case (("note" | "standby"), _):
                    self._noted(event["at_ms"], event["text"])
                case "checkpoint", _:
                    self._completed(event)
                case "step", "deployed":
                    self._workers.clear()
                    self._abort()
                    self._deployments += 1
                case "step", "triggered":
                    self._triggered(event["checkpoint"], event["at_ms"])
                case "step", "acknowledged" if known := self._checkpoints.get(event["checkpoint"]):
                    row = (event["task"], event["worker"], event["at_ms"], event["sync_ms"], event["async_ms"])
                    known.acknowledged.append(row)
                case "step", "requests until visible" if known := self._checkpoints.get(event["checkpoint"]):
                    known.visible_ms = event["at_ms"]

    def _noted(self, at_ms: int, text: str) -> None:
        self._notes.append((at_ms, text))
        for number in {int(match) for match in _CHECKPOINT.findall(text)}:
            if (known := self._checkpoints.get(number)) is not None:
                known.notes.append(text)
                if "aborted" in text and known.outcome == "running":
                    known.outcome = "aborted"

    def _triggered(self, number: int, at_ms: int) -> None:
        self._checkpoints[number] = Attempted(number, at_ms)
        while len(self._checkpoints) > CHECKPOINTS:
            del self._checkpoints[min(self._checkpoints)]

    def _completed(self, event: Mapping[str, Any]) -> None:
        known = self._checkpoints.get(event["checkpoint"])
        if known is not None:
            known.outcome, known.finalized_ms, known.event = "completed", event["at_ms"], dict(event)

    def _abort(self) -> None:
        """What the last workers were at will never be complete."""
        for known in self._checkpoints.values():
            if known.outcome == "running":
                known.outcome = "aborted"

    def live(self, figures: Mapping[str, Any]) -> None:
        with self._lock:
            self._figures = figures
            self._samples.append((self._clock.now_ms(), figures["records_per_s"], figures["lag"]))

    def progress(self, progress: Progress) -> None:
        with self._lock:
            self._workers.setdefault(progress.subtask, WorkerFigures()).add(self._clock.monotonic_ms() / 1000, progress)

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        self._state = state

    # --- asked for ----------------------------------------------------------------------------------------------

    @property
    def paths(self) -> Paths:
        return paths_of(self.state, self._checkpoint)

    def _checkpoint(self, number: int) -> Attempted | None:
        with self._lock:
            return copy.copy(self._checkpoints.get(number))

    def state(self) -> dict[str, Any]:
        """All but the details of checkpoints, for JSON."""
        verdict = self._health.wellness
        with self._lock:
            operators = self._operators()
            return {
                "pipeline": self._pipeline, "parallelism": self._parallelism, "at_ms": self._clock.now_ms(),
                "state": self._state, "well": verdict.well, "sentence": verdict.sentence,
                "cause": self._cause(operators, well=verdict.well), "incarnation": self._incarnation,
                "restarts": max(0, self._deployments - 1), "figures": self._figures, "samples": list(self._samples),
                "graph": [node | operators.get(node["id"], {}) for node in self._graph],
                "workers": [_worker(figures.newest) for _, figures in sorted(self._workers.items())],
                "checkpoints": [_bar(known) for _, known in sorted(self._checkpoints.items())],
                "notes": list(reversed(self._notes)),
            }  # fmt: skip

    def _operators(self) -> dict[str, dict[str, Any]]:
        """Records a second and the greatest share of a worker's time, by operator; the lag, by source."""
        shown: dict[str, dict[str, Any]] = {}
        for figures in self._workers.values():
            for operator, rate, share in figures.rates():
                of = shown.setdefault(operator, {"rate": 0.0, "busy": 0.0})
                of["rate"] += rate
                of["busy"] = max(of["busy"], share)
            for source, lag in figures.newest.lags.items():
                of = shown.setdefault(source, {})
                of["lag"] = of.get("lag", 0) + lag
        return shown

    def _cause(self, operators: Mapping[str, Mapping[str, Any]], *, well: bool) -> str:
        """What to look at first; empty if there is nothing."""
        for figures in self._workers.values():
            if waits := _waits(figures.newest):
                return f"worker {figures.newest.subtask}: {waits[0]}"
        if not well and (recent := self._recent_note()):
            return recent
        busy = {name: of["busy"] for name, of in operators.items() if of.get("busy", 0.0) >= BUSY_SHARE}
        if busy:
            name = max(busy, key=busy.__getitem__)
            return f"operator {name!r} takes {busy[name]:.0%} of a worker's time: it bounds the throughput"
        return ""

    def _recent_note(self) -> str:
        return self._notes[-1][1] if self._notes and self._notes[-1][0] >= self._clock.now_ms() - RECENT_MS else ""


def paths_of(state: Callable[[], Any], checkpoint: Callable[[int], Any], below: str = "/") -> Paths:
    """The page, and what it asks for: *state* without and *checkpoint* with details, which gives None if unknown."""
    html = (Path(__file__).parent / "page.html").read_bytes()

    def answer_checkpoint(asked: Asked) -> Answer:
        number = asked.query.get("id", "")
        known = checkpoint(int(number)) if number.isdecimal() else None
        return Answer(msgspec.json.encode(known), "application/json", 404 if known is None else 200)

    return {
        below: lambda _: Answer(html, "text/html; charset=utf-8"),
        f"{below}state.json": lambda _: Answer(msgspec.json.encode(state()), "application/json"),
        f"{below}checkpoint.json": answer_checkpoint,
    }


def drawn(plan: Plan) -> Iterator[dict[str, Any]]:
    """The nodes of the graph, for JSON."""
    graph = plan.graph
    for node in graph.nodes:
        reads = [
            {
                "node": read.node, "output": read.output, "back": node.kind is Kind.FEEDBACK,
                "shuffled": plan.shuffle_into(node, port) is not None,
            }
            for port, read in enumerate(node.inputs)
        ]  # fmt: skip
        yield {"id": node.id, "kind": node.kind.value, "reads": reads, "about": _about(graph, node)}


def _about(graph: LogicalGraph, node: Node) -> str:
    """What it reads, writes or keeps."""
    if node.source is not None:
        return f"{type(node.source).__name__} {node.source.place}"
    if node.sink is not None:
        return f"{type(node.sink).__name__} {node.sink.shown}"
    return f"state {node.kept.name}" if node.state_type is not None else schema.type_name(node.type)


_OF_WORKER = (
    *("subtask", "records_in", "records_out", "skipped", "open_transactions", "going_round"),
    *("busiest", "busiest_share"),
)


def _waits(progress: Progress) -> list[str]:
    """The reasons why the worker waits, the gravest first."""
    return [*progress.full, *progress.held_up, *progress.waiting]


def _worker(progress: Progress) -> dict[str, Any]:
    figures = {name: getattr(progress, name) for name in _OF_WORKER}
    return {**figures, "lag": sum(progress.lags.values()), "waits": _waits(progress), "unwritten": progress.unwritten}


def _bar(known: Attempted) -> dict[str, Any]:
    names = ("kind", "duration_ms", "bytes", "state_bytes", "records_committed", "sync_ms", "async_ms")
    figures = {name: known.event[name] for name in names if name in known.event}
    return {"id": known.id, "triggered_ms": known.triggered_ms, "outcome": known.outcome, **figures}
