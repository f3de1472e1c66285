"""Schedules that break sinks: answers that are lost and land late, zombies in the middle, a paused or killed server.

Threads stand for processes: each has a store, and so a connection, of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from held_chunks import Held, until
from statement_proxy import Fate

from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks.write_ahead.store import LedgerEntry
from exactlyonce.testing.cluster import LIMIT_S

Stores = Callable[..., Any]
COMMIT = "\x03COMMIT"
"""As it comes over the connection."""
SHORT_S = 2.0
"""A time limit of the store's that a test waits for."""


class Total(msgspec.Struct):
    customer: str
    cents: int


def entry(checkpoint: int, subtask: int = 0, incarnation: int = 1) -> LedgerEntry:
    return LedgerEntry(
        pipeline="p",
        sink="s",
        subtask=subtask,
        checkpoint=checkpoint,
        previous=0,
        incarnation=incarnation,
        origin="origin",
    )


@pytest.fixture
def first(stores: Stores) -> Any:
    """The store of incarnation 1, which has made table and ledger."""
    store = stores(Total, create=True)
    store.check()
    store.fence("p", "s", 1, "origin")
    return store


@pytest.fixture
def rows(first: Any) -> list[bytes]:
    """Two chunks of two rows."""
    encoded = first.encoder().encode([Total("ann", 1), Total("bob", 2), Total("cid", 3), Total("dan", 4)])
    return [b"".join(encoded[:2]), b"".join(encoded[2:])]


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """`aside(function, ...)` runs it beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def counted(mariadb: Any) -> int:
    ((count,),) = mariadb.sql("SELECT count(*) FROM totals")
    return int(count)


def waits_for_a_lock(mariadb: Any) -> bool:
    ((count,),) = mariadb.sql("SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
    return bool(count)


def test_a_fence_waits_for_a_commit_that_lands_late(
    mariadb: Any, proxy: Any, first: Any, rows: Any, stores: Stores, aside: Any
) -> None:
    """What a fence tells of the ledger has in it what an older incarnation has still committed."""
    store = stores(Total, dsn=mariadb.dsn.replace(str(mariadb.port), str(proxy.port)))
    proxy.meet(COMMIT, Fate.LATE)
    with pytest.raises(StoreUnavailable):
        store.apply(rows, entry(1))
    fenced = aside(stores(Total).fence, "p", "s", 2, "origin")
    until(lambda: waits_for_a_lock(mariadb))
    proxy.release()
    assert fenced.result() == {0: 1}
    assert counted(mariadb) == 4


def test_a_fence_waits_for_a_zombie_in_the_middle_of_its_rows(
    mariadb: Any, first: Any, rows: Any, stores: Stores, aside: Any
) -> None:
    """An apply that began before the fence ends before it; one that begins after it is fenced."""
    held = Held(rows)
    zombie = aside(first.apply, held, entry(1))
    assert held.reached.wait(LIMIT_S)
    newer = stores(Total, timeout_s=SHORT_S)
    with pytest.raises(StoreUnavailable, match="waited too long for a lock"):
        newer.fence("p", "s", 2, "origin")
    fenced = aside(stores(Total).fence, "p", "s", 2, "origin")
    until(lambda: waits_for_a_lock(mariadb))
    held.goes_on.set()
    assert zombie.result() is True
    assert fenced.result() == {0: 1}
    with pytest.raises(Fenced):
        first.apply(rows, entry(2))
    assert counted(mariadb) == 4


def test_a_zombie_that_is_silent_is_ended_by_the_server(
    mariadb: Any, first: Any, rows: Any, stores: Stores, aside: Any
) -> None:
    """A paused client's locks last twice its time limit: then the server ends its connection and its transaction."""
    held = Held(rows)
    paused = stores(Total, timeout_s=1.0)
    zombie = aside(paused.apply, held, entry(1))
    assert held.reached.wait(LIMIT_S)
    assert stores(Total).fence("p", "s", 2, "origin") == {}
    held.goes_on.set()
    with pytest.raises(StoreUnavailable):
        zombie.result()
    with pytest.raises(Fenced):
        paused.apply(rows, entry(1))
    assert counted(mariadb) == 0


def test_an_apply_behind_a_fence_is_fenced(mariadb: Any, first: Any, rows: Any, stores: Stores, aside: Any) -> None:
    """An apply that comes while a fence is under way waits for its end, and learns of the newer incarnation."""
    with mariadb.connection() as fence:
        fence.begin()
        fence.query("UPDATE exactlyonce_ledger SET incarnation = 2 WHERE subtask = -1")
        zombie = aside(first.apply, rows, entry(1))
        until(lambda: waits_for_a_lock(mariadb))
        fence.commit()
    with pytest.raises(Fenced):
        zombie.result()
    assert counted(mariadb) == 0


def test_many_at_once_apply_each_checkpoint_once(
    mariadb: Any, first: Any, rows: Any, stores: Stores, aside: Any
) -> None:
    """Four appliers race through the same checkpoints of three subtasks: deadlocks are retried, nothing is doubled."""

    def race() -> int:
        store, applied = stores(Total), 0
        for checkpoint in range(1, 11):
            for subtask in range(3):
                while True:
                    try:
                        applied += store.apply(rows, entry(checkpoint, subtask))
                        break
                    except StoreUnavailable:
                        continue
        return applied

    racing = [aside(race) for _ in range(4)]
    assert sum(each.result() for each in racing) == 30
    assert counted(mariadb) == 120


def test_a_paused_server_is_unavailable(mariadb: Any, first: Any, rows: Any, stores: Stores) -> None:
    """A server that gives no sign of life does not hold a call for longer than its limit, connected or not."""
    connected, new = stores(Total, timeout_s=SHORT_S), stores(Total, timeout_s=SHORT_S)
    assert connected.apply(rows, entry(1))
    mariadb.pause()
    try:
        for store in (connected, new):
            with pytest.raises(StoreUnavailable, match=r"has not answered for 2 s\. Nothing is lost"):
                store.apply(rows, entry(2))
    finally:
        mariadb.go_on()
    assert connected.apply(rows, entry(2))
    assert counted(mariadb) == 8


def test_a_server_paused_in_the_middle_applies_once(mariadb: Any, first: Any, rows: Any, stores: Stores) -> None:
    """What the paused server had taken of the first apply is rolled back or waited for by the second."""
    store = stores(Total, timeout_s=SHORT_S)

    def pausing() -> Iterator[bytes]:
        yield rows[0]
        mariadb.pause()
        yield rows[1]

    try:
        with pytest.raises(StoreUnavailable, match="has not answered for 2 s"):
            store.apply(pausing(), entry(1))
    finally:
        mariadb.go_on()
    assert stores(Total).apply(rows, entry(1))
    assert counted(mariadb) == 4


def test_a_connection_lost_while_idle_is_made_again(mariadb: Any, first: Any, rows: Any, stores: Stores) -> None:
    """A connection that was killed, or that the server has closed, costs no apply."""
    assert first.apply(rows, entry(1))
    for (connection,) in mariadb.sql("SELECT id FROM information_schema.processlist WHERE id <> connection_id()"):
        mariadb.sql(f"KILL {connection}")
    assert first.apply(rows, entry(2))
    idle = stores(Total, timeout_s=1.0)
    assert idle.apply(rows, entry(3))
    ((connection,),) = mariadb.sql("SELECT max(id) FROM information_schema.processlist WHERE id < connection_id()")
    until(
        lambda: mariadb.sql("SELECT count(*) FROM information_schema.processlist WHERE id = %s", [connection]) == [(0,)]
    )
    assert idle.apply(rows, entry(4))
    assert counted(mariadb) == 16
