"""The producers of a sink's writer: the seam, and those of confluent-kafka.

Invariants: `make`, `flush` and `drop` return at once, and their work runs elsewhere; a producer is never closed: that
would abort its transaction. A flush sends at once, whatever `linger.ms` says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from exactlyonce.connectors.confluent import make_producer
from exactlyonce.connectors.kafka.client import connect
from exactlyonce.connectors.kafka.partitioning import SETTING
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, Outdated, RecordError
from exactlyonce.sinks.writer import SinkFailed

PREPARE_TIMEOUT_S = 60.0
TRANSACTION_LINGER_MS = 20
"""The default in a transaction: nobody sees its records before their checkpoint completes, and few large batches cost
less. Without a transaction the library's own default counts."""
LINGER_MAX_MS = 100
"""The upper bound: a lingering record waits for the broker, and writers pause if the broker takes little."""
_LINGER = ("linger.ms", "queue.buffering.max.ms")
FLUSH_SLICE_S = 0.2
"""The interval at which a flush notices that it was abandoned."""

_NOT_ALLOWED = {
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_SECONDARY = {
    KafkaError._FATAL,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._PURGE_QUEUE,
    KafkaError._STATE,
}
"""Errors of a producer that has failed before."""
_OF_A_BATCH = {KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD}
"""Errors that the client gives for each record of a refused batch, even if only some were wrong."""
_INVALID = (
    "Is topic {topic!r} compacted? Then it takes no record without a key: give the sink key=, or the topic another "
    "cleanup.policy, and run again. If it is not, timestamp= of the sink gives a time that the topic refuses: see its "
    "message.timestamp.before.max.ms and message.timestamp.after.max.ms."
)
_REFUSED_TIME = (
    "Topic {topic!r} does not take the time of a record. The job has stopped before it; nothing is lost. Raise "
    "message.timestamp.before.max.ms or message.timestamp.after.max.ms of the topic (an hour ahead unless set), or let "
    "timestamp= of the sink give another time, and run again."
)
_OUTDATED = (
    "The broker's transaction.max.timeout.ms is lower than when this run began, which takes the value at its start: "
    "nothing is lost, and it has to begin anew."
)
_GRANT = (
    "The broker does not allow it: grant whoever runs this Write on topic {topic!r} and on the pipeline's "
    "transactional ids, and run again."
)

T_co = TypeVar("T_co", covariant=True)


class Failure(NamedTuple):
    """A record was not delivered, or a producer has failed."""

    reason: str
    kind: type[ExactlyOnceError] = SinkFailed
    of_times: bool = False
    """Whether the broker has refused the timestamp of some record."""


OnFailure = Callable[[Failure], None]


class Pending(Protocol[T_co]):
    """The result of work on another thread."""

    def done(self) -> bool: ...
    def result(self) -> T_co:
        """The result, once done; raises the error of the work."""


class SinkProducer(Protocol):
    """An initialised producer, whose transaction has begun, if it has one."""

    @property
    def produce(self) -> Callable[..., None]:
        """``produce(topic, value, key, partition, timestamp=..., headers=...)``; BufferError: its queue is full."""

    @property
    def poll(self) -> Callable[[float], int]:
        """Let it report failed deliveries, for so many seconds."""

    def __len__(self) -> int:
        """The number of records that it holds and has not delivered."""


@dataclass
class Transaction:
    """A producer with its one transaction."""

    transactional_id: str
    producer: SinkProducer
    producer_id: int = -1
    epoch: int = -1
    records: int = 0
    opened_ms: int = 0
    checkpoint: int = 0


class Producers(Protocol):
    """The producers of one sink subtask."""

    def make(self, transactional_id: str | None, failed: OnFailure) -> Pending[SinkProducer]:
        """Initialise a producer and begin its transaction, if it has an id. *failed* is called while it is polled or
        flushed."""

    def flush(self, producer: SinkProducer) -> Pending[int]:
        """-> the number of outstanding records, more than 0 only after `abandon`. Failures are reported before."""

    def wait(self, pending: Pending[Any], timeout_s: float) -> None:
        """Wait until it is done, at most so long."""

    def drop(self, transaction: Transaction) -> None:
        """Drop its producer, without closing it."""

    def abandon(self) -> None:
        """Give up a flush in progress."""


class KafkaProducers:
    """Producers of confluent-kafka: made and dropped on the thread of *executor*, flushed on a thread of their own."""

    def __init__(
        self,
        topic: str,
        config: dict[str, str],
        transaction_timeout_ms: int,
        executor: ThreadPoolExecutor,
        *,
        partitioner: str | None = None,
    ) -> None:
        """*config*: librdkafka settings, without a transactional id. *partitioner*: None: that of *config*."""
        own = {} if partitioner is None else {SETTING: partitioner}
        self._topic, self._config, self._timeout_ms = topic, {**config, **own}, transaction_timeout_ms
        self._executor = executor
        self._flusher = ThreadPoolExecutor(1, "flush")
        self._abandoned = False

    def make(self, transactional_id: str | None, failed: OnFailure) -> Future[Producer]:
        return self._executor.submit(self._make, transactional_id, failed)

    def _make(self, transactional_id: str | None, failed: OnFailure) -> Producer:
        """Runs on the executor's thread."""
        reported = False

        def undelivered(error: KafkaError | None, message: Message) -> None:
            nonlocal reported
            if error is not None and not reported:  # further failures follow from the first
                reported = True
                what = f"a record for {self._topic}[{message.partition()}] was not delivered"
                failed(failure(self._topic, what, why(reference(), error)))

        def broken(error: KafkaError) -> None:
            if error.fatal():
                failed(failure(self._topic, "the producer failed", error))

        too_long = [name for name in _LINGER if float(self._config.get(name, 0)) > LINGER_MAX_MS]
        transactions = {"transactional.id": transactional_id, "transaction.timeout.ms": self._timeout_ms}
        producer = make_producer(
            {
                **({} if transactional_id is None else {"linger.ms": TRANSACTION_LINGER_MS}),
                **self._config,
                **dict.fromkeys(too_long, LINGER_MAX_MS),
                **({"enable.idempotence": True} if transactional_id is None else transactions),
                "delivery.report.only.error": True,
                "on_delivery": undelivered,
                "error_cb": broken,
            }
        )
        reference = weakref.ref(producer)  # for the callback, while a poll or a flush holds the producer
        connect(producer, self._topic, PREPARE_TIMEOUT_S)
        if transactional_id is not None:
            producer.init_transactions(PREPARE_TIMEOUT_S)
            producer.begin_transaction()
        return producer

    def flush(self, producer: Any) -> Future[int]:
        return self._flusher.submit(self._flush, producer)

    def _flush(self, producer: Producer) -> int:
        """Runs on the flusher's thread."""
        while left := producer.flush(FLUSH_SLICE_S):
            if self._abandoned:
                return left
        return 0

    def wait(self, pending: Any, timeout_s: float) -> None:
        wait([pending], timeout_s)

    def drop(self, transaction: Transaction) -> None:
        """On the executor's thread: ending librdkafka's threads takes milliseconds."""
        self._executor.submit(_drop, transaction)

    def abandon(self) -> None:
        self._abandoned = True


def failure(topic: str, what: str, error: KafkaError) -> Failure:
    """The failure *what*, caused by *error*; its kind is final if another attempt would meet it again."""
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return Failure(too_large(topic, "a record, or the batch that it was sent with,"), RecordError)
    if error.code() in _OF_A_BATCH:
        return Failure(f"{what}: {error.str()}. {_INVALID.format(topic=topic)}", RecordError, of_times=True)
    if error.code() == KafkaError.INVALID_TIMESTAMP:
        return Failure(f"{what}: {error.str()}. {_REFUSED_TIME.format(topic=topic)}", RecordError, of_times=True)
    if error.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return Failure(f"{what}: {error.str()}. {_OUTDATED}", Outdated)
    if error.code() in _NOT_ALLOWED:
        return Failure(f"{what}: {error.str()}. {_GRANT.format(topic=topic)}", ConfigError)
    return Failure(f"{what}: {error.str()}", SinkFailed)


def why(producer: Any, error: KafkaError) -> KafkaError:
    """The cause of *error*, if that only says that the transaction or the batch has failed; else *error*.

    The client gives the cause when it refuses the next transaction. It must not be called within a callback, hence the
    thread.
    """
    if error.code() not in _SECONDARY | _OF_A_BATCH:
        return error
    with ThreadPoolExecutor(1, "why") as thread:
        refusal = thread.submit(producer.begin_transaction).exception()
    cause = refusal.args[0] if isinstance(refusal, KafkaException) else error
    return error if cause.code() in _SECONDARY | {KafkaError._NOT_CONFIGURED} else cause


def too_large(topic: str, what: str) -> str:
    """The error text if *what* is larger than the client or the topic allows."""
    return (
        f"{what} is too large for topic {topic!r}. The job has stopped before it; nothing is lost. Raise "
        "max.message.bytes of the topic, and message.max.bytes of the client (1 MB unless set; [kafka] in the "
        "configuration file, or --kafka); or write less with each record, or in each batch (batch.size)."
    )


def _drop(transaction: Transaction) -> None:
    """Drop the last reference."""
    del transaction.producer
