"""The clients by which a worker reaches Kafka, its peers and the time: all that differs in a simulation.

Invariant: nothing is decided here. A worker with other clients runs the same code.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from exactlyonce.checkpoint.block_storage import AttemptBlocks, Blocks
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.reader import Consumers, exact_consumer
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.local.channels import Pipe
from exactlyonce.engines.local.messages import Start
from exactlyonce.engines.options import ROCKSDB
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.sinks.kafka.writer import KafkaProducers, Producers


class Clients(Protocol):
    """The clients of one worker."""

    @property
    def clock(self) -> Clock: ...

    @property
    def monotonic_s(self) -> Callable[[], float]:
        """Time that only grows, finer than the clock's."""

    @property
    def processing_s(self) -> Callable[[], float]:
        """See `Clock.processing_s`."""

    def block_writer(self) -> AttemptBlocks:
        """The writer of this attempt's blocks."""

    def block_reader(self) -> Blocks: ...

    def consumers(self, topic: str, client: ClientConfig | None = None) -> Consumers:
        """The consumers of a source's subtask that reads *topic*; *client*: see `connectors.source.ReadsTopic`."""

    def producers(self, topic: str, partitioner: str | None) -> Producers:
        """The producers of a sink's subtask that writes to *topic*; *partitioner*: see `WriterContext`."""

    def pipe(self, name: str) -> Pipe:
        """This worker's end of the channel that `Start` calls *name*."""


class KafkaClients:
    """The `Clients` of a worker process."""

    def __init__(self, start: Start, pipeline: str) -> None:
        self.clock = SystemClock()
        self.monotonic_s, self.processing_s = time.monotonic, self.clock.processing_s
        self._start, self._pipeline = start, pipeline
        self._config = ClientConfig(start.client)
        lazily = start.state.backend == ROCKSDB  # it reads blocks now and then
        self._blocks = block_storage(self._config, start.spec.topic, start.spec.storage, stays_connected=lazily)
        self._executor = ThreadPoolExecutor(1, "producers")
        """Makes and drops the producers of all sinks, one after the other."""

    def block_writer(self) -> AttemptBlocks:
        return self._blocks.begin(self._start.spec.incarnation, self._start.spec.attempt)

    def block_reader(self) -> Blocks:
        return self._blocks

    def consumers(self, topic: str, client: ClientConfig | None = None) -> Consumers:
        return Consumers((client or self._config).confluent({"group.id": self._pipeline}), exact_consumer)

    def producers(self, topic: str, partitioner: str | None) -> Producers:
        config, timeout_ms = self._config.confluent(), self._start.transaction_timeout_ms
        return KafkaProducers(topic, config, timeout_ms, self._executor, partitioner=partitioner)

    def pipe(self, name: str) -> socket.socket:
        pipe = socket.socket(fileno=self._start.channels[name])
        pipe.setblocking(False)
        return pipe
