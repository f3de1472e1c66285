"""The reports of a run: events for machines, one line for people.

A `Reporter` gets events (dicts that JSON can hold) and live figures, without any secret.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import msgspec

from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.events import Ack, Decided, PendingCheckpoint, Phases
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.succession import Awaited
from exactlyonce.engines import events
from exactlyonce.engines.local.messages import Progress, records_unread
from exactlyonce.engines.runtime.faults import RepeatedNotes
from exactlyonce.pipeline.durations import Duration, shown_duration
from exactlyonce.pipeline.event_time import shown_time
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sizes import shown_bytes

LIVE_INTERVAL_S = 0.5
WAITING_INTERVAL_S = 60.0
"""The least time between two notes on waiting sources."""


class Reporter:
    """The receiver of a run's events."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Report an event; `event["event"]` is its kind."""
        raise NotImplementedError

    def line(self, event: Mapping[str, Any]) -> str:
        """*event* as a line."""
        raise NotImplementedError

    def live(self, figures: Mapping[str, Any]) -> None:
        """Report the figures now, about twice a second."""

    def progress(self, progress: Progress) -> None:
        """A worker has sent its figures since it started."""

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        """The run has come round, in *state*, and now may rest for *rests_s*. Called at least every second but then."""

    def close(self) -> None:
        """The run is over."""


class EventReporter(Reporter):
    """Hands events of *level* or graver to *on_event*."""

    def __init__(self, on_event: Callable[[dict[str, Any]], object], *, level: str = "info") -> None:
        self._on_event = on_event
        self._is_selected = events.Selection(level)

    def event(self, event: Mapping[str, Any]) -> None:
        if self._is_selected(event):
            self._on_event(dict(event))


class LineReporter(EventReporter):
    """Writes a line for each event of *level* or graver."""

    def __init__(self, stream: TextIO | None = None, *, level: str = "info") -> None:
        super().__init__(self._write, level=level)
        self._stream = stream or sys.stderr

    def _write(self, event: Mapping[str, Any]) -> None:
        self._stream.write(self.line(event) + "\n")
        self._stream.flush()


class JsonReporter(LineReporter):
    """Writes a line of JSON for each event."""

    def line(self, event: Mapping[str, Any]) -> str:
        return json.dumps(event)


class TextReporter(LineReporter):
    """Writes a line for each event as logs have it: time, level, pipeline, and what happened."""

    def line(self, event: Mapping[str, Any]) -> str:
        head = f"{event['at']} {events.level_of(event['event']):<7} {event['pipeline']}:"
        if "text" in event:
            return f"{head} {event['text']}"
        facts = [f"{name}={value}" for name, value in event.items() if name not in ("event", "at", "at_ms", "pipeline")]
        return " ".join([head, event["event"], *facts])


class TerminalReporter(Reporter):
    """Rewrites one line of figures, and writes one for each event of *level* or graver that is for a person."""

    def __init__(self, stream: TextIO | None = None, *, level: str = "info") -> None:
        self._stream = stream or sys.stderr
        self._is_selected = events.Selection(level)
        self._last: Mapping[str, Any] = {}
        self._shown = False

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self._last = event
        elif not self._is_selected(event):
            return
        elif event["event"] in ("note", "standby", "listening"):
            self._say(str(event["text"]))
        elif event["event"] == "started":
            self._say(f"{event['pipeline']}: incarnation {event['incarnation']}, from checkpoint {event['checkpoint']}")

    def line(self, event: Mapping[str, Any]) -> str:
        return f"\r\x1b[K{event['text']}"

    def _say(self, text: str) -> None:
        self._erase()
        self._stream.write(text + "\n")
        self._stream.flush()

    def _erase(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._shown = False

    def live(self, figures: Mapping[str, Any]) -> None:
        line = (
            f"{figures['records_per_s']:>9,} records/s   lag {_shown_lag(figures)}   "
            f"open transactions {figures['open_transactions']}"
        )
        if figures.get("dead_letters"):
            line += f"   dead letters {figures['dead_letters']:,}"
        if figures.get("late"):
            line += f"   late {figures['late']:,} of {figures['records_in']:,}"
        if self._last:
            last = self._last
            line += f"   checkpoint {last['checkpoint']}: {last['duration_ms']:,} ms, {shown_bytes(last['bytes'])}"
        else:
            line += f"   {figures['state']}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + line[:width])
        self._stream.flush()
        self._shown = True

    def close(self) -> None:
        self._erase()
        self._stream.flush()


SILENT_MS = 5_000
"""An operator that waits for a partition without any record for so long says so."""


class SilentPartition(NamedTuple):
    """A partition without records, neither idle nor ended, that holds back an operator by event time."""

    operator: str
    source: str
    place: str
    silent_ms: int
    idle: Duration | None
    """See `EventTime.idle`."""
    others_ms: int | None
    """The event time up to which another partition has come; None: no other is further."""

    @property
    def text(self) -> str:
        others = "" if self.others_ms is None else f", while another has come to {shown_time(self.others_ms)}"
        until = "one comes: idle=None" if self.idle is None else f"one comes, or it is idle: idle={self.idle!r}"
        return (
            f"operator {self.operator!r} waits for source {self.source!r}: {self.place} has had no record for "
            f"{shown_duration(self.silent_ms // 1000 * 1000)}{others}. Results wait until {until}. A shorter "
            f"EventTime(..., idle=) of the source ends that sooner"
        )


def silent_partitions(graph: LogicalGraph, workers: Collection[Progress]) -> Iterator[SilentPartition]:
    """The partition that each operator waits for, of operators that have got records."""
    event_times = {node.id: node.source.event_time for node in graph.sources if node.source is not None}
    for node in graph.timed:
        sources = graph.above(node.id, timing=True) & event_times.keys()
        if not any(worker.operators.get(node.id, (0.0, 0))[1] for worker in workers):
            continue
        known = [
            (watermark.time_ms, -watermark.silent_ms, source, watermark)
            for worker in workers
            for source, watermark in worker.watermarks.items()
            if source in sources and not watermark.idle
        ]
        if not known:
            continue
        lowest_ms, _, source, slowest = min(known, key=lambda one: one[:3])
        event_time, furthest_ms = event_times[source], max(watermark.furthest_ms for *_, watermark in known)
        if slowest.silent_ms >= SILENT_MS and event_time is not None:
            others_ms = furthest_ms if furthest_ms > lowest_ms else None
            yield SilentPartition(node.id, source, slowest.held_back_by, slowest.silent_ms, event_time.idle, others_ms)


def _log_problems(progress: Progress) -> set[str]:
    read = ((source, log) for source, logs in progress.logs.items() for log in logs)
    return {f"source {source!r}: {log.problem}." for source, log in read if log.problem}


def _shown_lag(figures: Mapping[str, Any]) -> str:
    """
    >>> _shown_lag({"lag": 1200}), _shown_lag({"lag": None, "log_lag_ms": 2300, "log_lag_bytes": 3 << 20})
    ('1,200', '2.3 s, 3.0 MB of log')
    """
    shown = [] if figures["lag"] is None else [f"{figures['lag']:,}"]
    if figures.get("log_lag_ms") is not None:
        shown += [shown_duration(figures["log_lag_ms"]), f"{shown_bytes(figures['log_lag_bytes'])} of log"]
    return ", ".join(shown) or "-"


def reporter_for(log_format: str, level: str) -> Reporter:
    """The reporter on stderr for a `RunOptions.log_format`."""
    in_terminal = sys.stderr.isatty()
    if log_format == "json" or (log_format == "auto" and not in_terminal):
        return JsonReporter(level=level)
    return TerminalReporter(level=level) if in_terminal else TextReporter(level=level)


class Report:
    """Gathers the workers' figures for the reporters. *redact* removes secrets from a text; *dead_letters* are the ids
    of the sinks that dead letters go to. With the *graph*, a note names a silent partition that is waited for."""

    def __init__(
        self,
        pipeline: str,
        reporters: Sequence[Reporter],
        redact: Callable[[str], str],
        dead_letters: Collection[str] = (),
        graph: LogicalGraph | None = None,
    ) -> None:
        self._pipeline, self._graph = pipeline, graph
        self._silent = set[tuple[str, str]]()
        """The operators and sources of the silent partitions that were told."""
        self._reporters = reporters
        self._redact = redact
        self._letters = dict.fromkeys(dead_letters, 0)
        """The letters of finalized checkpoints, by sink."""
        self._repeated = RepeatedNotes(self.note)
        self._workers: dict[int, Progress] = {}
        self._triggered: dict[int, float] = {}
        """When each checkpoint in flight was triggered, by the monotonic clock."""
        self._phases: dict[int, list[Phases]] = {}
        self._live_at = 0.0
        self._previous = (time.monotonic(), 0)
        self._gap_ms = 0.0
        self._waiting_at = 0.0

    def _event(self, kind: str, /, **fields: Any) -> None:
        event = events.event(kind, self._pipeline, **fields)
        for reporter in self._reporters:
            reporter.event(event)

    def note(self, text: str) -> None:
        self._event("note", text=self._redact(text))

    def awaits(self, awaited: Awaited) -> None:
        text, other = self._redact(awaited.text(self._pipeline)), awaited.incarnation
        if awaited.pause_ms is not None:
            self.note(text)
        else:
            self._event("standby", incarnation=other.incarnation, host=other.host, process=other.process, text=text)

    def step(self, step: str, **fields: Any) -> None:
        self._event("step", step=step, **fields)

    def restarting(self, reason: str, text: str) -> None:
        """The workers, or the whole incarnation, begin again; *text* says so to a person."""
        self.step("restarting", reason=self._redact(reason))
        self.note(text)

    def recovered(self, manifest: Manifest, incarnation: int) -> None:
        self._event("started", incarnation=incarnation, checkpoint=manifest.checkpoint)

    def deployed(self, processes: list[int]) -> None:
        self._workers.clear()
        self._previous = (time.monotonic(), 0)
        self.step("deployed", workers=processes)

    def running(self, manifest: Manifest, incarnation: int) -> None:
        """All workers have restored *manifest*: records flow."""
        self._event("running", incarnation=incarnation, checkpoint=manifest.checkpoint)

    def triggered(self, checkpoint: int) -> None:
        self._triggered[checkpoint] = time.monotonic()
        self.step("triggered", checkpoint=checkpoint)

    def acknowledged(self, ack: Ack) -> None:
        triggered_s, times = self._triggered.get(ack.checkpoint), {}
        if ack.phases is not None:
            self._phases.setdefault(ack.checkpoint, []).append(ack.phases)
            times = {"sync_ms": round(ack.phases.sync_ms, 1), "async_ms": round(ack.phases.async_ms, 1)}
        stats = ack.stats(None if triggered_s is None else round(1000 * (time.monotonic() - triggered_s)))
        figures = {name: value for name, value in msgspec.structs.asdict(stats).items() if name != "subtask"}
        self.step("acknowledged", checkpoint=ack.checkpoint, worker=ack.subtask, **times, **figures)

    def completed(self, plan: PendingCheckpoint, decided: Decided, now_ms: int) -> None:
        """A checkpoint is finalized."""
        manifest = decided.manifest
        phases = [timed for n in list(self._phases) if n <= plan.checkpoint for timed in self._phases.pop(n)]
        self._triggered = {n: triggered_s for n, triggered_s in self._triggered.items() if n > plan.checkpoint}
        gap_ms, self._gap_ms = self._gap_ms, 0.0
        for committable in manifest.committables:
            if committable.sink in self._letters:
                self._letters[committable.sink] += committable.records
        self._event(
            "checkpoint",
            checkpoint=plan.checkpoint,
            kind=manifest.kind,
            duration_ms=now_ms - plan.triggered_ms,
            decided_at_ms=decided.decided_at_ms,
            committed_at_ms=decided.committed_at_ms,
            sync_ms=round(max((timed.sync_ms for timed in phases), default=0.0), 1),
            async_ms=round(max((timed.async_ms for timed in phases), default=0.0), 1),
            bytes=manifest.written_bytes,
            state_bytes=manifest.state_bytes,
            committables=len(manifest.committables) + len(manifest.staged),
            records_committed=manifest.records_committed,
            longest_gap_ms=round(gap_ms, 1),
            **self.figures(),
        )

    def progress(self, progress: Progress) -> None:
        before = self._workers.get(progress.subtask)
        first = before is None or not before.first_record_ms
        self._workers[progress.subtask] = progress
        for problem in _log_problems(progress) - (_log_problems(before) if before else set()):
            self.note(problem)
        self._gap_ms = max(self._gap_ms, progress.longest_gap_ms)
        for reporter in self._reporters:
            reporter.progress(progress)
        if first and progress.first_record_ms:
            self.step("first-record", worker=progress.subtask, first_record_ms=progress.first_record_ms)
        for note in progress.notes:
            self.note(note)
        self._repeated.add(progress.repeated, time.monotonic())
        if progress.waiting and time.monotonic() >= self._waiting_at:
            self._waiting_at = time.monotonic() + WAITING_INTERVAL_S
            waiting = [text for worker in self._workers.values() for text in worker.waiting]
            self.note("; ".join(dict.fromkeys(waiting)))

    def figures(self) -> dict[str, int | None]:
        """Totals of the current attempt."""
        workers = self._workers.values()
        totals: dict[str, int | None] = {
            name: sum(getattr(worker, name) for worker in workers)
            for name in ("records_in", "records_out", "skipped", "going_round", "open_transactions")
        }
        totals["late"] = sum(sum(worker.late.values()) for worker in workers)
        totals["lag"] = records_unread(workers)
        logs = [log for worker in workers for read in worker.logs.values() for log in read]
        if logs:
            totals["log_lag_ms"] = max((log.lag_ms for log in logs if log.lag_ms is not None), default=None)
            totals["log_lag_bytes"] = sum(log.lag_bytes or 0 for log in logs)
        return totals | ({"dead_letters": sum(self._letters.values())} if self._letters else {})

    def live(self, core: Coordinator) -> None:
        """Report live figures now and then. Called in every turn of the loop."""
        now = time.monotonic()
        if now < self._live_at:
            return
        self._live_at = now + LIVE_INTERVAL_S
        for silent in silent_partitions(self._graph, self._workers.values()) if self._graph is not None else ():
            if (told := silent[:2]) not in self._silent:
                self._silent.add(told)
                self.note(silent.text)
        figures: dict[str, Any] = dict(self.figures())
        before, count = self._previous
        self._previous = (now, figures["records_in"])
        rate = (figures["records_in"] - count) / (now - before) if now > before else 0.0
        self.turned(core.state.value)
        for reporter in self._reporters:
            reporter.live({**figures, "records_per_s": max(0, round(rate)), "state": core.state.value})

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        """The run has come round; see `Reporter.turned`."""
        for reporter in self._reporters:
            reporter.turned(state, rests_s)

    def ended(self, manifest: Manifest | None) -> None:
        """The run ended cleanly: transactions last reported as open are committed."""
        self._repeated.flush(time.monotonic())
        figures = {**self.figures(), "open_transactions": 0}
        self._event("ended", checkpoint=manifest.checkpoint if manifest else None, **figures)

    def close(self) -> None:
        self._repeated.flush(time.monotonic())
        for reporter in self._reporters:
            reporter.close()
