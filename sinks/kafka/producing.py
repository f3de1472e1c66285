"""The producing loop of writers to Kafka: outputs are produced in their order, and a barrier waits for all before it.

Invariants: outputs before a barrier are flushed before any after it is produced (order within a partition); after a
delivery error the writer raises and acknowledges nothing. Writing never blocks: outputs that cannot be produced yet
wait in a backlog. A flush waits for the broker, so `room` asks the caller to pause if more records wait, in client and
backlog, than the broker took lately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import repeat
from operator import length_hint

from confluent_kafka import KafkaError, KafkaException

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.connectors.confluent import ANY_PARTITION
from exactlyonce.pipeline.errors import ExactlyOnceError, RecordError, require
from exactlyonce.pipeline.rate_meter import RateMeter
from exactlyonce.sinks.kafka.producers import Failure, Pending, Producers, SinkProducer, failure, too_large, why
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.writer import IntervalWriter

WAITING_S = 1.0
"""As many records may wait as the broker took in the last so many seconds,"""
WAITING_MIN = 100
"""and so many at least: from there, what the broker takes doubles with each round trip."""
BACKLOG_BYTES_MAX = 32 << 20


@dataclass
class _Barrier:
    checkpoint: int


@dataclass(kw_only=True)
class ProducingWriter(IntervalWriter, ABC):
    """Writes to *topic*; see the module. Its producers are made, flushed and dropped by `producers`, elsewhere."""

    topic: str
    producers: Producers
    clock: Clock
    _flushing: Pending[int] | None = None
    _backlog: deque[Outputs | _Barrier] = field(default_factory=deque)
    _backlog_records: int = 0
    _backlog_bytes: int = 0
    _error: ExactlyOnceError | None = None
    _times_ms: tuple[int, int] | None = None
    """The earliest and the latest timestamp of its outputs."""
    _departures: RateMeter = field(default_factory=lambda: RateMeter(WAITING_S))
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

    def _failed(self, failure: Failure) -> None:
        reason = failure.reason
        if failure.of_times and self._times_ms is not None:
            earliest, latest = map(_shown_time, self._times_ms)
            reason = f"{reason} The times so far are from {earliest} to {latest}."
        self._error = self._error or failure.kind(f"sink {self.sink!r}: {reason}")

    def _initialised(self, pending: Pending[SinkProducer]) -> SinkProducer:
        """The producer that `make` has made."""
        try:
            return pending.result()
        except KafkaException as error:
            raise self._error_of("no producer could be made", error.args[0]) from None

    def _error_of(self, what: str, error: KafkaError) -> ExactlyOnceError:
        """The first reported failure, which may be *what*, caused by *error*."""
        self._failed(failure(self.topic, what, error))
        assert self._error is not None
        return self._error

    @property
    def room(self) -> int:
        """The number of further records that may wait for the broker."""
        if self._backlog_bytes > BACKLOG_BYTES_MAX:
            return 0
        may_wait = max(WAITING_MIN, self._departures.lately(self._now_s()))
        return max(0, may_wait - (self.records - self._delivered))

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
            self._backlog.append(_Barrier(checkpoint))
        else:
            self._cut(checkpoint)

    def _produce(self, outputs: Outputs) -> bool:
        """Produce until librdkafka's queue is full; True if all were produced."""
        assert self._producer is not None
        produce, topic, begin = self._producer.produce, self.topic, outputs.done
        values = iter(outputs.values[begin:])
        keys = repeat(None, outputs.left) if outputs.keys is None else outputs.keys[begin:]
        places = repeat(ANY_PARTITION, outputs.left) if outputs.partitions is None else outputs.partitions[begin:]
        full = False
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
        except BufferError:
            full = True
        except KafkaException as error:
            if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
                what = f"a record of {len(value or b'') + len(key or b''):,} bytes"
                raise RecordError(f"sink {self.sink!r}: {too_large(topic, what)}", operator=self.sink) from None
            raise self._error_of("a record could not be produced", why(self._producer, error.args[0])) from None
        outputs.done = len(outputs.values) - length_hint(values) - full
        self._produced(outputs.done - begin)
        return not outputs.left

    def abandon(self) -> None:
        """Give up a flush in progress."""
        self.producers.abandon()

    def poll(self, wait_s: float = 0.0) -> bool:
        """See `SinkWriter`: prepare producers, drain them, work off the backlog."""
        try:
            moved = self._go_on(wait_s)
        except KafkaException as error:  # a fatal one, which any call of the client may raise
            raise self._error_of("the producer failed", error.args[0]) from None
        if self._error is not None:
            raise self._error
        return moved

    def _go_on(self, wait_s: float) -> bool:
        self._prepare()
        moved = self._drain(wait_s)
        while self._backlog and self._flushing is None:
            entry = self._backlog[0]
            if isinstance(entry, _Barrier):
                self._cut(entry.checkpoint)
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
            self._departures.left(delivered - self._delivered, since_s=self._since_s, until_s=now_s)
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


def _shown_time(time_ms: int) -> str:
    """A time in ms since 1970 in ISO format, if the calendar has it."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
