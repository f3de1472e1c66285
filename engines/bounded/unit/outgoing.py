"""The ends of a unit: records that go to the next stage's subtasks, and outputs that are to be published.

Invariant: what is pushed here is in a file, in the order in which it was pushed, once `close` has returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exactlyonce.engines.batch_codec import BatchCodec
from exactlyonce.engines.bounded.unit.ordering import BATCH_RECORDS_MAX, TIME_BYTES, BatchTime
from exactlyonce.engines.bounded.unit.staging import ChannelFile, FrameWriter, OutputBatch, OutputFile
from exactlyonce.engines.operators import Batch, Origin
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.state.key_groups import subtask_of

WAITING_RECORDS_MAX = 20_000
FRAME_RECORDS_MIN = 200
"""With many receivers frames are smaller, so that no more records than these wait for their frames, if that will do."""

_append: Callable[[Any, Any], None] = list.append
_exhaust = deque[Any](maxlen=0).extend


@dataclass
class _Channel:
    """What waits for one receiver, and its file. Frames are of about the same size, however much comes at a time."""

    codec: BatchCodec
    writer: FrameWriter
    records: list[Any] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    time_ms: int = 0

    def write(self) -> None:
        if self.records:
            body = self.codec.encode(Batch(self.records, self.origins, self.keys))
            self.writer.write(body, len(self.records), self.time_ms.to_bytes(TIME_BYTES, "big"))
            for waiting in (self.records, self.origins, self.keys):
                waiting.clear()


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
        self._channels = [_Channel(codec, writer) for writer in writers]
        self._groups: set[int] = set()
        share = max(FRAME_RECORDS_MIN, WAITING_RECORDS_MAX // len(writers))
        self._frame_records = min(BATCH_RECORDS_MAX, share)

    def __call__(self, batch: Batch) -> None:
        assert batch.keys is not None
        if not batch.keys:
            return
        groups = key_groups(batch.keys, self._max_parallelism)
        self._groups.update(groups)
        receivers = list(map(self._owners.__getitem__, groups))
        channels = self._channels
        receiving = [channels[receiver] for receiver in set(receivers)]
        for channel in receiving:
            if not channel.records:
                channel.time_ms = max(channel.time_ms, self._clock.time_ms)
        _deal([channel.records for channel in channels], receivers, batch.records)
        _deal([channel.origins for channel in channels], receivers, batch.origins)
        _deal([channel.keys for channel in channels], receivers, batch.keys)
        for channel in receiving:
            if len(channel.records) >= self._frame_records:
                channel.write()

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


def _deal(lists: list[list[Any]], receivers: list[int], items: Sequence[Any]) -> None:
    """Append each item to its receiver's list, without a step of Python for each."""
    _exhaust(map(_append, map(lists.__getitem__, receivers), items))


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
        batch = OutputBatch(list(outputs.values), _list(outputs.keys), _list(outputs.headers), origins)
        self._writer.write(_encode_output(batch), len(outputs.values))

    def close(self) -> list[OutputFile]:
        """The file, if there was any output."""
        file = self._writer.close()
        return [] if file is None else [OutputFile(self._sink, self._subtask, file)]


def _list(items: Sequence[Any] | None) -> list[Any] | None:
    return items if items is None or isinstance(items, list) else list(items)
