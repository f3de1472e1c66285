"""A page about a run, for a browser: is it well, what is slow, what happened. It needs nothing from the network.

`page.html` asks for `state.json?after=VERSION`, which is answered once there is another version, and for
`checkpoint.json?id=N` when a checkpoint is opened. Invariant: the last `CHECKPOINTS` are kept, as the run's events tell
of them; one that has ended, completed or aborted, changes no more but for its notes.
"""

from __future__ import annotations

import base64
import copy
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.manifest import SubtaskStats, slowest, slowest_first
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.source import LogRead
from exactlyonce.engines.local.messages import Progress, WatermarkOf, records_unread
from exactlyonce.engines.local.monitoring.serving import POLICY, Answer, Asked, Health, Paths
from exactlyonce.engines.local.reporting import Reporter, silent_partitions
from exactlyonce.engines.pending_output import WaitingLook, WaitingOutput
from exactlyonce.engines.plan import Plan
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.graph import Kind, LogicalGraph, Node

CHECKPOINTS = 60
"""How many are kept."""
RUNNING, COMPLETED, ABORTED = "running", "completed", "aborted"
"""The outcomes of a checkpoint, as the page and spans have them."""
_CHECKPOINT = re.compile(r"\bcheckpoint (\d+)\b")


class TriggeredCheckpoint(msgspec.Struct, omit_defaults=True):
    """A checkpoint that was triggered in this run. Times are in milliseconds since 1970."""

    id: int
    triggered_ms: int
    outcome: str = RUNNING
    subtasks: list[SubtaskStats] = []
    """Those that have acknowledged it, in that order."""
    event: Mapping[str, Any] = {}
    """Its event, once it is completed."""
    aborted_ms: int = 0
    notes: list[str] = []
    """What was said about it."""


class TriggeredCheckpoints:
    """The triggered checkpoints of one run, by number."""

    def __init__(self) -> None:
        self.by_number: dict[int, TriggeredCheckpoint] = {}

    def event(self, event: Mapping[str, Any]) -> list[TriggeredCheckpoint]:
        """Take in an event of the run. Gives the checkpoints that it ended."""
        known = self.by_number.get(event.get("checkpoint", -1))
        match event["event"], event.get("step"):
            case "note", _:
                return self._noted(event)
            case "checkpoint", _ if known is not None:
                known.outcome, known.event = COMPLETED, dict(event)
                return [known]
            case "step", "deployed":  # what the last workers were at will never be complete
                return self._abort(self.by_number.values(), event["at_ms"])
            case "step", "triggered":
                self.by_number[event["checkpoint"]] = TriggeredCheckpoint(event["checkpoint"], event["at_ms"])
                while len(self.by_number) > CHECKPOINTS:
                    del self.by_number[min(self.by_number)]
            case "step", "acknowledged" if known is not None:
                figures = {name: event[name] for name in SubtaskStats.__struct_fields__ if name in event}
                known.subtasks.append(SubtaskStats(**figures, subtask=event["worker"]))
        return []

    def _noted(self, note: Mapping[str, Any]) -> list[TriggeredCheckpoint]:
        text = note["text"]
        named = [self.by_number[number] for number in {*map(int, _CHECKPOINT.findall(text))} & self.by_number.keys()]
        for known in named:
            known.notes.append(text)
        return self._abort(named, note["at_ms"]) if "aborted" in text else []

    def _abort(self, checkpoints: Iterable[TriggeredCheckpoint], at_ms: int) -> list[TriggeredCheckpoint]:
        running = [known for known in checkpoints if known.outcome == RUNNING]
        for known in running:
            known.outcome, known.aborted_ms = ABORTED, at_ms
        return running


SAMPLES, NOTES = 240, 100
"""How many of each are kept."""
WINDOW_S = 5.0
"""The time over which rates of operators are taken."""
RECENT_MS = 120_000
"""A note of the last minutes may be the reason of what is wrong."""
ANSWER_WITHIN_S = 1.0
"""A state is given by then, changed or not: ages grow."""
BUSY_SHARE = 0.8
"""An operator with this share of a worker's time is named."""


class ShownCheckpoint(msgspec.Struct, kw_only=True):
    """One checkpoint among the last ones. What is not known, or is none of an aborted one, is left out."""

    id: int
    triggered_ms: int
    """Since 1970."""
    outcome: str
    """See `TriggeredCheckpoint`."""
    duration_ms: int | UnsetType = UNSET
    kind: str | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    """Written by it."""
    state_bytes: int | UnsetType = UNSET
    """All state that it refers to."""
    records_committed: int | UnsetType = UNSET
    sync_ms: float | UnsetType = UNSET
    async_ms: float | UnsetType = UNSET
    slowest: str | UnsetType = UNSET
    """Its slowest subtask, in words."""
    reason: str | UnsetType = UNSET
    """Why it was aborted."""


class ShownAborted(msgspec.Struct):
    """A checkpoint that was aborted, as the next completed one tells."""

    checkpoint: int
    triggered_at_ms: int
    lasted_ms: int
    reason: str


class CheckpointDetails(ShownCheckpoint, kw_only=True):
    """One checkpoint, opened."""

    decided_at_ms: int | UnsetType | None = UNSET
    committed_at_ms: int | UnsetType | None = UNSET
    subtasks: list[dict[str, Any]] = []
    """See `SubtaskStats.figures`; the slowest comes first."""
    aborted: list[ShownAborted] | UnsetType = UNSET
    """Those before it."""
    missing: list[str] = []
    """Subtasks that have not acknowledged it."""
    notes: list[str] = []
    parts: list[tuple[str, str, int]] | UnsetType = UNSET
    """(operator or sink, "state" or "records", bytes or count)"""


class ShownPartition(msgspec.Struct, kw_only=True):
    """A split of a source that is read."""

    source: str
    topic: str
    partition: int
    offset: int | UnsetType = UNSET
    """Sn of the newest checkpoint."""
    lag: int | None
    """Records that are not read; None: not known."""


class ShownLog(LogRead, kw_only=True):
    """A server's log that a source reads."""

    source: str


class ShownWatermark(msgspec.Struct, kw_only=True):
    """Event time of a source or operator."""

    id: str
    at_ms: int | None
    """None: a split has had no record yet."""
    held_back_by: str
    late: int | None
    came: int | None
    """Late records, and all; None: not known."""


class ShownSavepoint(msgspec.Struct):
    id: int
    at_ms: int
    state_bytes: int


class PipelineSummary(msgspec.Struct, kw_only=True):
    """Whether a pipeline is well."""

    pipeline: str
    state: str
    well: bool
    sentence: str
    figures: Mapping[str, Any]
    """`records_per_s`, `lag` and `open_transactions`; of a run all that its events tell, and nothing at first."""


class Pipelines(msgspec.Struct):
    """What a page about several pipelines shows."""

    pipelines: list[PipelineSummary]


class PipelineState(PipelineSummary, kw_only=True):
    """All that the page, `exactlyonce top` and its JSON show, but for the details of checkpoints."""

    at_ms: int
    as_of_ms: int | None
    """The time of the figures; None: there are none yet."""
    cause: str
    """What to look at first; empty if there is nothing."""
    from_topic: bool | UnsetType = UNSET
    """Whether the checkpoint topic tells; else the run does."""
    parallelism: int
    incarnation: int
    restarts: int
    samples: list[tuple[int, int, int]]
    """(at_ms, records a second, lag in records, or in bytes where only logs are read)"""
    graph: list[dict[str, Any]]
    """See `drawn`."""
    workers: list[dict[str, Any]]
    partitions: list[ShownPartition]
    logs: list[ShownLog] = []
    watermarks: list[ShownWatermark]
    checkpoints: list[ShownCheckpoint]
    savepoints: list[ShownSavepoint] | UnsetType = UNSET
    transactions: list[dict[str, Any]]
    """See `WaitingOutput.figures`."""
    notes: list[tuple[int, str]]
    """(at_ms, text), newest first"""
    version: int | UnsetType = UNSET
    """See `Changes`."""


class Changes:
    """The version of what a page shows. Any thread may say that it has changed, or wait for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.version = 0

    def add(self) -> None:
        with self._changed:
            self.version += 1
            self._changed.notify_all()

    def wait(self, after: int, timeout_s: float) -> None:
        """Wait until the version is another than *after*."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != after, timeout_s)


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

    def __init__(
        self, plan: Plan, health: Health, clock: Clock, waiting: Callable[[], list[dict[str, Any]]] = list
    ) -> None:
        """*waiting* gives its waiting output; see `WaitingOutput.figures`."""
        self._waiting = waiting
        self._pipeline, self._parallelism = plan.graph.pipeline_id, plan.parallelism
        self._health, self._clock = health, clock
        self._graph, self._logical = list(drawn(plan)), plan.graph
        self._subtasks = [(task.name, subtask) for task in plan.tasks for subtask in range(plan.parallelism)]
        self._lock = threading.Lock()
        self._state = ""
        self._asks: tuple[str, int] | None = None
        """What a run that has not begun asks for, and since when by the monotonic clock, in ms."""
        self._current_ms: int | None = None
        """When a worker last sent its figures while none waited for its sources, by the monotonic clock."""
        self._incarnation = self._deployments = 0
        self._figures: Mapping[str, Any] = {}
        self._samples = deque[tuple[int, int, int]](maxlen=SAMPLES)
        """See `PipelineState.samples`."""
        self._changes = Changes()
        self._checkpoints = TriggeredCheckpoints()
        self._workers: dict[int, WorkerFigures] = {}
        self._notes = deque[tuple[int, str]](maxlen=NOTES)

    # --- gathered -----------------------------------------------------------------------------------------------

    def event(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self._checkpoints.event(event)
            match event["event"], event.get("step"):
                case "started", _:
                    self._incarnation, self._asks = event["incarnation"], None
                case "step", "asks":
                    self._asks = event["whom"], self._clock.monotonic_ms()
                case (("note" | "standby"), _):
                    self._notes.append((event["at_ms"], event["text"]))
                case "step", "deployed":
                    self._workers.clear()
                    self._deployments += 1
        self._changes.add()

    def live(self, figures: Mapping[str, Any]) -> None:
        with self._lock:
            self._figures = figures
            lag = figures.get("log_lag_bytes", 0) if figures["lag"] is None else figures["lag"]
            self._samples.append((self._clock.now_ms(), figures["records_per_s"], lag))
        self._changes.add()

    def progress(self, progress: Progress) -> None:
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            self._workers.setdefault(progress.subtask, WorkerFigures()).add(now_ms / 1000, progress)
            if not any(figures.newest.waiting for figures in self._workers.values()):
                self._current_ms = now_ms

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        self._state = state

    # --- asked for ----------------------------------------------------------------------------------------------

    @property
    def paths(self) -> Paths:
        return paths_of(self.state, self._checkpoint, self._changes)

    def _checkpoint(self, number: int) -> CheckpointDetails | None:
        with self._lock:
            known = copy.copy(self._checkpoints.by_number.get(number))
            subtasks = list(known.subtasks) if known is not None else []
        if known is None:
            return None
        acknowledged = {(stats.task, stats.subtask) for stats in subtasks}
        missing = [f"{task}[{subtask}]" for task, subtask in self._subtasks if (task, subtask) not in acknowledged]
        details = {
            "decided_at_ms": known.event.get("decided_at_ms"), "committed_at_ms": known.event.get("committed_at_ms"),
            "slowest": slowest(subtasks), "subtasks": [stats.figures for stats in slowest_first(subtasks)],
            "missing": missing if known.outcome != COMPLETED else [], "notes": list(known.notes),
        }  # fmt: skip
        return CheckpointDetails(**{**msgspec.structs.asdict(_shown(known)), **details})

    def state(self) -> PipelineState:
        verdict, waiting, now_ms = self._health.wellness, self._waiting(), self._clock.now_ms()
        with self._lock:
            operators, current_ms = self._operators(), self._current_ms
            return PipelineState(
                pipeline=self._pipeline, parallelism=self._parallelism, at_ms=now_ms,
                as_of_ms=None if current_ms is None else now_ms - (self._clock.monotonic_ms() - current_ms),
                state=self._state, well=verdict.well, sentence=verdict.sentence,
                cause=self._cause(operators, well=verdict.well), incarnation=self._incarnation,
                restarts=max(0, self._deployments - 1), figures=self._figures, samples=list(self._samples),
                graph=[node | operators.get(node["id"], {}) for node in self._graph],
                workers=[_worker(figures.newest) for _, figures in sorted(self._workers.items())],
                partitions=[*self._partitions()], logs=[*self._logs()], watermarks=[*self._watermarks()],
                checkpoints=[_shown(known) for _, known in sorted(self._checkpoints.by_number.items())],
                transactions=waiting, notes=list(reversed(self._notes)),
            )  # fmt: skip

    def _operators(self) -> dict[str, dict[str, Any]]:
        """Records a second and the greatest share of a worker's time, by operator; the lag, by source."""
        shown: dict[str, dict[str, Any]] = {}
        for figures in self._workers.values():
            for operator, rate, share in figures.rates():
                of = shown.setdefault(operator, {"rate": 0.0, "busy": 0.0})
                of["rate"] += rate
                of["busy"] = max(of["busy"], share)
            for source, lag in figures.newest.lag_by_source.items():
                of = shown.setdefault(source, {})
                of["lag"] = of.get("lag", 0) + lag
            for source, logs in figures.newest.logs.items():
                del shown[source]["lag"]
                if known := [log.lag_ms for log in logs if log.lag_ms is not None]:
                    shown[source]["lag_ms"] = max(known)
        return shown

    def _watermarks(self) -> Iterator[ShownWatermark]:
        """By source and operator, the lowest of its subtasks that expect records."""
        lowest: dict[str, WatermarkOf] = {}
        late, came = Counter[str](), Counter[str]()
        for figures in self._workers.values():
            late.update(figures.newest.late)
            came.update({operator: records for operator, (_, records) in figures.newest.operators.items()})
            for id, watermark in figures.newest.watermarks.items():
                lowest[id] = min(lowest.get(id, watermark), watermark, key=lambda known: (known.idle, known.time_ms))
        for id, watermark in lowest.items():
            at_ms = watermark.time_ms if NO_WATERMARK < watermark.time_ms < END_OF_TIME else None
            yield ShownWatermark(id=id, at_ms=at_ms, held_back_by=watermark.held_back_by, late=late[id], came=came[id])

    def _partitions(self) -> Iterator[ShownPartition]:
        for figures in self._workers.values():
            for source, places in figures.newest.lags.items():
                for topic, partition, lag in places:
                    yield ShownPartition(source=source, topic=topic, partition=partition, lag=lag)

    def _logs(self) -> Iterator[ShownLog]:
        for figures in self._workers.values():
            for source, logs in figures.newest.logs.items():
                for log in logs:
                    yield ShownLog(source=source, **{name: getattr(log, name) for name in LogRead.__struct_fields__})

    def _cause(self, operators: Mapping[str, Mapping[str, Any]], *, well: bool) -> str:
        """What to look at first; empty if there is nothing."""
        for figures in self._workers.values():
            if waits := _waits(figures.newest):
                return f"worker {figures.newest.subtask}: {waits[0]}"
        for log in self._logs():
            if log.problem:
                return f"source {log.source!r}: {log.problem}"
        newest = [figures.newest for figures in self._workers.values()]
        if silent := next(silent_partitions(self._logical, newest), None):
            return silent.text
        if not well and (recent := self._recent_note()):
            return recent
        if self._asks is not None:
            whom, since_ms = self._asks
            return f"no answer yet from {whom}, after {shown_duration(self._clock.monotonic_ms() - since_ms)}"
        busy = {name: of["busy"] for name, of in operators.items() if of.get("busy", 0.0) >= BUSY_SHARE}
        if busy:
            name = max(busy, key=busy.__getitem__)
            return f"operator {name!r} takes {busy[name]:.0%} of a worker's time: it bounds the throughput"
        return ""

    def _recent_note(self) -> str:
        return self._notes[-1][1] if self._notes and self._notes[-1][0] >= self._clock.now_ms() - RECENT_MS else ""


def paths_of(
    state: Callable[[], PipelineState | Pipelines],
    checkpoint: Callable[[int], CheckpointDetails | None],
    changes: Changes | None = None,
    below: str = "/",
) -> Paths:
    """The page, and what it asks for: *state* without and *checkpoint* with details, which gives None if unknown.

    *changes* of the state wake it; None: it is asked for now and then.
    """
    html = (Path(__file__).parent / "page.html").read_bytes()
    script = sha256(html.partition(b"<script>")[2].partition(b"</script>")[0]).digest()
    policy = (
        f"{POLICY}; connect-src 'self'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{base64.b64encode(script).decode()}'"
    )

    def answer_state(asked: Asked) -> Answer:
        if changes is None:
            return Answer(msgspec.json.encode(state()), "application/json")
        if (after := dict(asked.query).get("after", "")).isdecimal():
            changes.wait(int(after), ANSWER_WITHIN_S)
        version = changes.version  # the state may already be a later one
        return Answer(msgspec.json.encode(msgspec.structs.replace(state(), version=version)), "application/json")

    def answer_checkpoint(asked: Asked) -> Answer:
        number = dict(asked.query).get("id", "")
        known = checkpoint(int(number)) if number.isdecimal() else None
        return Answer(msgspec.json.encode(known), "application/json", 404 if known is None else 200)

    return {
        below: lambda _: Answer(html, "text/html; charset=utf-8", policy=policy),
        f"{below}state.json": answer_state,
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
    """What it reads or writes, which records it brings together, or what it keeps."""
    if node.source is not None:
        return f"{type(node.source).__name__} {node.source.shown}"
    if node.sink is not None:
        return f"{type(node.sink).__name__} {node.sink.shown}"
    for told in (node.timed, node.lookup, node.calls):
        if told is not None:
            return str(told)
    return f"state {node.kept.name}" if node.state_type is not None else shape.type_name(node.type)


_OF_WORKER = (
    *("subtask", "records_in", "records_out", "skipped", "open_transactions", "going_round"),
    *("busiest", "busiest_share"),
)


def _waits(progress: Progress) -> list[str]:
    """The reasons why the worker waits, the gravest first."""
    return [*progress.full, *progress.held_up, *progress.waiting]


def _worker(progress: Progress) -> dict[str, Any]:
    figures = {name: getattr(progress, name) for name in _OF_WORKER}
    return {**figures, "lag": records_unread([progress]), "waits": _waits(progress), "unwritten": progress.unwritten}


def _shown(known: TriggeredCheckpoint) -> ShownCheckpoint:
    names = ("kind", "duration_ms", "bytes", "state_bytes", "records_committed", "sync_ms", "async_ms")
    figures = {name: known.event[name] for name in names if name in known.event}
    if known.aborted_ms:
        figures["duration_ms"] = known.aborted_ms - known.triggered_ms
    return ShownCheckpoint(id=known.id, triggered_ms=known.triggered_ms, outcome=known.outcome, **figures)


LOOK_INTERVAL_MS = 1_000
TIMEOUT_MS = 5_000


class WaitingNow:
    """Looks from a thread of its own, so that nobody waits for it: an answer has what was seen last."""

    def __init__(self, config: ClientConfig, pipeline: str, clock: Clock) -> None:
        self._log, self._waiting = LogFollower(config, pipeline), WaitingLook(config, pipeline, TIMEOUT_MS)
        self._clock = clock
        self._lock = threading.Lock()
        self._due_ms = 0
        self._thread: threading.Thread | None = None
        self._seen: list[WaitingOutput] = []

    def figures(self) -> list[dict[str, Any]]:
        """See `WaitingOutput.figures`. From any thread."""
        with self._lock:
            if self._clock.monotonic_ms() >= self._due_ms and (self._thread is None or not self._thread.is_alive()):
                self._due_ms = self._clock.monotonic_ms() + LOOK_INTERVAL_MS
                self._thread = threading.Thread(target=self._look, name="waiting output", daemon=True)
                self._thread.start()
            return [output.figures(self._clock.now_ms()) for output in self._seen]

    def close(self) -> None:
        """Nobody asks any more."""
        if self._thread is not None:
            self._thread.join()
        self._log.close()
        self._waiting.close()

    def _look(self) -> None:
        try:
            seen = self._waiting.look(self._log.look())
        except ExactlyOnceError:  # a broker is away; the run itself says so
            seen = []
        with self._lock:
            self._seen = seen
