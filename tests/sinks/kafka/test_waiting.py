"""The records that may wait in the writer of a Kafka sink."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from exactlyonce.sinks.kafka.open_transaction import OnFailure, OnThrottle
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.kafka.writer import QUOTA_S, THROTTLED_S, WAITING_MIN, WAITING_THROTTLED_S, PlainWriter
from exactlyonce.testing.clock import SimulatedClock

SECOND_MS = 1_000


class Producers:
    """Makes itself as the producer, whose records wait until they are `taken`."""

    waiting = 0
    throttled: OnThrottle

    def make(self, transactional_id: str | None, failed: OnFailure, throttled: OnThrottle) -> Future[Any]:
        self.throttled = throttled
        made = Future[Any]()
        made.set_result(self)
        return made

    def produce(self, *record: Any) -> None:
        self.waiting += 1

    def poll(self, timeout_s: float) -> int:
        return 0

    def __len__(self) -> int:
        return self.waiting


def test_as_many_as_the_broker_took_lately_until_it_throttles() -> None:
    """Then half a second's worth of the last ten seconds, until it has not throttled for long."""
    clock, producers = SimulatedClock(), Producers()
    broker: Any = producers
    writer = PlainWriter(sink="out", topic="out", producers=broker, clock=clock)

    def taken(records: int, after_ms: int) -> int:
        """The room once the broker has taken so many."""
        writer.write(Outputs([b""] * records, None, None))
        clock.advance(after_ms)
        producers.waiting = 0
        writer.poll()
        return writer.room

    writer.poll()
    assert writer.room == WAITING_MIN
    assert taken(10_000, 10) == 10_000
    producers.throttled()
    assert writer.room == 10_000 * WAITING_THROTTLED_S / QUOTA_S
    for _ in range(int(QUOTA_S)):
        assert taken(200, SECOND_MS) >= 200 * WAITING_THROTTLED_S
    assert writer.room == 200 * WAITING_THROTTLED_S
    clock.advance(int(THROTTLED_S * SECOND_MS))
    writer.poll()
    assert taken(300, SECOND_MS) == 300
