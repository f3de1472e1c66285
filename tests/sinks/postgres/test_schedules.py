"""The schedules that break a sink which trusts an answer, or its absence: the ledger decides in each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from held_chunks import Held
from postgres_rows import ORIGIN, Database, Total, chunks, entry
from statement_proxy import Fate, StatementProxy
from table_keys import key_of

from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks.postgres.connection import Limits
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.testing.cluster import LIMIT_S

COMMIT = "COMMIT\0"
"""As it comes over the connection."""
QUICK = Limits(answer=30, lock=0.3, grace=0.3)
"""Locks are given up soon."""


@pytest.fixture
def proxy(database: Database) -> Iterator[StatementProxy]:
    made = StatementProxy(database.server.port)
    yield made
    made.close()


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


class Applying:
    """An apply beside the test, which has stopped in the middle of its COPY."""

    def __init__(self, store: PostgresStore, waiting: list[bytes], checkpoint: int, **names: Any) -> None:
        self.chunks = Held(waiting)
        self._pool = ThreadPoolExecutor(1)
        self._applied = self._pool.submit(store.apply, self.chunks, entry(checkpoint, **names))
        assert self.chunks.reached.wait(LIMIT_S)

    def ended(self) -> Any:
        """Let it go on; -> what it returned or raised."""
        self.chunks.goes_on.set()
        with self._pool:
            return self._applied.exception() or self._applied.result()


@pytest.mark.parametrize("mode", ["append", "upsert", "delete"])
def test_a_zombie_in_the_middle_of_its_copy(database: Database, mode: str) -> None:
    zombie = database.ready(mode=mode, key=key_of(mode))
    waiting = chunks(zombie, [Total(f"c{number}", number) for number in range(1000)])
    applying = Applying(zombie, waiting, 1)
    new = database.store(limits=Limits(grace=0.3), mode=mode, key=key_of(mode))
    assert new.fence("p", "s", 2, ORIGIN) == {}
    assert new.apply(waiting, entry(1, incarnation=2))
    assert isinstance(applying.ended(), StoreUnavailable)
    with pytest.raises(Fenced):
        zombie.apply(waiting, entry(1))
    assert len(database.totals()) == (0 if mode == "delete" else 1000)


def test_an_apply_that_is_under_way_is_waited_for(database: Database) -> None:
    old = database.ready()
    applying = Applying(old, chunks(old, [Total("ann", 1), Total("bob", 2)], rows=1), 1)
    threading.Timer(0.5, applying.chunks.goes_on.set).start()
    assert database.store(limits=Limits(grace=LIMIT_S)).fence("p", "s", 2, ORIGIN) == {0: 1}
    assert applying.ended() is True
    assert len(database.totals()) == 2


def test_a_zombie_that_fences_does_not_end_the_sessions_of_the_newer_one(database: Database) -> None:
    new = database.ready(incarnation=2)
    applying = Applying(new, chunks(new, [Total("ann", 1), Total("bob", 2)], rows=1), 1, incarnation=2)
    with pytest.raises(Fenced):
        database.store(limits=Limits(grace=0.1)).fence("p", "s", 1, ORIGIN)
    assert applying.ended() is True


def test_a_fence_ends_no_sessions_of_other_sinks(database: Database) -> None:
    other, mine = database.ready(), database.ready(limits=QUICK)
    other.fence("q", "s", 1, ORIGIN)
    waiting = chunks(other, [Total("ann", 1), Total("bob", 2)], rows=1)
    undisturbed, ended = Applying(other, waiting, 1, pipeline="q"), Applying(mine, waiting, 1)
    assert database.store(limits=Limits(grace=0.1)).fence("p", "s", 2, ORIGIN) == {}
    assert isinstance(ended.ended(), StoreUnavailable)
    assert undisturbed.ended() is True


def test_two_that_fence_at_once(database: Database) -> None:
    database.store().check()
    outcomes: dict[int, Any] = {}

    def begin(incarnation: int) -> None:
        try:
            store = database.store(limits=Limits(lock=LIMIT_S, grace=LIMIT_S))
            outcomes[incarnation] = store.fence("p", "s", incarnation, ORIGIN)
        except Exception as error:
            outcomes[incarnation] = error

    threads = [threading.Thread(target=begin, args=(incarnation,)) for incarnation in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert outcomes[8] == {}
    assert all(outcome == {} or isinstance(outcome, Fenced) for outcome in outcomes.values())
    assert database.ledger() == {-1: (0, 8)}


def test_two_that_begin_at_once(database: Database) -> None:
    failed: list[BaseException] = []

    def begin(number: int) -> None:
        try:
            store = database.store(table="fresh")
            store.check()
            store.fence(f"p{number}", "s", 1, ORIGIN)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert failed == []
    assert len(database.ledger()) == 1
    assert database.execute("SELECT count(*) FROM exactlyonce_ledger") == [(8,)]
