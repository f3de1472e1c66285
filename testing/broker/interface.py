"""The interface of a broker with transactions; the in-memory model and a real cluster answer it alike.

Every operation is one request of the Kafka protocol (for `produce`, the pair that librdkafka sends) and returns the
broker's answer unchanged, without retries. It raises `NoAnswer` if the request or its answer was lost.
`UnreliableBroker` loses, delays and repeats requests on order.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.requests import ListedTransaction, ProducerState, TransactionState


class Error(enum.IntEnum):
    """The error codes of the Kafka protocol that concern transactions."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_COORDINATOR = 16
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    UNKNOWN_PRODUCER_ID = 59
    INVALID_RECORD = 87
    PRODUCER_FENCED = 90
    TRANSACTIONAL_ID_NOT_FOUND = 105
    TRANSACTION_ABORTABLE = 120


class Isolation(enum.IntEnum):
    """Readers see all records up to the high watermark, or committed ones up to the last stable offset."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class NoAnswer(Exception):
    """No answer came: the request may have been applied, or not, or may still be."""


class Initialized(NamedTuple):
    """The answer to InitProducerId. *error* CONCURRENT_TRANSACTIONS: the open transaction is being aborted; retry."""

    error: Error
    producer_id: int = -1
    epoch: int = -1


class Produced(NamedTuple):
    """The first refusal of AddPartitionsToTxn and Produce, or the answer to Produce."""

    error: Error
    first_offset: int = -1


class Record(NamedTuple):
    """A record in a partition. The model keeps any Python objects as key and value, a real broker bytes."""

    offset: int
    key: Any
    value: Any
    producer_id: int
    epoch: int


class Fetched(NamedTuple):
    """The answer to Fetch: the data records visible at the isolation level, and the log's offsets."""

    error: Error
    records: tuple[Record, ...] = ()
    log_start_offset: int = -1
    last_stable_offset: int = -1
    high_watermark: int = -1


class TransactionalBroker(Protocol):
    """The operations. Topics and partitions are named as Kafka names them; times are in milliseconds."""

    def create_topic(self, topic: str, partitions: int = 1, *, compact: bool = False) -> Error:
        """Create a topic that is compacted or has no retention."""

    def delete_topic(self, topic: str) -> Error:
        """Delete a topic with all its records. One created later under its name has another id."""

    def add_partitions(self, topic: str, total: int) -> Error:
        """Raise the number of a topic's partitions to *total*."""

    def topic_id(self, topic: str) -> str | None:
        """The topic's id; None: there is no such topic."""

    def init_transactions(self, transactional_id: str | None, timeout_ms: int = 60_000) -> Initialized:
        """InitProducerId: a producer id and an epoch that fence earlier producers of the id. None: only idempotent."""

    def add_to_transaction(
        self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int
    ) -> Error:
        """AddPartitionsToTxn for one partition: begins the transaction, whose marker is written there in any case."""

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
        """Append (key, value) pairs as one batch, adding the partition to the transaction first.

        *sequence* of the first record: None continues after the last batch of this (producer id, epoch). *added*: the
        producer believes that the partition is in its transaction and sends the batch alone, as zombies do.
        """

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        """EndTxn, version 5: it bumps the epoch."""

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionState | None]:
        """DescribeTransactions; None: the broker does not know the id."""

    def list_transactions(self, prefix: str = "") -> list[ListedTransaction]:
        """ListTransactions, of ids that begin with *prefix*, sorted by id."""

    def describe_producers(self, partitions: Iterable[tuple[str, int]]) -> list[ProducerState]:
        """DescribeProducers, sorted by topic, partition and producer id. Raises `TopicError` for an unknown one."""

    def fetch(
        self, topic: str, partition: int, offset: int = 0, isolation: Isolation = Isolation.READ_COMMITTED
    ) -> Fetched:
        """All records from *offset* on that are visible at *isolation*."""

    def delete_records(self, topic: str, partition: int, before_offset: int) -> Error:
        """DeleteRecords: move the log's start to *before_offset*; -1: to the high watermark."""


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
