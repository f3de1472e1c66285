"""One subtask of a Kafka sink: a transaction per checkpoint, flushed at the barrier, committed by the coordinator.

Invariants: a transaction holds the records between two barriers and no others; the next transaction's first record is
produced only after the last one's flush (order within a partition); a delivery error poisons the writer, which then
raises and acknowledges nothing; no code path closes a producer that has begun a transaction. Writing never blocks: what
cannot be produced now waits in a backlog, bounded by records and bytes, and `full` asks the caller to pause. Producers
are made, flushed and dropped by its `Producers`, elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from operator import length_hint

from confluent_kafka import KafkaException

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.decision import Precommit
from exactlyonce.checkpoint.records.committable import TransactionalId
from exactlyonce.pipeline.errors import require
from exactlyonce.sinks.kafka.producers import Pending, Producers, Transaction, TransactionalProducer
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.kafka.transaction_pool import SlotState, TransactionPool
from exactlyonce.sinks.writer import FlushedInterval, SinkFailed, WriterContext

BACKLOG_RECORDS_MAX = 50_000
BACKLOG_BYTES_MAX = 32 << 20


@dataclass
class _Barrier:
    checkpoint: int


@dataclass
class KafkaWriter:
    """Writes to *topic*; see the module. `prepared` is called with each transactional id whose producer is ready."""

    sink: str
    subtask: int
    topic: str
    pool: TransactionPool
    producers: Producers
    prepared: Callable[[str], None]
    clock: Clock
    _preparing: dict[str, Pending[TransactionalProducer]] = field(default_factory=dict)
    _waiting: dict[str, Transaction] = field(default_factory=dict)
    _ready: deque[Transaction] = field(default_factory=deque)
    _current: Transaction | None = None
    _draining: Transaction | None = None
    _flushing: Pending[int] | None = None
    _backlog: deque[Outputs | _Barrier] = field(default_factory=deque)
    _backlog_records: int = 0
    _backlog_bytes: int = 0
    _flushed: dict[int, FlushedInterval] = field(default_factory=dict)
    _error: str = ""
    records: int = 0

    # --- producers ----------------------------------------------------------------------------------------------

    def _failed(self, reason: str) -> None:
        self._error = self._error or reason

    def granted(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        """The coordinator has read whose the id is: it may be written with."""
        transaction = self._waiting.pop(transactional_id)
        transaction.producer_id, transaction.epoch = producer_id, epoch
        self.pool.move(transactional_id, SlotState.READY)
        self._ready.append(transaction)

    def finalized(self, checkpoint: int) -> None:
        """Ids used up to *checkpoint* are free."""
        self.pool.finalized(checkpoint)

    def _prepare(self) -> None:
        wanted = self.pool.wanted()
        if wanted is not None:
            self.pool.move(wanted, SlotState.PREPARING)
            self._preparing[wanted] = self.producers.make(wanted, self._failed)
        for name, pending in list(self._preparing.items()):
            if pending.done():
                del self._preparing[name]
                try:
                    self._waiting[name] = Transaction(name, pending.result())
                except KafkaException as error:
                    raise SinkFailed(f"sink {self.sink!r}: no producer could be made: {error.args[0].str()}") from None
                self.pool.move(name, SlotState.PREPARED)
                self.prepared(name)

    # --- records and barriers -----------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the caller should pause: too much waits to be produced."""
        return self._backlog_records > BACKLOG_RECORDS_MAX or self._backlog_bytes > BACKLOG_BYTES_MAX

    @property
    def open_transactions(self) -> int:
        """Transactions of this subtask that are open on the broker."""
        return self.pool.open

    def write(self, outputs: Outputs) -> None:
        """Produce *outputs*, now or as soon as possible."""
        if not outputs.left:
            return
        if self._backlog or not self._activate() or not self._produce(outputs):
            self._backlog.append(outputs)
            self._backlog_records += outputs.left
            self._backlog_bytes += outputs.size

    def barrier(self, checkpoint: int) -> None:
        """What was written before belongs to *checkpoint*; `take_flushed` tells when it is flushed."""
        if self._backlog:
            self._backlog.append(_Barrier(checkpoint))
        else:
            self._cut(checkpoint)

    def _activate(self) -> bool:
        """Make sure that there is a transaction to write with."""
        if self._current is not None:
            return True
        if self._draining is not None or not self._ready:
            return False
        self._current = self._ready.popleft()
        self.pool.move(self._current.transactional_id, SlotState.WRITING)
        self._current.opened_ms = self.clock.monotonic_ms()
        return True

    def _produce(self, outputs: Outputs) -> bool:
        """Produce until librdkafka's queue is full; True if all went."""
        assert self._current is not None
        produce, topic, begin = self._current.producer.produce, self.topic, outputs.done
        values = iter(outputs.values[begin:])
        keys = repeat(None) if outputs.keys is None else outputs.keys[begin:]
        full = False
        try:
            if outputs.headers is None:
                for value, key in zip(values, keys):  # noqa: B905 - keys may be endless
                    produce(topic, value, key)
            else:
                for value, key, headers in zip(values, keys, outputs.headers[begin:]):  # noqa: B905 - so may they here
                    produce(topic, value, key, headers=[*headers])
        except BufferError:
            full = True
        except KafkaException as error:
            raise SinkFailed(f"sink {self.sink!r} cannot write to {topic}: {error.args[0].str()}") from None
        outputs.done = len(outputs.values) - length_hint(values) - full
        self._current.records += outputs.done - begin
        self.records += outputs.done - begin
        return not outputs.left

    def _cut(self, checkpoint: int) -> None:
        transaction, self._current = self._current, None
        if transaction is None:
            self._flushed[checkpoint] = FlushedInterval()
            return
        transaction.checkpoint = checkpoint
        self.pool.move(transaction.transactional_id, SlotState.DRAINING)
        self._draining = transaction
        self._flushing = self.producers.flush(transaction.producer)

    def abandon(self) -> None:
        """The worker ends, however: a flush that is under way need not."""
        self.producers.abandon()

    def poll(self, wait_s: float = 0.0) -> bool:
        """Let producers work: prepare, drain, work the backlog off. True if anything moved; raises `SinkFailed`.

        Who has nothing else to do gives the producer *wait_s* for it.
        """
        self._prepare()
        moved = self._drain(wait_s)
        while self._backlog and self._draining is None:
            entry = self._backlog[0]
            if isinstance(entry, _Barrier):
                self._cut(entry.checkpoint)
            elif not self._activate() or not self._work_off(entry):
                break
            self._backlog.popleft()
            moved = True
        if self._current is not None:
            self._current.producer.poll(wait_s)
        if self._error:
            raise SinkFailed(f"sink {self.sink!r}: {self._error}")
        return moved

    def _work_off(self, outputs: Outputs) -> bool:
        before = outputs.left
        finished = self._produce(outputs)
        self._backlog_records -= before - outputs.left
        if finished:
            self._backlog_bytes -= outputs.size
        return finished

    def _drain(self, wait_s: float) -> bool:
        transaction, flushing = self._draining, self._flushing
        if transaction is None or flushing is None:
            return False
        if wait_s:
            self.producers.wait(flushing, wait_s)
        if not flushing.done() or self._error:  # an error is told before the flush that met it is done
            return False
        require(flushing.result() == 0, "nothing is outstanding after a flush")
        self._draining = self._flushing = None
        self.pool.precommitted(transaction.transactional_id, transaction.checkpoint)
        precommit = Precommit(
            transactional_id=transaction.transactional_id,
            producer_id=transaction.producer_id,
            epoch=transaction.epoch,
            sink=self.sink,
            subtask=self.subtask,
            checkpoint=transaction.checkpoint,
            records=transaction.records,
            open_ms=self.clock.monotonic_ms() - transaction.opened_ms,
        )
        self._flushed[transaction.checkpoint] = FlushedInterval(precommit)
        self.producers.drop(transaction)
        return True

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        """The interval that *checkpoint* ends, once; None while some of it is still to be flushed."""
        return self._flushed.pop(checkpoint, None)


def open_writer(topic: str, context: WriterContext) -> KafkaWriter:
    """The writer of one sink subtask in an attempt, and its transactional ids."""
    ids = (
        TransactionalId(
            context.pipeline, context.sink, context.subtask, context.incarnation, str(context.attempt), str(slot)
        )
        for slot in range(context.slots)
    )
    return KafkaWriter(
        sink=context.sink,
        subtask=context.subtask,
        topic=topic,
        pool=TransactionPool(map(str, ids)),
        producers=context.clients.producers(topic),
        prepared=context.prepared,
        clock=context.clients.clock,
    )
