"""The schedules that break a sink which trusts an answer: what is in the store decides in each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from preparing import Preparing
from statement_proxy import Fate
from table_rows import ORIGIN, Total

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.commits.stores import ForeignLedger, LedgerBehind
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import Fenced, StoreError, StoreUnavailable
from exactlyonce.sinks.prepared.committer import PreparedCommitter
from exactlyonce.sinks.prepared.writer import KEEP_INTERVAL_MS
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.cluster import LIMIT_S


def test_rows_become_visible_when_they_are_committed(preparing: Preparing) -> None:
    committer, writer = preparing.committer(1), preparing.writer(1)
    committable = preparing.prepare(writer, 1, "ann", "bob")
    assert (committable.kind, committable.records) == ("prepared", 2)
    assert preparing.rows() == []
    assert preparing.listed() == [committable.body.decode()]
    assert committer.commit([committable], 1, ORIGIN)
    assert preparing.rows() == ["ann", "bob"]
    assert preparing.ledger() == {0: 1}
    assert (preparing.listed(), preparing.left()) == ([], [])


def test_several_intervals_wait_at_once(preparing: Preparing) -> None:
    committer, writers = preparing.committer(1), [preparing.writer(1, subtask=subtask) for subtask in range(2)]
    waiting = [
        preparing.prepare(writers[subtask], number, f"{number}-{subtask}", previous=number - 1)
        for number in (1, 2, 3)
        for subtask in range(2)
    ]
    assert len(preparing.listed()) == 6
    assert all(committer.commit([each], 1, ORIGIN) for each in waiting)
    assert len(preparing.rows()) == 6
    assert preparing.ledger() == {0: 3, 1: 3}


def test_an_interval_without_rows(preparing: Preparing) -> None:
    writer = preparing.writer(1)
    writer.barrier(1)
    flushed = writer.take_flushed(1)
    assert flushed is not None
    assert flushed.staged is None


def test_rows_after_a_barrier_belong_to_the_next_interval(preparing: Preparing) -> None:
    committer, writer = preparing.committer(1), preparing.writer(1)
    preparing.write(writer, "ann")
    writer.barrier(1)
    second = preparing.prepare(writer, 2, "bob", previous=1)
    flushed = writer.take_flushed(1)
    assert flushed is not None
    assert flushed.staged is not None
    assert committer.commit([flushed.staged.committable], 1, ORIGIN)
    assert preparing.rows() == ["ann"]
    assert committer.commit([second], 1, ORIGIN)
    assert preparing.rows() == ["ann", "bob"]


@pytest.mark.parametrize("statement", ["commit", "enter"])
@pytest.mark.parametrize("fate", [Fate.ANSWER_LOST, Fate.NEVER])
def test_an_answer_that_is_lost(preparing: Preparing, statement: str, fate: Fate) -> None:
    proxy = preparing.proxy()
    preparing.use(proxy.port)
    committer = preparing.committer(1)
    preparing.use(preparing.port)
    committable = preparing.prepare(preparing.writer(1), 1, "ann")
    preparing.await_owner_gone(committable.body.decode())  # else the answer that is lost may be "unknown"
    proxy.meet(preparing.words[statement], fate)
    with pytest.raises(StoreUnavailable):
        committer.commit([committable], 1, ORIGIN)
    if fate is Fate.ANSWER_LOST:
        proxy.await_landed()
    happened = statement == "enter" or fate is Fate.ANSWER_LOST
    assert committer.commit([committable], 1, ORIGIN) is not happened
    assert preparing.rows() == ["ann"]
    assert (preparing.ledger(), preparing.left()) == ({0: 1}, [])


def test_a_commit_that_lands_late(preparing: Preparing) -> None:
    proxy = preparing.proxy()
    preparing.use(proxy.port)
    old = preparing.committer(1)
    preparing.use(preparing.port)
    writer = preparing.writer(1)
    first = preparing.prepare(writer, 1, "ann")
    proxy.meet(preparing.words["commit"], Fate.LATE)
    with pytest.raises(StoreUnavailable):
        old.commit([first], 1, ORIGIN)
    new = preparing.committer_that_fenced(2)
    assert new.commit([first], 2, ORIGIN)
    proxy.release()
    new.clean(2, 0)
    assert preparing.rows() == ["ann"]
    with pytest.raises(Fenced):
        old.commit([first], 1, ORIGIN)


def test_a_prepare_whose_answer_is_lost(preparing: Preparing) -> None:
    committer, proxy = preparing.committer(1), preparing.proxy()
    preparing.use(proxy.port)
    writer = preparing.writer(1)
    preparing.write(writer, "ann")
    proxy.meet(preparing.words["prepare"], Fate.ANSWER_LOST)
    with pytest.raises(SinkFailed):
        preparing.prepare(writer, 1)
    proxy.await_landed()
    assert len(preparing.listed()) == 1
    preparing.use(preparing.port)
    committer.clean(1, 1)
    assert (preparing.listed(), preparing.rows()) == ([], [])


def test_a_zombie_that_prepares_late(preparing: Preparing) -> None:
    committer, zombie = preparing.committer(1), preparing.writer(1)
    preparing.write(zombie, "zombie")
    committer.clean(1, 1)
    late = preparing.prepare(zombie, 1)
    writer = preparing.writer(1, attempt=1)
    committable = preparing.prepare(writer, 1, "ann")
    assert preparing.listed() == sorted([late.body.decode(), committable.body.decode()])
    assert committer.commit([committable], 1, ORIGIN)
    assert (preparing.listed(), preparing.rows()) == ([], ["ann"])
    preparing.prepare(zombie, 2, "again")
    preparing.committer(2)
    assert (preparing.listed(), preparing.rows()) == ([], ["ann"])


def test_what_is_prepared_for_others_stays(preparing: Preparing) -> None:
    zombie = preparing.committer(5)
    preparing.committer_that_fenced(6)
    mine = preparing.prepare(preparing.writer(1), 1, "ann")
    preparing.committer(9, pipeline="q")
    with pytest.raises(Fenced):
        zombie.clean(5, 1)
    preparing.sql("UPDATE exactlyonce_ledger SET incarnation = 1, origin = 'topic-2'")
    with pytest.raises(Fenced, match="the pipeline was reset"):
        zombie.clean(5, 1)
    assert preparing.listed() == [mine.body.decode()]


def test_a_pipeline_that_was_reset(preparing: Preparing) -> None:
    """Its numbers begin anew; older transactions with larger numbers are rolled back at the start."""
    preparing.committer(7)
    preparing.prepare(preparing.writer(7), 1, "ann")
    preparing.sql("DELETE FROM exactlyonce_ledger")
    preparing.committer(1)
    assert (preparing.listed(), preparing.rows()) == ([], [])


def test_a_zombie_committer(preparing: Preparing) -> None:
    old = preparing.committer(1)
    committable = preparing.prepare(preparing.writer(1), 1, "ann")
    preparing.committer_that_fenced(2)
    with pytest.raises(Fenced):
        old.commit([committable], 1, ORIGIN)
    with pytest.raises(Fenced):
        old.fence(1, ORIGIN)
    with pytest.raises(ForeignLedger):
        old.fence(3, "topic-2")


def test_somebody_rolls_back_what_was_decided(preparing: Preparing) -> None:
    committer, writer = preparing.committer(1), preparing.writer(1)
    lost, kept = preparing.prepare(writer, 1, "ann"), preparing.prepare(writer, 2, "bob", previous=1)
    preparing.by_hand(lost.body.decode(), commit=False)
    with pytest.raises(StoreError, match=r"with 1 records is gone, and was not committed.*--accept-loss"):
        committer.commit([lost], 1, ORIGIN)
    with pytest.raises(LedgerBehind):
        committer.commit([kept], 1, ORIGIN)
    assert committer.commit([msgspec.structs.replace(lost, records=0, body=b"")], 1, ORIGIN)
    assert committer.commit([kept], 1, ORIGIN)
    assert (preparing.rows(), preparing.ledger()) == (["bob"], {0: 2})


def test_somebody_commits_what_was_decided(preparing: Preparing) -> None:
    committer, writer = preparing.committer(1), preparing.writer(1)
    committable = preparing.prepare(writer, 1, "ann")
    preparing.by_hand(committable.body.decode(), commit=True)
    assert not committer.commit([committable], 1, ORIGIN)
    assert (preparing.rows(), preparing.ledger(), preparing.left()) == (["ann"], {0: 1}, [])


def test_somebody_commits_what_was_never_decided(preparing: Preparing) -> None:
    preparing.committer(1)
    committable = preparing.prepare(preparing.writer(1), 1, "ann")
    name = committable.body.decode()
    preparing.by_hand(name, commit=True)
    with pytest.raises(StoreError, match=r"never decided.*Its 1 records come again"):
        preparing.committer(2)
    preparing.sql("DELETE FROM totals")
    preparing.sql(f"DELETE FROM exactlyonce_prepared WHERE name = '{name}'")
    preparing.committer(2)


def test_a_loss_that_is_accepted_of_what_is_there(preparing: Preparing) -> None:
    preparing.committer(1)
    committable = preparing.prepare(preparing.writer(1), 1, "ann")
    new = preparing.committer_that_fenced(2)
    assert new.commit([msgspec.structs.replace(committable, records=0, body=b"")], 2, ORIGIN)
    new.clean(2, 0)
    assert (preparing.listed(), preparing.rows(), preparing.ledger()) == ([], [], {0: 1})


def test_the_server_is_killed_with_prepared_transactions(preparing: Preparing) -> None:
    committer, writer, other = preparing.committer(1), preparing.writer(1), preparing.writer(1, attempt=0, subtask=1)
    first, second = preparing.prepare(writer, 1, "ann"), preparing.prepare(writer, 2, "bob", previous=1)
    preparing.write(other, "open")
    other._send()
    assert other.poll(LIMIT_S), "the server has the row"
    preparing.kill()
    assert preparing.listed() == [first.body.decode(), second.body.decode()]
    with pytest.raises(SinkFailed):
        preparing.prepare(other, 3, "more")
    fresh = preparing.committer_that_fenced(2)
    assert fresh.commit([first], 2, ORIGIN)
    fresh.clean(2, 0)
    assert (preparing.listed(), preparing.rows()) == ([], ["ann"])
    with pytest.raises((StoreUnavailable, Fenced)):
        committer.commit([second], 1, ORIGIN)


def test_rows_that_the_table_refuses(preparing: Preparing) -> None:
    preparing.committer(1)
    writer = preparing.writer(1)
    preparing.sql("ALTER TABLE totals ADD CONSTRAINT positive CHECK (cents > 1)")
    with pytest.raises(StoreError, match="positive"):
        preparing.prepare(writer, 1, "ann")
    assert preparing.listed() == []


def test_what_does_not_go_with_it(preparing: Preparing) -> None:
    for more, said in (
        ({"mode": "upsert", "key": ("customer",)}, "needs mode='append': rows that a prepared transaction has changed"),
        ({"delivery": "at_least_once"}, "is for delivery='exactly_once'"),
        ({"commit": "two_phase"}, "must be 'write_ahead'"),
    ):
        (problem,) = preparing.sink(**more).problems(Total)
        assert said in problem


def test_connections_that_are_ended_between_two_intervals(preparing: Preparing) -> None:
    """Servers end those that are idle: nothing is lost by it, and neither writer nor committer fails."""
    committer, writer = preparing.committer(1), preparing.writer(1)
    first = preparing.prepare(writer, 1, "ann")
    preparing.end_connections()
    assert committer_goes_on(committer, first)
    second = preparing.prepare(writer, 2, "bob", previous=1)
    assert committer.commit([second], 1, ORIGIN)
    assert preparing.rows() == ["ann", "bob"]


def committer_goes_on(committer: PreparedCommitter, committable: StoreCommittable) -> bool:
    """Whether it commits, at the second time at the latest: its leader asks again."""
    try:
        return committer.commit([committable], 1, ORIGIN)
    except StoreUnavailable:
        return committer.commit([committable], 1, ORIGIN)


def test_an_open_transaction_that_is_lost(preparing: Preparing) -> None:
    """The writer shows now and then that it lives, and so learns of it without a row or a barrier."""
    preparing.committer(1)
    writer = preparing.writer(1)
    now_ms = [0]
    writer.clock = cast("Clock", SimpleNamespace(monotonic_ms=lambda: now_ms[0]))
    preparing.write(writer, *map(str, range(30_000)))
    while writer._backlog_bytes:
        writer.poll(1)
    now_ms[0] += KEEP_INTERVAL_MS
    writer.poll()
    assert writer.poll(LIMIT_S), "the server answers that it is there"
    preparing.end_connections()
    now_ms[0] += KEEP_INTERVAL_MS
    writer.poll()
    with pytest.raises(SinkFailed):
        writer.poll(LIMIT_S)


def test_a_writer_that_has_too_much_to_write(preparing: Preparing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exactlyonce.sinks.prepared.writer.BACKLOG_BYTES_MAX", 1 << 20)
    committer, writer = preparing.committer(1), preparing.writer(1)
    rows = 0
    while writer.room:
        preparing.write(writer, *(f"{rows + number:010}" for number in range(20_000)))
        rows += 20_000
    while not writer.room:
        writer.poll(LIMIT_S)
    assert committer.commit([preparing.prepare(writer, 1)], 1, ORIGIN)
    assert len(preparing.rows()) == rows
