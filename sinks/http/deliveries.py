"""The ledger of an HTTP sink: a topic of one partition, whose last record says what the service has answered.

The service itself has no ledger, so an answer and its entry are two steps, and requests between them are repeated.

Invariants: one transaction has the ledger's next state and the dead letters that it counts, so each letter is written
once. All writers of a ledger have one transactional id. A writer initialises it, which ends the transaction of an older
one, then reads the ledger, judges, and writes: a transaction fails if another writer has initialised it since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message

from exactlyonce.checkpoint.records.manifest import transaction_prefix
from exactlyonce.connectors.confluent import make_producer
from exactlyonce.connectors.kafka.client import MESSAGE_SIZE_MAX
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.dead_letters import DeadLetter
from exactlyonce.pipeline.errors import ASKED_AGAIN, BrokerUnavailable, StoreError, StoreUnavailable, TopicError
from exactlyonce.pipeline.retries import OF_BROKER, retried
from exactlyonce.sinks.http.sink import deliveries_topic
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger

if TYPE_CHECKING:
    from confluent_kafka import Producer

R = TypeVar("R")
TIMEOUT_S = 30.0
TRANSACTION_TIMEOUT_MS = 60_000
_KEY = b"ledger"
_TAILS = (8, 1_024)
"""The offsets before the end in which the last record is looked for first: markers and aborted records follow it."""


class Deliveries(SinkLedger, frozen=True, kw_only=True):
    """The ledger, with the progress within a checkpoint."""

    answered: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    """By subtask, the checkpoint that is being sent, and the number of its records that were answered."""

    def start(self, entry: LedgerEntry) -> int:
        """The number of records of *entry* that were answered."""
        checkpoint, records = self.answered.get(entry.subtask, (0, 0))
        return records if checkpoint == entry.checkpoint else 0

    def progressed(self, entry: LedgerEntry, records: int) -> Deliveries:
        """The ledger once so many *records* of *entry* are answered, and not all."""
        answered = {**self.answered, entry.subtask: (entry.checkpoint, records)}
        return msgspec.structs.replace(self, answered=answered)


class DeliveryLog:
    """The ledger of *sink*. For one thread; it connects when it is first asked.

    Raises `StoreUnavailable` where the broker does not answer or another writer has begun. Then the next call looks
    again: the ledger's incarnation says who may write.
    """

    def __init__(self, config: ClientConfig, pipeline: str, sink: str) -> None:
        self._config = config
        self._topic = deliveries_topic(pipeline, sink)
        self._id = f"{transaction_prefix(pipeline)}{sink}:deliveries"
        self._topics = Topics(config)
        self._producer: Producer | None = None
        self._known, self._end = Deliveries(), -1
        """The ledger at an offset; -1: it is not known."""
        self._errors: list[KafkaError] = []
        self._last_offset = -1

    def create(self) -> None:
        """Create the topic if it is missing. `StoreError` if it is not as it must be."""
        with self._explained():
            self._create()
            partitions = self._topics.describe([self._topic])[self._topic].partitions
            policy = self._topics.settings(self._topic)["cleanup.policy"]
        if partitions != 1 or policy != "compact":
            raise StoreError(
                f"Topic {self._topic} has {partitions} partitions and cleanup.policy={policy}, and must have one "
                f"partition and compact: it is not that of the sink's ledger. Rename the pipeline, or the sink."
            )

    def _create(self) -> None:
        if self._topics.facts(self._topic) is None:
            self._topics.create(self._topic, partitions=1, settings={"cleanup.policy": "compact"})

    def look(self) -> Deliveries:
        """The committed ledger; an empty one without the topic."""
        with self._explained():
            try:
                return self._latest()
            except TopicError:
                return Deliveries()

    def judged(self, judge: Callable[[Deliveries], R]) -> tuple[Deliveries, R]:
        """The ledger and what *judge* says of it, once no other writer can change it any more without a `write` that
        fails. An error of *judge* disturbs no other writer."""
        ledger = self.look()
        judgement = judge(ledger)
        if self._producer is None:
            with self._explained():
                self._initialise()
                ledger = self._latest()
            judgement = judge(ledger)
        return ledger, judgement

    def _initialise(self) -> None:
        settings = {
            "transactional.id": self._id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "message.max.bytes": MESSAGE_SIZE_MAX,
        }
        self._create()
        producer = make_producer(self._config.confluent(settings))
        producer.init_transactions(TIMEOUT_S)
        offsets = self._topics.log_offsets(self._topic)
        if offsets.stable != offsets.end:
            raise StoreUnavailable(f"Topic {self._topic} has a transaction that is not ended yet. {ASKED_AGAIN}")
        self._producer = producer

    def _latest(self) -> Deliveries:
        end = self._topics.end_offsets(self._topic, committed=True)[0]
        if end > self._end:
            self._known, self._end = self._read(end), end
        return self._known

    def _read(self, end: int) -> Deliveries:
        """The last committed record before *end*."""
        first = self._topics.start_offsets(self._topic)[0]
        for tail in (*_TAILS, end):
            start = max(first, end - tail)
            last: bytes | None = None
            with closing(RangeReader(self._topic, 0, start, end, self._config)) as reader:
                while messages := reader.read(1_000):
                    last = messages[-1].value()
            if last is not None or start == first:
                break
        return Deliveries() if last is None else msgspec.json.decode(last, type=Deliveries)

    def write(self, ledger: Deliveries, letters: Sequence[DeadLetter] = (), letters_topic: str = "") -> None:
        """Write *ledger*, which is `judged`, and *letters*, in one transaction."""
        with self._explained():
            producer, self._errors = self._producer, []
            if producer is None:
                raise StoreUnavailable(f"Topic {self._topic} has another writer. {ASKED_AGAIN}")
            producer.begin_transaction()
            for letter in letters:
                self._produce(producer, letters_topic, letter.value, letter.headers)
            self._produce(producer, self._topic, ledger.encode())
            left = producer.flush(TIMEOUT_S)
            self._raise_first(letters_topic)
            if left:
                raise StoreUnavailable(f"Topic {self._topic}: {left} records were not taken in time. {ASKED_AGAIN}")
            producer.commit_transaction(TIMEOUT_S)
            self._known, self._end = ledger, self._last_offset + 2  # the record, and the marker of its transaction
            self._await_readers()

    def _await_readers(self) -> None:
        """Return once readers see the last transaction: a zombie that looks is fenced before it sends anything."""

        def look() -> None:
            if self._topics.end_offsets(self._topic, committed=True)[0] < self._end:
                raise StoreUnavailable(f"Topic {self._topic} does not show a transaction to readers. {ASKED_AGAIN}")

        deadline_s = time.monotonic() + TIMEOUT_S
        retried(look, StoreUnavailable, OF_BROKER, deadline_s, clock=time.monotonic, sleep=threading.Event().wait)

    def _produce(
        self, producer: Producer, topic: str, value: bytes | None, headers: Iterable[tuple[str, bytes | None]] = ()
    ) -> None:
        key = _KEY if topic == self._topic else None
        while True:
            try:
                producer.produce(topic, value, key, headers=[*headers], on_delivery=self._delivered)
                return
            except BufferError:
                producer.poll(0.1)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._errors.append(error)
        elif message.topic() == self._topic:
            self._last_offset = message.offset() or 0

    def _raise_first(self, letters_topic: str) -> None:
        for error in self._errors:
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise StoreError(
                    f"Topic {letters_topic} does not take a dead letter of this size: raise its max.message.bytes"
                )
            raise KafkaException(error)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors as those of a store. After one the ledger is read again, by a new producer."""
        try:
            yield
        except (KafkaException, BrokerUnavailable, SystemError) as error:  # the latter for a callback after a fence
            self._forget()
            text = error.args[0].str() if isinstance(error, KafkaException) else str(error)
            raise StoreUnavailable(
                f"Topic {self._topic}: {self._config.redact(text).rstrip('.')}. {ASKED_AGAIN}"
            ) from None
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drop the producer, and let its successor end its transaction."""
        self._producer, self._end = None, -1

    def close(self) -> None:
        self._forget()
        self._topics.close()
