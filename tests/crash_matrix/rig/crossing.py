"""The pipelines of the crash matrix; every worker imports this module.

Each row names its order and the total after it, so that a fold of the input gives the expected rows. Pipelines of event
time read events; `folds` says what comes of them.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from exactlyonce import (
    Count,
    Emit,
    EventTime,
    Joined,
    Output,
    Pipeline,
    Session,
    Stream,
    Sum,
    Timers,
    Tumbling,
    Windowed,
)
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import DeltaSink, IcebergSink, KafkaSink, PostgresSink

DSN = "CRASH_MATRIX_DSN"
"""The variable that says where PostgreSQL is."""
SLOW = "CRASH_MATRIX_SLOW_S"
"""The variable that says how long a record takes behind the shuffle; without it, no longer than it must."""
SLOW_S = float(os.environ.get(SLOW, "0"))
LAKE = "CRASH_MATRIX_LAKE"
"""The variable with the folder of the lake's tables, and of their catalog."""
SHAPES = ("chain", "diamond", "cycle")
TIMED = ("windows", "sessions", "join", "timers")
"""The shapes that read events: what they write depends on event time alone."""
STREAM = "stream"
"""A query of Spark, without a pipeline: files, copied by its streaming sink."""
SINKS = ("kafka", "postgres", "both")
LAKES = ("iceberg", "delta")
DISORDER, WINDOW, GAP, WITHIN, WAIT_MS = "2s", "2s", "400ms", ("-500ms", "500ms"), 1_050
"""Of event time; an event's time is a multiple of 100 ms, so that no timer is due with one."""


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


class Round(msgspec.Struct):
    """An order that has gone round so many times; its total once it goes round no more."""

    order: Order
    rounds: int = 0
    sum: int | None = None


class Total(msgspec.Struct):
    id: int
    customer: str
    sum: int


class Event(msgspec.Struct):
    id: int
    user: str
    at: int
    amount: int


class Counted(msgspec.Struct):
    """A window or a session that is over."""

    user: str
    start: int
    end: int
    n: int
    amount: int


class Pair(msgspec.Struct):
    left: int | None
    right: int | None


class Rang(msgspec.Struct):
    """A timer that was due, and the events of its user since it was set."""

    user: str
    at: int
    n: int


def table(name: str, content: str) -> str:
    return f"{name}_{content}".replace("-", "_")


def iceberg_catalog(folder: str) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def crossing(name: str, shape: str, sinks: str) -> Pipeline:
    """Topic NAME-in through a running total to the *sinks*; as a diamond united with NAME-more, and every order copied
    past the totals; as a cycle, orders go round up to three times before they are added. Shapes of event time read
    events of NAME-in, a join of NAME-more too, and write to NAME-results and NAME-late."""
    if shape in TIMED:
        return _timed(Pipeline(name, max_parallelism=16), name, shape)
    pipeline = Pipeline(name)
    orders = pipeline.source("left", KafkaSource(f"{name}-in", value=Order))
    if shape == "diamond":
        orders = orders.union(pipeline.source("right", KafkaSource(f"{name}-more", value=Order)))
        _sink(orders, name, "copies", sinks)
    if shape == "cycle":
        totals = _added_after_rounds(pipeline, orders)
    else:
        totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    _sink(totals, name, "totals", sinks)
    return pipeline


def add(total: int | None, order: Order) -> tuple[int, Total]:
    if SLOW_S:
        time.sleep(SLOW_S)
    total = (total or 0) + order.total
    return total, Total(order.id, order.customer, total)


def _added_after_rounds(pipeline: Pipeline, orders: Stream[Order]) -> Stream[Total]:
    loop = pipeline.feedback("rounds", Round, pause="1s")
    rounds = orders.map(Round).union(loop).key_by(lambda each: each.order.customer).stateful_map("totals", add_at_last)
    rounds.filter(lambda each: each.sum is None).feed(loop)
    return rounds.filter(lambda each: each.sum is not None).map(as_total)


def add_at_last(total: int | None, each: Round) -> tuple[int | None, Round]:
    if each.rounds < each.order.id % 4:
        return total, Round(each.order, each.rounds + 1)
    total = (total or 0) + each.order.total
    return total, Round(each.order, each.rounds, total)


def as_total(each: Round) -> Total:
    return Total(each.order.id, each.order.customer, each.sum or 0)


late, late_right = Output("late", Event), Output("late-right", Event)


def _timed(pipeline: Pipeline, name: str, shape: str) -> Pipeline:
    def events(source: str, topic: str) -> Any:
        time = EventTime("at", disorder=DISORDER, idle=None, ahead=None)
        stream = pipeline.source(source, KafkaSource(f"{name}-{topic}", value=Event, time=time))
        return stream.peek(be_slow, id=f"{source}-slow").key_by(by_user)

    lefts = events("left", "in")
    if shape == "join":
        joined = lefts.join(
            "joined", events("right", "more"), within=WITHIN, how="full", late=late, late_right=late_right
        )
        joined.side(late_right).sink("late-right", KafkaSink(f"{name}-late", key=by_user))
        results: Any = joined.map(as_pair)
    elif shape == "timers":
        joined = lefts.process("timers", Counts, late=late)
        results = joined
    else:
        windows = lefts.window(Session(GAP) if shape == "sessions" else Tumbling(WINDOW))
        joined = windows.aggregate("counts", {"n": Count(), "amount": Sum("amount")}, late=late)
        results = joined.map(as_counted)
    joined.side(late).sink("late", KafkaSink(f"{name}-late", key=by_user))
    results.sink("results", KafkaSink(f"{name}-results"))
    return pipeline


def be_slow(_: Event) -> None:
    if SLOW_S:
        time.sleep(SLOW_S)


def by_user(event: Event) -> str:
    return event.user


def as_pair(joined: Joined[str, Event | None, Event | None]) -> Pair:
    left, right = (None if side is None else side.id for side in (joined.left, joined.right))
    return Pair(left, right)


def as_counted(window: Windowed[str, Any]) -> Counted:
    start, end = (round(at.timestamp() * 1000) for at in (window.start, window.end))
    return Counted(window.key, start, end, window.value.n, window.value.amount)


class Counts:
    """Counts a user's events from one on, for WAIT_MS, and then from the next one on."""

    def on_record(self, key: str, n: int | None, event: Event, timers: Timers, emit: Emit[Rang]) -> int:
        if n is None:
            timers.event.set(event.at + WAIT_MS)
        return (n or 0) + 1

    def on_time(self, key: str, n: int | None, at: Any, timers: Timers, emit: Emit[Rang]) -> None:
        emit(Rang(key, round(at.timestamp() * 1000), n or 0))


def _sink(stream: Any, name: str, content: str, sinks: str) -> None:
    if sinks in ("kafka", "both"):
        stream.sink(f"{content}-kafka", KafkaSink(f"{name}-{content}", key=lambda row: row.customer))
    if sinks in ("postgres", "both"):
        target: PostgresSink[Any] = PostgresSink(table(name, content), dsn=f"env:{DSN}", mode="append")
        stream.sink(f"{content}-postgres", target)
    if sinks == "iceberg":
        catalog = iceberg_catalog(os.environ[LAKE])
        stream.sink(f"{content}-iceberg", IcebergSink(f"lake.{content}", catalog=catalog, create=True))
    if sinks == "delta":
        stream.sink(f"{content}-delta", DeltaSink(f"{os.environ[LAKE]}/{content}", create=True))
