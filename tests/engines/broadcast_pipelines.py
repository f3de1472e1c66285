"""Pipelines with a table that all subtasks have, that the tests run as `exactlyonce run broadcast_pipelines:...`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from exactlyonce import DeadLetters, EventTime, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Event(msgspec.Struct):
    id: int
    kind: str


class Ruled(msgspec.Struct):
    id: int
    kind: str
    rules: dict[str, int]
    count: int = 0


def apply(event: Event, rules: Mapping[str, int]) -> Ruled:
    if event.kind == "wrong":
        raise ValueError("no rule is for that")
    return Ruled(event.id, event.kind, dict(rules))


def count(counted: int | None, ruled: Ruled) -> tuple[int, Ruled]:
    counted = (counted or 0) + 1
    return counted, msgspec.structs.replace(ruled, count=counted)


def ruled(name: str, pause_ms: float = 0, keyed: str = "", timed: str = "", dead: str = "") -> Pipeline:
    """The events of NAME-in with all rules of NAME-rules, to NAME-out; with *dead*, others to NAME-dead.

    With *keyed* they are counted by kind before and after. With *timed* both have event times.
    """
    pipeline = Pipeline(name, max_parallelism=8)
    stamped: dict[str, Any] = {"time": EventTime(lambda record: record.timestamp_ms, disorder="2s")} if timed else {}
    rules = pipeline.table("rules", KafkaSource.records(f"{name}-rules", key=str, value=int, **stamped))
    events = pipeline.source("events", KafkaSource(f"{name}-in", value=Event))
    if keyed:
        events = events.key_by(lambda event: event.id).reduce("distinct", lambda _, event: event)
    slow = events.peek(lambda _: time.sleep(pause_ms / 1000), id="slow")
    if keyed:
        by_kind = slow.key_by(lambda event: event.kind).with_broadcast("ruled", rules, apply)
        by_kind.stateful_map("counted", count).sink("out", KafkaSink(f"{name}-out"))
        return pipeline
    on_error = DeadLetters(f"{name}-dead") if dead else None
    slow.with_broadcast("ruled", rules, apply, on_error=on_error).sink("out", KafkaSink(f"{name}-out"))
    return pipeline
