"""The outputs of a unit: records for the next stage's subtasks, and outputs to be published; and their publication.

Invariants: after `close`, all pushed records are in a file, in order for each receiver; a record is encoded before the
push returns, because the next branch may change it in place; waiting records and frames are bounded by records and
bytes, except for a single larger record. An output's partition depends on the outputs before it, never on batches: a
replay may have others.

A publication writes the staged outputs of a sink in some partitions, in one transaction that is left open for the
decision. A partition gets the outputs of each subtask in turn, all in this transaction. No other attempt of this
publication has the transaction's id, and the next checkpoint reuses it only if no attempt has failed. The transaction
is never ended here: the driver sweeps it unless a manifest names it.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar, overload

import msgspec

from exactlyonce.checkpoint.records.manifest import TransactionalId
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import Partitioner
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.unit.messages import Publication, Published, tries_before
from exactlyonce.engines.bounded.unit.ordering import BATCH_RECORDS_MAX, BatchTime
from exactlyonce.engines.bounded.unit.staging import (
    FrameWriter,
    Origin,
    OutputBatch,
    OutputFile,
    SentFile,
    StagedFiles,
    origin_bytes,
    read_outputs,
)
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, OpenFrame, coordinates_of
from exactlyonce.engines.runtime.operators import Shuffle, SinkOutput, ToAll
from exactlyonce.engines.runtime.watermarks import Watermark, encode_signal
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.kafka.open_transaction import OpenTransaction
from exactlyonce.sinks.kafka.sink import Outputs

T = TypeVar("T")

WAITING_RECORDS_MAX = 20_000
WAITING_BYTES_MAX = 64 << 20
FRAME_RECORDS_MIN = 200
FRAME_BYTES_MAX = 1 << 20
"""With many receivers frames are smaller, so that about WAITING_BYTES_MAX wait in all."""
KEYLESS_RUN = 100
"""The outputs without a partition of their own that go to the same one before the next has its turn. Its value is part
of every manifest with `outputs_by_partition`: it never changes."""


def _records_max(receivers: int) -> int:
    return min(BATCH_RECORDS_MAX, max(FRAME_RECORDS_MIN, WAITING_RECORDS_MAX // receivers))


def _bytes_max(receivers: int) -> int:
    return min(FRAME_BYTES_MAX, WAITING_BYTES_MAX // receivers)


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
    """The waiting records for one receiver. Frames are of about the same size, whatever the batches."""

    receiver: int
    codec: BatchCodec
    writer: FrameWriter
    records_max: int
    bytes_max: int
    frame: OpenFrame = field(default_factory=OpenFrame)
    time_ms: int = 0
    watermark: Watermark | None = None
    """The last one that is not written: it goes after the frame."""

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
            self.writer.write(self.receiver, self.frame.encode(), len(self.frame), self.time_ms)
            self.frame = OpenFrame()
        if self.watermark is not None:
            self.writer.write(self.receiver, encode_signal(self.watermark), 0, self.time_ms, is_signal=True)
            self.watermark = None


class Sending:
    """A shuffle's output: *shuffle* distributes records to the receiving subtasks, all in one file; *to_all*: it sends
    each to all of them.

    A watermark waits until the frame before it is full: later is always right. With *exact* it keeps its place.
    """

    def __init__(
        self,
        edge: str,
        sender: int,
        max_parallelism: int,
        codec: BatchCodec,
        writer: FrameWriter,
        clock: BatchTime,
        *,
        exact: bool = False,
        to_all: bool = False,
    ) -> None:
        self._edge, self._sender, self._writer, self._clock, self._exact = edge, sender, writer, clock, exact
        limits = _records_max(writer.receivers), _bytes_max(writer.receivers)
        self._channels = [_Channel(receiver, codec, writer, *limits) for receiver in range(writer.receivers)]
        shuffle = ToAll if to_all else Shuffle
        self.shuffle = shuffle(edge, self._send, writer.receivers, max_parallelism, groups=set(), tell=self._tell)

    def _send(self, receiver: int, batch: Batch) -> None:
        self._channels[receiver].add(batch, self._clock.time_ms)

    def _tell(self, watermark: Watermark) -> None:
        for channel in self._channels:
            channel.watermark = watermark
            if self._exact:
                channel.write()

    def close(self) -> list[SentFile]:
        """The file, if there was any record or watermark."""
        for channel in self._channels:
            channel.write()
        file = self._writer.close(self.shuffle.groups_by_subtask())
        return [] if file is None else [SentFile(self._edge, self._sender, file)]


class LanesByKey:
    """Outputs of one key in one of so many *lanes*; those without a key by their value, or rows by their origin."""

    def __init__(self, lanes: int, *, rows: bool = False) -> None:
        self._lanes, self._rows = lanes, rows

    def places(self, outputs: Outputs, origins: Sequence[Origin] | None) -> Sequence[int]:
        keys = outputs.keys or [None] * len(outputs.values)
        others = map(origin_bytes, origins) if self._rows and origins is not None else outputs.values
        chosen = (other or b"" if key is None else key for key, other in zip(keys, others, strict=True))
        return [zlib.crc32(data) % self._lanes for data in chosen]


class ByPartition:
    """The choice of an output's partition: the sink's, else the partitioner's by its key, else partitions in turn."""

    def __init__(self, partition_of: Partitioner, partitions: int, subtask: int) -> None:
        self._partition_of, self._partitions, self._subtask = partition_of, partitions, subtask
        self.keyless = 0
        """The outputs so far that went to partitions in turn."""

    def places(self, outputs: Outputs, origins: Sequence[Origin] | None) -> Sequence[int]:
        """The partition of each output, wherever it stems from."""
        if outputs.partitions is not None:
            return outputs.partitions
        keys = outputs.keys or [None] * len(outputs.values)
        places = [self._partition_of(key, self._partitions) for key in keys]
        return [self._next() if place is None else place for place in places]

    def _next(self) -> int:
        place = (self._subtask + self.keyless // KEYLESS_RUN) % self._partitions
        self.keyless += 1
        return place


Distribution = LanesByKey | ByPartition
"""The choice of the receiver of each output."""


_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Lane:
    """The waiting outputs for one receiver."""

    receiver: int
    writer: FrameWriter
    records_max: int
    bytes_max: int
    batch: OutputBatch | None = None
    size: int = 0

    def add(self, batch: OutputBatch) -> None:
        size = sum(map(len, filter(None, batch.values))) + sum(map(len, filter(None, batch.keys or ())))
        if self.size + size > self.bytes_max:
            self.write()
        self.batch = batch if self.batch is None else self.batch.joined(batch)
        self.size += size
        if len(self.batch.values) >= self.records_max or self.size >= self.bytes_max:
            self.write()

    def write(self) -> None:
        batch, self.batch, self.size = self.batch, None, 0
        if batch is None:
            return

        def encode(start: int, end: int) -> bytes:
            return _encode(batch.part(start, end))

        for start, end, encoded in _cut(len(batch.values), self.bytes_max, encode):
            self.writer.write(self.receiver, encoded, end - start)


class Staging:
    """A sink's output: the `Writer` of a Kafka `SinkOutput`, which stages its outputs."""

    def __init__(
        self, sink: str, subtask: int, writer: FrameWriter, distribution: Distribution | None, *, origins: bool
    ) -> None:
        """*distribution* chooses the receiver; None: there is but one, since the client chooses partitions."""
        self._sink, self._subtask, self._writer, self._keeps_origins = sink, subtask, writer, origins
        self._distribution = distribution
        self._lanes: dict[int, _Lane] = {}
        self.output: SinkOutput
        """The operator that writes here, and knows the origins."""

    def write(self, outputs: Outputs) -> None:
        origins = None
        if self._keeps_origins:
            origins = list(zip(*coordinates_of(self.output.origins), strict=True))
            if outputs.records is not None:
                origins = [origins[place] for place in outputs.records]
        batch = OutputBatch(
            _list(outputs.values), _list(outputs.keys), _list(outputs.headers), origins, _list(outputs.timestamps)
        )
        if self._distribution is None:
            self._lane(0).add(msgspec.structs.replace(batch, partitions=_list(outputs.partitions)))
            return
        shares = defaultdict[int, list[int]](list)
        for number, partition in enumerate(self._distribution.places(outputs, origins)):
            shares[partition].append(number)
        for partition, numbers in shares.items():
            self._lane(partition).add(batch.share(numbers))

    def _lane(self, receiver: int) -> _Lane:
        lane = self._lanes.get(receiver)
        if lane is None:
            limits = _records_max(self._writer.receivers), _bytes_max(self._writer.receivers)
            lane = self._lanes[receiver] = _Lane(receiver, self._writer, *limits)
        return lane

    def close(self) -> list[OutputFile]:
        """The file, if there was any output."""
        for _, lane in sorted(self._lanes.items()):
            lane.write()
        file = self._writer.close()
        return [] if file is None else [OutputFile(self._sink, self._subtask, file, self._writer.counts)]


@overload
def _list(items: Sequence[T]) -> list[T]: ...
@overload
def _list(items: Sequence[T] | None) -> list[T] | None: ...
def _list(items: Sequence[T] | None) -> list[T] | None:
    return items if items is None or isinstance(items, list) else list(items)


# --- a publication --------------------------------------------------------------------------------------------------

SLOT = "0"

_decoder = msgspec.msgpack.Decoder(Publication)
_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])


def publish(publication: bytes, attempt_label: str) -> bytes:
    """Write an encoded `Publication`; return the encoded `Published`."""
    began_ms, work = SystemClock().now_ms(), _decoder.decode(publication)
    with closing(StagedFiles()) as files:
        outputs = _outputs_decoder.decode(files.message(work.outputs))
        lanes = [
            (output, partition) for output in outputs for partition in work.partitions if output.counts.get(partition)
        ]
        transaction = _begun(work, attempt_label)
        for (output, partition), batches in zip(lanes, read_outputs(files, lanes), strict=True):
            _write(transaction, work.topic, batches, partition, output.counts[partition])
    transaction.flush()
    precommit = transaction.precommit(work.sink, work.publisher, work.checkpoint, SystemClock().monotonic_ms())
    transaction.drop()
    wanted = sum(output.counts[partition] for output, partition in lanes)
    require(precommit.records == wanted, "all that was staged is in the transaction")
    hit("publication-flushed")
    return _encode(Published(precommit, began_ms, SystemClock().now_ms(), attempt_label))


def _begun(work: Publication, label: str) -> OpenTransaction:
    attempt = f"{work.attempt}-{tries_before(label)}"
    name = str(TransactionalId(work.pipeline, work.sink, work.publisher, work.incarnation, attempt, SLOT))
    config = ClientConfig(work.client)
    with closing(Transactions(config)) as transactions:
        return OpenTransaction.begun(
            config,
            name,
            transactions,
            timeout_ms=work.transaction_timeout_ms,
            topic=work.topic,
            subject=f"sink {work.sink!r}",
            opened_ms=SystemClock().monotonic_ms(),
        )


def _write(
    transaction: OpenTransaction, topic: str, batches: Iterator[OutputBatch], partition: int, staged: int
) -> None:
    """Write all that a subtask has staged for *partition*: so many outputs."""
    before = transaction.records
    for batch in batches:
        places = [partition] * len(batch.values)
        transaction.write(topic, Outputs(batch.values, batch.keys, batch.headers, batch.timestamps, partitions=places))
    require(transaction.records - before == staged, "all that a subtask has staged for a partition is written")
