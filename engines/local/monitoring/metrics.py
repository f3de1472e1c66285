"""The figures of a run for Prometheus.

Counters begin at 0 with the run, and go on over restarts of its workers. None has a secret: labels are ids and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from exactlyonce.checkpoint.coordinator import JobState
from exactlyonce.engines.local.messages import Progress
from exactlyonce.engines.local.monitoring.health import STATES
from exactlyonce.engines.local.monitoring.serving import Answer, Asked
from exactlyonce.engines.local.reporting import Reporter
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK
from exactlyonce.pipeline.extras import needing

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
        ("loop_records", "gauge", ("subtask",), "Records that wait to come round a loop"),
        ("open_transactions", "gauge", ("subtask",), "Open transactions of the sinks"),
        ("unwritten_records", "gauge", ("sink", "subtask"), "Committed records that an at_most_once sink still holds"),
        ("longest_gap_seconds", "gauge", (),
         "The longest time between two batches of a worker with input, in the interval of the newest checkpoint"),
    )
)  # fmt: skip


_Place = tuple[str, str, int]
"""Source, topic and partition."""


def _by_place(progress: Progress) -> dict[_Place, int]:
    return {
        (source, topic, partition): lag for source, places in progress.lags.items() for topic, partition, lag in places
    }


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
                    self._forget_lags(subtask, _by_place(self._workers.pop(subtask)))
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
        lags = _by_place(progress)
        self._forget_lags(subtask, (_by_place(before) if before else lags).keys() - lags.keys())
        for place, lag in lags.items():
            self._of("pending_records", *place, subtask).set(lag)
        for sink in {**(before.unwritten if before else {}), **progress.unwritten}:
            self._of("unwritten_records", sink, subtask).set(progress.unwritten.get(sink, 0))
        self._of("loop_records", subtask).set(progress.going_round)
        self._of("open_transactions", subtask).set(progress.open_transactions)

    def _forget_lags(self, subtask: int, places: Iterable[_Place]) -> None:
        """The worker does not read *places* any more."""
        for place in places:
            self._metrics["pending_records"].remove(self._pipeline, *map(str, place), str(subtask))

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        for known in STATES:
            self._of("job_state", known).set(int(known == state))

    def answer(self, asked: Asked) -> Answer:
        """All of them, in the form that the scraper accepts. For any thread."""
        encode, content_type = self._client.exposition.choose_encoder(asked.accept)
        return Answer(encode(self.registry), content_type)
