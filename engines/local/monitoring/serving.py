"""Answers of a run over HTTP: two probes, and figures for Prometheus; `server` gives them.

Invariants: counters begin at 0 with the run, and go on over restarts of its workers. No answer has a secret: labels are
ids and numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from exactlyonce.checkpoint.coordinator import JobState
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.engines.local.messages import Progress
from exactlyonce.engines.local.reporting import Reporter
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.extras import needing

POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""The content security policy: nothing runs, nothing is loaded, nobody embeds it."""


class Asked(NamedTuple):
    """A request."""

    path: str
    """As it was written, without the host."""
    query: Sequence[tuple[str, str]] = ()
    """Names and values, of which a name may have several."""
    accept: str = ""
    """Its header of that name."""
    authorization: str = ""
    """Its header of that name."""


class Answer(NamedTuple):
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    policy: str = POLICY


@dataclass(frozen=True)
class AtOnce:
    """Answers mostly without waiting for anything."""

    quick: Callable[[Asked], Answer | None]
    """Gives None where it would have to wait."""
    waiting: Callable[[Asked], Answer]

    def __call__(self, asked: Asked) -> Answer:
        return self.waiting(asked)


Paths = Mapping[str, Callable[[Asked], Answer]]
"""What answers, by path; a path that ends with /* answers all below it. Called on any thread. The server's own thread
calls only what is `AtOnce`."""


STANDBY, WAITING = "standby", "waiting"
"""The states of a run without a job: another run leads; a broker or a service is away."""
STATES = (*(state.value for state in JobState), STANDBY, WAITING)
STUCK_S = 30.0
"""A run that has not come round for so long is stuck."""


LATE_S, LATE_TIMES = 10.0, 3
"""A checkpoint is late after so many seconds, or so many times the usual time, whichever is more."""


class Verdict(NamedTuple):
    well: bool
    sentence: str


class Health(Reporter):
    """Written by one thread, read by others: each field is replaced whole."""

    def __init__(self, settings: CheckpointSettings, now_s: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._now_s = settings, now_s
        self._state = JobState.RECOVERING.value, now_s()
        """The state, and since when."""
        self._stuck_at_s = now_s() + STUCK_S
        self._completed: tuple[int, float, float] | None = None
        """The newest completed checkpoint, when it was completed, and the seconds that it took."""

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self._completed = event["checkpoint"], self._now_s(), event["duration_ms"] / 1000

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        now_s = self._now_s()
        self._stuck_at_s = now_s + rests_s + STUCK_S
        if state != self._state[0]:
            self._state = state, now_s

    @property
    def liveness(self) -> Verdict:
        """Whether the run comes round, restoring and waiting included."""
        state, since_s = self._state
        stuck_s = self._now_s() - self._stuck_at_s
        if stuck_s > 0:
            return Verdict(False, f"stuck: {state}, and it has not come round for {STUCK_S + stuck_s:.0f} s")
        return Verdict(True, f"{state}, for {self._now_s() - since_s:.1f} s")

    @property
    def readiness(self) -> Verdict:
        """Whether records are processed, and the last checkpoint was in time."""
        settings = self._settings
        return self._verdict((settings.interval_ms + settings.min_pause_ms + settings.timeout_ms) / 1000)

    @property
    def wellness(self) -> Verdict:
        """Whether it is ready, and checkpoints come about as often as they should: sooner than `readiness`."""
        usual_s = (self._settings.interval_ms + self._settings.min_pause_ms) / 1000
        took_s = self._completed[2] if self._completed is not None else 0.0
        return self._verdict(max(LATE_S, LATE_TIMES * (usual_s + took_s)))

    def _verdict(self, allowed_s: float) -> Verdict:
        """*allowed_s* may pass from one completed checkpoint to the next."""
        (state, since_s), completed, now_s = self._state, self._completed, self._now_s()
        live = self.liveness
        if not live.well or state != JobState.RUNNING.value:
            return Verdict(False, live.sentence)
        if completed is None:
            last_s, ago = since_s, "no checkpoint of this run is complete yet"
        else:
            last_s, ago = max(completed[1], since_s), f"checkpoint {completed[0]} is {now_s - completed[1]:.1f} s old"
        if now_s - last_s > allowed_s:
            return Verdict(False, f"{state}, but {ago}; one should be complete every {allowed_s:g} s at the latest")
        return Verdict(True, f"{state}; {ago}")

    def answer_live(self, _: Asked) -> Answer:
        return _answer(self.liveness)

    def answer_ready(self, _: Asked) -> Answer:
        return _answer(self.readiness)


def _answer(verdict: Verdict) -> Answer:
    return Answer(f"{verdict.sentence}\n".encode(), status=200 if verdict.well else 503)


BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metric(NamedTuple):
    """A metric, as Prometheus shows it. Each has the label `pipeline` as well."""

    name: str
    kind: str
    """counter, gauge or histogram"""
    labels: tuple[str, ...]
    help: str


METRICS = tuple(
    Metric(f"exactlyonce_{name}", kind, labels, help)
    for name, kind, labels, help in (
        ("job_state", "gauge", ("state",), f"1 for the present state, 0 for the others: {', '.join(STATES)}"),
        ("incarnation", "gauge", (), "The number of the present incarnation"),
        ("restarts_total", "counter", (), "Restarts of the workers since the run began"),
        ("checkpoints_triggered_total", "counter", (), "Checkpoints begun, aborted ones too"),
        ("checkpoints_completed_total", "counter", (), "Checkpoints whose output is committed"),
        ("checkpoint_duration_seconds", "histogram", ("phase",),
         "Of completed checkpoints: sync, async (each of the slowest subtask), end_to_end from trigger to committed"),
        ("last_checkpoint_id", "gauge", (), "The number of the newest completed checkpoint"),
        ("last_checkpoint_timestamp_seconds", "gauge", (), "When it was completed, in seconds since 1970"),
        ("last_checkpoint_size_bytes", "gauge", (), "The bytes that it wrote"),
        ("last_checkpoint_full_size_bytes", "gauge", (), "The bytes of all state that it refers to"),
        ("last_checkpoint_committables", "gauge", (), "The transactions and sets of rows that it committed"),
        ("records_committed_total", "counter", (), "Records of committed output, each counted once"),
        ("dead_letters_total", "counter", (), "Dead letters of completed checkpoints"),
        ("records_in_total", "counter", ("subtask",), "Records read, again after a restart"),
        ("records_out_total", "counter", ("subtask",), "Records written, again after a restart"),
        ("records_skipped_total", "counter", ("subtask",), "Records that sources left out"),
        ("operator_records_in_total", "counter", ("operator", "subtask"),
         "Records that came to an operator, late ones too"),
        ("operator_busy_seconds_total", "counter", ("operator", "subtask"), "Time in an operator's function or state"),
        ("late_records_total", "counter", ("operator", "subtask"),
         "Records that came after their time was over, whether left out or given to a side output"),
        ("watermark_timestamp_seconds", "gauge", ("operator", "subtask"),
         "Event time: a source or an operator has all records up to it, in seconds since 1970"),
        ("pending_records", "gauge", ("source", "topic", "partition", "subtask"),
         "The lag: committed records that are not read; of other sources, those at hand of each open split"),
        ("source_log_lag_seconds", "gauge", ("source", "log"),
         "The age of the oldest commit in a database's log that may be unread, by its clock; 0: all was read"),
        ("source_log_lag_bytes", "gauge", ("source", "log"), "Bytes of the log that are not read"),
        ("source_log_kept_bytes", "gauge", ("source", "log"), "Bytes of the log that the server keeps for the source"),
        ("source_log_safe_bytes", "gauge", ("source", "log"),
         "Bytes that may be written before the server removes log that is needed; only where there is a limit"),
        ("source_log_status", "gauge", ("source", "log", "status"),
         "1 for what the server says of a slot: reserved, extended, unreserved, or lost"),
        ("source_snapshot_page", "gauge", ("source", "table"),
         "The page at hand of the rows that were there, from 1 on; only while they are read"),
        ("source_snapshot_pages", "gauge", ("source", "table"), "About so many pages, by the server's estimate"),
        ("loop_records", "gauge", ("subtask",), "Records that wait to come round a loop"),
        ("open_transactions", "gauge", ("subtask",), "Open transactions of the sinks"),
        ("unwritten_records", "gauge", ("sink", "subtask"), "Committed records that an at_most_once sink still holds"),
        ("longest_gap_seconds", "gauge", (),
         "The longest time between two batches of a worker with input, in the interval of the newest checkpoint"),
    )
)  # fmt: skip


def _of_splits(progress: Progress) -> dict[tuple[str, ...], float]:
    """The figures of the splits that a worker reads, by metric and labels."""
    figures: dict[tuple[str, ...], float] = {}
    for source, places in progress.lags.items():
        for topic, partition, lag in places:
            figures["pending_records", source, topic, str(partition), str(progress.subtask)] = lag
    for source, logs in progress.logs.items():
        for log in logs:
            known = {
                "lag_seconds": None if log.lag_ms is None else log.lag_ms / 1000,
                "lag_bytes": log.lag_bytes,
                "kept_bytes": log.kept_bytes,
                "safe_bytes": log.safe_bytes,
            }
            for name, figure in known.items():
                if figure is not None:
                    figures[f"source_log_{name}", source, log.name] = figure
            if log.status:
                figures["source_log_status", source, log.name, log.status] = 1
            for read in log.tables:
                figures["source_snapshot_page", source, read.table] = read.page
                figures["source_snapshot_pages", source, read.table] = read.pages
    return figures


class Metrics(Reporter):
    """Gathers the figures of *pipeline*'s run, over all its incarnations."""

    def __init__(self, pipeline: str) -> None:
        with needing("metrics", "prometheus_client", "metrics (--metrics)"):
            import prometheus_client as client
        self.registry = client.CollectorRegistry()
        self._client, self._pipeline = client, pipeline
        made = {"counter": client.Counter, "gauge": client.Gauge}
        self._metrics: dict[str, Any] = {}
        for name, kind, labels, help in METRICS:
            if kind == "histogram":
                metric: Any = client.Histogram(
                    name, help, ("pipeline", *labels), buckets=BUCKETS_S, registry=self.registry
                )
            else:
                metric = made[kind](name, help, ("pipeline", *labels), registry=self.registry)
            self._metrics[name.removeprefix("exactlyonce_")] = metric
            if not labels:
                metric.labels(pipeline)  # shown from the start, as 0
        self._workers: dict[int, Progress] = {}
        self._letters = 0
        self._deployed = False
        self.turned(JobState.RECOVERING.value)

    def _of(self, name: str, *labels: object) -> Any:
        return self._metrics[name].labels(self._pipeline, *map(str, labels))

    def event(self, event: Mapping[str, Any]) -> None:
        match event["event"], event.get("step"):
            case "started", _:
                self._of("incarnation").set(event["incarnation"])
                self._letters = 0
            case "step", "triggered":
                self._of("checkpoints_triggered_total").inc()
            case "step", "deployed":
                self._of("restarts_total").inc(int(self._deployed))
                self._deployed = True
                for subtask in [*self._workers]:
                    self._forget(_of_splits(self._workers.pop(subtask)))
            case "checkpoint", _:
                self._completed(event)

    def _completed(self, event: Mapping[str, Any]) -> None:
        self._of("checkpoints_completed_total").inc()
        self._of("records_committed_total").inc(event["records_committed"])
        letters = event.get("dead_letters", 0)
        self._of("dead_letters_total").inc(letters - self._letters)
        self._letters = letters
        for phase, field_ in (("sync", "sync_ms"), ("async", "async_ms"), ("end_to_end", "duration_ms")):
            self._of("checkpoint_duration_seconds", phase).observe(event[field_] / 1000)
        self._of("last_checkpoint_id").set(event["checkpoint"])
        self._of("last_checkpoint_timestamp_seconds").set(event["at_ms"] / 1000)
        self._of("last_checkpoint_size_bytes").set(event["bytes"])
        self._of("last_checkpoint_full_size_bytes").set(event["state_bytes"])
        self._of("last_checkpoint_committables").set(event["committables"])
        self._of("longest_gap_seconds").set(event["longest_gap_ms"] / 1000)

    def progress(self, progress: Progress) -> None:
        subtask = progress.subtask
        before = self._workers.get(subtask)
        self._workers[subtask] = progress
        for name, of in (("records_in", "records_in"), ("records_out", "records_out"), ("records_skipped", "skipped")):
            grown = getattr(progress, of) - (getattr(before, of) if before else 0)
            self._of(f"{name}_total", subtask).inc(max(0, grown))
        for operator, (took_s, records) in progress.operators.items():
            took_before_s, records_before = before.operators.get(operator, (0.0, 0)) if before else (0.0, 0)
            self._of("operator_busy_seconds_total", operator, subtask).inc(max(0.0, took_s - took_before_s))
            self._of("operator_records_in_total", operator, subtask).inc(max(0, records - records_before))
        for operator, late in progress.late.items():
            self._of("late_records_total", operator, subtask).inc(
                max(0, late - (before.late.get(operator, 0) if before else 0))
            )
        for operator, watermark in progress.watermarks.items():
            if NO_WATERMARK < watermark.time_ms < END_OF_TIME:
                self._of("watermark_timestamp_seconds", operator, subtask).set(watermark.time_ms / 1000)
        figures = _of_splits(progress)
        self._forget((_of_splits(before) if before else figures).keys() - figures.keys())
        for labels, figure in figures.items():
            self._of(*labels).set(figure)
        for sink in {**(before.unwritten if before else {}), **progress.unwritten}:
            self._of("unwritten_records", sink, subtask).set(progress.unwritten.get(sink, 0))
        self._of("loop_records", subtask).set(progress.going_round)
        self._of("open_transactions", subtask).set(progress.open_transactions)

    def _forget(self, figures: Iterable[tuple[str, ...]]) -> None:
        """No worker has these *figures* any more."""
        for name, *labels in figures:
            self._metrics[name].remove(self._pipeline, *labels)

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        for known in STATES:
            self._of("job_state", known).set(int(known == state))

    def answer(self, asked: Asked) -> Answer:
        """All of them, in the form that the scraper accepts. For any thread."""
        encode, content_type = self._client.exposition.choose_encoder(asked.accept)
        return Answer(encode(self.registry), content_type)
