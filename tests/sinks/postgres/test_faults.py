"""The server stands still while rows are written. Kills are in `StoreContract`, and in tests/sinks/test_kills.py."""

from __future__ import annotations

import time
from typing import Any

import pytest
from postgres_rows import ORIGIN, Database, Total, chunks, entry

from exactlyonce.connectors.postgres.connection import Limits
from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.testing.cluster import LIMIT_S

QUICK = Limits(connect=2, answer=1, lock=1, grace=0.5)


def limit(store: PostgresStore, limits: Limits) -> None:
    """Only while the server stands still: a slow machine may take longer for an answer."""
    connection = store._session
    connection._limits = limits
    if connection._connection is not None:
        connection._connection.answer_s = limits.answer


def until_applied(store: PostgresStore, waiting: Any, row: Any) -> bool:
    """The result of the first call that gets an answer."""
    limit = time.monotonic() + LIMIT_S
    while True:
        try:
            return store.apply(waiting, row)
        except StoreUnavailable:
            assert time.monotonic() < limit
            time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_server_that_is_paused(database: Database) -> None:
    """No call is held for longer than the limit: neither a login, nor rows, nor a commit. Rows come once."""
    store = database.ready()
    waiting = chunks(store, [Total("x" * 1000, number) for number in range(20_000)])

    def pausing() -> Any:
        yield waiting[0]
        database.server.pause()
        limit(store, QUICK)
        yield from waiting[1:]

    try:
        with pytest.raises(StoreUnavailable, match="has not answered for 1 s"):
            store.apply(pausing(), entry(1))
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            store.fence("p", "s", 2, ORIGIN)
    finally:
        database.server.go_on()
    limit(store, Limits())
    assert until_applied(store, waiting, entry(1))
    database.server.pause()
    limit(store, QUICK)
    try:
        for call in (lambda: store.fence("p", "s", 2, ORIGIN), store.check, store.encoder):
            with pytest.raises(StoreUnavailable, match=r"has not answered for 1 s\.|cannot be reached"):
                call()
    finally:
        database.server.go_on()
    limit(store, Limits())
    assert not until_applied(store, waiting, entry(1))
    assert database.execute("SELECT count(*) FROM totals") == [(20_000,)]
