"""One subtask of a Kafka sink: a transaction per checkpoint, flushed at the barrier, committed by the coordinator.

Invariants: a transaction holds the records between two barriers and no others; the next transaction's first record is
produced only after the last one's flush; no code path closes a producer that has begun a transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from exactlyonce.checkpoint.records.manifest import Precommit
from exactlyonce.sinks.kafka.producers import Pending, SinkProducer, Transaction
from exactlyonce.sinks.kafka.producing import ProducingWriter
from exactlyonce.sinks.kafka.transaction_pool import SlotState, TransactionPool
from exactlyonce.sinks.writer import FlushedInterval


@dataclass(kw_only=True)
class KafkaWriter(ProducingWriter):
    """See the module. `prepared` is called with each transactional id whose producer is ready."""

    subtask: int
    pool: TransactionPool
    prepared: Callable[[str], None]
    _preparing: dict[str, Pending[SinkProducer]] = field(default_factory=dict)
    _waiting: dict[str, Transaction] = field(default_factory=dict)
    _ready: deque[Transaction] = field(default_factory=deque)
    _current: Transaction | None = None
    _draining: Transaction | None = None

    # --- producers ----------------------------------------------------------------------------------------------

    def granted(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        transaction = self._waiting.pop(transactional_id)
        transaction.producer_id, transaction.epoch = producer_id, epoch
        self.pool.move(transactional_id, SlotState.READY)
        self._ready.append(transaction)

    def finalized(self, checkpoint: int) -> None:
        """Free the ids used up to *checkpoint*."""
        self.pool.finalized(checkpoint)

    def _prepare(self) -> None:
        wanted = self.pool.wanted()
        if wanted is not None:
            self.pool.move(wanted, SlotState.PREPARING)
            self._preparing[wanted] = self.producers.make(wanted, self._failed)
        for name, pending in list(self._preparing.items()):
            if pending.done():
                del self._preparing[name]
                self._waiting[name] = Transaction(name, self._initialised(pending))
                self.pool.move(name, SlotState.PREPARED)
                self.prepared(name)

    # --- records and barriers -----------------------------------------------------------------------------------

    @property
    def open_transactions(self) -> int:
        """Transactions of this subtask that are open on the broker."""
        return self.pool.open

    def _activate(self) -> bool:
        if self._current is not None:
            return True
        if self._draining is not None or not self._ready:
            return False
        self._current = self._ready.popleft()
        self.pool.move(self._current.transactional_id, SlotState.WRITING)
        self._current.opened_ms = self.clock.monotonic_ms()
        return True

    @property
    def _producer(self) -> SinkProducer | None:
        return None if self._current is None else self._current.producer

    @property
    def _undelivered(self) -> int:
        transaction = self._draining or self._current
        return 0 if transaction is None else len(transaction.producer)

    def _produced(self, count: int) -> None:
        assert self._current is not None
        self._current.records += count

    def _cut(self, checkpoint: int) -> None:
        transaction, self._current = self._current, None
        if transaction is None:
            self._flushed[checkpoint] = FlushedInterval()
            return
        transaction.checkpoint = checkpoint
        self.pool.move(transaction.transactional_id, SlotState.DRAINING)
        self._draining = transaction
        self._flushing = self.producers.flush(transaction.producer)

    def _drained(self) -> None:
        transaction, self._draining = self._draining, None
        assert transaction is not None
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
