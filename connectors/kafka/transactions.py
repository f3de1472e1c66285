"""Transactions as the brokers know them, and their end from another process than their writer's.

Invariants: a question is retried until its timeout, first with remembered brokers; an EndTxn is repeated only with the
same producer id, epoch and verdict; an EndTxn without an answer may have been carried out.

The answers to EndTxn, measured with Kafka 4.3.1 and transaction.version 2; tests/connectors/kafka/test_transactions.py
has every row. The end of a transaction raises the epoch of its id by one, which fences the producer that opened it.

    asked                                              answer
    -------------------------------------------------  -------------------------------------------------------------
    commit or abort of an open one, at its epoch       COMPLETED; it shows Prepare..., some ms later Complete...
    the same again while its markers are written       BUSY
    the same again later                               COMPLETED, changes nothing
    abort after commit, commit after abort             REFUSED
    commit after the broker's timeout aborted it       REFUSED
    commit of one without records (Empty)              REFUSED
    abort of an Empty or complete id, at its epoch     COMPLETED; the epoch grows: an idle producer is fenced
    anything, after a new producer or such an abort    UNKNOWN (90), whether it had been committed or aborted
    another producer id; an id never used, or expired  UNKNOWN (49)
    an epoch that is not reached yet                   UNKNOWN (90)

A producer is given epoch 32,766 at most. Ending a transaction at that epoch shows epoch 32,767 while its markers are
written, then a new producer id with epoch 0. All rows hold there as well, but that UNKNOWN is 49, not 90.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kafka.protocol.admin.configs import DescribeConfigsRequest
from kafka.protocol.admin.transactions import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest, EndTxnRequest

from exactlyonce.checkpoint.requests import EndAnswer, Ending, ListedTransaction, ProducerState, TransactionState
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import Again, refuse
from exactlyonce.connectors.kafka.kafka_protocol import Observe, Places, Request, Wire
from exactlyonce.pipeline.errors import ConfigError

ANSWERS: Mapping[int, EndAnswer] = {
    0: EndAnswer.COMPLETED,
    -1: EndAnswer.BUSY,  # UNKNOWN_SERVER_ERROR: the coordinator could not write its log
    7: EndAnswer.BUSY,  # REQUEST_TIMED_OUT, likewise
    14: EndAnswer.BUSY,  # COORDINATOR_LOAD_IN_PROGRESS
    15: EndAnswer.BUSY,  # COORDINATOR_NOT_AVAILABLE
    16: EndAnswer.BUSY,  # NOT_COORDINATOR
    51: EndAnswer.BUSY,  # CONCURRENT_TRANSACTIONS
    48: EndAnswer.REFUSED,  # INVALID_TXN_STATE
    47: EndAnswer.UNKNOWN,  # INVALID_PRODUCER_EPOCH
    49: EndAnswer.UNKNOWN,  # INVALID_PRODUCER_ID_MAPPING
    90: EndAnswer.UNKNOWN,  # PRODUCER_FENCED
}
"""The meaning of error codes for an EndTxn. `errors.refuse` knows the others."""

MOVED = {14, 15, 16}
"""The codes after which the coordinator is looked up again."""
NOT_FOUND = 105  # TRANSACTIONAL_ID_NOT_FOUND
NOT_ATTEMPTED = 55  # OPERATION_NOT_ATTEMPTED: another partition of the request stood in the way
TRANSACTION_LOG = "__transaction_state"
TRANSACTION_VERSION = 2
BROKER = 4  # DescribeConfigs' number for the kind of resource


class Transactions:
    """Describes and ends transactions. Used by one thread at a time.

    Every method raises `BrokerUnavailable` without an answer after *timeout_ms*, `ConfigError` if we lack the right,
    and `BrokerRefused` for an unexpected error.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        timeout_ms: int = 30_000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        observe: Observe | None = None,
        places: Places | None = None,
    ) -> None:
        self._wire = Wire(config, timeout_ms=timeout_ms, clock=clock, sleep=sleep, observe=observe, places=places)
        self._version: int | None = None

    def describe(self, transactional_ids: Iterable[str]) -> dict[str, TransactionState | None]:
        """The present state of each id; None: unknown to the broker. It says nothing about the past."""
        ids = list(dict.fromkeys(transactional_ids))
        return self._wire.retrying(
            lambda: self._wire.remembering(lambda: self._describe(ids)), "Describing transactions"
        )

    def list(self, prefix: str, producer_ids: Iterable[int] = ()) -> Sequence[ListedTransaction]:
        """Every id that begins with *prefix*, in any state, at all brokers; with these producer ids, if given.

        The list is complete, or this fails: every coordinator has answered, and none moved meanwhile. Brokers leave out
        ids that we may not describe.
        """
        wanted = tuple(producer_ids)
        return self._wire.retrying(lambda: self._list(prefix, wanted), "Listing transactions")

    def producers(self, partitions: Iterable[tuple[str, int]]) -> Sequence[ProducerState]:
        """The producers active on each (topic, partition), as its leader knows them. Raises `TopicError`."""
        wanted = list(dict.fromkeys(partitions))
        return self._wire.retrying(
            lambda: self._wire.remembering(lambda: self._producers(wanted)), "Describing producers"
        )

    def named(self, producer_id: int) -> str | None:
        """The transactional id with that producer id; None: unknown to the brokers, or hidden from us."""
        listed = self.list("", [producer_id])
        return next((one.transactional_id for one in listed if one.producer_id == producer_id), None)

    def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> EndAnswer:
        """Ask once to commit or abort; see `end_all`."""
        return self.end_all([Ending(transactional_id, producer_id, epoch)], commit=commit)[0]

    def end_all(self, endings: Sequence[Ending], *, commit: bool) -> Sequence[EndAnswer]:
        """Ask once to commit or abort each; the answers in the same order.

        Raises `BrokerUnavailable` if an answer is missing: each may have been carried out or not, and only the same
        request may be repeated.
        """
        self._require_version()
        ids = [ending.transactional_id for ending in endings]
        nodes = self._wire.retrying(lambda: self._wire.coordinators_remembered(ids), "Finding transaction coordinators")
        try:
            return self._end(endings, nodes, commit=commit)
        except Again as obstacle:
            raise self._wire.unavailable("Ending transactions", obstacle) from None

    def end_until_answered(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> EndAnswer:
        """Repeat the request until the answer is no longer `BUSY`."""
        self._require_version()
        ending = Ending(transactional_id, producer_id, epoch)

        def attempt() -> EndAnswer:
            answer = self._end([ending], self._wire.coordinators([transactional_id]), commit=commit)[0]
            if answer is EndAnswer.BUSY:
                raise Again(f"the coordinator of {transactional_id} is still writing markers or is moving")
            return answer

        return self._wire.retrying(attempt, "Ending a transaction")

    def abort_listed(self, listed: Iterable[ListedTransaction]) -> None:
        """Abort and fence each, in any state: the producers with these ids can write no more.

        An abort at the present epoch raises the epoch, also without an open transaction. An epoch that grew meanwhile
        is looked up again.
        """
        self._require_version()
        waiting = {transaction.transactional_id for transaction in listed}

        def attempt() -> None:
            states = self._describe(sorted(waiting))
            endings = [Ending(s.transactional_id, s.producer_id, s.epoch) for s in states.values() if s is not None]
            waiting.intersection_update(known.transactional_id for known in endings)
            answers = self._end(endings, self._wire.coordinators(sorted(waiting)), commit=False)
            for ending, answer in zip(endings, answers, strict=True):
                if answer is EndAnswer.COMPLETED:
                    waiting.discard(ending.transactional_id)
            if waiting:
                raise Again(f"{', '.join(sorted(waiting))} could not be aborted yet")

        self._wire.retrying(attempt, "Aborting transactions")

    def rewrite_markers(self, last: Ending, partitions: Iterable[tuple[str, int]], *, commit: bool) -> None:
        """End a complete transaction again in *partitions*, whose markers the broker has lost (KAFKA-20734).

        It ends a transaction without records under the epoch of *last*, the present one of its id: the new markers also
        end the records that are still open. An unfinished earlier attempt is taken over, never initialised, which would
        abort it. Nothing is done if the id is past that epoch, as after an end whose answer was lost.
        """
        self._require_version()
        wanted = list(partitions)
        self._wire.retrying(lambda: self._rewrite(last, wanted, commit), "Writing lost markers again")

    def cluster_id(self) -> str:
        return self._wire.retrying(lambda: str(self._wire.metadata().cluster_id), "Asking for the cluster's id")

    def max_timeout_ms(self) -> int:
        """The longest that any broker lets a transaction stay open (its `transaction.max.timeout.ms`)."""
        return self._wire.retrying(self._max_timeout_ms, "Asking for transaction.max.timeout.ms")

    def transaction_version(self) -> int:
        """The cluster's `transaction.version`; 0 if it has none."""
        return self._wire.retrying(self._transaction_version, "Asking for the cluster's features")

    def close(self) -> None:
        self._wire.close()

    def _require_version(self) -> None:
        if self._version is None:
            self._version = self.transaction_version()
        if self._version < TRANSACTION_VERSION:
            raise ConfigError(
                f"The cluster runs transaction.version {self._version}; exactlyonce needs {TRANSACTION_VERSION}, where "
                f"the end of a transaction fences its producer. Raise it (Kafka 4.0 or newer): kafka-features.sh "
                f"--bootstrap-server {self._wire.config.bootstrap_servers} upgrade --feature transaction.version=2"
            )

    def _describe(self, ids: Sequence[str]) -> dict[str, TransactionState | None]:
        ids_by_node: defaultdict[int, list[str]] = defaultdict(list)
        for name, node in self._wire.coordinators_remembered(ids).items():
            ids_by_node[node].append(name)
        questions = [
            Request(DescribeTransactionsRequest(transactional_ids=names), node) for node, names in ids_by_node.items()
        ]
        answers = self._wire.ask_all(questions) if questions else []
        states = {state.transactional_id: _state(state) for answer in answers for state in answer.transaction_states}
        return {name: states[name] for name in ids}

    def _list(self, prefix: str, producer_ids: Sequence[int]) -> Sequence[ListedTransaction]:
        nodes, leaders = self._transaction_log()
        question = ListTransactionsRequest(
            state_filters=[], producer_id_filters=[*producer_ids], transactional_id_pattern=re.escape(prefix) + ".*"
        )
        answers = self._wire.ask_all([Request(question, node) for node in nodes])
        for node, answer in zip(nodes, answers, strict=True):
            refuse(answer.error_code, f"Listing the transactions of broker {node}")
        if self._transaction_log() != (nodes, leaders):
            raise Again("transaction coordinators moved while they were being asked")
        return [
            ListedTransaction(transaction.transactional_id, transaction.producer_id, transaction.transaction_state)
            for answer in answers
            for transaction in answer.transaction_states
            if transaction.transactional_id.startswith(prefix)  # a broker before 4.1 knows no pattern
        ]

    def _transaction_log(self) -> tuple[Sequence[int], dict[int, tuple[int, int]]]:
        """All brokers; and the leader and its epoch of each partition of the transaction log, if it is visible."""
        metadata = self._wire.metadata([TRANSACTION_LOG])
        leaders = {}
        for partition in metadata.topics[0].partitions:
            refuse(partition.error_code, f"Finding the leader of {TRANSACTION_LOG}-{partition.partition_index}")
            leaders[partition.partition_index] = (partition.leader_id, partition.leader_epoch)
        return sorted(broker.node_id for broker in metadata.brokers), leaders

    def _producers(self, wanted: Sequence[tuple[str, int]]) -> Sequence[ProducerState]:
        indexes: defaultdict[int, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for (topic, partition), leader in self._wire.leaders_remembered(wanted).items():
            indexes[leader.node_id][topic].append(partition)
        entry = DescribeProducersRequest.TopicRequest
        questions = []
        for node, topics in indexes.items():
            asked = [entry(name=topic, partition_indexes=partitions) for topic, partitions in topics.items()]
            questions.append(Request(DescribeProducersRequest(topics=asked), node))
        producers: list[ProducerState] = []
        for answer in self._wire.ask_all(questions) if questions else []:
            for topic in answer.topics:
                for partition in topic.partitions:
                    index = partition.partition_index
                    refuse(partition.error_code, f"Describing the producers of {topic.name}-{index}")
                    producers += (_producer(topic.name, index, producer) for producer in partition.active_producers)
        return producers

    def _end(self, endings: Sequence[Ending], nodes: Mapping[str, int], *, commit: bool) -> Sequence[EndAnswer]:
        messages = [
            EndTxnRequest(
                transactional_id=ending.transactional_id,
                producer_id=ending.producer_id,
                producer_epoch=ending.epoch,
                committed=commit,
                min_version=5,  # the version whose answers the table of EndAnswer is about
            )
            for ending in endings
        ]
        requests = [Request(m, nodes[ending.transactional_id]) for m, ending in zip(messages, endings, strict=True)]
        answers = self._wire.ask_all(requests) if requests else []
        if any(answer.error_code in MOVED for answer in answers):
            self._wire.places.forget()
        return [_answer(ending, answer.error_code) for ending, answer in zip(endings, answers, strict=True)]

    def _rewrite(self, last: Ending, partitions: Sequence[tuple[str, int]], commit: bool) -> None:
        name = last.transactional_id
        self._wire.places.forget()  # a former leader that has not learnt of the change shows no markers
        nodes = self._wire.coordinators([name])
        answer = self._wire.ask(_add_request(last, partitions), nodes[name])
        added = [
            (result.partition_error_code, f"{topic.name}-{result.partition_index}")
            for topic in answer.results_by_topic_v3_and_below
            for result in topic.results_by_partition
        ]
        # A refused partition keeps the others from being attempted: report it first.
        for error_code, partition in sorted(added, key=lambda result: result[0] == NOT_ATTEMPTED):
            if ANSWERS.get(error_code) in (EndAnswer.REFUSED, EndAnswer.UNKNOWN):
                return
            _added(partition, error_code, name)
        if self._end([last], nodes, commit=commit)[0] is EndAnswer.BUSY:
            raise Again(f"{name} is busy")

    def _max_timeout_ms(self) -> int:
        name = "transaction.max.timeout.ms"
        questions = []
        for broker in self._wire.metadata().brokers:
            resource = DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=BROKER, resource_name=str(broker.node_id), configuration_keys=[name]
            )
            questions.append(Request(DescribeConfigsRequest(resources=[resource]), broker.node_id))
        results = [result for answer in self._wire.ask_all(questions) for result in answer.results]
        for result in results:
            refuse(result.error_code, f"Asking broker {result.resource_name} for {name} (DescribeConfigs on Cluster)")
        return min(int(setting.value) for result in results for setting in result.configs)

    def _transaction_version(self) -> int:
        question = ApiVersionsRequest(client_software_name="exactlyonce", client_software_version="1")
        answer = self._wire.ask(question)
        refuse(answer.error_code, "Asking for the cluster's features")
        features = {feature.name: feature.max_version_level for feature in answer.finalized_features}
        return int(features.get("transaction.version", 0))


def _add_request(ending: Ending, partitions: Sequence[tuple[str, int]]) -> AddPartitionsToTxnRequest:
    indexes: defaultdict[str, list[int]] = defaultdict(list)
    for topic, partition in partitions:
        indexes[topic].append(partition)
    entry = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=ending.transactional_id,
        v3_and_below_producer_id=ending.producer_id,
        v3_and_below_producer_epoch=ending.epoch,
        v3_and_below_topics=[entry(name=topic, partitions=partitions) for topic, partitions in indexes.items()],
        max_version=3,  # later ones are for brokers
    )


def _added(partition: str, error_code: int, transactional_id: str) -> None:
    """Raise `Again` if the state of the id must be looked up again, or our error for *error_code*."""
    if error_code and (error_code in ANSWERS or error_code == NOT_ATTEMPTED):
        raise Again(f"{transactional_id} cannot add {partition}: the broker answers {error_code}")
    refuse(error_code, f"Adding {partition} to {transactional_id}")


def _state(answer: Any) -> TransactionState | None:
    if answer.error_code == NOT_FOUND:
        return None
    refuse(answer.error_code, f"Describing transaction {answer.transactional_id}")
    return TransactionState(
        transactional_id=answer.transactional_id,
        state=answer.transaction_state,
        producer_id=answer.producer_id,
        epoch=answer.producer_epoch,
        timeout_ms=answer.transaction_timeout_ms,
        start_time_ms=answer.transaction_start_time_ms,
        partitions=tuple((topic.topic, partition) for topic in answer.topics for partition in topic.partitions),
    )


def _producer(topic: str, partition: int, producer: Any) -> ProducerState:
    start = producer.current_txn_start_offset
    return ProducerState(
        topic=topic,
        partition=partition,
        producer_id=producer.producer_id,
        epoch=producer.producer_epoch,
        last_sequence=producer.last_sequence,
        last_timestamp_ms=producer.last_timestamp,
        transaction_start_offset=None if start < 0 else start,
    )


def _answer(ending: Ending, error_code: int) -> EndAnswer:
    if error_code not in ANSWERS:
        refuse(error_code, f"Ending transaction {ending.transactional_id}")
    return ANSWERS[error_code]
