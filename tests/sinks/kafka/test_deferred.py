"""The writer of a Kafka sink at most once: outputs wait for their checkpoint, and come once, as they were."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.sinks.kafka import deferred
from exactlyonce.sinks.kafka.deferred import DeferredWriter
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.writer import FlushedInterval, IntervalWriter, SinkFailed


class Topic(IntervalWriter):
    """Has all outputs; a barrier is flushed at once."""

    def __init__(self) -> None:
        super().__init__("out")
        self.taken: list[Outputs] = []

    def write(self, outputs: Outputs) -> None:
        self.taken.append(outputs)

    def barrier(self, checkpoint: int) -> None:
        self._flushed[checkpoint] = FlushedInterval()

    @property
    def values(self) -> list[bytes | None]:
        return [value for outputs in self.taken for value in outputs.values]


def outputs(first: int, last: int) -> Outputs:
    return Outputs(lines(first, last), None, None)


def lines(first: int, last: int) -> list[bytes | None]:
    return [b"%d" % i for i in range(first, last)]


def made() -> tuple[DeferredWriter, Topic]:
    topic = Topic()
    return DeferredWriter(topic), topic


def settle(writer: DeferredWriter) -> None:
    while writer.unwritten:
        writer.poll()


def test_outputs_wait_for_their_checkpoint() -> None:
    writer, topic = made()
    writer.write(outputs(0, 3))
    writer.write(outputs(3, 4))
    writer.barrier(1)
    assert writer.take_flushed(1) is not None, "a barrier waits for nothing"
    writer.write(outputs(4, 6))
    writer.poll()
    assert (topic.values, writer.unwritten) == ([], 0)
    writer.finalized(1)
    assert writer.unwritten == 4
    settle(writer)
    assert (topic.values, writer.records) == (lines(0, 4), 6)
    writer.finalized(1)
    settle(writer)
    assert topic.values == lines(0, 4), "once"


def test_outputs_of_an_aborted_checkpoint_wait_for_the_next() -> None:
    writer, topic = made()
    for checkpoint in (1, 2, 3):
        writer.write(outputs(10 * checkpoint, 10 * checkpoint + 2))
        writer.barrier(checkpoint)
    writer.finalized(2)
    settle(writer)
    assert topic.values == lines(10, 12) + lines(20, 22)


def test_much_waits_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "MEMORY_BYTES_MAX", 100)
    monkeypatch.setattr(deferred, "UNWRITTEN_BYTES_MAX", 1000)
    writer, topic = made()
    for first in range(0, 2000, 50):
        writer.write(outputs(first, first + 50))
    writer.barrier(1)
    assert writer.room, "or no barrier could be taken that would end it"
    writer.finalized(1)
    assert not writer.room
    settle(writer)
    assert writer.room
    assert topic.values == lines(0, 2000)


def test_a_full_disk_fails_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, packed: bytes, records: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deferred._Interval, "keep", refuse)
    with pytest.raises(SinkFailed, match=r"No space left on device\. Make room there, or set TMPDIR"):
        made()[0].write(outputs(0, 1))


@pytest.mark.parametrize(
    ("keys", "headers"),
    [(None, None), ([b"k", None], [[("by", b"x"), ("as", None)], [("text", "y")]])],
    ids=["values", "keys and headers"],
)
def test_outputs_come_as_they_were(keys: Any, headers: Any) -> None:
    writer, topic = made()
    written = Outputs([b"1", None], keys, headers, [5, 1 << 62])
    writer.write(written)
    writer.barrier(1)
    writer.finalized(1)
    assert (writer.records, writer.unwritten) == (2, 2)
    settle(writer)
    (back,) = topic.taken
    assert (back.values, back.keys, back.timestamps, back.left) == (written.values, keys, written.timestamps, 2)
    assert headers is None or [list(map(tuple, each)) for each in back.headers or ()] == headers
