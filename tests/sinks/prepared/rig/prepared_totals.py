"""Pipelines that the tests run as `exactlyonce run prepared_totals:...`; every worker imports this module."""

from __future__ import annotations

from typing import Any

from pipelines import Order, add, stopper

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink, MySQLSink, PostgresSink


def totals(name: str, store: str, folder: str = "", commit: str = "") -> Pipeline:
    """Topic NAME-in through a running total to NAME-out and to table `totals` of the store; every order to NAME-copies.

    With *folder*, workers stop; see `stopper`.
    """
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order))
    if folder:
        orders = orders.map(stopper(folder), id="stop")
    orders.sink("copies", KafkaSink(f"{name}-copies", key=lambda order: str(order.id)))
    sums = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    sums.sink("out", KafkaSink(f"{name}-out", key=lambda total: total.customer))
    sums.sink("rows", _sink(store, commit))
    return pipeline


def _sink(store: str, commit: str) -> Any:
    if store == "postgres":
        return PostgresSink("totals", dsn="env:TOTALS_DSN", commit=commit or "prepared")
    return MySQLSink("totals", dsn="env:TOTALS_DSN", commit=commit or "xa")
