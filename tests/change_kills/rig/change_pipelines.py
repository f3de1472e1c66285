"""The pipeline whose processes are killed, as `exactlyonce run change_pipelines:make` has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from exactlyonce import KafkaSink, Pipeline
from exactlyonce.connectors import PostgresChanges
from exactlyonce.connectors.postgres import change_split
from exactlyonce.pipeline.changes import Change
from exactlyonce.sinks import PostgresSink


class Account(msgspec.Struct):
    id: int
    amount: int
    version: int


class Entry(msgspec.Struct):
    account: int
    number: int
    amount: int
    version: int


TABLES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "accounts": (Account, ("id",)),
    "entries": (Entry, ("account", "number")),
}


def make(name: str, page_rows: int, rows_a_second: int) -> Pipeline:
    """The changes of both tables to NAME-accounts and NAME-entries, and to tables of those names in another database.

    Pages are of *page_rows* rows. No worker takes more than *rows_a_second*, so that kills meet pages and transactions.
    """
    change_split.PAGE_ROWS = page_rows
    pipeline = Pipeline(name)
    for table, (type_, key) in TABLES.items():
        changes = pipeline.source(table, PostgresChanges(table, dsn="env:SHOP_DSN", key=key, value=type_))
        slowed = changes.filter(slower(rows_a_second))
        slowed.sink(f"{table}-topic", KafkaSink(f"{name}-{table}", headers=headers))
        slowed.sink(f"{table}-copy", PostgresSink(table, dsn="env:COPY_DSN", mode="upsert", key=key, create=True))
    return pipeline


def headers(change: Change[Any]) -> list[tuple[str, bytes]]:
    """The judge's: what kind of change it is, and where it was committed."""
    return [("op", change.op.encode()), ("lsn", str(change.lsn).encode())]


def slower(rows_a_second: int) -> Callable[[Change[Any]], bool]:
    never, count, rows = threading.Event(), 0, 50

    def passes(change: Change[Any]) -> bool:
        nonlocal count
        count += 1
        if count % rows == 0:
            never.wait(rows / rows_a_second)
        return True

    return passes
