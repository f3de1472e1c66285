"""Pipelines with windows that the tests run as `exactlyonce run window_pipelines:...`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from exactlyonce import (
    Aggregate,
    Count,
    CountDistinct,
    EventTime,
    Hopping,
    Max,
    Output,
    Percentiles,
    Pipeline,
    Session,
    Sum,
    Tumbling,
    Windowed,
)
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink, PostgresSink


class Click(msgspec.Struct):
    id: int
    user: str
    at: int
    amount: int


WINDOWS: dict[str, Any] = {
    "tumbling": Tumbling("10s"),
    "hopping": Hopping("30s", every="10s"),
    "session": Session("3s"),
    "waiting": Session("3s", wait="3s"),
    "daily": Tumbling("1d", zone="Europe/Paris"),
    "folded": Session("3s"),
    "topics": Tumbling("10s"),
    "revised": Hopping("30s", every="10s"),
    "processed": Tumbling("10s"),
}
REVISIONS: dict[str, dict[str, Any]] = {
    "revised": {"early": "4s", "lateness": "5s"},
    "processed": {"early": "4s", "lateness": "20s"},
}


AGGREGATES: dict[str, Aggregate[Click, Any]] = {
    "n": Count(),
    "spent": Sum("amount"),
    "most": Max("amount"),
    "ids": CountDistinct("id", error=0.05),
    "percentiles": Percentiles("amount", [50, 100]),
}


def adding(pause_s: float) -> Callable[[list[int], Click], list[int]]:
    def added(amounts: list[int], click: Click) -> list[int]:
        time.sleep(pause_s)  # a slow user function
        amounts.append(click.amount)
        return amounts

    return added


class Amounts(msgspec.Struct):
    """The next version of a state."""

    amounts: list[int]


def added_to(state: Amounts, click: Click) -> Amounts:
    state.amounts.append(click.amount)
    return state


def united(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(one.amounts + other.amounts)


def migrated(amounts: list[int]) -> Amounts:
    return Amounts(amounts)


def summed(window: Windowed[str, list[Click]]) -> Iterator[Windowed[str, dict[str, int]]]:
    times, amounts = [click.at for click in window.value], [click.amount for click in window.value]
    assert times == sorted(times)
    value = {"n": len(amounts), "spent": sum(amounts), "most": max(amounts)}
    yield Windowed(window.key, window.start, window.end, value, window.revision)


class Row(msgspec.Struct):
    user: str
    first: datetime
    n: int
    spent: int
    most: int
    revision: int


def row(window: Windowed[str, Any]) -> Row:
    value = window.value
    return Row(window.key, window.start, value.n, value.spent, value.most, window.revision)


def windowed(name: str, window: str, version: int = 1, pause_ms: int = 0, table: str = "") -> Pipeline:
    """The clicks of NAME-in, or of all topics NAME-in-..., by user in windows, to NAME-out, and to rows of *table*; the
    late ones to NAME-late."""
    pipeline, late = Pipeline(name, max_parallelism=8), Output("late", Click)
    topics: Any = {"pattern": f"{name}-in-.*"} if window == "topics" else {"topic": f"{name}-in"}
    source = KafkaSource(**topics, value=Click, time=EventTime("at", disorder="2s", idle=None, ahead=None))
    windows = pipeline.source("clicks", source).key_by(lambda click: click.user).window(WINDOWS[window])
    options = REVISIONS.get(window, {})
    if window == "folded" and version == 2:
        migrations = {1: migrated}
        results: Any = windows.fold(
            "counts", lambda: Amounts([]), added_to, united, late=late, state_version=2, migrations=migrations
        )
    elif window == "folded":  # with states that change in place
        results = windows.fold("counts", list, adding(pause_ms / 1000), list.__add__, state=list[int], late=late)
    elif window == "processed":
        results = windows.apply("counts", summed, late=late, **options)
    else:
        results = windows.aggregate("counts", AGGREGATES, late=late, **options)
    if table:
        into = PostgresSink[Row](table, dsn="env:WINDOWS_DSN", mode="upsert", key=("user", "first"), create=True)
        results.map(row).sink("table", into)
    results.sink("out", KafkaSink(f"{name}-out", key=lambda result: result.key))
    results.side(late).sink("late", KafkaSink(f"{name}-late", key=lambda click: click.user))
    return pipeline


def left_out(name: str, timed_by: str = "its source") -> Pipeline:
    """The clicks of NAME-in by user in windows, to NAME-out; no output gets the late ones. Unless *timed_by* their
    source, they get their time again."""
    pipeline = Pipeline(name, max_parallelism=8)
    clicks = pipeline.source("clicks", KafkaSource(f"{name}-in", value=Click, time=EventTime("at", ahead=None)))
    clicks = clicks if timed_by == "its source" else clicks.with_time("at", id="again")
    counts = clicks.key_by(lambda click: click.user).window(Tumbling("10s")).aggregate("counts", Count())
    counts.sink("out", KafkaSink(f"{name}-out", key=lambda result: result.key))
    return pipeline
