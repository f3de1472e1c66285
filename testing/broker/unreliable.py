"""A network between a client and a broker that loses, delays and repeats requests on order.

Every fault is ordered for one call and noted once it has happened, so that a test can assert that it did.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.requests import ListedTransaction, ProducerState, TransactionState
from exactlyonce.testing.broker.interface import (
    Error,
    Fetched,
    Initialized,
    Isolation,
    NoAnswer,
    Produced,
    TransactionalBroker,
)

P = ParamSpec("P")
T = TypeVar("T")


class Fault(enum.Enum):
    """The faults of one request. All but the last raise `NoAnswer`."""

    REQUEST_LOST = "request lost"
    """The request is never applied."""
    ANSWER_LOST = "answer lost"
    """The request is applied."""
    DELAYED = "delayed"
    """The request is applied later, whatever has happened meanwhile."""
    APPLIED_TWICE = "applied twice"
    """The request is applied twice in a row; the answer is the second one."""


@dataclass(frozen=True)
class Injection:
    """A fault and its call."""

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
        """Faults that have not fired yet."""
        self._calls: Counter[str] = Counter()
        self._late: list[tuple[int, Callable[[], Any]]] = []
        """Delayed requests with the times when they are due."""

    def inject(self, api: str, fault: Fault, nth: int = 1, delay_ms: int = 0) -> None:
        """Order *fault* for the *nth* call from now of *api*, the name of an operation of `TransactionalBroker`."""
        self.pending.append(Injection(api, fault, self._calls[api] + nth, delay_ms))

    def init_transactions(self, transactional_id: str | None, timeout_ms: int = 60_000) -> Initialized:
        return self._send(self._broker.init_transactions, transactional_id, timeout_ms)

    def add_to_transaction(
        self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int
    ) -> Error:
        return self._send(self._broker.add_to_transaction, transactional_id, producer_id, epoch, topic, partition)

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
        return self._send(self._broker.produce, *place, records, sequence=sequence, added=added)

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        return self._send(self._broker.end_txn, transactional_id, producer_id, epoch, commit)

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionState | None]:
        return self._send(self._broker.describe_transactions, list(transactional_ids))

    def list_transactions(self, prefix: str = "") -> list[ListedTransaction]:
        return self._send(self._broker.list_transactions, prefix)

    def describe_producers(self, partitions: Iterable[tuple[str, int]]) -> list[ProducerState]:
        return self._send(self._broker.describe_producers, list(partitions))

    def fetch(
        self, topic: str, partition: int, offset: int = 0, isolation: Isolation = Isolation.READ_COMMITTED
    ) -> Fetched:
        return self._send(self._broker.fetch, topic, partition, offset, isolation)

    def create_topic(self, topic: str, partitions: int = 1, *, compact: bool = False) -> Error:
        return self._send(self._broker.create_topic, topic, partitions, compact=compact)

    def delete_topic(self, topic: str) -> Error:
        return self._send(self._broker.delete_topic, topic)

    def add_partitions(self, topic: str, total: int) -> Error:
        return self._send(self._broker.add_partitions, topic, total)

    def topic_id(self, topic: str) -> str | None:
        return self._send(self._broker.topic_id, topic)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> Error:
        return self._send(self._broker.delete_records, topic, partition, before_offset)

    def _send(self, operation: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        self._deliver_late()
        api = operation.__name__
        self._calls[api] += 1
        injection = self._due(api) if self.pending else None
        if injection is None:
            return operation(*arguments, **options)
        self.pending.remove(injection)
        self.fired.append(injection)
        if injection.fault is Fault.DELAYED:
            due_ms = self._clock.monotonic_ms() + injection.delay_ms
            self._late.append((due_ms, partial(operation, *arguments, **options)))
        elif injection.fault is not Fault.REQUEST_LOST:
            operation(*arguments, **options)
        if injection.fault is Fault.APPLIED_TWICE:
            return operation(*arguments, **options)
        raise NoAnswer(f"{api}: {injection.fault.value}")

    def _due(self, api: str) -> Injection | None:
        nth = self._calls[api]
        return next((ordered for ordered in self.pending if (ordered.api, ordered.nth) == (api, nth)), None)

    def _deliver_late(self) -> None:
        """Send the delayed requests that are due; their answers are lost."""
        if not self._late:
            return
        now_ms = self._clock.monotonic_ms()
        due = sorted((request for request in self._late if request[0] <= now_ms), key=itemgetter(0))
        self._late = [request for request in self._late if request[0] > now_ms]
        for _, send in due:
            with suppress(NoAnswer):
                send()
