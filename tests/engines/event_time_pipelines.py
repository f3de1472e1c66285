"""Pipelines with event time that the tests run as `exactlyonce run event_time_pipelines:...`."""

from __future__ import annotations

from typing import Any

import msgspec

from exactlyonce import Count, DeadLetters, Output, Pipeline, Tumbling, Windowed
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
    source = KafkaSource(**topics, value=Click, time="at", disorder="100ms", idle=idle, ahead=None,
                         on_time_error=DeadLetters(f"{name}-dead"))  # fmt: skip
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
