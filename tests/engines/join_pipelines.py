"""Pipelines with joins that the tests run as `exactlyonce run join_pipelines:...`."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import msgspec

from exactlyonce import Count, Emit, EventTime, Hopping, Joined, Output, Pipeline, Session, Timers, Tumbling
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Event(msgspec.Struct):
    id: int
    user: str
    at: int


WINDOWS = {"tumbling": Tumbling("2s"), "hopping": Hopping("4s", every="2s"), "session": Session("300ms")}


def by_user(event: Event) -> str:
    return event.user


Pair = Joined[str, Event | None, Event | None]


class Newest(msgspec.Struct):
    right: Event
    is_used: bool = False


class PairsNewest:
    """Pairs each left event with the newest right one before it, and tells of right ones without any for a second."""

    def on_left(self, key: str, newest: Newest | None, left: Event, timers: Timers, emit: Emit[Pair]) -> Newest | None:
        emit(Joined(key, left, None if newest is None else newest.right))
        return newest and Newest(newest.right, is_used=True)

    def on_right(self, key: str, newest: Newest | None, right: Event, timers: Timers, emit: Emit[Pair]) -> Newest:
        timers.event.set(right.at + 1_000)
        return Newest(right)

    def on_time(self, key: str, newest: Newest | None, at: datetime, timers: Timers, emit: Emit[Pair]) -> Newest | None:
        if newest is not None and not newest.is_used and timers.event.now_ms == newest.right.at + 1_000:
            emit(Joined(key, None, newest.right))
        return newest


def joined(name: str, join: str, keep: str = "0s", pause_ms: int = 0) -> Pipeline:
    """The events of NAME-in with those of NAME-right, to NAME-out; late ones to NAME-late and NAME-late-right.

    *join* is the how= of an interval join, with a window before it as tumbling-full; or self, as-of, lookup or
    co-process, with -arrival for that order. Or it is moved: pairs are counted in windows by the time of the left one.
    """
    pipeline, late = Pipeline(name, max_parallelism=8), Output("late", Event)
    lefts = pipeline.source("lefts", _source(f"{name}-in", value=Event)).key_by(by_user)
    if join == "self":
        lefts.join("joined", lefts, within=("0s", "2s")).sink("out", KafkaSink(f"{name}-out"))
        return pipeline
    if join in ("as-of", "lookup"):
        table = pipeline.table("table", _source(f"{name}-right", KafkaSource.records, value=Event, key=str))
        if join == "lookup":
            lefts.lookup("joined", table).sink("out", KafkaSink(f"{name}-out"))
            return pipeline
        results: Any = lefts.as_of("joined", table, keep=keep, late=late)
    else:
        rights = pipeline.source("rights", _source(f"{name}-right", value=Event)).key_by(by_user)
        window, _, how = join.rpartition("-")
        late_right = Output("late-right", Event)
        if join.startswith("co-process"):
            order: Any = "arrival" if how == "arrival" else "time"
            results = lefts.co_process("joined", rights, PairsNewest, order=order, late=late, late_right=late_right)
        else:
            how = "inner" if join == "moved" else how
            options: Any = {"how": how, "window": WINDOWS[window]} if window else {"how": how, "within": ("-1s", "3s")}
            results = lefts.join("joined", rights, late=late, late_right=late_right, **options)
        results.side(late_right).sink("late-right", KafkaSink(f"{name}-late-right"))
    given = _by_left(results, name) if join == "moved" else results
    slow = given.peek(lambda _: time.sleep(pause_ms / 1000), id="slow")  # a slow user function
    slow.sink("out", KafkaSink(f"{name}-out"))
    results.side(late).sink("late", KafkaSink(f"{name}-late"))
    return pipeline


def _by_left(pairs: Any, name: str) -> Any:
    late = Output("late-pairs", Joined[str, Event, Event])
    moved = pairs.with_time(lambda pair: pair.left.at, disorder="2s").key_by(lambda pair: pair.key)
    counts = moved.window(Tumbling("5s")).aggregate("counts", Count(), late=late)
    counts.side(late).sink("late-pairs", KafkaSink(f"{name}-late-pairs"))
    return counts


def _source(topic: str, read: Any = KafkaSource, **options: Any) -> Any:
    return read(topic, time=EventTime("at", disorder="2s", idle=None, ahead=None), **options)
