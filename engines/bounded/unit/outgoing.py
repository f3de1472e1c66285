"""The outputs of a unit: records for the next stage's subtasks, and outputs to be published.

Invariants: after `close`, all pushed records are in a file, in order; a record is encoded before the push returns,
because the next branch may change it in place; waiting records and frames are bounded by records and bytes, except for
a single larger record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exactlyonce.engines.bounded.unit.ordering import BATCH_RECORDS_MAX, TIME_BYTES, BatchTime
from exactlyonce.engines.bounded.unit.staging import ChannelFile, FrameWriter, OutputBatch, OutputFile
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import BatchCodec, OpenFrame
from exactlyonce.engines.runtime.operators import Shuffle, SinkOutput
from exactlyonce.sinks.kafka.sink import Outputs

WAITING_RECORDS_MAX = 20_000
WAITING_BYTES_MAX = 64 << 20
FRAME_RECORDS_MIN = 200
FRAME_BYTES_MAX = 1 << 20
"""With many receivers frames are smaller, so that about WAITING_BYTES_MAX wait in all."""


def _cut(count: int, bytes_max: int, encode: Callable[[int, int], bytes]) -> Iterator[tuple[int, int, bytes]]:
    """*count* items in parts of (start, end, encoded), bounded by records and, except for a single record, by bytes."""
    starts = range(0, count, BATCH_RECORDS_MAX)
    todo = [(start, min(start + BATCH_RECORDS_MAX, count)) for start in reversed(starts)]
    while todo:
        start, end = todo.pop()
        encoded = encode(start, end)
        if len(encoded) <= bytes_max or end - start == 1:
            yield start, end, encoded
        else:
            middle = (start + end) // 2
            todo += ((middle, end), (start, middle))


@dataclass
class _Channel:
    """The waiting records for one receiver, and its file. Frames are of about the same size, whatever the batches."""

    codec: BatchCodec
    writer: FrameWriter
    records_max: int
    bytes_max: int
    frame: OpenFrame = field(default_factory=OpenFrame)
    time_ms: int = 0

    def add(self, batch: Batch, time_ms: int) -> None:
        def encode(start: int, end: int) -> bytes:
            return self.codec.encode_records(batch.part(start, end))

        for start, end, encoded in _cut(len(batch.records), self.bytes_max, encode):
            if self.frame.size + len(encoded) > self.bytes_max:
                self.write()
            if not self.frame:
                self.time_ms = max(self.time_ms, time_ms)
            self.frame.add(batch.part(start, end), encoded)
            if len(self.frame) >= self.records_max or self.frame.size >= self.bytes_max:
                self.write()

    def write(self) -> None:
        if self.frame:
            self.writer.write(self.frame.encode(), len(self.frame), self.time_ms.to_bytes(TIME_BYTES, "big"))
            self.frame = OpenFrame()


class Sending:
    """A shuffle's output: *shuffle* distributes records to files, one for each receiving subtask."""

    def __init__(
        self,
        edge: str,
        sender: int,
        max_parallelism: int,
        codec: BatchCodec,
        writers: Sequence[FrameWriter],
        clock: BatchTime,
    ) -> None:
        self._edge, self._sender, self._clock = edge, sender, clock
        records_max = min(BATCH_RECORDS_MAX, max(FRAME_RECORDS_MIN, WAITING_RECORDS_MAX // len(writers)))
        bytes_max = min(FRAME_BYTES_MAX, WAITING_BYTES_MAX // len(writers))
        self._channels = [_Channel(codec, writer, records_max, bytes_max) for writer in writers]
        self.shuffle = Shuffle(edge, self._send, len(writers), max_parallelism, groups=set())

    def _send(self, receiver: int, batch: Batch) -> None:
        self._channels[receiver].add(batch, self._clock.time_ms)

    def close(self) -> list[ChannelFile]:
        """The files with any record."""
        files = []
        for receiver, channel in enumerate(self._channels):
            channel.write()
            file = channel.writer.close()
            if file is not None:
                files.append(ChannelFile(self._edge, self._sender, receiver, file, self.shuffle.groups_of(receiver)))
        return files


_encode_output = msgspec.msgpack.Encoder().encode


class Staging:
    """A sink's output: the `Writer` of a Kafka `SinkOutput`, which stages its outputs."""

    def __init__(self, sink: str, subtask: int, writer: FrameWriter, *, origins: bool) -> None:
        self._sink, self._subtask, self._writer, self._keeps_origins = sink, subtask, writer, origins
        self.output: SinkOutput
        """The operator that writes here, and knows the origins."""

    def write(self, outputs: Outputs) -> None:
        origins = None
        if self._keeps_origins:
            origins = [
                (origin.topic() or "", origin.partition() or 0, origin.offset() or 0) for origin in self.output.origins
            ]
        batch = OutputBatch(
            list(outputs.values), _list(outputs.keys), _list(outputs.headers), origins, _list(outputs.timestamps),
            _list(outputs.partitions),
        )  # fmt: skip

        def encode(start: int, end: int) -> bytes:
            return _encode_output(batch.part(start, end))

        for start, end, encoded in _cut(len(outputs.values), FRAME_BYTES_MAX, encode):
            self._writer.write(encoded, end - start)

    def close(self) -> list[OutputFile]:
        """The file, if there was any output."""
        file = self._writer.close()
        return [] if file is None else [OutputFile(self._sink, self._subtask, file)]


def _list(items: Sequence[Any] | None) -> list[Any] | None:
    return items if items is None or isinstance(items, list) else list(items)
