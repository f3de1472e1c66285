"""Pipelines from Kafka into tables of a lake; every worker imports this module."""

from __future__ import annotations

import os

from pipelines import add, reading

from exactlyonce import Pipeline
from exactlyonce.sinks import IcebergSink

LAKE = "LAKE_OF_TESTS"
"""The variable with the folder of the lake."""


def iceberg_properties(folder: str | os.PathLike[str]) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def iceberg(name: str) -> Pipeline:
    """The running totals of the orders in NAME-in, appended to shop.NAME."""
    pipeline, orders = reading(name)
    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    table = f"shop.t{name.replace('-', '_')}"
    totals.sink("lake", IcebergSink(table, catalog=iceberg_properties(os.environ[LAKE]), create=True))
    return pipeline
