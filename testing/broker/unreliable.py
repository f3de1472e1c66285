"""A network between a client and a broker that loses, delays and repeats requests on order.

Every fault is ordered for one call and is noted once it has happened, so that a test can assert that it did. The broker
behind may be the model or a real one.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.transactions.broker_answers import ListedTransaction, ProducerState, TransactionState
from exactlyonce.testing.broker.interface import (
    Error,
    Fetched,
    Initialized,
    Isolation,
    NoAnswer,
    Produced,
    TransactionalBroker,
)


class Fault(enum.Enum):
    """What happens to one request. But for the last, the caller meets `NoAnswer`."""

    REQUEST_LOST = "request lost"
    """It is never carried out."""
    ANSWER_LOST = "answer lost"
    """It is carried out."""
    DELAYED = "delayed"
    """It is carried out later, whatever has happened meanwhile."""
    APPLIED_TWICE = "applied twice"
    """It arrives a second time right after the first; the answer is the second one."""


@dataclass(frozen=True)
class Injection:
    """A fault, and the call that it is for."""

    api: str
    fault: Fault
    nth: int
    delay_ms: int


class UnreliableBroker:
    """A `TransactionalBroker` that reaches *broker* over a network with faults.

    >>> from exactlyonce.testing import BrokerModel, SimulatedClock
    >>> clock = SimulatedClock()
    >>> broker = UnreliableBroker(BrokerModel(clock), clock)
    >>> broker.inject("end_txn", Fault.ANSWER_LOST)
    >>> _, producer_id, epoch = broker.init_transactions("a")
    >>> broker.end_txn("a", producer_id, epoch, commit=False)
    Traceback (most recent call last):
    exactlyonce.testing.broker.interface.NoAnswer: end_txn: answer lost
    >>> broker.pending
    []
    """

    def __init__(self, broker: TransactionalBroker, clock: Clock) -> None:
        self._broker, self._clock = broker, clock
        self.fired: list[Injection] = []
        self.pending: list[Injection] = []
        """Ordered, and not fired yet."""
        self._calls: Counter[str] = Counter()
        self._late: list[tuple[int, str, tuple[Any, ...], dict[str, Any]]] = []

    def inject(self, api: str, fault: Fault, nth: int = 1, delay_ms: int = 0) -> None:
        """Order *fault* for the *nth* call from now of *api*, the name of an operation of `TransactionalBroker`."""
        self.pending.append(Injection(api, fault, self._calls[api] + nth, delay_ms))

    def init_transactions(self, transactional_id: str | None, timeout_ms: int = 60_000) -> Initialized:
        answer: Initialized = self._send("init_transactions", transactional_id, timeout_ms)
        return answer

    def add_to_transaction(
        self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int
    ) -> Error:
        answer: Error = self._send("add_to_transaction", transactional_id, producer_id, epoch, topic, partition)
        return answer

    def produce(
        self,
        transactional_id: str | None,
        producer_id: int,
        epoch: int,
        topic: str,
        partition: int,
        records: Sequence[tuple[Any, Any]],
        *,
        sequence: int | None = None,
        added: bool = False,
    ) -> Produced:
        place = (transactional_id, producer_id, epoch, topic, partition)
        answer: Produced = self._send("produce", *place, records, sequence=sequence, added=added)
        return answer

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        answer: Error = self._send("end_txn", transactional_id, producer_id, epoch, commit)
        return answer

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionState | None]:
        answer: dict[str, TransactionState | None] = self._send("describe_transactions", list(transactional_ids))
        return answer

    def list_transactions(self, prefix: str = "") -> list[ListedTransaction]:
        answer: list[ListedTransaction] = self._send("list_transactions", prefix)
        return answer

    def describe_producers(self, partitions: Iterable[tuple[str, int]]) -> list[ProducerState]:
        answer: list[ProducerState] = self._send("describe_producers", list(partitions))
        return answer

    def fetch(
        self, topic: str, partition: int, offset: int = 0, isolation: Isolation = Isolation.READ_COMMITTED
    ) -> Fetched:
        answer: Fetched = self._send("fetch", topic, partition, offset, isolation)
        return answer

    def create_topic(self, topic: str, partitions: int = 1, *, compact: bool = False) -> Error:
        answer: Error = self._send("create_topic", topic, partitions, compact=compact)
        return answer

    def delete_topic(self, topic: str) -> Error:
        answer: Error = self._send("delete_topic", topic)
        return answer

    def add_partitions(self, topic: str, total: int) -> Error:
        answer: Error = self._send("add_partitions", topic, total)
        return answer

    def topic_id(self, topic: str) -> str | None:
        answer: str | None = self._send("topic_id", topic)
        return answer

    def delete_records(self, topic: str, partition: int, before_offset: int) -> Error:
        answer: Error = self._send("delete_records", topic, partition, before_offset)
        return answer

    def _send(self, api: str, *arguments: Any, **options: Any) -> Any:
        self._deliver_late()
        self._calls[api] += 1
        injection = self._due(api) if self.pending else None
        if injection is None:
            return getattr(self._broker, api)(*arguments, **options)
        self.pending.remove(injection)
        self.fired.append(injection)
        if injection.fault is Fault.DELAYED:
            due_ms = self._clock.monotonic_ms() + injection.delay_ms
            self._late.append((due_ms, api, arguments, options))
        elif injection.fault is not Fault.REQUEST_LOST:
            getattr(self._broker, api)(*arguments, **options)
        if injection.fault is Fault.APPLIED_TWICE:
            return getattr(self._broker, api)(*arguments, **options)
        raise NoAnswer(f"{api}: {injection.fault.value}")

    def _due(self, api: str) -> Injection | None:
        nth = self._calls[api]
        return next((each for each in self.pending if each.api == api and each.nth == nth), None)

    def _deliver_late(self) -> None:
        """Carry out what was delayed until now; nobody hears the answers."""
        if not self._late:
            return
        now_ms = self._clock.monotonic_ms()
        late = sorted((each for each in self._late if each[0] <= now_ms), key=itemgetter(0))
        self._late = [each for each in self._late if each[0] > now_ms]
        for _, api, arguments, options in late:
            with suppress(NoAnswer):
                getattr(self._broker, api)(*arguments, **options)
