"""The requests of the decision log and its writer at a real broker: each is sent once, and its answer classified.

`checkpoint.transactions.transactional_writer` decides on transactions, retries and epochs. This module finds brokers,
encodes batches and reads error codes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from kafka.errors import for_code
from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest, ProduceRequest
from kafka.record.default_records import DefaultRecordBatchBuilder

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.manifest import TopicInfo, Written
from exactlyonce.checkpoint.requests import Answered, Fate, Producer, WriteAnswer
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import log_ends, read_log
from exactlyonce.connectors.kafka.checkpoint_topic.topic import TIMEOUT_MS, as_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID, Again, refuse
from exactlyonce.connectors.kafka.kafka_protocol import Observe, PartitionLeader, Places, Request, Wire
from exactlyonce.connectors.kafka.log import fates_now
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, InvariantViolation, TopicError

PRODUCE_TIMEOUT_MS = 10_000
ALL_REPLICAS = -1
LOOK_TIMEOUT_MS = 15_000
UNBOUNDED = 2**31 - 1
"""Bytes of a batch, for the builder: the request is bounded already."""

INVALID_TRANSACTION_TIMEOUT = 50
WRITE_ANSWERS = {
    0: WriteAnswer.DONE,
    46: WriteAnswer.ABORTABLE,  # DUPLICATE_SEQUENCE_NUMBER: written, at an offset that is forgotten
    47: WriteAnswer.FENCED,  # INVALID_PRODUCER_EPOCH
    48: WriteAnswer.FENCED,  # INVALID_TXN_STATE
    49: WriteAnswer.FENCED,  # INVALID_PRODUCER_ID_MAPPING
    90: WriteAnswer.FENCED,  # PRODUCER_FENCED
    45: WriteAnswer.ABORTABLE,  # OUT_OF_ORDER_SEQUENCE_NUMBER
    59: WriteAnswer.ABORTABLE,  # UNKNOWN_PRODUCER_ID
    120: WriteAnswer.ABORTABLE,  # TRANSACTION_ABORTABLE
    UNKNOWN_TOPIC: WriteAnswer.BUSY,  # the next look-up shows whether it is gone or moved
    UNKNOWN_TOPIC_ID: WriteAnswer.BUSY,
}
"""The meaning of error codes for a batch. `errors.refuse` knows the others."""


class _TopicLost(Exception):
    """The topic is not the one that was opened."""

    def __init__(self, answer: WriteAnswer) -> None:
        super().__init__(answer.value)
        self.answered = Answered(answer, answer.value)


class LogRequests:
    """Answers the requests of a decision log in *topic*. The constructor opens no connection.

    Used by one thread at a time; a second one may ask `LookOnce`, and a third `FirstOffsets`, over connections of their
    own. A request without an answer raises `BrokerUnavailable`; the next one looks the brokers up again.
    """

    def __init__(
        self,
        config: ClientConfig,
        topic: TopicInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        observed: Callable[[], Observe | None] = lambda: None,
    ) -> None:
        """*observed* is called for each client that is made."""
        self.topic = topic
        self.sleep = sleep
        self._places = Places()
        """A look in another thread may clear them at any time."""

        def wire(timeout_ms: int) -> Wire:
            return Wire(
                config, timeout_ms=timeout_ms, clock=clock, sleep=sleep, observe=observed(), places=self._places
            )

        self._wire = wire(PRODUCE_TIMEOUT_MS)
        self._looks = wire(LOOK_TIMEOUT_MS)
        """The connections of requests that wait at a broker, where they would hold up others."""
        self._topics = Topics(config, clock=clock, sleep=sleep, observe=observed())
        self._ends = Topics(config, timeout_ms=TIMEOUT_MS)
        self._topic_id: UUID | None = None

    def __call__(self, request: ask.Request) -> Any:
        match request:
            case ask.InitTransactions():
                doing = f"Fencing older writers of {self.topic.name}"
                return self._once(lambda: self._initialised(request, doing), doing, request.wait_ms)
            case ask.ProduceBatches():
                doing = f"Writing to {self.topic.name}"
                answers = self._once(lambda: self._produced(request, doing), doing, request.wait_ms)
                if isinstance(answers, Answered):
                    return {batch.partition: answers for batch in request.batches}
                return answers
            case ask.EndTransaction():
                doing = f"Ending a transaction in {self.topic.name}"
                return self._once(lambda: self._ended(request, doing), doing, request.wait_ms)
            case ask.LookOnce():
                doing = f"Looking for a decision in {self.topic.name}"
                return self._looks.once(lambda: self._looked(request), doing, LOOK_TIMEOUT_MS)
            case ask.LogEnds():
                return log_ends(self._ends, self.topic.name)
            case ask.ReadLog(end):
                return read_log(self._ends, self.topic.name, end)
            case ask.FirstOffsets():
                topic = as_topic(self.topic)
                firsts = self._topics.first_offsets(topic)
                return None if firsts is None else tuple(firsts[partition] for partition in range(topic.partitions))
            case ask.Pause(duration_ms):
                return self.sleep(duration_ms / 1000)
            case ask.Together(requests):  # one after the other, in this order
                return tuple(ask.answered(single, self) for single in requests)
        raise InvariantViolation(f"{request} is not a request of a decision log")

    def freeze(self, topic: TopicInfo) -> None:
        """Use only the partitions of *topic*: those that the log was written with."""
        self.topic = topic
        self._places.forget()

    def close(self) -> None:
        """Close the connections; transactions stay as they are."""
        self._wire.close()
        self._looks.close()
        self._topics.close()
        self._ends.close()

    # --- single requests

    def _once(self, attempt: Callable[[], Any], doing: str, wait_ms: int) -> Any:
        """The result of *attempt*; after a failed one the brokers are looked up again."""

        def looking() -> Any:
            try:
                return attempt()
            except _TopicLost as lost:
                return lost.answered
            except Again:
                self._places.forget()
                raise

        return self._wire.once(looking, doing, wait_ms)

    def _initialised(self, request: ask.InitTransactions, doing: str) -> Answered:
        message = InitProducerIdRequest(
            transactional_id=request.transactional_id,
            transaction_timeout_ms=request.transaction_timeout_ms,
            producer_id=-1,
            producer_epoch=-1,
            max_version=5,  # later ones can keep a prepared transaction
        )
        answer = self._wire.ask(message, self._coordinator(request.transactional_id))
        if answer.error_code == INVALID_TRANSACTION_TIMEOUT:
            raise ConfigError(
                f"The broker refuses the transaction timeout of decisions, {request.transaction_timeout_ms} ms. Raise "
                f"its transaction.max.timeout.ms to {request.transaction_timeout_ms} or more."
            )
        refuse(answer.error_code, doing)
        return Answered(WriteAnswer.DONE, "", Producer(answer.producer_id, answer.producer_epoch))

    def _produced(self, request: ask.ProduceBatches, doing: str) -> dict[int, Answered]:
        leaders = self._leaders()
        by_node: defaultdict[int, list[ask.DecisionBatch]] = defaultdict(list)
        for batch in request.batches:
            by_node[leaders[self.topic.name, batch.partition].node_id].append(batch)
        messages = [Request(self._produce_request(request, batches), node) for node, batches in by_node.items()]
        answers = {
            response.index: _written(response, f"{doing}[{response.index}]")
            for answer in self._wire.ask_all(messages)
            for response in answer.responses[0].partition_responses
        }
        if any(answered.answer is WriteAnswer.BUSY for answered in answers.values()):
            self._places.forget()
        return answers

    def _ended(self, request: ask.EndTransaction, doing: str) -> Answered:
        message = EndTxnRequest(
            transactional_id=request.transactional_id,
            producer_id=request.producer.producer_id,
            producer_epoch=request.producer.epoch,
            committed=request.commit,
            min_version=5,  # it raises the epoch
        )
        answer = self._wire.ask(message, self._coordinator(request.transactional_id))
        if WRITE_ANSWERS.get(answer.error_code) is WriteAnswer.FENCED:
            return Answered(WriteAnswer.FENCED, for_code(answer.error_code).__name__)
        refuse(answer.error_code, doing)
        return Answered(WriteAnswer.DONE, "", Producer(answer.producer_id, answer.producer_epoch))

    def _looked(self, request: ask.LookOnce) -> dict[int, Fate | None]:
        """Fetch from the leaders of the batches or, if they are forgotten, from the present leaders."""
        name = self.topic.name
        leaders = self._looks.leaders_remembered([(name, partition) for partition, _ in request.offsets])
        places = {
            Written(name, partition, offset, 1): leaders[name, partition] for partition, offset in request.offsets
        }
        try:
            fates = fates_now(self._looks, request.producer, places, request.wait_ms)
        except Again:
            self._places.forget()
            raise
        return {place.partition: fate for place, fate in zip(places, fates, strict=True)}

    # --- brokers

    def _coordinator(self, transactional_id: str) -> int:
        """The coordinator of the id; raises `_TopicLost` first if the topic is not the opened one."""
        self._leaders()
        return self._wire.coordinators_remembered([transactional_id])[transactional_id]

    def _leaders(self) -> dict[tuple[str, int], PartitionLeader]:
        name = self.topic.name
        try:
            leaders = self._wire.leaders_remembered([(name, partition) for partition in range(self.topic.partitions)])
        except TopicError:
            self._require_gone()
            raise _TopicLost(WriteAnswer.TOPIC_DELETED) from None
        self._require_same({leader.topic_id for leader in leaders.values()})
        return leaders

    def _require_gone(self) -> None:
        """Raise `Again` while any broker knows the topic: brokers learn of a new one one after the other."""
        answers = self._wire.metadata_of_each([self.topic.name])
        if any(topic.error_code != UNKNOWN_TOPIC for answer in answers for topic in answer.topics):
            raise Again(f"not every broker knows {self.topic.name} yet")

    def _require_same(self, topic_ids: set[UUID]) -> None:
        """Raise `_TopicLost` if the topic was recreated: decisions belong into the opened one."""
        self._topic_id = self._topic_id or next(iter(topic_ids))
        if topic_ids != {self._topic_id}:
            raise _TopicLost(WriteAnswer.TOPIC_MADE_ANEW)

    def _produce_request(self, request: ask.ProduceBatches, batches: Sequence[ask.DecisionBatch]) -> ProduceRequest:
        entry = ProduceRequest.TopicProduceData
        data = [
            entry.PartitionProduceData(index=batch.partition, records=_encoded(batch, request)) for batch in batches
        ]
        return ProduceRequest(
            transactional_id=request.transactional_id,
            acks=ALL_REPLICAS,
            timeout_ms=PRODUCE_TIMEOUT_MS,
            topic_data=[entry(name=self.topic.name, topic_id=self._topic_id, partition_data=data)],
            min_version=12,  # it adds the partitions to the transaction
        )


def _written(answer: Any, doing: str) -> Answered:
    code = answer.error_code
    if code in WRITE_ANSWERS:
        known, text = WRITE_ANSWERS[code], for_code(code).__name__
        reason = text if known is WriteAnswer.FENCED else f"{doing}: {text} ({code})"
        return Answered(known, reason, first_offset=answer.base_offset)
    try:
        refuse(code, doing)
    except Again as obstacle:
        return Answered(WriteAnswer.BUSY, str(obstacle))
    except ExactlyOnceError as error:
        return Answered(WriteAnswer.REFUSED, f"{error} {answer.error_message or ''}".rstrip())
    raise InvariantViolation(f"error code {code} is not an error")


def _encoded(batch: ask.DecisionBatch, request: ask.ProduceBatches) -> bytes:
    producer_id, epoch = request.producer
    builder = DefaultRecordBatchBuilder(2, 0, True, producer_id, epoch, batch.sequence, UNBOUNDED)
    for number, (_, key, value, headers) in enumerate(batch.writes):
        builder.append(number, request.timestamp_ms, key.encode(), value, list(headers))
    return bytes(builder.build())
