"""The writers of weaker deliveries: what they write when, what they keep, what they give up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks import deferred
from exactlyonce.sinks.deferred import DeferredWriter
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.write_ahead import direct
from exactlyonce.sinks.write_ahead.direct import DirectWriter
from exactlyonce.sinks.writer import FlushedInterval, IntervalWriter, SinkFailed
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


def made(lost: Callable[[str], None] | None = None) -> tuple[DirectWriter, Store]:
    store: Any = Store()
    return DirectWriter("db", store, lost), store


def flush(writer: DirectWriter, checkpoint: int) -> None:
    while writer.take_flushed(checkpoint) is None:
        writer.poll(LIMIT_S)


def settle(writer: DeferredWriter) -> None:
    while writer.unwritten:
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
    monkeypatch.setattr(direct, "TRANSACTION_BYTES", 40)
    monkeypatch.setattr(direct, "BACKLOG_BYTES_MAX", 50)
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


def test_a_store_that_is_away_fails_an_at_least_once_sink() -> None:
    writer, store = made()
    store.answers = [AWAY]
    writer.write(rows(0, 3))
    writer.barrier(1)
    with pytest.raises(SinkFailed, match="sink 'db': the store is away"):
        flush(writer, 1)


@pytest.mark.parametrize("lost", [None, lambda text: None], ids=["at least once", "at most once"])
def test_what_a_store_refuses_names_the_sink(lost: Callable[[str], None] | None) -> None:
    """Another attempt would meet it again, even where rows may be lost."""
    writer, store = made(lost)
    store.answers = [StoreError("a row breaks a constraint: correct the table.")]
    writer.write(rows(0, 3))
    writer.barrier(1)
    with pytest.raises(StoreError, match=r"^Sink 'db': a row breaks a constraint: correct the table"):
        flush(writer, 1)


def test_a_store_that_is_away_loses_rows_at_most_once() -> None:
    notes: list[str] = []
    writer, store = made(notes.append)
    store.answers = [AWAY]
    writer.write(rows(0, 3))
    writer.barrier(1)
    flush(writer, 1)
    writer.write(rows(3, 5))
    writer.barrier(2)
    flush(writer, 2)
    assert store.rows == lines(3, 5), "nothing is tried again"
    (note,) = notes
    assert note.startswith("sink 'db': 3 rows up to checkpoint 1 are lost")
    assert note.endswith(str(AWAY))


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


def test_outputs_wait_for_their_checkpoint() -> None:
    inner, store = made()
    writer = DeferredWriter(inner, list[bytes])
    writer.write(rows(0, 3))
    writer.write(rows(3, 4))
    writer.barrier(1)
    assert writer.take_flushed(1) is not None, "a barrier waits for nothing"
    writer.write(rows(4, 6))
    writer.poll()
    assert (store.rows, writer.unwritten) == ([], 0)
    writer.finalized(1)
    assert writer.unwritten == 4
    settle(writer)
    assert (store.rows, writer.records) == (lines(0, 4), 6)
    writer.finalized(1)
    settle(writer)
    assert store.rows == lines(0, 4), "once"


def test_outputs_of_an_aborted_checkpoint_wait_for_the_next() -> None:
    inner, store = made()
    writer = DeferredWriter(inner, list[bytes])
    for checkpoint in (1, 2, 3):
        writer.write(rows(10 * checkpoint, 10 * checkpoint + 2))
        writer.barrier(checkpoint)
    writer.finalized(2)
    settle(writer)
    assert store.rows == lines(10, 12) + lines(20, 22)


def test_much_waits_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "MEMORY_BYTES_MAX", 100)
    monkeypatch.setattr(deferred, "UNWRITTEN_BYTES_MAX", 1000)
    inner, store = made()
    writer = DeferredWriter(inner, list[bytes])
    for first in range(0, 2000, 50):
        writer.write(rows(first, first + 50))
    writer.barrier(1)
    assert writer.room, "or no barrier could be taken that would end it"
    writer.finalized(1)
    assert not writer.room
    settle(writer)
    assert writer.room
    assert store.rows == lines(0, 2000)


def test_a_full_disk_fails_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = DeferredWriter(made()[0], list[bytes])

    def refuse(self: Any, packed: bytes, records: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deferred._Interval, "keep", refuse)
    with pytest.raises(SinkFailed, match=r"No space left on device\. Make room there, or set TMPDIR"):
        writer.write(rows(0, 1))


@pytest.mark.parametrize(
    ("keys", "headers"),
    [(None, None), ([b"k", None], [[("by", b"x"), ("as", None)], [("text", "y")]])],
    ids=["values", "keys and headers"],
)
def test_outputs_for_kafka_come_back_as_they_were(keys: Any, headers: Any) -> None:
    taken: list[Outputs] = []

    class Inner(IntervalWriter):
        def write(self, outputs: Outputs) -> None:
            taken.append(outputs)

        def barrier(self, checkpoint: int) -> None:
            self._flushed[checkpoint] = FlushedInterval()

    writer, outputs = DeferredWriter(Inner("out"), Outputs), Outputs([b"1", None], keys, headers, [5, 1 << 62])
    writer.write(outputs)
    writer.barrier(1)
    writer.finalized(1)
    assert (writer.records, writer.unwritten) == (2, 2)
    settle(writer)
    (back,) = taken
    assert (back.values, back.keys, back.timestamps, back.left) == (outputs.values, keys, outputs.timestamps, 2)
    assert headers is None or [list(map(tuple, each)) for each in back.headers or ()] == headers
