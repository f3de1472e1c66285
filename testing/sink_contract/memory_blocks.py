"""The blocks of a checkpoint topic in memory, written by a sink's writer and read by its committer.

Invariant: the shipped code writes and reads them; only the broker is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.records.encoding import Block, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, TopicInfo
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockWriter, OnDelivery

_TOPIC = TopicInfo("contract", "topic-1", partitions=5, replicas=1)


class _Place(NamedTuple):
    """Partition and offset of a delivered record."""

    at: tuple[int, int]

    def partition(self) -> int:
        return self.at[0]

    def offset(self) -> int:
        return self.at[1]


class MemoryBlocks:
    """The blocks of all subtasks of a test; a `checkpoint.block_storage.Blocks`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def produce(self, topic: str, value: bytes, key: str, partition: int, on_delivery: OnDelivery) -> None:
        """Keep a value; it is durable at once."""
        self._values[key] = value
        on_delivery(None, _Place((partition, len(self._values))))

    def poll(self, timeout_s: float) -> None:
        """Do nothing: all deliveries have been reported."""

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        """Each of *refs* with its block."""
        for ref in refs:
            yield ref, decode(self._values[ref.key], Block)


class MemoryStaging:
    """The `BlockStaging` of one sink subtask; *life* is unique."""

    def __init__(self, blocks: MemoryBlocks, sink: str, subtask: int, life: int) -> None:
        self._writer = BlockWriter(blocks, _TOPIC, incarnation=life, attempt=0, nonce="memory")
        self._sink = sink
        self._subtask = subtask
        self._parts = 0

    @property
    def pending(self) -> int:
        """Blocks in flight: none."""
        return self._writer.poll()

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        """Keep a block."""
        self._parts += 1
        block = Block(self._sink, checkpoint, kind, "", "", body)
        return self._writer.write(block, self._subtask, self._parts)
