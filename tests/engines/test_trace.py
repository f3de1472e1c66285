"""The requests between the last acknowledgement and visible output, as a run tells of them; and a run as spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from run_figures import CHECKPOINT, PHASES
from running import Job, stop

from exactlyonce.connectors.trace import Sent, Trace, as_fields, in_sequence
from exactlyonce.engines.local.monitoring.spans import Spans
from exactlyonce.engines.options import collector_at
from exactlyonce.pipeline.errors import ConfigError

NEEDED = 4


def test_requests_of_one_round_wait_for_each_other_only_within_a_client() -> None:
    together = [Sent("Metadata", 0, 1), Sent("Produce", 2, 3, client=1), Sent("FindCoordinator", 0, 1, client=2)]
    assert in_sequence(together) == 1
    chain = [*together, Sent("DescribeTransactions", 1.5, 3, client=2)]
    assert in_sequence(chain) == 2
    assert in_sequence([*chain, Sent("EndTxn", 4, 5, round=1), Sent("EndTxn", 4, 6, round=1)]) == 3
    assert in_sequence([]) == 0


def test_a_trace_tells_what_was_sent_and_answered_in_a_time() -> None:
    """Requests that began before or were not answered are left out; durations are in milliseconds from the begin."""
    trace = Trace()
    first, second = trace.client(), trace.client()
    first("Metadata", 0.5, 1.5)
    trace.next_round()
    second("Produce", 1.2, 1.3)
    first("Fetch", 1.1, 1.4)
    first("EndTxn", 1.8, 2.1)
    sent = trace.between(1.0, 2.0)
    assert [(each.request, each.round) for each in sent] == [("Fetch", 1), ("Produce", 1)]
    assert as_fields(sent, 1.0, 2.0) == {
        "duration_ms": 1000.0,
        "in_sequence": 1,
        "requests": [
            {"request": "Fetch", "began_ms": 100.0, "took_ms": 300.0},
            {"request": "Produce", "began_ms": 200.0, "took_ms": 100.0},
        ],
    }


def test_four_requests_wait_for_one_another_until_output_is_visible(job_of: Callable[..., Job]) -> None:
    """The first checkpoint with output also looks up brokers and connects."""
    job = job_of("linear", "--parallelism", "2")
    run = job.start()
    with_output: list[dict[str, Any]] = []
    for _ in range(50):  # a busy broker may ask to be asked again
        job.feed(100)
        run.await_checkpoint()
        seen = [event for event in run.events if event.get("step") == "requests until visible"]
        with_output = [event for event in seen if "DescribeTransactions" in names(event)][1:]
        if len(with_output) >= 3 and min(event["in_sequence"] for event in with_output) <= NEEDED:
            break
    stop(run)
    assert min(event["in_sequence"] for event in with_output) <= NEEDED
    assert all(names(event)[-1] == "EndTxn" for event in with_output)


def names(event: dict[str, Any]) -> list[str]:
    return [each["request"] for each in event["requests"]]


# --- a run as spans of OpenTelemetry ----------------------------------------------------------------------------------


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
