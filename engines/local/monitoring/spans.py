"""A run as spans of OpenTelemetry: one for each checkpoint and each restart.

Invariants: a span is made once it has ended, with the times of its events, so none is open when a process is killed.
None has a secret: attributes are ids, numbers, and notes of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exactlyonce.engines.local.monitoring.page import COMPLETED, TriggeredCheckpoint, TriggeredCheckpoints
from exactlyonce.engines.local.reporting import Reporter
from exactlyonce.pipeline.extras import needing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 5
"""How long the end of a run may wait for a collector that is away."""
_OF_CHECKPOINT = ("kind", "bytes", "state_bytes", "committables", "records_committed", "sync_ms", "async_ms")


class Spans(Reporter):
    """Gives the spans of *pipeline*'s run to a tracer of *provider*."""

    def __init__(self, pipeline: str, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("exactlyonce")
        self._pipeline, self._incarnation = pipeline, 0
        self._checkpoints = TriggeredCheckpoints()
        self._restart: tuple[int, list[str]] | None = None
        """The beginning in ms since 1970, and the reasons: several if attempts have failed before one was deployed."""
        self._restoring = 0
        """The workers that have not restored their state yet."""

    def event(self, event: Mapping[str, Any]) -> None:
        for ended in self._checkpoints.event(event):
            self._add_checkpoint(ended, event["at_ms"])
        match event["event"], event.get("step"):
            case "started", _:
                self._incarnation = event["incarnation"]
            case "step", "restarting":
                begun_ms, reasons = self._restart or (event["at_ms"], [])
                self._restart = begun_ms, [*reasons, event["reason"]]
            case "step", "deployed":
                self._restoring = len(event["workers"])
            case "step", "restored":
                self._restoring -= 1
                if self._restart is not None and self._restoring == 0:
                    begun_ms, reasons = self._restart
                    self._restart = None
                    facts = {"reason": reasons[-1], "attempts": len(reasons)}
                    self._add("restart", begun_ms, event["at_ms"], facts)

    def _add_checkpoint(self, ended: TriggeredCheckpoint, at_ms: int) -> None:
        facts = {"checkpoint": ended.id, "outcome": ended.outcome}
        facts |= {name: ended.event[name] for name in _OF_CHECKPOINT if name in ended.event}
        moments = [
            (
                f"{stats.task}[{stats.subtask}] acknowledged",
                ended.triggered_ms + (stats.acknowledged_ms or 0),
                {name: value for name, value in stats.figures.items() if isinstance(value, int)},
            )
            for stats in ended.subtasks
        ]
        if ended.event:
            moments += [(name, ended.event[f"{name}_at_ms"], {}) for name in ("decided", "committed")]
        error = "" if ended.outcome == COMPLETED else "; ".join(ended.notes) or "its workers are gone"
        self._add("checkpoint", ended.triggered_ms, at_ms, facts, moments, error)

    def _add(
        self,
        name: str,
        begun_ms: int,
        ended_ms: int,
        facts: Mapping[str, Any],
        moments: Sequence[tuple[str, int, Mapping[str, Any]]] = (),
        error: str = "",
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        common = {"pipeline": self._pipeline, "incarnation": self._incarnation}
        attributes = {f"exactlyonce.{key}": value for key, value in {**common, **facts}.items()}
        span = self._tracer.start_span(name, attributes=attributes, start_time=begun_ms * 1_000_000)
        for text, at_ms, others in moments:
            span.add_event(text, {f"exactlyonce.{key}": value for key, value in others.items()}, at_ms * 1_000_000)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(begun_ms, ended_ms) * 1_000_000)  # clocks may be set back


@contextmanager
def exporting(pipeline: str, url: str) -> Iterator[Spans]:
    """The spans of *pipeline*'s run, sent to the collector at *url* by OTLP over HTTP, from a thread of their own."""
    with needing("otel", "opentelemetry-sdk", "traces (--traces)"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    # Its lines about a collector that is away are for a program that has a handler, as those of librdkafka.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    provider = TracerProvider(resource=Resource.create({"service.name": pipeline}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"{url}/v1/traces", timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield Spans(pipeline, provider)
    finally:
        provider.shutdown()
