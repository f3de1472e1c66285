"""The writer of a write-ahead sink: rows in blocks, intervals as committables."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX, BlockRef
from exactlyonce.sinks.write_ahead.writer import (
    CHUNK_SIZE,
    INDEXED,
    NAMED_MAX,
    ROW_SIZE_MAX,
    ROWS,
    ROWS_INDEX,
    BoundedRows,
    RowsWriter,
    decode_index,
)
from exactlyonce.sinks.writer import BLOCKS_PENDING_MAX


class Topic:
    def __init__(self) -> None:
        self.sent: list[tuple[str, int, bytes]] = []
        self.tickets: list[Ticket] = []
        self.arrived = 0

    @property
    def pending(self) -> int:
        return len(self.sent) - self.arrived

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        self.sent.append((kind, checkpoint, body))
        self.tickets.append(Ticket(f"block/{len(self.sent)}", body))
        return self.tickets[-1]

    def arrive(self) -> None:
        for offset in range(self.arrived, len(self.sent)):
            self.tickets[offset].written(1, offset)
        self.arrived = len(self.sent)

    def body(self, ref: BlockRef) -> bytes:
        body = self.sent[ref.offset][2]
        assert (ref.size, ref.sha256) == (len(body), hashlib.sha256(body).digest())
        return body


def writer() -> tuple[RowsWriter, Topic]:
    topic = Topic()
    return RowsWriter("db", 3, topic), topic


def test_an_interval_without_rows_has_nothing_to_commit() -> None:
    made, topic = writer()
    made.barrier(1)
    assert made.poll()
    flushed = made.take_flushed(1)
    assert flushed is not None
    assert flushed.staged is None
    assert topic.sent == []


def test_rows_go_as_they_come() -> None:
    made, topic = writer()
    row = b"x" * 999 + b"\n"
    for _ in range(20):
        made.write([row] * 100)
    assert sum(len(body) for _, _, body in topic.sent) >= 20 * 100_000 - CHUNK_SIZE
    made.write([b"y" * (ROW_SIZE_MAX - 1) + b"\n"] * 2)
    made.barrier(1)
    assert max(len(body) for _, _, body in topic.sent) < BLOCK_SIZE_MAX
    assert all(body.endswith(b"\n") for _, _, body in topic.sent)
    assert b"".join(body for _, _, body in topic.sent) == row * 2000 + (b"y" * (ROW_SIZE_MAX - 1) + b"\n") * 2


def test_many_blocks_are_listed_in_an_index() -> None:
    made, topic = writer()
    for number in range(NAMED_MAX + 5):
        made.write([bytes([number]) * CHUNK_SIZE])
    made.barrier(1)
    topic.arrive()
    assert not made.poll(), "the index is on its way"
    topic.arrive()
    assert made.poll()
    flushed = made.take_flushed(1)
    assert flushed is not None
    assert flushed.staged is not None
    committable = flushed.staged.committable
    assert (committable.body, len(committable.blocks)) == (INDEXED, 1)
    rows = decode_index(topic.body(committable.blocks[0]))
    assert [topic.body(ref)[0] for ref in rows] == list(range(NAMED_MAX + 5))
    assert set(flushed.staged.blocks) == {*rows, *committable.blocks}
    assert [kind for kind, _, _ in topic.sent] == [ROWS] * (NAMED_MAX + 5) + [ROWS_INDEX]


def test_a_writer_is_full_while_many_blocks_are_on_their_way() -> None:
    made, topic = writer()
    for _ in range(BLOCKS_PENDING_MAX + 2):
        made.write([b"x" * CHUNK_SIZE])
    assert not made.room
    topic.arrive()
    assert made.room


def test_a_row_that_no_block_has_room_for_is_refused() -> None:
    class Long:
        def encode(self, records: Any) -> list[bytes]:
            return [b"x" * record for record in records]

    encoder = BoundedRows(Long())
    assert encoder.encode([]) == []
    assert len(encoder.encode([ROW_SIZE_MAX])[0]) == ROW_SIZE_MAX
    with pytest.raises(ValueError, match="larger than 1,044,480"):
        encoder.encode([1, ROW_SIZE_MAX + 1])
