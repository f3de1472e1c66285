"""A run as spans of OpenTelemetry."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from run_figures import CHECKPOINT, PHASES

from exactlyonce.engines.local.monitoring.spans import Spans
from exactlyonce.engines.options import collector_at
from exactlyonce.pipeline.errors import ConfigError


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Spans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans("totals", provider)
    spans.event({"event": "started", "incarnation": 3})
    return spans


def step(spans: Spans, step: str, at_ms: int, **fields: Any) -> None:
    spans.event({"event": "step", "step": step, "at_ms": at_ms, **fields})


def test_a_completed_checkpoint(spans: Spans, exporter: InMemorySpanExporter) -> None:
    begun_ms, ended_ms = 1_700_000_000_200, 1_700_000_000_500
    step(spans, "triggered", begun_ms, checkpoint=7)
    ack = {"task": "words", "worker": 1, **dict.fromkeys(PHASES, 10)}
    step(spans, "acknowledged", begun_ms + 50, checkpoint=7, **ack)
    assert exporter.get_finished_spans() == (), "it is still running"
    spans.event(CHECKPOINT)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.start_time, span.end_time) == (
        "checkpoint", begun_ms * 1_000_000, ended_ms * 1_000_000,
    )  # fmt: skip
    assert span.attributes is not None
    assert (span.attributes["exactlyonce.pipeline"], span.attributes["exactlyonce.checkpoint"]) == ("totals", 7)
    assert span.attributes["exactlyonce.records_committed"] == 50
    assert [(event.name, event.timestamp) for event in span.events] == [
        ("words[1] acknowledged", (begun_ms + 50) * 1_000_000),
        ("decided", CHECKPOINT["decided_at_ms"] * 1_000_000), ("committed", CHECKPOINT["committed_at_ms"] * 1_000_000),
    ]  # fmt: skip


def test_an_aborted_checkpoint_and_a_restart(spans: Spans, exporter: InMemorySpanExporter) -> None:
    step(spans, "deployed", 10, workers=[41, 42])
    for number in (1, 2):
        step(spans, "triggered", 20, checkpoint=number)
    spans.event({"event": "note", "at_ms": 30, "text": "checkpoint 1 took longer than 5 ms; aborted"})
    for at_ms in (40, 50):  # the second attempt fails, too
        step(spans, "restarting", at_ms, reason=f"killed at {at_ms}")
        step(spans, "deployed", at_ms + 5, workers=[43, 44])
        step(spans, "restored", at_ms + 6, worker=0)
    step(spans, "restored", 60, worker=1)
    finished = exporter.get_finished_spans()
    assert [(span.name, span.end_time) for span in finished] == [
        ("checkpoint", 30_000_000), ("checkpoint", 45_000_000), ("restart", 60_000_000),
    ]  # fmt: skip
    assert [span.status.status_code for span in finished] == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET]
    restart = finished[-1]
    assert restart.start_time == 40_000_000
    assert restart.attributes is not None
    assert (restart.attributes["exactlyonce.reason"], restart.attributes["exactlyonce.attempts"]) == ("killed at 50", 2)


@pytest.mark.parametrize("text", ["127.0.0.1:4318", "ftp://host", "http://", "http://me:secret@host:4318"])
def test_what_is_no_collector(text: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        collector_at(text)
    assert "secret" not in str(refused.value)
