"""A real cluster as a `TransactionalBroker`, for contract tests: each operation is sent once, its answer returned.

It uses librdkafka's versions (AddPartitionsToTxn 0, Produce 10), so that its answers are those that the engine's
producers get. Only the lookups of coordinators and partition leaders are retried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]  # its stubs hide two
from kafka.protocol.admin.topics import DeleteRecordsRequest
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest
from kafka.protocol.producer import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest, ProduceRequest
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from exactlyonce.checkpoint.requests import ListedTransaction, ProducerState, TransactionState
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import Again, refuse
from exactlyonce.connectors.kafka.kafka_protocol import Request, Wire
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import TopicError
from exactlyonce.testing.broker.interface import Error, Fetched, Initialized, Isolation, NoAnswer, Produced, Record

TIMEOUT_MS = 30_000
FETCH_BYTES_MAX = 16 << 20
BATCH_BYTES_MAX = 1 << 20
REQUESTS_AT_ONCE = 1_000
_MOVING = (14, 15, 16)
"""Errors of a transaction coordinator that loads, is not available or moved."""


class RealBroker:
    """A `TransactionalBroker` that is real. Topics have one replica. Used by one thread."""

    def __init__(self, bootstrap_servers: str) -> None:
        config = ClientConfig({"bootstrap.servers": bootstrap_servers})
        self._wire = Wire(config, timeout_ms=TIMEOUT_MS)
        self._transactions = Transactions(config, timeout_ms=TIMEOUT_MS)
        self._admin = AdminClient(config.confluent())
        self._sequences: defaultdict[tuple[str, int, int, int], int] = defaultdict(int)
        """The next sequence number by topic, partition, producer id and epoch."""

    def create_topic(self, topic: str, partitions: int = 1, *, compact: bool = False) -> Error:
        config = {"cleanup.policy": "compact"} if compact else {"retention.ms": "-1"}
        error = _error(self._admin.create_topics([NewTopic(topic, partitions, 1, config=config)]))
        self._await_leaders(topic, partitions)
        return error

    def delete_topic(self, topic: str) -> Error:
        error = _error(self._admin.delete_topics([topic]))
        self._wire.retrying(lambda: self._require_gone(topic), f"Deleting topic {topic}")
        for key in [key for key in self._sequences if key[0] == topic]:
            del self._sequences[key]
        return error

    def add_partitions(self, topic: str, total: int) -> Error:
        error = _error(self._admin.create_partitions([NewPartitions(topic, total)]))
        if error is Error.NONE:
            self._await_leaders(topic, total)
        return error

    def topic_id(self, topic: str) -> str | None:
        try:
            return str(self._wire.topics([topic])[topic].topic_id)
        except TopicError:
            return None

    def init_transactions(self, transactional_id: str | None, timeout_ms: int = 60_000) -> Initialized:
        answer = self._ask_coordinator(transactional_id, _init_request(transactional_id, timeout_ms))
        return Initialized(Error(answer.error_code), answer.producer_id, answer.producer_epoch)

    def use_up_epochs(self, transactional_id: str, count: int) -> None:
        """Initialise *count* times, with up to `REQUESTS_AT_ONCE` requests in flight."""
        node = self._coordinator(transactional_id)
        for first in range(0, count, REQUESTS_AT_ONCE):
            requests = range(first, min(count, first + REQUESTS_AT_ONCE))
            self._wire.ask_all([Request(_init_request(transactional_id, TIMEOUT_MS), node) for _ in requests])

    def add_to_transaction(
        self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int
    ) -> Error:
        in_topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[in_topic(name=topic, partitions=[partition])],
            max_version=0,
        )
        answer = self._ask_coordinator(transactional_id, request)
        return Error(answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)

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
        if transactional_id is not None and not added:
            error = self.add_to_transaction(transactional_id, producer_id, epoch, topic, partition)
            if error is not Error.NONE:
                return Produced(error)
        position = (topic, partition, producer_id, epoch)
        first_sequence = self._sequences[position] if sequence is None else sequence
        request = _produce_request(transactional_id, producer_id, epoch, topic, partition, records, first_sequence)
        answer = self._ask_leader(topic, partition, request)
        if answer is None:
            return Produced(Error.UNKNOWN_TOPIC_OR_PARTITION)
        produced = _produced(answer)
        if produced.error is Error.NONE:
            self._sequences[position] = max(self._sequences[position], first_sequence + len(records))
        return produced

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        request = _end_request(transactional_id, producer_id, epoch, commit)
        return Error(self._ask_coordinator(transactional_id, request).error_code)

    def commit_in_a_rush(
        self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int, late: Sequence[Any]
    ) -> tuple[Error, Error, Error, Produced]:
        """Send a commit, the same again, an abort and a *late* batch before the first answer comes."""
        node = self._coordinator(transactional_id)
        endings = [_end_request(transactional_id, producer_id, epoch, commit) for commit in (True, True, False)]
        sequence = self._sequences[topic, partition, producer_id, epoch]
        batch = _produce_request(transactional_id, producer_id, epoch, topic, partition, late, sequence)
        leader = self._wire.leaders([(topic, partition)])[topic, partition].node_id
        requests = [*(Request(ending, node) for ending in endings), Request(batch, leader)]
        first, again, abort, produced = self._wire.ask_all(requests)
        return Error(first.error_code), Error(again.error_code), Error(abort.error_code), _produced(produced)

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionState | None]:
        return self._transactions.describe(transactional_ids)

    def list_transactions(self, prefix: str = "") -> list[ListedTransaction]:
        return sorted(self._transactions.list(prefix), key=lambda listed: listed.transactional_id)

    def describe_producers(self, partitions: Iterable[tuple[str, int]]) -> list[ProducerState]:
        states = self._transactions.producers(partitions)
        return sorted(states, key=lambda state: (state.topic, state.partition, state.producer_id))

    def fetch(
        self, topic: str, partition: int, offset: int = 0, isolation: Isolation = Isolation.READ_COMMITTED
    ) -> Fetched:
        records: list[Record] = []
        position = offset
        while True:
            answer = self._ask_leader(topic, partition, _fetch_request(topic, partition, position, isolation))
            if answer is None:
                return Fetched(Error.UNKNOWN_TOPIC_OR_PARTITION)
            data = _fetched(answer)
            if data.error_code:
                return Fetched(Error(data.error_code))
            batches = list(_batches(data.records))
            hidden = data.aborted_transactions if isolation is Isolation.READ_COMMITTED else None
            records += (record for record in _visible(batches, hidden or []) if record.offset >= position)
            if not batches:
                return Fetched(
                    Error.NONE, tuple(records), data.log_start_offset, data.last_stable_offset, data.high_watermark
                )
            position = batches[-1].last_offset + 1

    def delete_records(self, topic: str, partition: int, before_offset: int) -> Error:
        in_topic = DeleteRecordsRequest.DeleteRecordsTopic
        of_partition = in_topic.DeleteRecordsPartition(partition_index=partition, offset=before_offset)
        topics = [in_topic(name=topic, partitions=[of_partition])]
        answer = self._ask_leader(topic, partition, DeleteRecordsRequest(topics=topics, timeout_ms=TIMEOUT_MS))
        if answer is None:
            return Error.UNKNOWN_TOPIC_OR_PARTITION
        return Error(answer.topics[0].partitions[0].error_code)

    def close(self) -> None:
        """Close the connections."""
        self._wire.close()
        self._transactions.close()

    def _ask_coordinator(self, transactional_id: str | None, request: Any) -> Any:
        """The answer of the id's transaction coordinator; of any broker without an id."""

        def attempt() -> Any:
            node = None if transactional_id is None else self._coordinator(transactional_id)
            answer = self._ask(request, node)
            if getattr(answer, "error_code", 0) in _MOVING:
                raise Again("the transaction coordinator is moving")
            return answer

        return self._wire.retrying(attempt, f"Asking the coordinator of {transactional_id}")

    def _coordinator(self, transactional_id: str) -> int:
        kind = CoordinatorType.TRANSACTION.value
        question = FindCoordinatorRequest(key_type=kind, coordinator_keys=[transactional_id])
        coordinator = self._wire.ask(question).coordinators[0]
        refuse(coordinator.error_code, f"Finding the coordinator of {transactional_id}")
        return int(coordinator.node_id)

    def _ask_leader(self, topic: str, partition: int, request: Any) -> Any:
        """The answer of the partition's leader; None: there is no such partition."""
        try:
            leaders = self._wire.leaders([(topic, partition)])
        except TopicError:
            return None
        except Again as lost:
            raise NoAnswer(str(lost)) from None
        return self._ask(request, leaders[topic, partition].node_id)

    def _ask(self, request: Any, node: int | None) -> Any:
        try:
            return self._wire.ask(request, node)
        except Again as lost:
            raise NoAnswer(str(lost)) from None

    def _await_leaders(self, topic: str, partitions: int) -> None:
        """Wait until the leader of every partition answers."""

        def attempt(partition: int) -> None:
            request = _fetch_request(topic, partition, 0, Isolation.READ_UNCOMMITTED)
            answer = self._ask_leader(topic, partition, request)
            if answer is None or _fetched(answer).error_code not in (Error.NONE, Error.OFFSET_OUT_OF_RANGE):
                raise Again(f"{topic}-{partition} has no leader yet")

        for partition in range(partitions):
            self._wire.retrying(partial(attempt, partition), f"Creating {topic}-{partition}")

    def _require_gone(self, topic: str) -> None:
        if self.topic_id(topic) is not None:
            raise Again(f"{topic} is still there")


def _init_request(transactional_id: str | None, timeout_ms: int) -> Any:
    return InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
        max_version=4,
    )


def _end_request(transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Any:
    return EndTxnRequest(
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        committed=commit,
        min_version=5,
        max_version=5,
    )


def _produce_request(
    transactional_id: str | None,
    producer_id: int,
    epoch: int,
    topic: str,
    partition: int,
    records: Sequence[tuple[Any, Any]],
    first_sequence: int,
) -> Any:
    transactional = transactional_id is not None
    batch = DefaultRecordBatchBuilder(2, 0, transactional, producer_id, epoch, first_sequence, BATCH_BYTES_MAX)
    for index, (key, value) in enumerate(records):
        batch.append(index, None, key, value, [])
    in_topic = ProduceRequest.TopicProduceData
    data = in_topic.PartitionProduceData(index=partition, records=bytes(batch.build()))
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=-1,
        timeout_ms=TIMEOUT_MS,
        topic_data=[in_topic(name=topic, partition_data=[data])],
        max_version=10,
    )


def _produced(answer: Any) -> Produced:
    result = answer.responses[0].partition_responses[0]
    return Produced(Error(result.error_code), result.base_offset)


def _error(futures: Mapping[Any, Future[Any]]) -> Error:
    """The error of a request about topics."""
    for future in futures.values():
        try:
            future.result(TIMEOUT_MS / 1000)
        except KafkaException as failure:
            return Error(failure.args[0].code())
    return Error.NONE


def _fetch_request(topic: str, partition: int, offset: int, isolation: Isolation) -> Any:
    in_topic = FetchRequest.FetchTopic
    of_partition = in_topic.FetchPartition(
        partition=partition,
        current_leader_epoch=-1,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=FETCH_BYTES_MAX,
    )
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=FETCH_BYTES_MAX,
        isolation_level=isolation.value,
        session_id=0,
        session_epoch=-1,
        topics=[in_topic(topic=topic, partitions=[of_partition])],
        forgotten_topics_data=[],
        rack_id="",
        max_version=12,  # later ones name topics by id
    )


def _fetched(answer: Any) -> Any:
    return answer.responses[0].partitions[0]


def _batches(data: bytes | None) -> Iterator[Any]:
    memory = MemoryRecords(bytes(data or b""))
    while memory.has_next():
        yield memory.next_batch()


def _visible(batches: Iterable[Any], aborted: Iterable[Any]) -> Iterator[Record]:
    """The data records in *batches* without those of the *aborted* transactions (producer id, first offset)."""
    aborting = sorted(((transaction.first_offset, transaction.producer_id) for transaction in aborted), reverse=True)
    hidden: set[int] = set()
    for batch in batches:
        while aborting and aborting[-1][0] <= batch.last_offset:
            hidden.add(aborting.pop()[1])
        if batch.is_control_batch:
            hidden.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in hidden):
            for record in batch:
                yield Record(record.offset, record.key, record.value, batch.producer_id, batch.producer_epoch)
