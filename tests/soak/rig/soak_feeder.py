"""The feeder of the soak: orders and payments of a seed, at a steady rate, through all faults."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable

from confluent_kafka import KafkaError, Message, Producer
from soak_judge import END_MS

BEGIN_MS = 1_790_000_000_000
STEP_MS = 4
"""The time between two orders, by their own clocks."""
USERS = 100
BEHIND_MS = (0, 0, 0, 0, 300, 900, 1_900, 2_000, 2_001, 3_000, 15_000)
"""An order is so far behind the newest; one of a hundred is a minute behind."""
PAYMENTS = 0.7
"""The share of orders with a payment close by."""
BACKLOG_MAX = 5_000
"""Records that wait for the broker, at most."""


class Feeder(threading.Thread):
    def __init__(
        self, servers: str, name: str, seed: int, rate: int, partitions: tuple[int, int],
        may_write: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """*rate*: records a second; *partitions*: of the topics of orders, and of payments. *may_write* takes the
        number of orders that are written."""
        super().__init__(daemon=True)
        self._luck = random.Random(f"feeder/{seed}")
        self.topics = (f"{name}-orders", f"{name}-payments")
        self.partitions = [*partitions]
        self._rate, self._may_write = rate, may_write
        self.orders = self.payments = 0
        self.newest_ms = BEGIN_MS
        """The latest time of a record, which may be about to be written."""
        self._failures: list[str] = []
        self._is_over = threading.Event()
        self._producer = Producer({
            "bootstrap.servers": servers, "enable.idempotence": True, "max.in.flight": 1, "linger.ms": 20,
            "delivery.timeout.ms": 1_800_000, "log_level": 0, "reconnect.backoff.max.ms": 500,
        })  # fmt: skip

    def run(self) -> None:
        try:
            looked_s = time.monotonic()
            due = 0.0
            while not self._is_over.wait(0.02):
                now = time.monotonic()
                due, looked_s = min(due + (now - looked_s) * self._rate, self._rate), now
                while due >= 1 and len(self._producer) < BACKLOG_MAX and self._may_write(self.orders):
                    due -= self._feed()
                self._producer.poll(0)
            self._end()
        except Exception as error:  # raised where it is waited for
            self._failures.append(repr(error))

    def _feed(self) -> int:
        """The number of records."""
        now = BEGIN_MS + self.orders * STEP_MS
        behind = self._luck.choice(BEHIND_MS) if self._luck.random() > 0.01 else 60_000
        self._order(now - behind, self._luck.randrange(self.partitions[0]))
        if self._luck.random() < PAYMENTS:
            order = max(0, self.orders - 1 - self._luck.randrange(200))
            at = BEGIN_MS + order * STEP_MS + self._luck.randrange(-1_500, 3_500)
            self._payment(order, at, self._luck.randrange(self.partitions[1]))
            return 2
        return 1

    def _order(self, at: int, partition: int) -> None:
        user, cents = f"u{self._luck.randrange(USERS)}", self._luck.randrange(1, 10_000)
        self._write(0, partition, {"id": self.orders, "user": user, "at": at, "cents": cents}, at)
        self.orders += 1

    def _payment(self, order: int, at: int, partition: int) -> None:
        self._write(1, partition, {"id": self.payments, "order": order, "at": at}, at)
        self.payments += 1

    def _write(self, topic: int, partition: int, event: dict[str, object], at: int) -> None:
        self.newest_ms = max(at, self.newest_ms)
        self._producer.produce(self.topics[topic], json.dumps(event), None, partition, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error:
            self._failures.append(str(error))

    def _end(self) -> None:
        """A record in each partition a long time after all others, so that their windows close."""
        for partition in range(self.partitions[0]):
            self._order(END_MS, partition)
        for partition in range(self.partitions[1]):
            self._payment(self.orders - 1, END_MS, partition)
        if self._producer.flush(300):
            self._failures.append("not everything could be written")

    def added(self, topic: int, partitions: int) -> None:
        """Write to so many partitions of a topic from now on, all of which have a leader."""
        self._producer.list_topics(self.topics[topic], timeout=30)  # it knows of them then
        self.partitions[topic] = partitions

    def check(self) -> None:
        if self._failures:
            raise AssertionError(f"the feeder has failed: {self._failures[:3]}")

    def end(self) -> None:
        """Returns once all of it is in the topics."""
        self._is_over.set()
        self.join()
        self.check()
