"""The inputs of a task's subtask: sources and channels, alike to whoever reads them.

Invariants: an input hands out batches and barriers in order; a source's barrier comes between two batches, and Sn is
noted at that moment; after a final barrier a source hands out nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from exactlyonce.checkpoint.manifest import SourceOffset
from exactlyonce.connectors.kafka_reader import KafkaReader
from exactlyonce.connectors.kafka_source import KafkaSource
from exactlyonce.engines.batch_codec import BatchCodec
from exactlyonce.engines.local.channels import BarrierFrame, Channel
from exactlyonce.engines.operators import Batch, Push
from exactlyonce.engines.source_decoder import SourceDecoder

BATCH_RECORDS_MAX = 2_000


class Input(Protocol):
    """Where a subtask's records come from."""

    @property
    def name(self) -> str: ...
    @property
    def push(self) -> Push: ...

    def next(self, wait_s: float) -> Batch | BarrierFrame | None:
        """What comes next; a source waits up to *wait_s* for records."""

    def runs(self) -> Iterable[tuple[int, int]]:
        """(partition or -1, count) of the batch just handed out."""


class SourceTrigger(NamedTuple):
    """A barrier to be injected."""

    frame: BarrierFrame
    final: bool
    added: Mapping[int, int]
    """By partition that is to be read from this barrier on, the offset to begin at."""


@dataclass
class SourceInput:
    """The partitions of a source that this subtask reads."""

    name: str
    reader: KafkaReader
    topic_id: str
    source: KafkaSource[Any]
    push: Push
    triggers: deque[SourceTrigger] = field(default_factory=deque)
    noted: dict[int, tuple[SourceOffset, ...]] = field(default_factory=dict)
    """Sn by checkpoint, until the snapshot takes it."""
    stopped: bool = False
    records: int = 0
    notes: list[str] = field(default_factory=list)
    """What was skipped, until the worker tells the coordinator."""

    def __post_init__(self) -> None:
        self._decoder = SourceDecoder(self.name, self.source, self.notes.append)

    @property
    def skipped(self) -> int:
        """Records passed over because they do not decode."""
        return self._decoder.skipped

    def next(self, wait_s: float) -> Batch | BarrierFrame | None:
        if self.triggers:
            trigger = self.triggers.popleft()
            for partition, offset in trigger.added.items():
                self.reader.add(partition, offset)
            epochs = self.reader.epochs
            self.noted[trigger.frame.checkpoint] = tuple(
                SourceOffset(self.name, self.reader.topic, self.topic_id, partition, offset, epochs.get(partition, -1))
                for partition, offset in sorted(self.reader.offsets.items())
            )
            self.stopped = trigger.final
            return trigger.frame
        if self.stopped:
            return None
        messages = self.reader.poll(BATCH_RECORDS_MAX, wait_s)
        if not messages:
            return None
        self.records += len(messages)
        return self._decoder.decode(messages)

    def runs(self) -> Iterable[tuple[int, int]]:
        return self.reader.runs

    @property
    def finished(self) -> bool:
        """Whether all that the job is to read has been handed out."""
        return self.reader.finished


@dataclass
class ChannelInput:
    """One channel into this subtask."""

    name: str
    channel: Channel
    codec: BatchCodec
    push: Push
    _count: int = 0

    def next(self, wait_s: float) -> Batch | BarrierFrame | None:
        frame = self.channel.receive()
        if frame is None or isinstance(frame, BarrierFrame):
            return frame
        batch = self.codec.decode(frame)
        self._count = len(batch.records)
        return batch

    def runs(self) -> Iterable[tuple[int, int]]:
        return ((-1, self._count),)
