"""Rows of a small type, and a store that applies them, as a leader would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from exactlyonce.pipeline.errors import Fenced
from exactlyonce.sinks import RedisSink
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.redis.store import RedisStore

LEDGER = "exactlyonce_ledger:shop:totals"


class Total(msgspec.Struct):
    customer: str
    sum: int
    note: str | None = None


def key_of(total: Total) -> str:
    return f"total:{total.customer}"


def sink_of(url: str, **options: Any) -> RedisSink[Any]:
    return RedisSink(url, **{"key": key_of, **options})


def store_of(url: str, type_: Any = Total, **options: Any) -> RedisStore:
    store = sink_of(url, **options).store(type_)
    assert isinstance(store, RedisStore)
    return store


def begun(store: RedisStore) -> RedisStore:
    """It, with a ledger that the first incarnation has begun, or a newer one."""
    with suppress(Fenced):
        store.fence("shop", "totals", 1, "t")
    return store


def limit(store: RedisStore, timeout_s: float) -> None:
    """Only once the server stands still: a slow machine may take longer for an answer."""
    store._timeout_s = store._server._timeout_s = timeout_s
    if (connection := store._server._connection) is not None:
        connection._sock.settimeout(timeout_s)
        connection._parser._buffer.socket_timeout = timeout_s  # which a look for an answer sets again


def entry(checkpoint: int, previous: int | None = None, **others: Any) -> LedgerEntry:
    """The entry of a checkpoint behind the one before, unless *previous* says another."""
    fields: dict[str, Any] = {"pipeline": "shop", "sink": "totals", "subtask": 0, "incarnation": 1, "origin": "t"}
    fields["previous"] = checkpoint - 1 if previous is None else previous
    return LedgerEntry(checkpoint=checkpoint, **fields | others)


def chunks_of(store: RedisStore, records: Iterable[Any], rows: int = 100) -> list[bytes]:
    encoded = store.encoder().encode(list(records))
    return [b"".join(encoded[at : at + rows]) for at in range(0, len(encoded), rows)]


def totals(count: int, sum_: Callable[[int], int] = int) -> list[Total]:
    return [Total(f"customer-{number}", sum_(number)) for number in range(count)]
