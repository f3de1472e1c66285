"""Pipelines from Kafka into tables of a lake; every worker imports this module."""

from __future__ import annotations

import os

from pipelines import add, reading

from exactlyonce import Pipeline
from exactlyonce.sinks import DeltaSink, IcebergSink

LAKE = "LAKE_OF_TESTS"
"""The variable with the folder of the lake."""


def iceberg_properties(folder: str | os.PathLike[str]) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def into(name: str, lake: str) -> Pipeline:
    """The running totals of the orders in NAME-in, appended to a table of *lake*: "iceberg" or "delta"."""
    pipeline, orders = reading(name)
    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    folder = os.environ[LAKE]
    if lake == "delta":
        totals.sink("lake", DeltaSink(f"{folder}/totals", create=True))
    else:
        totals.sink("lake", IcebergSink("shop.totals", catalog=iceberg_properties(folder), create=True))
    return pipeline
