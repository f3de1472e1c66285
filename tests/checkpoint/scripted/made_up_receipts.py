"""A leader of bounded work over the model of a broker; what its units and publications would bring is made up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.block_storage import Scanned
from exactlyonce.checkpoint.decision_log import DECISIONS, DecisionLog
from exactlyonce.checkpoint.events import Ack, OperatorAck, PendingCheckpoint
from exactlyonce.checkpoint.leader import Leader, Verdict
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef, OrderLog, SourceOffset
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.references import named_by
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.transactions.broker_answers import (
    Answered,
    EndAnswer,
    Fate,
    Producer,
    WriteAnswer,
)
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import WRITE_ANSWERS
from exactlyonce.testing.broker.interface import Error
from exactlyonce.testing.broker.model import BrokerModel, BrokerSettings
from exactlyonce.testing.clock import SimulatedClock

PIPELINE, BLOCK_PARTITIONS = "orders", 5
TOPIC = f"{PIPELINE}.checkpoints"
INPUT, OUTPUT = "orders-of-all-shops-of-the-day", "totals-of-the-orders-of-the-day"
"""Names of 30 characters."""
DAY_MS = 86_400_000


class BoundedLeader:
    """*subtasks* with state of `OPERATORS` and order logs of `TASKS`, and a transaction for each output partition."""

    OPERATORS = ("totals-by-customer", "totals-by-day")
    TASKS = ("totals-by-customer", "totals-by-day")

    def __init__(self, subtasks: int, partitions: int) -> None:
        self.subtasks, self.partitions = subtasks, partitions
        self.clock = SimulatedClock()
        self.broker = BrokerModel(self.clock, BrokerSettings(transaction_timeout_max_ms=DAY_MS))
        self.broker.create_topic(TOPIC, BLOCK_PARTITIONS, compact=True)
        self.broker.create_topic(INPUT, partitions)
        self.broker.create_topic(OUTPUT, partitions)
        self._random = Random(f"{subtasks} {partitions}")
        self._offsets = count(1_000_000)
        self.begin()

    def begin(self) -> None:
        """Another incarnation reads the log, and recovers."""
        topic = TopicInfo(TOPIC, self.broker.topic_id(TOPIC) or "", BLOCK_PARTITIONS, 1)
        self.log = DecisionLog(PIPELINE, topic, self.clock)
        config = LeaderConfig(
            pipeline=PIPELINE, transaction_timeout_ms=DAY_MS, fingerprint="0" * 64, max_parallelism=1 << 15,
            parallelism=self.subtasks, cluster_id="M" * 22, transaction_version=2, bounded=True,
        )  # fmt: skip
        settings = CheckpointSettings(num_retained=2)
        self.leader = Leader(config, self.log, KnownBlocks(settings), self.clock, lambda text: None)
        self.drive(self.leader.begin())
        self.drive(self.leader.recover())

    def drive(self, procedure: ask.Procedure[Any]) -> Any:
        return ask.drive(procedure, self)

    def decided(self, pending: PendingCheckpoint) -> Verdict:
        for ack in pending.acks.values():
            self.leader.acknowledged(ack)
        verdict: Verdict = self.drive(self.leader.decide(pending, (pending.base,)))
        return verdict

    # --- receipts

    def pending(self) -> PendingCheckpoint:
        """The next checkpoint: its receipts, and its transactions, which hold a record."""
        base = self.leader.manifest.checkpoint
        acks = [self._ack(base + 1, task, subtask) for task in self.TASKS for subtask in range(self.subtasks)]
        acks.append(Ack("source", 0, base + 1, tuple(self._source_offsets())))
        precommits = [self._published(base + 1, partition) for partition in range(self.partitions)]
        return PendingCheckpoint(
            checkpoint=base + 1, base=base, previous=base, final=False, triggered_ms=self.clock.monotonic_ms(),
            attempt=self.leader.attempt, acks={(ack.task, ack.subtask): ack for ack in acks},
            order_logs=[ack.order_log for ack in acks if ack.order_log is not None], precommits=precommits,
            ages_ms={precommit.transactional_id: 0 for precommit in precommits},
        )  # fmt: skip

    def _ack(self, checkpoint: int, task: str, subtask: int) -> Ack:
        state, index, log = (self._block(checkpoint, task, subtask, part) for part in range(3))
        operators = (OperatorAck(task, (index,), (state,), state.size),) if task in self.OPERATORS else ()
        written = (state, index, log) if operators else (log,)
        return Ack(
            task, subtask, checkpoint, operators=operators, order_log=OrderLog(task, subtask, (log,)), written=written
        )

    def _block(self, checkpoint: int, task: str, subtask: int, part: int) -> BlockRef:
        """The place of a block of its own process: neither its offset nor its nonce is that of the one before."""
        random = self._random
        key = BlockKey(1, checkpoint, task, subtask, part, 0, f"{random.getrandbits(48):012x}")
        partition = 1 + subtask % (BLOCK_PARTITIONS - 1)
        return BlockRef(partition, next(self._offsets), str(key), random.randrange(200, 9_000), random.randbytes(32))

    def _source_offsets(self) -> Iterator[SourceOffset]:
        for partition in range(self.partitions):
            yield SourceOffset("orders", INPUT, "T" * 22, partition, self._random.randrange(1 << 30), 7)

    def _published(self, checkpoint: int, partition: int) -> Precommit:
        name = f"eo:{PIPELINE}:out:{partition}:{self.leader.incarnation.incarnation}.{self.leader.attempt}:0"
        while (begun := self.broker.init_transactions(name, DAY_MS)).error is not Error.NONE:
            self.clock.advance(1)
        _, producer_id, epoch = begun
        self.broker.produce(name, producer_id, epoch, OUTPUT, partition, [(None, "total")])
        return Precommit(
            transactional_id=name, producer_id=producer_id, epoch=epoch, sink="out", subtask=partition,
            checkpoint=checkpoint, records=1, open_ms=0,
        )  # fmt: skip

    # --- the answers

    def __call__(self, request: ask.Request) -> Any:
        broker = self.broker
        match request:
            case ask.KnownOutputs():
                return (("out", OUTPUT, self.partitions),)
            case ask.DescribeTransactions(ids):
                return broker.describe_transactions(ids)
            case ask.DescribeProducers(partitions):
                return broker.describe_producers(partitions)
            case ask.ListTransactions(prefix):
                return broker.list_transactions(prefix)
            case ask.EndTransactions(endings, commit):
                return [self._ended(each, commit) for each in endings]
            case ask.InitTransactions(transactional_id=name):
                answer = broker.init_transactions(name, DAY_MS)
                return _answered(answer.error, Producer(answer.producer_id, answer.epoch))
            case ask.ProduceBatches():
                return {batch.partition: self._produced(request, batch) for batch in request.batches}
            case ask.EndTransaction(transactional_id=name, producer=producer, commit=commit):
                error = broker.end_txn(name, *producer, commit)
                return _answered(error, Producer(producer.producer_id, producer.epoch + 1))
            case ask.LookOnce(_, offsets):
                return {partition: self._fate(partition, offset) for partition, offset in offsets}
            case ask.LogEnds():
                log = broker.fetch(TOPIC, DECISIONS)
                return ask.Ends(log.last_stable_offset, log.high_watermark)
            case ask.ReadLog(end):
                records = [record for record in broker.fetch(TOPIC, DECISIONS).records if record.offset < end]
                items = (ask.DecisionRecord(record.key.encode(), *(record.value or (None, None))) for record in records)
                return ask.LogRead(0, tuple(items))
            case ask.FirstOffsets():
                return (0,) * BLOCK_PARTITIONS
            case ask.ScanBlocks():
                return Scanned((), (0,) * BLOCK_PARTITIONS)
            case ask.FindReferences(manifest):
                return frozenset(named_by(manifest))
            case ask.StartOffsets():
                return tuple(self._source_offsets())
            case ask.Pause(duration_ms):
                self.clock.advance(duration_ms)
            case ask.Together(requests):
                return tuple(ask.answered(each, self) for each in requests)
        return None

    def _produced(self, request: ask.ProduceBatches, batch: ask.DecisionBatch) -> Answered:
        records = [
            (write.key, None if write.value is None else (write.value, dict(write.headers)["sha256"]))
            for write in batch.writes
        ]
        producer = (request.transactional_id, *request.producer)
        answer = self.broker.produce(*producer, TOPIC, batch.partition, records, sequence=batch.sequence)
        return _answered(answer.error, first_offset=answer.first_offset)

    def _ended(self, ending: ask.Ending, commit: bool) -> EndAnswer:
        error = self.broker.end_txn(ending.transactional_id, ending.producer_id, ending.epoch, commit)
        return {Error.NONE: EndAnswer.COMPLETED, Error.CONCURRENT_TRANSACTIONS: EndAnswer.BUSY}[error]

    def _fate(self, partition: int, offset: int) -> Fate | None:
        return Fate.COMMITTED if self.broker.fetch(TOPIC, partition).last_stable_offset > offset else None


def _answered(error: Error, producer: Producer | None = None, first_offset: int = -1) -> Answered:
    """As the connection answers; the model's brokers write a marker for some time."""
    if error is Error.CONCURRENT_TRANSACTIONS:
        return Answered(WriteAnswer.BUSY, error.name)
    return Answered(WRITE_ANSWERS[error], error.name, producer, first_offset)
