"""Two versions of a pipeline, whose outputs differ for some customers."""

from __future__ import annotations

import os

import msgspec
from pipelines import Order, Total, add, reading

from exactlyonce import EventTime, Joined, Pipeline, Sum, Tumbling, Windowed
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import DeltaSink, FileSink, KafkaSink, PrintSink

RAISED, LEFT_OUT = "c3", "c5"
FILES = "DIFFED_FILES"
"""The variable that says in which folder rows are."""


def _written(name: str, changed: bool) -> Pipeline:
    pipeline, orders = reading(name)

    def total(state: int | None, order: Order) -> tuple[int, Total]:
        state, total = add(state, order)
        if changed and order.customer == RAISED and order.id % 2:
            total = Total(total.id, total.customer, total.sum + 1)
        return state, total

    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", total)
    if changed:
        totals = totals.filter(lambda total: total.customer != LEFT_OUT, id="some")
    totals.sink("out", KafkaSink(f"{name}-out", key=lambda total: total.customer))
    totals.sink("rows", FileSink(os.environ[FILES], format="jsonl"))
    orders.map(lambda order: order.id, output=int).sink("ids", KafkaSink(f"{name}-ids"))
    orders.sink("shown", PrintSink())
    return pipeline


def before(name: str) -> Pipeline:
    return _written(name, changed=False)


def after(name: str) -> Pipeline:
    return _written(name, changed=True)


def moved(name: str) -> Pipeline:
    """Its outputs are those of `before`, for other places."""
    pipeline, orders = reading(name)
    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    totals.sink("out", KafkaSink(f"{name}-elsewhere", key=lambda total: total.customer))
    totals.sink("rows", DeltaSink("/nowhere/rows", mode="upsert", key="customer"))
    orders.map(lambda order: order.id, output=int).sink("ids", KafkaSink(f"{name}-ids"))
    return pipeline


def elsewhere(name: str) -> Pipeline:
    """It reads another topic."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-more", value=Order))
    orders.sink("out", KafkaSink(f"{name}-out"))
    return pipeline


class Event(msgspec.Struct):
    id: int
    user: str
    at: int
    amount: int = 1


class Spent(msgspec.Struct):
    user: str
    start: int
    amount: int


class Pair(msgspec.Struct):
    user: str
    left: int
    right: int


def timed(name: str, disorder: str = "1s", raised: str = "") -> Pipeline:
    """The amounts of NAME-in by user in windows, and its events joined with those of NAME-right; to topics and rows.

    A longer *disorder* holds results back, and changes none. The amounts of user *raised* are larger by one.
    """
    pipeline = Pipeline(name)
    time = EventTime("at", disorder=disorder, idle=None, ahead=None)
    lefts, rights = (
        pipeline.source(id, KafkaSource(f"{name}-{id}", value=Event, time=time)).key_by(lambda event: event.user)
        for id in ("in", "right")
    )

    def spent(window: Windowed[str, int]) -> Spent:
        start = round(window.start.timestamp() * 1000)
        return Spent(window.key, start, window.value + (window.key == raised))

    def pair(joined: Joined[str, Event, Event]) -> Pair:
        return Pair(joined.key, joined.left.id, joined.right.id + (joined.key == raised))

    windows = lefts.window(Tumbling("10s")).aggregate("windows", Sum("amount")).map(spent, id="spent")
    pairs = lefts.join("pairs", rights, within=("-1s", "2s")).map(pair, id="pair")
    for id, results in (("windows", windows), ("pairs", pairs)):
        results.sink(f"{id}-out", KafkaSink(f"{name}-{id}", key=lambda result: result.user))
        results.sink(f"{id}-rows", FileSink(f"{os.environ[FILES]}-{id}", format="parquet"))
    return pipeline
