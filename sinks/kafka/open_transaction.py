"""An open transaction of Kafka: initialised, looked at, written, flushed, and left open for a decision elsewhere.

Invariants: the producer's id and epoch are read between its initialisation and its first record; a record that is not
delivered fails the transaction; a producer is never closed, for that would abort its transaction, but dropped. A flush
sends at once, whatever `linger.ms` says.

A worker's loop waits for nothing: it uses `initialised` on another thread, and `produce`. All others use the methods of
`OpenTransaction`, which wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from operator import length_hint
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer, ThrottleEvent

from exactlyonce.checkpoint.records.manifest import Precommit
from exactlyonce.checkpoint.requests import TxnState
from exactlyonce.connectors.confluent import ANY_PARTITION, make_producer
from exactlyonce.connectors.kafka.client import connect
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import SETTING
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, Outdated, RecordError
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.writer import SinkFailed

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.transactions import Transactions  # a worker does without its client

PREPARE_TIMEOUT_S = 60.0
TRANSACTION_LINGER_MS = 20
"""The default in a transaction: nobody sees its records before their checkpoint completes, and few large batches cost
less. Without a transaction the library's own default counts."""
LINGER_MAX_MS = 100
"""The upper bound: a lingering record waits for the broker, and writers pause if the broker takes little."""
_LINGER = ("linger.ms", "queue.buffering.max.ms")
TUNING = {"queue.buffering.max.messages": 200_000}
"""For a fast writer, which stalls at the client's default; memory bounds its queue. The user may change it."""
WAIT_S = 0.1
"""The interval at which a wait for the client looks for failures."""

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
    "The broker does not allow it: grant whoever runs this Write on {topic} and on the pipeline's "
    "transactional ids, and run again."
)


class ProducerFailure(NamedTuple):
    """A record was not delivered, or a producer has failed."""

    reason: str
    kind: type[ExactlyOnceError] = SinkFailed
    of_times: bool = False
    """Whether the broker has refused the timestamp of some record."""

    def error(self, subject: str, **facts: str) -> ExactlyOnceError:
        """The error of *subject*."""
        return self.kind(f"{subject}: {self.reason}", **facts)


OnFailure = Callable[[ProducerFailure], None]
OnThrottle = Callable[[], None]


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


def initialised(
    config: Mapping[str, Any],
    topic: str,
    transactional_id: str | None,
    timeout_ms: int,
    failed: OnFailure,
    throttled: OnThrottle | None = None,
) -> Producer:
    """A producer whose transaction has begun, if it has an id; older producers of the id are fenced.

    *config*: librdkafka settings, without a transactional id. *topic* is written to; empty: several are. While it is
    polled or flushed, *failed* is called, and *throttled* for each answer with which a broker's quota mutes it. Raises
    `KafkaException`.
    """
    reported = False

    def undelivered(error: KafkaError | None, message: Message) -> None:
        nonlocal reported
        if error is not None and not reported:  # further failures follow from the first
            reported = True
            name = message.topic() or topic
            what = f"a record for {name}[{message.partition()}] was not delivered"
            failed(failure(name, what, why(reference(), error)))

    def broken(error: KafkaError) -> None:
        if error.fatal():
            failed(failure(topic, "the producer failed", error))

    def muted(event: ThrottleEvent) -> None:
        if throttled is not None and event.throttle_time > 0:
            throttled()

    too_long = [name for name in _LINGER if float(config.get(name, 0)) > LINGER_MAX_MS]
    transactions = {"transactional.id": transactional_id, "transaction.timeout.ms": timeout_ms}
    producer = make_producer(
        {
            **({} if transactional_id is None else {"linger.ms": TRANSACTION_LINGER_MS}),
            **config,
            **dict.fromkeys(too_long, LINGER_MAX_MS),
            **({"enable.idempotence": True} if transactional_id is None else transactions),
            "delivery.report.only.error": True,
            "on_delivery": undelivered,
            "error_cb": broken,
            "throttle_cb": muted,
        }
    )
    reference = weakref.ref(producer)  # for the callback, while a poll or a flush holds the producer
    connect(producer, topic or None, PREPARE_TIMEOUT_S)
    if transactional_id is not None:
        producer.init_transactions(PREPARE_TIMEOUT_S)
        producer.begin_transaction()
    return producer


def produce(producer: SinkProducer, topic: str, outputs: Outputs) -> bool:
    """Produce *outputs* until the client's queue is full; True if all were produced. `KafkaException`: the first of the
    rest cannot be."""
    produce, begin = producer.produce, outputs.done
    values = iter(outputs.values[begin:])
    keys = repeat(None, outputs.left) if outputs.keys is None else outputs.keys[begin:]
    places = repeat(ANY_PARTITION, outputs.left) if outputs.partitions is None else outputs.partitions[begin:]
    failed = True
    try:
        if outputs.timestamps is not None:
            times = outputs.timestamps[begin:]
            all_headers = repeat([], outputs.left) if outputs.headers is None else outputs.headers[begin:]
            for value, key, place, headers, time_ms in zip(values, keys, places, all_headers, times, strict=True):
                produce(topic, value, key, place, timestamp=time_ms, headers=[*headers])
        elif outputs.headers is None:
            for value, key, place in zip(values, keys, places, strict=True):
                produce(topic, value, key, place)
        else:
            for value, key, place, headers in zip(values, keys, places, outputs.headers[begin:], strict=True):
                produce(topic, value, key, place, headers=[*headers])
        failed = False
    except BufferError:
        return False
    finally:
        outputs.done = len(outputs.values) - length_hint(values) - failed
    return True


@dataclass
class OpenTransaction:
    """A producer with its one transaction."""

    transactional_id: str
    producer: SinkProducer
    producer_id: int = -1
    epoch: int = -1
    records: int = 0
    opened_ms: int = 0
    """By a monotonic clock."""
    checkpoint: int = 0
    subject: str = ""
    """Its name in errors."""
    failures: list[ProducerFailure] = field(default_factory=list)
    """The reported ones, if nobody else takes them."""

    @classmethod
    def begun(
        cls,
        config: ClientConfig,
        transactional_id: str,
        transactions: Transactions,
        *,
        timeout_ms: int,
        topic: str = "",
        subject: str = "",
        partitioner: str | None = None,
        opened_ms: int = 0,
    ) -> OpenTransaction:
        """A transaction that is known to be ours. *topic*: the only one that it writes to. *partitioner*: None: that of
        *config*.

        Raises `SinkFailed`, or an error that another attempt would meet again.
        """
        failures: list[ProducerFailure] = []
        subject = subject or f"transaction {transactional_id}"
        client = {**TUNING, **config.confluent(), **({} if partitioner is None else {SETTING: partitioner})}
        try:
            producer = initialised(client, topic, transactional_id, timeout_ms, failures.append)
        except KafkaException as error:
            raise failure(topic, "no producer could be made", error.args[0]).error(subject) from None
        transaction = cls(transactional_id, producer, opened_ms=opened_ms, subject=subject, failures=failures)
        state = transactions.describe([transactional_id])[transactional_id]
        if state is None or state.state != TxnState.EMPTY:
            shown = state.state if state else "unknown"
            raise SinkFailed(f"transaction {transactional_id} is {shown} right after its initialisation")
        transaction.producer_id, transaction.epoch = state.producer_id, state.epoch
        return transaction

    def write(self, topic: str, outputs: Outputs) -> None:
        """Produce all of *outputs*; waits while the client's queue is full."""
        count = outputs.left
        try:
            while not produce(self.producer, topic, outputs):
                self.producer.poll(WAIT_S)
                self._raise_failure()
            self.producer.poll(0)
        except KafkaException as error:
            self._raise_failure()
            raise refused(topic, outputs, self.producer, error.args[0]).error(self.subject) from None
        self.records += count
        self._raise_failure()

    def flush(self) -> None:
        """Return once the broker has every record; the client fails at the transaction's timeout."""
        while cast("Producer", self.producer).flush(WAIT_S):
            self._raise_failure()
        self._raise_failure()

    def precommit(self, sink: str, subtask: int, checkpoint: int, now_ms: int) -> Precommit:
        """The transaction as the decision on *checkpoint* needs it, once it is flushed."""
        return Precommit(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            epoch=self.epoch,
            sink=sink,
            subtask=subtask,
            checkpoint=checkpoint,
            records=self.records,
            open_ms=now_ms - self.opened_ms,
        )

    def commit(self) -> None:
        """Commit it at once, without a decision. Raises `KafkaException`."""
        cast("Producer", self.producer).commit_transaction(PREPARE_TIMEOUT_S)

    def drop(self) -> None:
        """Release the client on a thread of its own: ending its threads takes milliseconds."""
        Thread(target=self.release, daemon=True).start()

    def release(self) -> None:
        """Drop the last reference to the client."""
        del self.producer

    def _raise_failure(self) -> None:
        if self.failures:
            raise self.failures[0].error(self.subject)


def refused(topic: str, outputs: Outputs, producer: SinkProducer, error: KafkaError) -> ProducerFailure:
    """The failure with which the client refuses the first of the rest of *outputs*."""
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE and outputs.left:
        value, key = outputs.values[outputs.done], None if outputs.keys is None else outputs.keys[outputs.done]
        what = f"a record of {len(value or b'') + len(key or b''):,} bytes"
        return ProducerFailure(too_large(topic, what), RecordError)
    partition = f"[{outputs.partitions[outputs.done]}]" if outputs.partitions is not None and outputs.left else ""
    return failure(topic, f"a record for {topic}{partition} could not be produced", why(producer, error))


def failure(topic: str, what: str, error: KafkaError) -> ProducerFailure:
    """The failure *what*, caused by *error*; its kind is final if another attempt would meet it again."""
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return ProducerFailure(too_large(topic, "a record, or the batch that it was sent with,"), RecordError)
    if error.code() in _OF_A_BATCH:
        return ProducerFailure(f"{what}: {error.str()}. {_INVALID.format(topic=topic)}", RecordError, of_times=True)
    if error.code() == KafkaError.INVALID_TIMESTAMP:
        return ProducerFailure(
            f"{what}: {error.str()}. {_REFUSED_TIME.format(topic=topic)}", RecordError, of_times=True
        )
    if error.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return ProducerFailure(f"{what}: {error.str()}. {_OUTDATED}", Outdated)
    if error.code() in _NOT_ALLOWED:
        return ProducerFailure(
            f"{what}: {error.str()}. {_GRANT.format(topic=f'topic {topic!r}' if topic else 'its topics')}", ConfigError
        )
    return ProducerFailure(f"{what}: {error.str()}", SinkFailed)


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
