"""The ends of a unit: records that go to the next stage's subtasks, and outputs that are to be published.

Invariants: what is pushed here is in a file, in the order in which it was pushed, once `close` has returned; it is
encoded before the push returns, for the next branch may change it in place; what waits, and a frame, are bounded by
records and by bytes, but for a record that is larger by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exactlyonce.engines.batch_codec import BatchCodec, OpenFrame
from exactlyonce.engines.bounded.unit.ordering import BATCH_RECORDS_MAX, TIME_BYTES, BatchTime
from exactlyonce.engines.bounded.unit.staging import ChannelFile, FrameWriter, OutputBatch, OutputFile
from exactlyonce.engines.operators import Batch, Origin
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.state.key_groups import subtask_of

WAITING_RECORDS_MAX = 20_000
WAITING_BYTES_MAX = 64 << 20
FRAME_RECORDS_MIN = 200
FRAME_BYTES_MAX = 1 << 20
"""With many receivers frames are smaller, so that no more than this waits for its frames, if that will do."""

_append: Callable[[Any, Any], None] = list.append
_exhaust = deque[Any](maxlen=0).extend


def _cut(count: int, bytes_max: int, encode: Callable[[int, int], bytes]) -> Iterator[tuple[int, int, bytes]]:
    """*count* items as (start, end, what *encode* makes of them): parts of so many records, and of so many bytes unless
    it is one record."""
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
    """What waits for one receiver, and its file. Frames are of about the same size, however much comes at a time."""

    codec: BatchCodec
    writer: FrameWriter
    records_max: int
    bytes_max: int
    frame: OpenFrame = field(default_factory=OpenFrame)
    time_ms: int = 0

    def add(self, batch: Batch, time_ms: int) -> None:
        """Append *batch*, which came to be at *time_ms*."""

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
    """A shuffle's end: distributes records to files, one for each subtask behind the edge."""

    def __init__(
        self,
        edge: str,
        sender: int,
        max_parallelism: int,
        codec: BatchCodec,
        writers: Sequence[FrameWriter],
        clock: BatchTime,
    ) -> None:
        self._edge, self._sender, self._max_parallelism, self._clock = edge, sender, max_parallelism, clock
        self._owners = [subtask_of(group, len(writers), max_parallelism) for group in range(max_parallelism)]
        records_max = min(BATCH_RECORDS_MAX, max(FRAME_RECORDS_MIN, WAITING_RECORDS_MAX // len(writers)))
        bytes_max = min(FRAME_BYTES_MAX, WAITING_BYTES_MAX // len(writers))
        self._channels = [_Channel(codec, writer, records_max, bytes_max) for writer in writers]
        self._groups: set[int] = set()

    def __call__(self, batch: Batch) -> None:
        assert batch.keys is not None
        if not batch.keys:
            return
        groups = key_groups(batch.keys, self._max_parallelism)
        self._groups.update(groups)
        receivers = list(map(self._owners.__getitem__, groups))
        records, origins, keys = (
            _dealt(each, receivers, len(self._channels)) for each in (batch.records, batch.origins, batch.keys)
        )
        for receiver in set(receivers):
            share = Batch(records[receiver], origins[receiver], keys[receiver])
            self._channels[receiver].add(share, self._clock.time_ms)

    def close(self) -> list[ChannelFile]:
        """The files that got any record."""
        found = []
        for receiver, channel in enumerate(self._channels):
            channel.write()
            file = channel.writer.close()
            if file is not None:
                groups = tuple(sorted(group for group in self._groups if self._owners[group] == receiver))
                found.append(ChannelFile(self._edge, self._sender, receiver, file, groups))
        return found


def _dealt(items: Sequence[Any], receivers: list[int], count: int) -> list[list[Any]]:
    """The items of each of *count* receivers, without a step of Python for each item."""
    shares: list[list[Any]] = [[] for _ in range(count)]
    _exhaust(map(_append, map(shares.__getitem__, receivers), items))
    return shares


_encode_output = msgspec.msgpack.Encoder().encode


class Staging:
    """A sink's end: the `Writer` of a Kafka `SinkOutput`, which stages what it is given."""

    def __init__(self, sink: str, subtask: int, writer: FrameWriter, *, origins: bool) -> None:
        self._sink, self._subtask, self._writer, self._keeps_origins = sink, subtask, writer, origins
        self._origins: Sequence[Origin] = ()

    def note(self, batch: Batch) -> None:
        """The origins of what `write` gets next."""
        self._origins = batch.origins

    def write(self, outputs: Outputs) -> None:
        """Stage *outputs*."""
        origins = None
        if self._keeps_origins:
            origins = [(o.topic() or "", o.partition() or 0, o.offset() or 0) for o in self._origins]
        batch = OutputBatch(
            list(outputs.values), _list(outputs.keys), _list(outputs.headers), origins, _list(outputs.timestamps)
        )

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
