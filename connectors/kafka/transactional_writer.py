"""Transactions of one transactional id, written request by request: what the decision log is written with.

Invariants: every transaction has an epoch of its own, which the end of the one before has raised, so that a request of
an older transaction that arrives late (a second EndTxn, a batch) is refused and ends nothing; only EndTxn raises it,
and the id is initialised once, in `open`, so that a writer that was fenced cannot come back. A request whose answer is
missing is repeated as it was: the broker takes a batch by its sequence once, and answers the same end alike.
`NOT_WRITTEN` only where the commit was never asked for; nothing new is begun before the abort of that is confirmed.

librdkafka's producer keeps one epoch over all its transactions: EndTxn of *k*, repeated after a lost connection and
held up on the way, would end *k+1*.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from kafka.errors import for_code
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest
from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest, ProduceRequest
from kafka.record.default_records import DefaultRecordBatchBuilder

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.committable import coordinator_id
from exactlyonce.checkpoint.store.decision_log import APPEND_TIMEOUT_S, DecisionLog
from exactlyonce.checkpoint.store.topic import TopicInfo
from exactlyonce.checkpoint.store.transaction import Write
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID, Again, Request, Wire, refuse
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, ExactlyOnceError, Fenced, Halt, TopicError

OPEN_TIMEOUT_S = 60.0
ABORT_TIMEOUT_S = 8.0
TRANSACTION_TIMEOUT_MS = 180_000
"""Longer than any write is tried for: else the broker aborts behind the writer's back."""
PRODUCE_TIMEOUT_MS = 10_000
"""How long a broker waits for the replicas of a batch."""
BATCH_BYTES_MAX = 1 << 20
ALL_REPLICAS = -1

INVALID_TRANSACTION_TIMEOUT = 50
DUPLICATE_SEQUENCE = 46
FENCED = {47, 48, 49, 90}
"""INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED: the id has moved on."""
BEGIN_ANEW = {45, 59, 120}
"""OUT_OF_ORDER_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID, TRANSACTION_ABORTABLE: a new transaction may do better."""


class _Producer(NamedTuple):
    """Who the broker takes us for in the present transaction."""

    producer_id: int
    epoch: int


class _Places(NamedTuple):
    """The brokers to ask, until one of them has moved."""

    coordinator: int
    leaders: dict[int, int]


class _Refused(Exception):
    """The broker refuses what was produced; the text is its own. *anew*: another transaction may do better."""

    def __init__(self, text: str, *, anew: bool) -> None:
        super().__init__(text)
        self.anew = anew


class TransactionalWriter:
    """Writes to *topic* as *transactional_id*, from `open` until a newer writer of that id is opened.

    Used by one thread at a time. Making one connects to nothing.
    """

    def __init__(
        self,
        config: ClientConfig,
        topic: TopicInfo,
        transactional_id: str,
        now_ms: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """*now_ms* gives the records' timestamps, *clock* seconds that only grow."""
        self.topic, self.transactional_id = topic, transactional_id
        self.refusal = ""
        """Why the last write was not written."""
        self._now_ms, self._clock = now_ms, clock
        self._wire = Wire(config, timeout_ms=round(OPEN_TIMEOUT_S * 1000), clock=clock, sleep=sleep)
        self._ended: ExactlyOnceError | None = None
        self._producer = _Producer(-1, -1)
        self._places: _Places | None = None
        self._topic_id: UUID | None = None
        self._aborting = False
        """Whether a transaction is to be aborted before the next one begins."""

    def open(self) -> None:
        """Fence every older writer, and abort what it had open."""
        doing = f"Fencing older writers of {self.topic.name}"
        self._producer = self._retrying(lambda: self._initialised(doing), doing, OPEN_TIMEOUT_S)

    def write(self, writes: Sequence[Write], timeout_s: float) -> Outcome:
        """Write all of *writes*, or none. Raises what ended the writer: `Fenced`, or what else is beyond repair."""
        deadline = self._clock() + timeout_s
        while True:
            if self._ended is not None:
                raise self._ended
            if self._aborting and not self._abort(deadline - self._clock()):
                return Outcome.NOT_WRITTEN
            try:
                self._produce(writes, deadline)
                break
            except (_Refused, BrokerUnavailable) as obstacle:
                self.refusal, self._aborting = str(obstacle), True
                aborted = self._abort(ABORT_TIMEOUT_S)
                if not (aborted and isinstance(obstacle, _Refused) and obstacle.anew and self._clock() < deadline):
                    return Outcome.NOT_WRITTEN
        return self._commit(deadline)

    def end(self, reason: ExactlyOnceError) -> None:
        """Write nothing more: whoever tries meets *reason*.

        An open transaction stays open for the next writer's `open` to end: after `UNKNOWN` it may be committed.
        """
        self._ended = reason
        self._wire.close()

    # --- the steps of a transaction

    def _initialised(self, doing: str) -> _Producer:
        request = InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
            max_version=5,  # later ones can keep a prepared transaction
        )
        answer = self._wire.ask(request, self._find().coordinator)
        if answer.error_code == INVALID_TRANSACTION_TIMEOUT:
            raise ConfigError(
                f"The broker refuses a transaction timeout of {TRANSACTION_TIMEOUT_MS} ms, which decisions need. Raise "
                f"its transaction.max.timeout.ms to three minutes ({TRANSACTION_TIMEOUT_MS}) or more."
            )
        refuse(answer.error_code, doing)
        return _Producer(answer.producer_id, answer.producer_epoch)

    def _produce(self, writes: Sequence[Write], deadline: float) -> None:
        """Bring every batch to its partition; raises `_Refused`, or `BrokerUnavailable` when the time is over."""
        doing = f"Writing to {self.topic.name}"
        waiting = _batches(writes, self._producer, self._now_ms())
        while waiting:
            first = {partition: batches[0] for partition, batches in waiting.items()}
            self._retrying(partial(self._send, first, doing), doing, deadline - self._clock())
            waiting = {partition: batches[1:] for partition, batches in waiting.items() if batches[1:]}

    def _send(self, missing: dict[int, bytes], doing: str) -> None:
        """Send these batches, and strike out those that are written; raises `Again` unless all are."""
        leaders = self._find().leaders
        by_node: defaultdict[int, list[int]] = defaultdict(list)
        for partition in missing:
            by_node[leaders[partition]].append(partition)
        requests = [
            Request(self._produce_request({each: missing[each] for each in some}), node)
            for node, some in by_node.items()
        ]
        obstacle: Again | None = None
        for answer in self._wire.ask_all(requests):
            for each in answer.responses[0].partition_responses:
                try:
                    self._written(each, f"{doing}[{each.index}]")
                    del missing[each.index]
                except Again as error:
                    obstacle = error
        if obstacle is not None:
            raise obstacle

    def _written(self, answer: Any, doing: str) -> None:
        """Raise what the answer to a batch calls for, unless it is written."""
        code = answer.error_code
        if code in (0, DUPLICATE_SEQUENCE):
            return
        if code in FENCED:
            raise self._fenced(code)
        if code in BEGIN_ANEW:
            raise _Refused(f"{doing}: {for_code(code).__name__} ({code})", anew=True)
        if code in (UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID):
            raise Again(f"{doing}: {for_code(code).__name__}")  # the next look-up tells whether it is gone, or moved
        try:
            refuse(code, doing)
        except ExactlyOnceError as error:
            raise _Refused(f"{error} {answer.error_message or ''}".rstrip(), anew=False) from None

    def _abort(self, timeout_s: float) -> bool:
        """Take back what was begun; False if the broker did not confirm it: then it is asked again.

        The commit was not asked for, so that nothing of it can ever be seen.
        """
        try:
            code = self._end_transaction(commit=False, timeout_s=timeout_s)
        except BrokerUnavailable as error:
            self.refusal = f"{self.refusal} {error}"
            return False
        if code in FENCED:
            raise self._fenced(code)
        self._aborting = False
        return True

    def _commit(self, deadline: float) -> Outcome:
        """Ask for the commit, and ask the same again while there is no answer: only success proves anything."""
        try:
            code = self._end_transaction(commit=True, timeout_s=deadline - self._clock())
        except BrokerUnavailable as error:
            self.end(
                BrokerUnavailable(
                    f"The broker did not say whether it wrote a decision to {self.topic.name}: {error} "
                    f"This life ends; the next one reads what is true."
                )
            )
            return Outcome.UNKNOWN
        if code in FENCED:
            raise self._fenced(code)
        return Outcome.DONE

    def _end_transaction(self, *, commit: bool, timeout_s: float) -> int:
        """End the transaction: 0, and the next one's epoch is known; or a code of `FENCED`."""
        doing = f"Ending a transaction in {self.topic.name}"
        request = EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self._producer.producer_id,
            producer_epoch=self._producer.epoch,
            committed=commit,
            min_version=5,  # it raises the epoch
        )

        def attempt() -> int:
            answer = self._wire.ask(request, self._find().coordinator)
            if answer.error_code in FENCED:
                return int(answer.error_code)
            refuse(answer.error_code, doing)
            self._producer = _Producer(answer.producer_id, answer.producer_epoch)
            return 0

        code: int = self._retrying(attempt, doing, timeout_s)
        return code

    def _fenced(self, code: int) -> Fenced:
        error = Fenced(f"A newer writer of {self.topic.name} took over ({for_code(code).__name__}).")
        self.end(error)
        return error

    # --- whom to ask

    def _retrying(self, attempt: Callable[[], Any], doing: str, timeout_s: float) -> Any:
        """The result of *attempt*; after each failure the brokers are looked up anew."""

        def looking() -> Any:
            try:
                return attempt()
            except Again:
                self._places = None
                raise

        return self._wire.retrying(looking, doing, timeout_ms=round(max(0.0, timeout_s) * 1000))

    def _find(self) -> _Places:
        """The broker that keeps the id, and those that lead the topic's partitions."""
        if self._places is None:
            kind = CoordinatorType.TRANSACTION.value
            question = FindCoordinatorRequest(key_type=kind, coordinator_keys=[self.transactional_id])
            found = self._wire.ask(question).coordinators[0]
            refuse(found.error_code, f"Finding the coordinator of {self.transactional_id}")
            name = self.topic.name
            try:
                leaders = self._wire.leaders([(name, each) for each in range(self.topic.partitions)])
            except TopicError:
                raise self._topic_gone("deleted") from None
            self._require_same({leader.topic_id for leader in leaders.values()})
            self._places = _Places(found.node_id, {each: leader.node_id for (_, each), leader in leaders.items()})
        return self._places

    def _require_same(self, topic_ids: set[UUID]) -> None:
        """Decisions go into the topic that was opened: one made anew under its name knows nothing of them."""
        self._topic_id = self._topic_id or next(iter(topic_ids))
        if topic_ids != {self._topic_id}:
            raise self._topic_gone("deleted and created again")

    def _topic_gone(self, what: str) -> Halt:
        return Halt(
            f"The checkpoint topic {self.topic.name} was {what} while the pipeline ran, and with it what was decided.\n"
            f"  Choices: restore it from a replica or backup and run again; or `exactlyonce reset "
            f"{self.topic.name.removesuffix('.checkpoints')}` and recompute the output from the input into new output "
            f"topics."
        )

    def _produce_request(self, batches: dict[int, bytes]) -> ProduceRequest:
        entry = ProduceRequest.TopicProduceData
        data = [entry.PartitionProduceData(index=each, records=batch) for each, batch in batches.items()]
        return ProduceRequest(
            transactional_id=self.transactional_id,
            acks=ALL_REPLICAS,
            timeout_ms=PRODUCE_TIMEOUT_MS,
            topic_data=[entry(name=self.topic.name, topic_id=self._topic_id, partition_data=data)],
            min_version=12,  # it adds the partitions to the transaction
        )


def decision_log(
    config: ClientConfig, pipeline: str, topic: TopicInfo, clock: Clock, append_timeout_s: float = APPEND_TIMEOUT_S
) -> DecisionLog:
    """The decision log of *pipeline* in *topic* of a real cluster. Making it fences nobody."""
    writer = TransactionalWriter(config, topic, coordinator_id(pipeline), clock.now_ms)
    return DecisionLog(config.confluent(), pipeline, topic, clock, writer, append_timeout_s)


def _batches(writes: Sequence[Write], producer: _Producer, now_ms: int) -> dict[int, list[bytes]]:
    """By partition, its records as batches in order; the first record's sequence is 0, for the epoch is fresh."""
    by_partition: defaultdict[int, list[Write]] = defaultdict(list)
    for each in writes:
        by_partition[each.partition].append(each)
    return {partition: list(_split(some, producer, now_ms)) for partition, some in by_partition.items()}


def _split(writes: Sequence[Write], producer: _Producer, now_ms: int) -> Iterator[bytes]:
    done = 0
    while done < len(writes):
        batch = DefaultRecordBatchBuilder(2, 0, True, producer.producer_id, producer.epoch, done, BATCH_BYTES_MAX)
        taken = 0
        for _, key, value, headers in writes[done:]:
            if batch.append(taken, now_ms, key.encode(), value, list(headers)) is None:  # there is no more room
                break
            taken += 1
        yield bytes(batch.build())
        done += taken
