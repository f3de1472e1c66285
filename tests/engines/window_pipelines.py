"""Pipelines with windows that the tests run as `exactlyonce run window_pipelines:...`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from exactlyonce import (
    Aggregate,
    Count,
    CountDistinct,
    Hopping,
    Max,
    Output,
    Percentiles,
    Pipeline,
    Session,
    Sum,
    Tumbling,
)
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Click(msgspec.Struct):
    id: int
    user: str
    at: int
    amount: int


WINDOWS: dict[str, Any] = {
    "tumbling": Tumbling("10s"),
    "hopping": Hopping("30s", every="10s"),
    "session": Session("3s"),
    "daily": Tumbling("1d", zone="Europe/Paris"),
    "folded": Session("3s"),
    "topics": Tumbling("10s"),
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


def windowed(name: str, window: str, version: int = 1, pause_ms: int = 0) -> Pipeline:
    """The clicks of NAME-in, or of all topics NAME-in-..., by user in windows, to NAME-out; the late ones to
    NAME-late."""
    pipeline, late = Pipeline(name, max_parallelism=8), Output("late", Click)
    topics: Any = {"pattern": f"{name}-in-.*"} if window == "topics" else {"topic": f"{name}-in"}
    source = KafkaSource(**topics, value=Click, time="at", disorder="2s", idle=None, ahead=None)
    windows = pipeline.source("clicks", source).key_by(lambda click: click.user).window(WINDOWS[window])
    if window == "folded" and version == 2:
        migrations = {1: migrated}
        results: Any = windows.fold(
            "counts", lambda: Amounts([]), added_to, united, late=late, state_version=2, migrations=migrations
        )
    elif window == "folded":  # with states that change in place
        results = windows.fold("counts", list, adding(pause_ms / 1000), list.__add__, state=list[int], late=late)
    else:
        results = windows.aggregate("counts", AGGREGATES, late=late)
    results.sink("out", KafkaSink(f"{name}-out", key=lambda result: result.key))
    results.side(late).sink("late", KafkaSink(f"{name}-late", key=lambda click: click.user))
    return pipeline
