"""A transaction of the decision log that is taken back: it is over only once its markers are there."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.requests import Answered, Producer, ProducerState, WriteAnswer
from exactlyonce.checkpoint.transactions.transactional_writer import TransactionalWriter
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.clock import SimulatedClock

HELD = ProducerState("t", 0, 7, 0, 0, 0, 5)


class Broker:
    def __init__(self, clock: SimulatedClock, looks: int) -> None:
        self.clock, self.looks = clock, looks
        self.asked: list[type] = []

    def __call__(self, request: ask.Request) -> Any:
        self.asked.append(type(request))
        match request:
            case ask.InitTransactions():
                return Answered(WriteAnswer.DONE, "", Producer(7, 0))
            case ask.ProduceBatches(batches=batches):
                return {each.partition: Answered(WriteAnswer.DONE, first_offset=5) for each in batches}
            case ask.EndTransaction(producer=producer):
                return Answered(WriteAnswer.DONE, "", Producer(7, producer.epoch + 1))
            case ask.DescribeProducers():
                self.looks -= 1
                return [HELD] if self.looks >= 0 else []
            case ask.Pause(duration_ms):
                return self.clock.advance(duration_ms)
        raise AssertionError(request)


def taken_back(looks: int) -> tuple[TransactionalWriter, Broker]:
    clock = SimulatedClock()
    broker, writer = Broker(clock, looks), TransactionalWriter("eo:p:coordinator", "t", clock)
    ask.drive(writer.open(), broker)
    assert ask.drive(writer.produce([ask.Write(0, "key", b"value")], clock.monotonic_ms() + 1_000), broker)
    broker.asked.clear()
    ask.drive(writer.take_back("a check failed"), broker)
    return writer, broker


def test_an_abort_is_over_once_its_markers_are_there() -> None:
    writer, broker = taken_back(looks=2)
    assert broker.asked == [
        ask.EndTransaction, ask.DescribeProducers, ask.Pause, ask.DescribeProducers, ask.Pause, ask.DescribeProducers,
    ]  # fmt: skip
    assert writer.refusal == "a check failed"
    assert ask.drive(writer.produce([ask.Write(0, "key", b"value")], 10_000), broker)


def test_an_abort_without_its_markers_ends_the_writer() -> None:
    """A commit would include what was taken back: the next incarnation sees to it."""
    with pytest.raises(BrokerUnavailable, match="does not show the marker"):
        taken_back(looks=1_000_000)
