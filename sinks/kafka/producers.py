"""The producers of a sink's writer, as it asks for them, and those of confluent-kafka.

Invariants: `make`, `flush` and `drop` return at once, and what they begin runs elsewhere; a producer is never closed:
that would abort its transaction. A flush sends at once, whatever `linger.ms` says.
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
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, RecordError
from exactlyonce.sinks.writer import SinkFailed

PREPARE_TIMEOUT_S = 60.0
TRANSACTION_LINGER_MS = 20
"""Unless settings say otherwise, how long a record of a transaction may wait for more: nobody sees it before its
checkpoint completes, and many small batches cost the broker and us more than few. Where others see records at once, the
library's own default counts."""
LINGER_MAX_MS = 100
"""A longer one counts as so much: what lingers the broker has not taken, and writers pause where it takes little."""
_LINGER = ("linger.ms", "queue.buffering.max.ms")
FLUSH_SLICE_S = 0.2
"""How soon a flush notices that it was abandoned."""

_NOT_ALLOWED = {
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_BEHIND_ANOTHER = {
    KafkaError._FATAL,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._PURGE_QUEUE,
    KafkaError._STATE,
}
"""What a producer says that has failed before."""
_OF_A_BATCH = {KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD}
"""A broker has refused a batch: the client tells this of each record, whatever was wrong with some of them."""
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
_GRANT = (
    "The broker does not allow it: grant whoever runs this Write on topic {topic!r} and on the pipeline's "
    "transactional ids, and run again."
)

T_co = TypeVar("T_co", covariant=True)


class OnFailure(Protocol):
    """Is told why a record was not delivered, or a producer can go on no more, and what of error that is.

    *of_times*: the broker has refused the timestamp of a record, and does not say of which.
    """

    def __call__(self, reason: str, kind: type[ExactlyOnceError] = SinkFailed, of_times: bool = False) -> None: ...


class Pending(Protocol[T_co]):
    """Something that was begun elsewhere."""

    def done(self) -> bool: ...
    def result(self) -> T_co:
        """Its result, once it is done; raises what it raised."""


class SinkProducer(Protocol):
    """A producer that is ready: if it has a transaction, that has begun."""

    @property
    def produce(self) -> Callable[..., None]:
        """``produce(topic, value, key, timestamp=..., headers=...)``; BufferError: it holds all that it may."""

    @property
    def poll(self) -> Callable[[float], int]:
        """Let it tell of failed deliveries, for so many seconds."""

    def __len__(self) -> int:
        """How many records it holds that are not delivered."""


@dataclass
class Transaction:
    """A producer that writes one transaction."""

    transactional_id: str
    producer: SinkProducer
    producer_id: int = -1
    epoch: int = -1
    records: int = 0
    opened_ms: int = 0
    checkpoint: int = 0


class Producers(Protocol):
    """Of one sink subtask."""

    def make(self, transactional_id: str | None, failed: OnFailure) -> Pending[SinkProducer]:
        """Initialise a producer, whose transaction has begun, unless it is to have none (None); it has written nothing.
        *failed* is called while it is polled or flushed."""

    def flush(self, producer: SinkProducer) -> Pending[int]:
        """-> how much is outstanding, which is more than 0 only after `abandon`. Failures are told before."""

    def wait(self, pending: Pending[Any], timeout_s: float) -> None:
        """Until it is done, at most so long."""

    def drop(self, transaction: Transaction) -> None:
        """Let go of its producer, without closing it."""

    def abandon(self) -> None:
        """A flush that is under way need not end."""


class KafkaProducers:
    """Producers of confluent-kafka: made and dropped on the thread of *executor*, flushed on one of their own."""

    def __init__(
        self, topic: str, config: dict[str, str], transaction_timeout_ms: int, executor: ThreadPoolExecutor
    ) -> None:
        """*config*: librdkafka settings, without a transactional id."""
        self._topic, self._config, self._timeout_ms, self._executor = topic, config, transaction_timeout_ms, executor
        self._flusher = ThreadPoolExecutor(1, "flush")
        self._abandoned = False

    def make(self, transactional_id: str | None, failed: OnFailure) -> Future[Producer]:
        return self._executor.submit(self._make, transactional_id, failed)

    def _make(self, transactional_id: str | None, failed: OnFailure) -> Producer:
        """Runs on the executor's thread."""

        told = False

        def undelivered(error: KafkaError | None, message: Message) -> None:
            nonlocal told
            if error is not None and not told:  # what else is not delivered follows from it
                told = True
                what = f"a record for {self._topic}[{message.partition()}] was not delivered"
                failed(*failure(self._topic, what, why(reference(), error)))

        def broken(error: KafkaError) -> None:
            if error.fatal():
                failed(*failure(self._topic, "the producer failed", error))

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
        reference = weakref.ref(producer)  # of the callback: whoever polls or flushes the producer holds it
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


class Undelivered(NamedTuple):
    """As `OnFailure` is told of it."""

    reason: str
    kind: type[ExactlyOnceError]
    of_times: bool = False


def failure(topic: str, what: str, error: KafkaError) -> Undelivered:
    """*what* has happened, because of *error*: a failure for good where another attempt would meet it again."""
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return Undelivered(too_large(topic, "a record, or the batch that it was sent with,"), RecordError)
    if error.code() in _OF_A_BATCH:
        return Undelivered(f"{what}: {error.str()}. {_INVALID.format(topic=topic)}", RecordError, of_times=True)
    if error.code() == KafkaError.INVALID_TIMESTAMP:
        return Undelivered(f"{what}: {error.str()}. {_REFUSED_TIME.format(topic=topic)}", RecordError, of_times=True)
    if error.code() in _NOT_ALLOWED:
        return Undelivered(f"{what}: {error.str()}. {_GRANT.format(topic=topic)}", ConfigError)
    return Undelivered(f"{what}: {error.str()}", SinkFailed)


def why(producer: Any, error: KafkaError) -> KafkaError:
    """*error*, or the one behind it, where *producer* only says that its transaction, or the batch, has failed.

    The client tells it to whoever asks for the next transaction, which it refuses. No call of it may be made within a
    callback, hence the thread.
    """
    if error.code() not in _BEHIND_ANOTHER | _OF_A_BATCH:
        return error
    with ThreadPoolExecutor(1, "why") as asking:
        found = asking.submit(producer.begin_transaction).exception()
    first = found.args[0] if isinstance(found, KafkaException) else error
    return error if first.code() in _BEHIND_ANOTHER | {KafkaError._NOT_CONFIGURED} else first


def too_large(topic: str, what: str) -> str:
    """What is said where the client, or the topic, does not take *what* for its size."""
    return (
        f"{what} is too large for topic {topic!r}. The job has stopped before it; nothing is lost. Raise "
        "max.message.bytes of the topic, and message.max.bytes of the client (1 MB unless set; [kafka] in the "
        "configuration file, or --kafka); or write less with each record, or in each batch (batch.size)."
    )


def _drop(transaction: Transaction) -> None:
    """Drop the last reference."""
    del transaction.producer
