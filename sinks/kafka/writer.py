"""The writers of one subtask of a Kafka sink, with their producers.

Invariants: outputs before a barrier are flushed before any after it is produced (order within a partition); after a
delivery error the writer raises and acknowledges nothing. Writing never blocks: outputs that cannot be produced yet
wait in a backlog. A flush waits for the broker, so `room` asks the caller to pause if more records wait, in client and
backlog, than the broker took lately.

Exactly once (`KafkaWriter`), a transaction holds the records between two barriers and no others; the coordinator
commits it. Its id is not used again before the checkpoint that used it is finalized. A producer writes one transaction
and is dropped, never closed (closing would abort it). Nothing is written before the coordinator has read the producer's
id and epoch.

Else (`PlainWriter`), a produced record is visible at once and permanently; the client repeats requests, not records. An
undelivered record fails the sink, and is not produced again by this writer.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol, TypeVar

from confluent_kafka import KafkaException, Producer

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.connectors.kafka.partitioning import SETTING
from exactlyonce.pipeline.errors import ExactlyOnceError, require
from exactlyonce.pipeline.rate_meter import RateMeter
from exactlyonce.sinks.kafka.open_transaction import (
    OnFailure,
    OnThrottle,
    OpenTransaction,
    ProducerFailure,
    SinkProducer,
    failure,
    initialised,
    produce,
    refused,
)
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.writer import FlushedInterval, IntervalWriter

WAITING_S = 1.0
"""As many records may wait as the broker took in the last so many seconds, and `WAITING_MIN` at least."""
WAITING_MIN = 100
"""The records that may always wait: from there, what the broker takes doubles with each round trip."""
QUOTA_S = 10.0
"""The time over which a broker averages what a client sends, unless configured otherwise. Within its quota it takes so
many seconds' worth at once, and then mutes the client for as long."""
WAITING_THROTTLED_S = 0.5
"""Once a broker has throttled the sink, as many records may wait as leave it in so many seconds on the average of the
last `QUOTA_S`."""
THROTTLED_S = 30.0
"""The average bounds the sink until this long after the last throttled answer."""
BACKLOG_BYTES_MAX = 32 << 20
FLUSH_SLICE_S = 0.2
"""The interval at which a flush notices that it was abandoned."""

T_co = TypeVar("T_co", covariant=True)

# --- the producers of a sink subtask --------------------------------------------------------------------------------


class Pending(Protocol[T_co]):
    """The result of work on another thread."""

    def done(self) -> bool: ...
    def result(self) -> T_co:
        """The result, once done; raises the error of the work."""


class Producers(Protocol):
    """The producers of one sink subtask."""

    def make(self, transactional_id: str | None, failed: OnFailure, throttled: OnThrottle) -> Pending[SinkProducer]:
        """Initialise a producer and begin its transaction, if it has an id. See `initialised` for *failed* and
        *throttled*."""

    def flush(self, producer: SinkProducer) -> Pending[int]:
        """-> the number of outstanding records, more than 0 only after `abandon`. Failures are reported before."""

    def wait(self, pending: Pending[Any], timeout_s: float) -> None:
        """Wait until it is done, at most so long."""

    def drop(self, transaction: OpenTransaction) -> None:
        """Drop its producer, without closing it."""

    def abandon(self) -> None:
        """Give up a flush in progress."""


class KafkaProducers:
    """Producers of confluent-kafka: made and dropped on the thread of *executor*, flushed on a thread of their own."""

    def __init__(
        self,
        topic: str,
        config: dict[str, str],
        transaction_timeout_ms: int,
        executor: ThreadPoolExecutor,
        *,
        partitioner: str | None = None,
    ) -> None:
        """*config*: librdkafka settings, without a transactional id. *partitioner*: None: *config*'s."""
        own = {} if partitioner is None else {SETTING: partitioner}
        self._topic, self._config, self._timeout_ms = topic, {**config, **own}, transaction_timeout_ms
        self._executor = executor
        self._flusher = ThreadPoolExecutor(1, "flush")
        self._abandoned = False

    def make(self, transactional_id: str | None, failed: OnFailure, throttled: OnThrottle) -> Future[Producer]:
        return self._executor.submit(
            initialised, self._config, self._topic, transactional_id, self._timeout_ms, failed, throttled
        )

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

    def drop(self, transaction: OpenTransaction) -> None:
        """On the executor's thread: ending librdkafka's threads takes milliseconds."""
        self._executor.submit(transaction.release)

    def abandon(self) -> None:
        self._abandoned = True


# --- the transactions of a sink subtask, as a table of states ------------------------------------------------------


class SlotState(enum.Enum):
    """The state of a slot's transactional id."""

    FREE = "free"
    PREPARING = "preparing"
    PREPARED = "prepared"
    READY = "ready"
    WRITING = "writing"
    DRAINING = "draining"
    PRECOMMITTED = "precommitted"


SLOT_TRANSITIONS: dict[SlotState, SlotState] = {
    SlotState.FREE: SlotState.PREPARING,
    SlotState.PREPARING: SlotState.PREPARED,
    SlotState.PREPARED: SlotState.READY,
    SlotState.READY: SlotState.WRITING,
    SlotState.WRITING: SlotState.DRAINING,
    SlotState.DRAINING: SlotState.PRECOMMITTED,
    SlotState.PRECOMMITTED: SlotState.FREE,
}

AHEAD = 2
"""Producers kept ready or in use: the current one, and the next."""
_AHEAD = (SlotState.PREPARING, SlotState.PREPARED, SlotState.READY, SlotState.WRITING)
_OPEN = (SlotState.WRITING, SlotState.DRAINING, SlotState.PRECOMMITTED)


class TransactionPool:
    """The slots of one sink subtask. `move` is the only way to change one."""

    def __init__(self, transactional_ids: Iterable[str]) -> None:
        self._states = dict.fromkeys(transactional_ids, SlotState.FREE)
        self._checkpoints: dict[str, int] = {}
        self._ahead = 0
        """The number of producers kept ready or in use."""
        self.open = 0
        """The number of transactions open on the broker."""

    def move(self, transactional_id: str, state: SlotState) -> None:
        """Change the state of a slot, as the table allows."""
        before = self._states[transactional_id]
        require(SLOT_TRANSITIONS[before] is state, f"a transaction moves from {before} to {state}")
        self._states[transactional_id] = state
        self._ahead += (state in _AHEAD) - (before in _AHEAD)
        self.open += (state in _OPEN) - (before in _OPEN)

    def precommitted(self, transactional_id: str, checkpoint: int) -> None:
        """Let the slot, whose transaction is flushed for *checkpoint*, wait for its finalization."""
        self.move(transactional_id, SlotState.PRECOMMITTED)
        self._checkpoints[transactional_id] = checkpoint

    def finalized(self, checkpoint: int) -> None:
        """Free the ids used up to *checkpoint*."""
        for name, used in list(self._checkpoints.items()):
            if used <= checkpoint:
                del self._checkpoints[name]
                self.move(name, SlotState.FREE)

    def wanted(self) -> str | None:
        """The id for which a producer should be prepared now, if any."""
        if self._ahead >= AHEAD:
            return None
        return next((name for name, state in self._states.items() if state is SlotState.FREE), None)


# --- the writers ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ProducingWriter(IntervalWriter, ABC):
    """Writes to *topic*; the common part. Its producers are made, flushed and dropped by `producers`, elsewhere."""

    topic: str
    producers: Producers
    clock: Clock
    _flushing: Pending[int] | None = None
    _backlog: deque[Outputs | int] = field(default_factory=deque)
    """Outputs, and the checkpoints whose barriers came between them."""
    _backlog_records: int = 0
    _backlog_bytes: int = 0
    _error: ExactlyOnceError | None = None
    _times_ms: tuple[int, int] | None = None
    """The earliest and the latest timestamp of its outputs."""
    _departures: RateMeter = field(default_factory=lambda: RateMeter(WAITING_S))
    _averaged: RateMeter = field(default_factory=lambda: RateMeter(QUOTA_S))
    _throttled_ms: float = -math.inf
    """The last time that a broker has throttled it, by the monotonic clock."""
    _delivered: int = 0
    """The number of `records` delivered at the last look."""
    _since_s: float = 0.0
    """The last time that records left, or none waited."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make the wanted producers."""

    @abstractmethod
    def _activate(self) -> bool:
        """Whether there is a producer to write with; takes the next one if there is none."""

    @property
    @abstractmethod
    def _producer(self) -> SinkProducer | None:
        """The producer to write with now."""

    @property
    @abstractmethod
    def _undelivered(self) -> int:
        """The number of produced records that the broker has not taken."""

    @abstractmethod
    def _produced(self, count: int) -> None:
        """Count records that the producer took."""

    @abstractmethod
    def _cut(self, checkpoint: int) -> None:
        """Begin to flush the interval of *checkpoint*, all of which was produced."""

    @abstractmethod
    def _drained(self) -> None:
        """Finish the interval whose flush is done."""

    def _drain(self, wait_s: float) -> bool:
        """Whether a flush has ended now."""
        flushing = self._flushing
        if flushing is None:
            return False
        if wait_s:
            self.producers.wait(flushing, wait_s)
        if not flushing.done() or self._error:  # an error is reported before its flush is done
            return False
        require(flushing.result() == 0, "nothing is outstanding after a flush")
        self._flushing = None
        self._drained()
        return True

    def _failed(self, failure: ProducerFailure) -> None:
        reason = failure.reason
        if failure.of_times and self._times_ms is not None:
            earliest, latest = map(_shown_time, self._times_ms)
            reason = f"{reason} The times so far are from {earliest} to {latest}."
        self._error = self._error or failure._replace(reason=reason).error(f"sink {self.sink!r}", operator=self.sink)

    def _initialised(self, pending: Pending[SinkProducer]) -> SinkProducer:
        """The producer that `make` has made."""
        try:
            return pending.result()
        except KafkaException as error:
            raise self._error_of(failure(self.topic, "no producer could be made", error.args[0])) from None

    def _error_of(self, failure: ProducerFailure) -> ExactlyOnceError:
        """The first reported failure, which may be *failure*."""
        self._failed(failure)
        assert self._error is not None
        return self._error

    @property
    def room(self) -> int:
        """The number of further records that may wait for the broker."""
        if self._backlog_bytes > BACKLOG_BYTES_MAX:
            return 0
        return max(0, self._may_wait - (self.records - self._delivered))

    @property
    def _may_wait(self) -> int:
        now_s = self._now_s()
        if self.clock.monotonic_ms() - self._throttled_ms > 1000 * THROTTLED_S:
            return max(WAITING_MIN, self._departures.lately(now_s))
        return max(1, int(self._averaged.lately(now_s) * WAITING_THROTTLED_S / QUOTA_S))

    def _throttled(self) -> None:
        """May be called on the thread of a flush."""
        self._throttled_ms = self.clock.monotonic_ms()

    @property
    def held_up(self) -> str:
        """See `SinkWriter`: the broker, if more records wait than it took lately."""
        waiting, lately = self.records - self._delivered, self._departures.lately(self._now_s())
        if waiting <= lately:
            return ""
        return (
            f"sink {self.sink!r} waits for the broker to take {waiting:,} records, of which it took {lately:,} in the "
            f"last {WAITING_S:g} s"
        )

    def write(self, outputs: Outputs) -> None:
        """Produce *outputs*, now or as soon as possible."""
        if not outputs.left:
            return
        self.records += outputs.left
        if outputs.timestamps:
            times_ms = (*(self._times_ms or ()), *outputs.timestamps)
            self._times_ms = min(times_ms), max(times_ms)
        if self._backlog or not self._activate() or not self._produce(outputs):
            self._backlog.append(outputs)
            self._backlog_records += outputs.left
            self._backlog_bytes += outputs.size

    def barrier(self, checkpoint: int) -> None:
        if self._backlog:
            self._backlog.append(checkpoint)
        else:
            self._cut(checkpoint)

    def _produce(self, outputs: Outputs) -> bool:
        """Produce until librdkafka's queue is full; True if all were produced."""
        assert self._producer is not None
        begin = outputs.done
        try:
            whole = produce(self._producer, self.topic, outputs)
        except KafkaException as error:
            raise self._error_of(refused(self.topic, outputs, self._producer, error.args[0])) from None
        self._produced(outputs.done - begin)
        return whole

    def abandon(self) -> None:
        """Give up a flush in progress."""
        self.producers.abandon()

    def poll(self, wait_s: float = 0.0) -> bool:
        """See `SinkWriter`: prepare producers, drain them, work off the backlog."""
        try:
            moved = self._go_on(wait_s)
        except KafkaException as error:  # a fatal one, which any call of the client may raise
            raise self._error_of(failure(self.topic, "the producer failed", error.args[0])) from None
        if self._error is not None:
            raise self._error
        return moved

    def _go_on(self, wait_s: float) -> bool:
        self._prepare()
        moved = self._drain(wait_s)
        while self._backlog and self._flushing is None:
            entry = self._backlog[0]
            if isinstance(entry, int):
                self._cut(entry)
            elif not self._activate() or not self._work_off(entry):
                break
            self._backlog.popleft()
            moved = True
        if self._producer is not None:
            self._producer.poll(wait_s)
        self._look()
        return moved

    def _look(self) -> None:
        """Note the records that the broker has taken since."""
        now_s, waiting = self._now_s(), self._backlog_records + self._undelivered
        delivered = self.records - waiting
        if delivered > self._delivered:
            for meter in (self._departures, self._averaged):
                meter.left(delivered - self._delivered, since_s=self._since_s, until_s=now_s)
            self._delivered = delivered
            self._since_s = now_s
        elif not waiting:
            self._since_s = now_s

    def _now_s(self) -> float:
        return self.clock.processing_s()

    def _work_off(self, outputs: Outputs) -> bool:
        before = outputs.left
        finished = self._produce(outputs)
        self._backlog_records -= before - outputs.left
        if finished:
            self._backlog_bytes -= outputs.size
        return finished


@dataclass(kw_only=True)
class KafkaWriter(ProducingWriter):
    """Exactly once. `prepared` is called with each transactional id whose producer is ready."""

    subtask: int
    pool: TransactionPool
    prepared: Callable[[str], None]
    _preparing: dict[str, Pending[SinkProducer]] = field(default_factory=dict)
    _waiting: dict[str, OpenTransaction] = field(default_factory=dict)
    _ready: deque[OpenTransaction] = field(default_factory=deque)
    _current: OpenTransaction | None = None
    _draining: OpenTransaction | None = None

    # --- producers ----------------------------------------------------------------------------------------------

    def granted(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        """Write with this id from now on: the coordinator knows its producer."""
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
            self._preparing[wanted] = self.producers.make(wanted, self._failed, self._throttled)
        for name, pending in list(self._preparing.items()):
            if pending.done():
                del self._preparing[name]
                self._waiting[name] = OpenTransaction(name, self._initialised(pending))
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
        precommit = transaction.precommit(self.sink, self.subtask, transaction.checkpoint, self.clock.monotonic_ms())
        self._flushed[transaction.checkpoint] = FlushedInterval(precommit)
        self.producers.drop(transaction)


@dataclass(kw_only=True)
class PlainWriter(ProducingWriter):
    """An idempotent producer, no transaction."""

    _ready: SinkProducer | None = None
    _pending: Pending[SinkProducer] | None = None
    _draining: int = 0
    """The checkpoint of the flush in progress."""
    _unflushed: int = 0
    """Records produced since the last flush began."""

    def _prepare(self) -> None:
        if self._ready is not None:
            return
        if self._pending is None:
            self._pending = self.producers.make(None, self._failed, self._throttled)
        if self._pending.done():
            self._ready = self._initialised(self._pending)

    def _activate(self) -> bool:
        return self._ready is not None and self._flushing is None

    @property
    def _producer(self) -> SinkProducer | None:
        return self._ready

    @property
    def _undelivered(self) -> int:
        return 0 if self._ready is None else len(self._ready)

    def _produced(self, count: int) -> None:
        self._unflushed += count

    def _cut(self, checkpoint: int) -> None:
        if not self._unflushed:
            self._flushed[checkpoint] = FlushedInterval()
            return
        assert self._ready is not None
        self._draining, self._unflushed = checkpoint, 0
        self._flushing = self.producers.flush(self._ready)

    def _drained(self) -> None:
        self._flushed[self._draining] = FlushedInterval()


def _shown_time(time_ms: int) -> str:
    """A time in ms since 1970 in ISO format, if the calendar has it."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
