"""Schedules that break a sink which trusts an answer, or its absence, on every server: the ledger decides in each.

Those that depend on how a server locks out a zombie are in the folders of the servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from held_chunks import Held, until
from statement_proxy import Fate
from table_stores import TOTALS, Tables, entry

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.testing.cluster import LIMIT_S


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_commit_whose_answer_is_lost_has_been_done(tables: Tables, mode: str) -> None:
    """The server committed, the client was not told: the next apply finds it in the ledger, over a new connection."""
    store = tables.ready(mode, proxied=True)
    waiting = tables.chunks(store)
    tables.proxy.meet(tables.commit, Fate.ANSWER_LOST)
    with pytest.raises(StoreUnavailable, match=tables.lost):
        store.apply(waiting, entry(1))
    tables.proxy.await_landed()
    assert not store.apply(waiting, entry(1))
    assert tables.totals() == TOTALS


def test_a_commit_that_never_arrives_has_not_been_done(tables: Tables) -> None:
    """It looks the same to the client: the next apply finds that it has to be done."""
    store = tables.ready(proxied=True)
    waiting = tables.chunks(store)
    tables.proxy.meet(tables.commit, Fate.NEVER)
    with pytest.raises(StoreUnavailable, match=tables.lost):
        store.apply(waiting, entry(1))
    assert store.apply(waiting, entry(1))
    assert tables.totals() == TOTALS


def test_a_commit_that_lands_late_is_waited_for(tables: Tables, aside: Any) -> None:
    """While a lost COMMIT is under way its ledger row is locked: whoever applies waits for it, or gives up; when it has
    landed, the ledger says so."""
    store = tables.ready(quick=True, proxied=True)
    waiting = tables.chunks(store)
    tables.proxy.meet(tables.commit, Fate.LATE)
    with pytest.raises(StoreUnavailable, match=tables.lost):
        store.apply(waiting, entry(1))
    for again in (store, tables.store(quick=True)):
        with pytest.raises(StoreUnavailable, match=tables.locked):
            again.apply(waiting, entry(1))
    waiter = aside(tables.store().apply, waiting, entry(1))
    until(tables.waits_for_a_lock)
    tables.proxy.release()
    assert waiter.result() is False
    assert not store.apply(waiting, entry(1))
    assert tables.totals() == TOTALS


def test_a_server_killed_in_the_middle_has_nothing_of_it(tables: Tables) -> None:
    """Killed after the first rows, the server comes back without them, and the same store applies them all, once."""
    store = tables.ready()
    waiting = tables.chunks(store)

    def killing() -> Iterator[bytes]:
        yield waiting[0]
        tables.kill()
        yield waiting[1]

    try:
        with pytest.raises(StoreUnavailable, match=tables.killed) as error:
            store.apply(killing(), entry(1))
        assert "othing is lost" in str(error.value)
        with pytest.raises(StoreUnavailable, match=r"cannot be reached"):
            store.apply(waiting, entry(1))
    finally:
        tables.start()
    assert tables.totals() == []
    assert store.apply(waiting, entry(1))
    assert not store.apply(waiting, entry(1))
    assert tables.totals() == TOTALS


def test_two_at_once_write_the_first_row_of_a_subtask(tables: Tables, aside: Any) -> None:
    """Of two that apply one committable, where there is no row yet, one waits for the other, and finds it done."""
    one, other = tables.ready(), tables.store()
    waiting = tables.chunks(one)
    held = Held(waiting)
    first = aside(one.apply, held, entry(1))
    assert held.reached.wait(LIMIT_S)
    second = aside(other.apply, waiting, entry(1))
    until(tables.waits_for_a_lock)
    held.goes_on.set()
    assert (first.result(), second.result()) == (True, False)
    assert tables.totals() == TOTALS


def test_of_two_at_once_the_second_does_what_the_first_gave_up(tables: Tables, aside: Any) -> None:
    """Where the one that came first fails in the middle, the one that waited writes the rows."""
    one, other = tables.ready(), tables.store()
    waiting = tables.chunks(one)
    held = Held([waiting[0], tables.spoilt])
    first = aside(one.apply, held, entry(1))
    assert held.reached.wait(LIMIT_S)
    second = aside(other.apply, waiting, entry(1))
    until(tables.waits_for_a_lock)
    held.goes_on.set()
    assert second.result() is True
    assert isinstance(first.exception(), StoreError)
    assert tables.spoilt_why in str(first.exception())
    assert tables.totals() == TOTALS


def test_subtasks_are_applied_side_by_side(tables: Tables, aside: Any) -> None:
    """An apply of one subtask does not hold up another's."""
    one, other = tables.ready(), tables.store()
    waiting = tables.chunks(one)
    held = Held(waiting)
    first = aside(one.apply, held, entry(1))
    assert held.reached.wait(LIMIT_S)
    assert other.apply(waiting, entry(1, subtask=1))
    held.goes_on.set()
    assert first.result() is True
    assert tables.totals() == sorted([*TOTALS, *TOTALS])
