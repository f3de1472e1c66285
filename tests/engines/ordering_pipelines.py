"""Pipelines that sort or deduplicate, which the tests run as `exactlyonce run ordering_pipelines:...`."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from window_pipelines import Click

from exactlyonce import Emit, EventTime, Output, Pipeline, Timers
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def ordered(name: str, what: str) -> Pipeline:
    """The clicks of NAME-in by user, sorted or the first of each 3 s, to NAME-out; the late ones to NAME-late."""
    pipeline, late = Pipeline(name, max_parallelism=8), Output("late", Click)
    source = KafkaSource(f"{name}-in", value=Click, time=EventTime("at", disorder="2s", idle=None, ahead=None))
    keyed = pipeline.source("clicks", source).key_by(lambda click: click.user)
    given = keyed.in_order("s", late=late) if what == "sorted" else keyed.deduplicate("s", within="3s", late=late)
    given.sink("out", KafkaSink(f"{name}-out", key=lambda click: click.user))
    given.side(late).sink("late", KafkaSink(f"{name}-late", key=lambda click: click.user))
    return pipeline


class Gathered(msgspec.Struct):
    user: str
    ids: list[int]
    at: datetime
    now: datetime
    """The time by the clock."""


class Gathers:
    """Gives the ids of the clicks of a user some ms after the first of them."""

    def on_record(
        self, user: str, ids: list[int] | None, click: Click, timers: Timers, emit: Emit[Gathered]
    ) -> list[int]:
        if ids is None:
            timers.clock.set(timers.clock.now + timedelta(milliseconds=5))
        return [*(ids or []), click.id]

    def on_clock(
        self, user: str, ids: list[int] | None, at: datetime, timers: Timers, emit: Emit[Gathered]
    ) -> list[int] | None:
        emit(Gathered(user, ids or [], at, timers.clock.now))
        return None


def by_clock(name: str) -> Pipeline:
    """The ids of the clicks of NAME-in, gathered by user and clock, to NAME-out."""
    pipeline = Pipeline(name, max_parallelism=8)
    clicks = pipeline.source("clicks", KafkaSource(f"{name}-in", value=Click)).key_by(lambda click: click.user)
    gathered = clicks.process("gathered", Gathers, order="arrival")
    gathered.sink("out", KafkaSink(f"{name}-out", key=lambda ids: ids.user))
    return pipeline


class Ids(msgspec.Struct):
    ids: list[int]


def ids_of(clicks: list[Click]) -> Ids:
    return Ids([click.id for click in clicks])


def in_batches(name: str) -> Pipeline:
    """The ids of the clicks of NAME-in, in batches by user, to NAME-out."""
    pipeline = Pipeline(name, max_parallelism=8)
    clicks = pipeline.source("clicks", KafkaSource(f"{name}-in", value=Click)).key_by(lambda click: click.user)
    clicks.batches("gathered", 5, timeout="5ms").map(ids_of).sink("out", KafkaSink(f"{name}-out"))
    return pipeline


class Counted(msgspec.Struct):
    id: int
    count: int


def counted(count: int | None, click: Click) -> tuple[int, Counted]:
    return (count or 0) + 1, Counted(click.id, (count or 0) + 1)


def expiring(name: str) -> Pipeline:
    """The number of clicks of a user in a partition of NAME-in since a pause of 3 s, with each, to NAME-out."""
    pipeline = Pipeline(name, max_parallelism=8)
    source = KafkaSource(f"{name}-in", value=Click, time=EventTime("at", disorder="2s", idle=None, ahead=None))
    clicks = pipeline.source("clicks", source).key_by(lambda click: f"{click.user} {click.id % 3}")
    clicks.stateful_map("counts", counted, ttl="3s").sink("out", KafkaSink(f"{name}-out"))
    return pipeline
