"""Pipelines with joins that the tests run as `exactlyonce run join_pipelines:...`."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from exactlyonce import Hopping, Output, Pipeline, Session, Tumbling
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Event(msgspec.Struct):
    id: int
    user: str
    at: int


WINDOWS = {"tumbling": Tumbling("2s"), "hopping": Hopping("4s", every="2s"), "session": Session("300ms")}


def by_user(event: Event) -> str:
    return event.user


def joined(name: str, join: str, keep: str = "0s", pause_ms: int = 0) -> Pipeline:
    """The events of NAME-in with those of NAME-right, to NAME-out; late ones to NAME-late and NAME-late-right.

    *join* is the how= of an interval join, with a window before it as tumbling-full; or self, as-of or lookup.
    """
    pipeline, late = Pipeline(name, max_parallelism=8), Output("late", Event)
    lefts = pipeline.source("lefts", _source(f"{name}-in", value=Event)).key_by(by_user)
    if join == "self":
        lefts.join("joined", lefts, within=("0s", "2s")).sink("out", KafkaSink(f"{name}-out"))
        return pipeline
    if join in ("as-of", "lookup"):
        table = pipeline.table("table", _source(f"{name}-right", value=Event, key=str, metadata=True))
        if join == "lookup":
            lefts.lookup("joined", table).sink("out", KafkaSink(f"{name}-out"))
            return pipeline
        results: Any = lefts.as_of("joined", table, keep=keep, late=late)
    else:
        rights = pipeline.source("rights", _source(f"{name}-right", value=Event)).key_by(by_user)
        window, _, how = join.rpartition("-")
        late_right = Output("late-right", Event)
        options: Any = {"how": how, "window": WINDOWS[window]} if window else {"how": how, "within": ("-1s", "3s")}
        results = lefts.join("joined", rights, late=late, late_right=late_right, **options)
        results.side(late_right).sink("late-right", KafkaSink(f"{name}-late-right"))
    slow = results.peek(lambda _: time.sleep(pause_ms / 1000), id="slow")  # a slow user function
    slow.sink("out", KafkaSink(f"{name}-out"))
    results.side(late).sink("late", KafkaSink(f"{name}-late"))
    return pipeline


def _source(topic: str, **options: Any) -> Any:
    return KafkaSource(topic, time="at", disorder="2s", idle=None, ahead=None, **options)
