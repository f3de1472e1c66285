"""Pipelines that the tests run as `exactlyonce run prepared_totals:...`; every worker imports this module."""

from __future__ import annotations

from typing import Any

from pipelines import copied_and_summed

from exactlyonce import Pipeline
from exactlyonce.sinks import MySQLSink, PostgresSink


def totals(name: str, store: str, folder: str = "", commit: str = "") -> Pipeline:
    """`copied_and_summed`, whose totals go to table `totals` of the store, too."""
    pipeline, sums = copied_and_summed(name, folder)
    sums.sink("rows", _sink(store, commit))
    return pipeline


def _sink(store: str, commit: Any) -> Any:
    if store == "postgres":
        return PostgresSink("totals", dsn="env:TOTALS_DSN", commit=commit or "prepared")
    return MySQLSink("totals", dsn="env:TOTALS_DSN", commit=commit or "xa")
