"""The schedules that break a sink which trusts an answer, or its absence: the ledger decides in each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from held_chunks import Applying
from postgres_rows import Database, chunks
from statement_proxy import Fate, StatementProxy
from table_rows import ORIGIN, Total, entry

from exactlyonce.connectors.postgres.connection import Limits
from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.testing.cluster import LIMIT_S

COMMIT = "COMMIT\0"
"""A COMMIT on the connection."""
QUICK = Limits(answer=30, lock=0.3, grace=0.3)
"""Locks are given up soon."""


@pytest.fixture
def proxy(database: Database) -> Iterator[StatementProxy]:
    proxy = StatementProxy(database.server.port)
    yield proxy
    proxy.close()


def through(proxy: StatementProxy, database: Database, **arguments: Any) -> PostgresStore:
    """A store that was checked and has fenced, by way of the proxy; others go straight to the server."""
    database.use(database.server.dsn(database.name, port=proxy.port))
    store = database.ready(**arguments)
    database.use(database.server.dsn(database.name))
    return store


def test_a_late_commit_meets_a_fence(database: Database, proxy: StatementProxy) -> None:
    """A COMMIT that is on its way when a newer incarnation fences does not land: the fence ends its session."""
    old = through(proxy, database, limits=QUICK)
    waiting = chunks(old, [Total("ann", 1)])
    proxy.meet(COMMIT, Fate.LATE)
    with pytest.raises(StoreUnavailable):
        old.apply(waiting, entry(1))
    new = database.store(limits=Limits(grace=0.3))
    assert new.fence("p", "s", 2, ORIGIN) == {}
    proxy.release()
    assert new.apply(waiting, entry(1, incarnation=2))
    with pytest.raises(Fenced):
        old.apply(waiting, entry(1))
    assert database.totals() == [("ann", 1)]


def test_an_apply_that_is_under_way_is_waited_for(database: Database) -> None:
    old = database.ready()
    applying = Applying(old, chunks(old, [Total("ann", 1), Total("bob", 2)], rows=1), entry(1))
    threading.Timer(0.5, applying.chunks.goes_on.set).start()
    assert database.store(limits=Limits(grace=LIMIT_S)).fence("p", "s", 2, ORIGIN) == {0: 1}
    assert applying.ended() is True
    assert len(database.totals()) == 2


def test_a_zombie_that_fences_does_not_end_the_sessions_of_the_newer_one(database: Database) -> None:
    new = database.ready(incarnation=2)
    applying = Applying(new, chunks(new, [Total("ann", 1), Total("bob", 2)], rows=1), entry(1, incarnation=2))
    with pytest.raises(Fenced):
        database.store(limits=Limits(grace=0.1)).fence("p", "s", 1, ORIGIN)
    assert applying.ended() is True


def test_a_fence_ends_no_sessions_of_other_sinks(database: Database) -> None:
    other, mine = database.ready(), database.ready(limits=QUICK)
    other.fence("q", "s", 1, ORIGIN)
    waiting = chunks(other, [Total("ann", 1), Total("bob", 2)], rows=1)
    undisturbed, ended = Applying(other, waiting, entry(1, pipeline="q")), Applying(mine, waiting, entry(1))
    assert database.store(limits=Limits(grace=0.1)).fence("p", "s", 2, ORIGIN) == {}
    assert isinstance(ended.ended(), StoreUnavailable)
    assert undisturbed.ended() is True


def at_once(act: Callable[[int], Any], numbers: range) -> list[Any]:
    """The result or error of *act* for each of *numbers*, all at a time."""
    with ThreadPoolExecutor(len(numbers)) as pool:
        futures = [pool.submit(act, number) for number in numbers]
    return [future.exception() or future.result() for future in futures]


def test_two_that_fence_at_once(database: Database) -> None:
    database.store().check()

    def begin(incarnation: int) -> Mapping[int, int]:
        store = database.store(limits=Limits(lock=LIMIT_S, grace=LIMIT_S))
        return store.fence("p", "s", incarnation, ORIGIN)

    *older, newest = at_once(begin, range(1, 9))
    assert newest == {}
    assert all(outcome == {} or isinstance(outcome, Fenced) for outcome in older)
    assert database.ledger() == {-1: (0, 8)}


def test_two_that_begin_at_once(database: Database) -> None:
    def begin(number: int) -> Mapping[int, int]:
        store = database.store(table="fresh")
        store.check()
        return store.fence(f"p{number}", "s", 1, ORIGIN)

    assert at_once(begin, range(8)) == [{}] * 8
    assert len(database.ledger()) == 1
    assert database.execute("SELECT count(*) FROM exactlyonce_ledger") == [(8,)]
