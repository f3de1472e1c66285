"""Schedules that break a sink which trusts an answer, or its absence, on every server: the ledger decides in each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from held_chunks import Applying
from statement_proxy import Fate
from table_rows import ORIGIN, Total, entry
from table_stores import TOTALS, Tables, on_mariadb
from waiting import succeeds, until

from exactlyonce.connectors.postgres.connection import Limits
from exactlyonce.pipeline.errors import Fenced, StoreError, StoreUnavailable
from exactlyonce.sinks.postgres import store as postgres_store
from exactlyonce.testing.cluster import LIMIT_S

LOST = "has closed the connection, or it was cut"


def test_a_commit_whose_answer_is_lost_has_been_done(tables: Tables) -> None:
    store = tables.ready(proxied=True)
    waiting = tables.chunks(store)
    tables.proxy.meet(tables.commit, Fate.ANSWER_LOST)
    with pytest.raises(StoreUnavailable, match=LOST):
        store.apply(waiting, entry(1))
    tables.proxy.await_landed()
    assert not store.apply(waiting, entry(1))
    assert tables.totals() == TOTALS


def test_a_commit_that_never_arrives_has_not_been_done(tables: Tables) -> None:
    store = tables.ready(proxied=True)
    waiting = tables.chunks(store)
    tables.proxy.meet(tables.commit, Fate.NEVER)
    with pytest.raises(StoreUnavailable, match=LOST):
        store.apply(waiting, entry(1))
    assert store.apply(waiting, entry(1))
    assert tables.totals() == TOTALS


def test_a_commit_that_lands_late_is_waited_for(tables: Tables, aside: Any) -> None:
    """Its ledger row stays locked meanwhile: an apply waits for it, or gives up."""
    store = tables.ready(quick=True, proxied=True)
    waiting = tables.chunks(store)
    tables.proxy.meet(tables.commit, Fate.LATE)
    with pytest.raises(StoreUnavailable, match=LOST):
        store.apply(waiting, entry(1))
    for again in (store, tables.store(quick=True)):
        with pytest.raises(StoreUnavailable, match=tables.locked):
            again.apply(waiting, entry(1))
    waiter = aside(tables.store().apply, waiting, entry(1))
    tables.until_a_lock_is_waited_for()
    tables.proxy.release()
    assert waiter.result() is False
    assert not store.apply(waiting, entry(1))
    assert tables.totals() == TOTALS


def test_two_at_once_write_the_first_row_of_a_subtask(tables: Tables, aside: Any) -> None:
    one, other = tables.ready(), tables.store()
    waiting = tables.chunks(one)
    first = Applying(one, waiting, entry(1))
    second = aside(other.apply, waiting, entry(1))
    tables.until_a_lock_is_waited_for()
    assert (first.ended(), second.result()) == (True, False)
    assert tables.totals() == TOTALS


def test_of_two_at_once_the_second_does_what_the_first_gave_up(tables: Tables, aside: Any) -> None:
    one, other = tables.ready(), tables.store()
    waiting = tables.chunks(one)
    first = Applying(one, [waiting[0], tables.spoilt], entry(1))
    second = aside(other.apply, waiting, entry(1))
    tables.until_a_lock_is_waited_for()
    error = first.ended()
    assert second.result() is True
    assert isinstance(error, StoreError)
    assert "encoded for other columns" in str(error)
    assert tables.totals() == TOTALS


def test_subtasks_are_applied_side_by_side(tables: Tables) -> None:
    one, other = tables.ready(), tables.store()
    waiting = tables.chunks(one)
    first = Applying(one, waiting, entry(1))
    assert other.apply(waiting, entry(1, subtask=1))
    assert first.ended() is True
    assert tables.totals() == sorted([*TOTALS, *TOTALS])


# --- how MariaDB locks out a zombie; of PostgreSQL, see its own folder ------------------------------------------------


@on_mariadb
def test_a_fence_waits_for_a_commit_that_lands_late(tables: Tables, aside: Any) -> None:
    """The ledger that a fence returns has the older incarnation's last commit."""
    store = tables.ready(proxied=True)
    waiting = tables.chunks(store)
    tables.proxy.meet(tables.commit, Fate.LATE)
    with pytest.raises(StoreUnavailable):
        store.apply(waiting, entry(1))
    fenced = aside(tables.store().fence, "p", "s", 2, ORIGIN)
    tables.until_a_lock_is_waited_for()
    tables.proxy.release()
    assert fenced.result() == {0: 1}
    assert tables.totals() == TOTALS


@on_mariadb
def test_a_zombie_that_is_silent_is_ended_by_the_server(tables: Tables) -> None:
    """A paused client's locks last twice its time limit: then the server ends its connection and its transaction."""
    waiting = tables.chunks(tables.ready())
    paused = tables.store(quick=True)
    zombie = Applying(paused, waiting, entry(1))
    assert tables.store().fence("p", "s", 2, ORIGIN) == {}
    assert isinstance(zombie.ended(), StoreUnavailable)
    with pytest.raises(Fenced):
        paused.apply(waiting, entry(1))
    assert tables.totals() == []


def test_a_paused_server_is_unavailable(tables: Any, aside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is held for longer than its limit: neither a login, nor rows, nor a commit. Rows come once."""
    waiting = tables.chunks(tables.ready())
    monkeypatch.setattr(postgres_store, "Limits", partial(Limits, connect=3))
    limit: dict[str, Any] = {"quick": True} if tables.name == "mariadb" else {"answer_timeout": "3s"}
    middle, connected, new = (tables.of(Total, create=True, **limit) for _ in range(3))
    until(lambda: succeeds(lambda: connected.apply(waiting, entry(1)), unless=StoreUnavailable))

    paused = threading.Event()

    def pausing() -> Iterator[bytes]:
        yield waiting[0]
        tables.server.pause()
        paused.set()
        yield waiting[1]

    try:
        applies = [aside(middle.apply, pausing(), entry(2))]
        assert paused.wait(LIMIT_S)
        applies += [aside(store.apply, waiting, entry(2)) for store in (connected, new)]
        for apply in applies:
            with pytest.raises(StoreUnavailable, match=r"has not answered for 3|cannot be reached"):
                apply.result()
    finally:
        tables.server.go_on()
    assert tables.store().apply(waiting, entry(2))
    assert not tables.store().apply(waiting, entry(2))
    assert tables.totals() == sorted([*TOTALS, *TOTALS])
