"""Two versions of a pipeline, whose outputs differ for some customers."""

from __future__ import annotations

import os

from pipelines import Order, Total, add, reading

from exactlyonce import Pipeline
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
