"""The writer of a store at least once: what it writes when."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.write_ahead import writer as rows_writer
from exactlyonce.sinks.write_ahead.writer import DirectWriter
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.cluster import LIMIT_S

AWAY = StoreUnavailable("the store is away.")


class Store:
    """Keeps each transaction; answers as it is told to, once it may."""

    def __init__(self) -> None:
        self.transactions: list[list[bytes]] = []
        self.answers: list[Exception | None] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.closed = threading.Event()

    def write(self, chunks: Iterable[bytes]) -> None:
        assert self.may_answer.wait(LIMIT_S)
        rows = [line for chunk in chunks for line in chunk.splitlines()]
        if self.answers and (error := self.answers.pop(0)) is not None:
            raise error
        self.transactions.append(rows)

    def close(self) -> None:
        self.closed.set()

    @property
    def rows(self) -> list[bytes]:
        return [row for rows in self.transactions for row in rows]


def rows(first: int, last: int) -> list[bytes]:
    return [b"%d\n" % i for i in range(first, last)]


def lines(first: int, last: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, last)]


def made() -> tuple[DirectWriter, Store]:
    store: Any = Store()
    return DirectWriter("db", store), store


def flush(writer: DirectWriter, checkpoint: int) -> None:
    while writer.take_flushed(checkpoint) is None:
        writer.poll(LIMIT_S)


def test_a_barrier_waits_for_what_was_written_before() -> None:
    writer, store = made()
    store.may_answer.clear()
    writer.write(rows(0, 5))
    writer.poll()
    writer.write(rows(5, 9))
    writer.barrier(1)
    writer.write(rows(9, 12))
    writer.poll()
    assert writer.take_flushed(1) is None
    store.may_answer.set()
    flush(writer, 1)
    writer.barrier(2)
    flush(writer, 2)
    assert (store.rows, writer.records) == (lines(0, 12), 12)
    assert writer.take_flushed(2) is None, "it is told once"


def test_a_transaction_takes_what_has_come_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_writer, "TRANSACTION_BYTES", 40)
    monkeypatch.setattr(rows_writer, "BACKLOG_BYTES_MAX", 50)
    writer, store = made()
    store.may_answer.clear()
    for first in range(0, 60, 10):
        writer.write(rows(first, first + 10))
        writer.poll()
    assert not writer.room
    store.may_answer.set()
    writer.barrier(1)
    flush(writer, 1)
    assert writer.room
    assert [len(each) for each in store.transactions] == [10, 20, 20, 10]
    assert store.rows == lines(0, 60)


def test_a_store_that_is_away_fails_the_sink() -> None:
    writer, store = made()
    store.answers = [AWAY]
    writer.write(rows(0, 3))
    writer.barrier(1)
    with pytest.raises(SinkFailed, match="sink 'db': the store is away"):
        flush(writer, 1)


def test_what_a_store_refuses_names_the_sink() -> None:
    writer, store = made()
    store.answers = [StoreError("a row breaks a constraint: correct the table.")]
    writer.write(rows(0, 3))
    writer.barrier(1)
    with pytest.raises(StoreError, match=r"^Sink 'db': a row breaks a constraint: correct the table"):
        flush(writer, 1)


def test_a_writer_that_is_abandoned_closes_its_store() -> None:
    writer, store = made()
    store.may_answer.clear()
    writer.write(rows(0, 3))
    writer.poll()
    writer.write(rows(3, 6))
    writer.abandon()
    store.may_answer.set()
    assert store.closed.wait(LIMIT_S)
    assert store.rows == lines(0, 3)
