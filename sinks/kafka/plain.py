"""One subtask of a Kafka sink whose delivery is not exactly once: an idempotent producer, no transaction.

Invariants: what was produced is visible at once, and nothing takes it back; the client repeats requests, not records;
a record that was not delivered fails the sink, and is not produced again by this writer.
"""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka import KafkaException

from exactlyonce.sinks.kafka.producers import Pending, SinkProducer
from exactlyonce.sinks.kafka.producing import ProducingWriter
from exactlyonce.sinks.writer import FlushedInterval, WriterContext


@dataclass(kw_only=True)
class PlainWriter(ProducingWriter):
    """See the module."""

    _made: SinkProducer | None = None
    _making: Pending[SinkProducer] | None = None
    _draining: int = 0
    """The checkpoint of the flush that is under way."""
    _unflushed: int = 0
    """Records that were produced since the last flush began."""

    def _prepare(self) -> None:
        if self._made is not None:
            return
        if self._making is None:
            self._making = self.producers.make(None, self._failed)
        if self._making.done():
            try:
                self._made = self._making.result()
            except KafkaException as error:
                raise self._error_of("no producer could be made", error.args[0]) from None

    def _activate(self) -> bool:
        return self._made is not None and self._flushing is None

    @property
    def _producer(self) -> SinkProducer | None:
        return self._made

    @property
    def _undelivered(self) -> int:
        return 0 if self._made is None else len(self._made)

    def _produced(self, count: int) -> None:
        self._unflushed += count

    def _cut(self, checkpoint: int) -> None:
        if not self._unflushed:
            self._flushed[checkpoint] = FlushedInterval()
            return
        assert self._made is not None
        self._draining, self._unflushed = checkpoint, 0
        self._flushing = self.producers.flush(self._made)

    def _drained(self) -> None:
        self._flushed[self._draining] = FlushedInterval()


def open_writer(topic: str, context: WriterContext) -> PlainWriter:
    """The writer of one sink subtask."""
    clients = context.clients
    return PlainWriter(sink=context.sink, topic=topic, producers=clients.producers(topic), clock=clients.clock)
