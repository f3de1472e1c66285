"""One subtask of a Kafka sink whose delivery is not exactly once: an idempotent producer, no transaction.

Invariants: a produced record is visible at once and permanently; the client repeats requests, not records; an
undelivered record fails the sink, and is not produced again by this writer.
"""

from __future__ import annotations

from dataclasses import dataclass

from exactlyonce.sinks.kafka.producers import Pending, SinkProducer
from exactlyonce.sinks.kafka.producing import ProducingWriter
from exactlyonce.sinks.writer import FlushedInterval


@dataclass(kw_only=True)
class PlainWriter(ProducingWriter):
    """See the module."""

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
            self._pending = self.producers.make(None, self._failed)
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
