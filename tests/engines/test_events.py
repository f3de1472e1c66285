"""Events: which of them are told, and what the last one of a command says."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from exactlyonce import Pipeline, RunResult
from exactlyonce.checkpoint.decision_log import fenced
from exactlyonce.checkpoint.records.manifest import Incarnation
from exactlyonce.checkpoint.succession import Awaited
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.bounded.stages import perform, settled
from exactlyonce.engines.events import Selection, ending, event, note
from exactlyonce.engines.local.reporting import (
    EventReporter,
    JsonReporter,
    Report,
    TerminalReporter,
    TextReporter,
    reporter_for,
)
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, Halt, RecordError
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.cluster import KafkaCluster

NEWEST = Incarnation(incarnation=3, host="h2", process=7, started_at_ms=0, heartbeat_ms=0)


def test_a_halt_has_its_choices() -> None:
    text = "Input is gone.\n  Choices: (1) restore it; (2) go on without `p`; or (3) `exactlyonce reset p`.\n  No more."
    told = ending(Halt(text, topic="orders", partition=2), "p", lambda said: said.replace("orders", "***"))
    assert told["choices"] == ["restore it", "go on without `p`", "`exactlyonce reset p`"]
    assert (told["event"], told["code"], told["topic"], told["partition"]) == ("failed", 6, "***", 2)
    assert "choices" not in ending(Halt("Run it again."), "p", str)


def test_a_takeover_says_by_whom() -> None:
    told = ending(fenced("p", 2, NEWEST), "p", str)
    assert (told["event"], told["by_incarnation"], told["by_host"], told["by_process"]) == ("taken_over", 3, "h2", 7)
    assert "by_host" not in ending(fenced("p", 3, NEWEST), "p", str), "who begins is not in the log yet"


def test_a_standby_says_for_whom_it_waits() -> None:
    told = list[Mapping[str, Any]]()
    report = Report("p", [EventReporter(told.append)], str)
    report.awaits(Awaited(NEWEST, None))
    report.awaits(Awaited(NEWEST, 4_000))
    standby, noted = told
    assert (standby["event"], standby["incarnation"], standby["host"], standby["process"]) == ("standby", 3, "h2", 7)
    assert (noted["event"], "for 4 s" in noted["text"]) == ("note", True)
    stream = io.StringIO()
    TerminalReporter(stream).event(standby)
    assert stream.getvalue() == f"{standby['text']}\n"


def test_lines_of_text_are_those_of_a_log() -> None:
    """Each has the time in ISO 8601, the level, the pipeline, and what happened."""
    stream = io.StringIO()
    reporter = TextReporter(stream)
    started = event("started", "p", checkpoint=3)
    for each in (started, note("p", "a source waits"), event("step", "p", step="decided")):
        reporter.event(each)
    first, second = stream.getvalue().splitlines()
    assert first == f"{started['at']} info    p: started checkpoint=3"
    assert second.endswith("Z warning p: a source waits")


@pytest.mark.parametrize(
    ("log_format", "expected"),
    [("auto", JsonReporter), ("json", JsonReporter), ("text", TextReporter)],
)
def test_outside_of_a_terminal_lines_are_json_unless_text_is_asked_for(
    log_format: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert type(reporter_for(log_format, "info")) is expected


@pytest.mark.parametrize("error", [RecordError("bad", operator="in", offset=3), RecordError("bad")])
def test_facts_survive_pickling(error: ExactlyOnceError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.facts) == ("bad", error.facts)


def test_facts_come_back_from_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver raises a unit's error with all its facts."""

    def failing(work: bytes, label: str) -> bytes:
        raise RecordError("bad", topic="orders", partition=1, offset=7)

    monkeypatch.setattr("exactlyonce.engines.bounded.stages._KINDS", {"unit": failing})
    with pytest.raises(RecordError) as raised:
        settled([perform(b"\x81\xa4type\xa4unit", "inline-1-0")])
    assert raised.value.facts == {"topic": "orders", "partition": 1, "offset": 7}


def checkpoint(at_s: float, records_in: int = 0, **changed: Any) -> dict[str, Any]:
    told = {"event": "checkpoint", "at_ms": round(at_s * 1000), "kind": "checkpoint", "records_committed": 0}
    return {**told, "records_in": records_in, **changed}


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (checkpoint(1), False),
        (checkpoint(1, records_in=7), True),
        (checkpoint(1, records_committed=1), True),
        (checkpoint(1, kind="savepoint"), True),
        (checkpoint(1, kind="final"), True),
        (checkpoint(-3600), True),
        (checkpoint(60), True),
    ],
    ids=["idle", "read", "written", "savepoint", "final", "the clock is set back", "a minute later"],
)
def test_which_checkpoints_are_told(then: dict[str, Any], told: bool) -> None:
    selection = Selection()
    assert selection(checkpoint(0))
    assert selection(then) == told
    assert Selection("debug")(then)


def test_levels() -> None:
    kinds = ("step", "started", "running", "ended", "note", "taken_over", "failed")
    told = {
        level: [kind for kind in kinds if Selection(level)({"event": kind})] for level in ("info", "warning", "error")
    }
    assert told["info"] == ["started", "running", "ended", "note", "taken_over", "failed"]
    assert told["warning"] == ["note", "taken_over", "failed"]
    assert told["error"] == ["taken_over", "failed"]
    with pytest.raises(ConfigError, match="log_level is 'loud': it must be one of debug, info, warning, error"):
        Selection("loud")


def test_events_in_python(kafka: KafkaCluster, topic_name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`on_event` gets every event from one thread, and stderr gets nothing."""
    for topic in ("in", "out"):
        kafka.create_topic(f"{topic_name}-{topic}")
    kafka.produce(f"{topic_name}-in", [("k", "v")])
    pipeline = Pipeline(topic_name)
    pipeline.source("in", KafkaSource(f"{topic_name}-in", value=str)).sink("out", KafkaSink(f"{topic_name}-out"))
    told: list[Mapping[str, Any]] = []
    threads: set[threading.Thread] = set()

    def on_event(event: Mapping[str, Any]) -> None:
        told.append(event)
        threads.add(threading.current_thread())

    def run(**options: Any) -> RunResult | None:
        servers = kafka.bootstrap_servers
        return pipeline.run(inline=True, until="latest", bootstrap_servers=servers, on_event=on_event, **options)

    assert run() == RunResult(topic_name, 1, {"in": {0: 1}})
    assert (told[0]["event"], told[-1]["event"], told[-1]["records_in"]) == ("started", "ended", 1)
    assert [(told[1][name]) for name in ("event", "incarnation", "checkpoint")] == ["running", 1, 0]
    assert "step" not in {event["event"] for event in told}
    assert len(threads) == 1
    run(log_level="debug")
    assert "step" in {event["event"] for event in told}
    assert '"event"' not in capfd.readouterr().err
    with pytest.raises(ConfigError, match="on_event is 'print': give a function"):
        pipeline.run(inline=True, on_event="print")  # type: ignore[arg-type]  # the error is what is tested
