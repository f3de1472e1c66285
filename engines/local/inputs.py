"""The inputs of a task's subtask: sources and channels, alike to whoever reads them.

Invariants: an input hands out batches and barriers in order; a source's barrier comes between two batches, and Sn is
noted at that moment; after a final barrier a source hands out nothing more.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, NamedTuple, Protocol

import msgspec
from confluent_kafka import Message

from exactlyonce.checkpoint.manifest import SourceOffset
from exactlyonce.connectors.kafka_reader import KafkaReader
from exactlyonce.connectors.kafka_source import KafkaSource
from exactlyonce.engines.local.channels import BarrierFrame, Channel
from exactlyonce.engines.local.operators import Batch, Push
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.schema import type_name

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
    skipped: int = 0

    def __post_init__(self) -> None:
        self._decode_value = self.source.decode_value
        self._decode: Callable[[Any], Any] = self._record if self.source.metadata else self._decode_value

    def _record(self, message: Message) -> Record[Any]:
        """A message with all that Kafka knows of it."""
        return Record(
            self._decode_value(message.value()),
            self.source.decode_key(message.key()),
            message.timestamp()[1],
            tuple(message.headers() or ()),  # type: ignore[arg-type]  # a consumed message has pairs of text and bytes
            message.topic() or "",
            message.partition() or 0,
            message.offset() or 0,
        )

    def next(self, wait_s: float) -> Batch | BarrierFrame | None:
        if self.triggers:
            trigger = self.triggers.popleft()
            self.noted[trigger.frame.checkpoint] = tuple(
                SourceOffset(self.name, self.reader.topic, self.topic_id, partition, offset)
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
        return self._decoded(messages)

    def runs(self) -> Iterable[tuple[int, int]]:
        return self.reader.runs

    @property
    def finished(self) -> bool:
        """Whether all that the job is to read has been handed out."""
        return self.reader.finished

    def _decoded(self, messages: list[Message]) -> Batch:
        values = messages if self.source.metadata else list(map(Message.value, messages))
        iterator = iter(values)
        try:
            return Batch(list(map(self._decode, iterator)), messages)
        except Exception as error:
            bad = len(values) - length_hint(iterator) - 1
            problem = self._undecodable(messages[bad], error)
            if self.source.on_error == "fail":
                raise RecordError(
                    f"{problem} The job has stopped before it; nothing is lost. Mend the type or the producer, or let "
                    f'the source pass over such records: on_error="skip".'
                ) from error
            self.skipped += 1
            sys.stderr.write(f"skipped: {problem}\n")
            rest = messages[:bad] + messages[bad + 1 :]
            return self._decoded(rest) if rest else Batch([], [])

    def _undecodable(self, message: Message, error: Exception) -> str:
        place = f"{message.topic()}[{message.partition()}] offset {message.offset()}"
        return f"Source {self.name!r}: the record at {place}: {self.source.value_problem(message.value(), error)}."


class Coordinates(NamedTuple):
    """What a shuffle keeps of a message, for error texts."""

    topic_name: str
    partition_number: int
    offset_number: int

    def topic(self) -> str:
        return self.topic_name

    def partition(self) -> int:
        return self.partition_number

    def offset(self) -> int:
        return self.offset_number


class BatchCodec:
    """Batches as bytes: typed records in msgpack, beside them keys and coordinates.

    A record that is not of its declared type is the user's error, on either side: `RecordError` names the first one.
    """

    def __init__(self, record_type: Any) -> None:
        self._type = record_type
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = _frame_decoder(record_type)

    def encode(self, batch: Batch) -> bytes:
        """One frame."""
        topics = [origin.topic() or "" for origin in batch.origins]
        names = sorted(set(topics))
        places = {name: place for place, name in enumerate(names)}
        coordinates = (
            names,
            array("H", map(places.__getitem__, topics)).tobytes(),
            array("i", [origin.partition() or 0 for origin in batch.origins]).tobytes(),
            array("q", [origin.offset() or 0 for origin in batch.origins]).tobytes(),
        )
        try:
            return self._encoder.encode((batch.records, batch.keys, *coordinates))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._misfit(batch, self._encoder.encode, error) from error

    def decode(self, frame: bytes) -> Batch:
        """The batch of a frame."""
        try:
            records, keys, *coordinates = self._decoder.decode(frame)
        except msgspec.ValidationError as error:
            raw, keys, *coordinates = _frame_decoder(msgspec.Raw).decode(frame)
            decode = msgspec.msgpack.Decoder(self._type).decode
            raise self._misfit(Batch(raw, _origins(*coordinates), keys), decode, error) from error
        return Batch(records, _origins(*coordinates), keys)

    def _misfit(self, batch: Batch, code: Callable[[Any], object], error: Exception) -> RecordError:
        for record, origin in zip(batch.records, batch.origins, strict=True):
            try:
                code(record)
            except Exception as found:
                where = f"{origin.topic()}[{origin.partition()}] offset {origin.offset()}"
                return RecordError(
                    f"A record that was to be sent to another worker is not a valid {type_name(self._type)}: {found}. "
                    f"It stems from the record at {where}. The job has stopped before it; nothing is lost. Let the "
                    f"function that made it return {type_name(self._type)}, or declare another type by output=."
                )
        return RecordError(f"Records that were to be sent to another worker cannot be encoded: {error}.")


def _frame_decoder(record_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(tuple[list[record_type], list[bytes], list[str], bytes, bytes, bytes])


def _origins(names: list[str], topics: bytes, partitions: bytes, offsets: bytes) -> list[Coordinates]:
    return list(
        map(Coordinates, map(names.__getitem__, array("H", topics)), array("i", partitions), array("q", offsets))
    )


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
