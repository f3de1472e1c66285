"""Pipelines with event time that the tests run as `exactlyonce run event_time_pipelines:...`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from exactlyonce import Count, DeadLetters, Emit, EventTime, Output, Pipeline, Timers, Tumbling, Windowed
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Click(msgspec.Struct):
    at: int | None
    user: str = "ann"


class Counted(msgspec.Struct):
    first: int
    count: int


def _counted(window: Windowed[str, int]) -> Counted:
    return Counted(round(window.start.timestamp() * 1000), window.value)


def counts(name: str, idle: str = "1s", size: str = "1s", pattern: str = "") -> Pipeline:
    """Clicks of NAME-in, or of all topics NAME-in..., in windows of *size*, to NAME-out; late ones to NAME-late, those
    without a time to NAME-dead."""
    pipeline, late = Pipeline(name, max_parallelism=8), Output("late", Click)
    topics: Any = {"pattern": f"{name}-in.*"} if pattern else {"topic": f"{name}-in"}
    at = EventTime("at", disorder="100ms", idle=idle, ahead=None, on_error=DeadLetters(f"{name}-dead"))
    source = KafkaSource(**topics, value=Click, time=at)
    windows = pipeline.source("clicks", source).key_by(lambda click: click.user).window(Tumbling(size))
    results = windows.aggregate("counts", Count(), late=late)
    results.map(_counted, id="counted").sink("out", KafkaSink(f"{name}-out"))
    results.side(late).sink("late", KafkaSink(f"{name}-late"))
    return pipeline


def rejected(name: str) -> Pipeline:
    """The same, with a loop beside it."""
    pipeline = counts(name)
    loop = pipeline.feedback("loop", Click)
    source = pipeline.source("other", KafkaSource(f"{name}-other", value=Click))
    again = source.union(loop, id="both").filter(lambda click: click.at is None, id="again")
    again.feed(loop)
    again.sink("looped", KafkaSink(f"{name}-looped"))
    return pipeline


class Reminds:
    """Gives each click at once, and a second later."""

    def on_record(self, user: str, state: int | None, click: Click, timers: Timers, emit: Emit[int]) -> None:
        timers.event.set((click.at or 0) + 1_000)
        emit(1)

    def on_time(self, user: str, state: int | None, at: datetime, timers: Timers, emit: Emit[int]) -> None:
        emit(2)


def _refused(record: Any) -> int:
    raise ValueError("refused")


def lettered(name: str) -> Pipeline:
    """Results of three operators by time, all of which are refused, to NAME-dead."""
    pipeline = Pipeline(name, max_parallelism=8)
    source = KafkaSource(f"{name}-in", value=Click, time=EventTime("at", idle="10m", ahead=None))
    clicks = pipeline.source("clicks", source).key_by(lambda click: click.user)
    counted = clicks.window(Tumbling("1s")).aggregate("counts", Count()).map(_counted, id="counted")
    results: dict[str, Any] = {
        "sorted": counted.key_by(lambda counted: counted.first).in_order("sorted"),
        "pairs": clicks.join("pairs", clicks, how="left", within=("1ms", "1s")),
        "reminders": clicks.process("reminders", Reminds, state=int),
    }
    for id, stream in results.items():
        refused = stream.map(_refused, id=f"{id}-refused", on_error=DeadLetters(f"{name}-dead"))
        refused.sink(f"{id}-out", KafkaSink(f"{name}-{id}"))
    return pipeline
