"""A Kafka topic as a sink: the description, and the encoder. It opens nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import TransactionalId
from exactlyonce.connectors.kafka.partitioning import PARTITIONERS
from exactlyonce.connectors.registry import OpenedCodec, check_writing, opened
from exactlyonce.connectors.registry import problems as registry_problems
from exactlyonce.pipeline.changes import holds_changes
from exactlyonce.pipeline.codec import BytesCodec, Codec, JsonCodec, codec_for, require_finite
from exactlyonce.pipeline.dead_letters import DeadLetter, DeadLetterLimits, DeadLetterTarget
from exactlyonce.pipeline.debezium import DebeziumCodec
from exactlyonce.pipeline.errors import GraphError, require
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.location import caller, location
from exactlyonce.pipeline.names import shared_name_problem, topic_problem
from exactlyonce.pipeline.shape import type_name
from exactlyonce.pipeline.sink import AT_LEAST_ONCE, EXACTLY_ONCE, Delivery, Routes, Sink, mapped
from exactlyonce.sinks.writer import Opened, WriterContext, codec_problems, holds_keys, holds_records, value_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from exactlyonce.connectors.kafka.source import KafkaSource

T = TypeVar("T")
Headers = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, eq=False)
class KafkaSink(Sink[T], Generic[T]):
    """Writes to a topic: a read_committed consumer sees every output once, after its checkpoint.

    - *topic*: its name, or a function from the output to the name of one of *topics*. Then each of these has a sink,
      ``<id>-<topic>``, with the other arguments in common, and a checkpoint commits the outputs of all or of none.
    - *value*: a type or a codec; None: by the type of the stream (bytes as they are, str in UTF-8, all else JSON). None
      as an output is a null value, Kafka's tombstone.
    - *key*: a function from the output to its key: bytes as they are, str in UTF-8, None as null, all else JSON.
    - *key_codec*: a codec for these keys, as ``AvroCodec(str, registry=...)``; a null key stays null.
    - *headers*: a function from the output to (name, bytes) pairs; text for bytes is written in UTF-8.
    - *timestamp*: a function from the output to its time, as milliseconds since 1970 from 1 on, or as a datetime with a
      time zone; None: the time when it is written. A topic with message.timestamp.type=LogAppendTime does not keep it.
    - *partition*: a function from the output to its partition, from 0 to before the topic's number of partitions; None:
      *partitioner* chooses it by the key, or any without one.
    - *partitioner*: a name of librdkafka: "murmur2_random", the default, that of Java's clients; "consistent_random",
      the library's own. An output keeps the one that it was begun with.
    - *create_partitions*: the partition count with which a missing topic is created; None makes that an error.
    - *delivery*: "exactly_once", or a weaker one without transactions: "at_least_once", whose outputs come at once, and
      again after a failure, or "at_most_once", whose outputs come after their checkpoint, or never.

    A stream of `Record[T]` is written with each record's own value, key and headers; so a tombstone with a key is
    ``Record(key="ann", value=None)``. *key* and *headers*, where given, win. To keep the time of a record as well, give
    ``timestamp=lambda record: record.timestamp_ms``. One of `Change[T]` likewise: the row by its key, a tombstone once
    it is deleted; a truncate is a record that cannot be written. `DebeziumCodec` writes whole changes.
    """

    topic_name: str | Callable[[T], str]
    value: TypeForm[Any] | Codec[Any] | None = None
    key: Callable[[T], object] | None = None
    headers: Callable[[T], Headers] | None = None
    timestamp: Callable[[T], int | datetime] | None = None
    partition: Callable[[T], int] | None = None
    create_partitions: int | None = 4
    delivery: str = EXACTLY_ONCE
    key_codec: Codec[Any] | None = None
    topics: tuple[str, ...] = ()
    partitioner: str | None = None

    def __init__(
        self,
        topic: str | Callable[[T], str],
        *,
        topics: Sequence[str] = (),
        value: TypeForm[Any] | Codec[Any] | None = None,
        key: Callable[[T], object] | None = None,
        headers: Callable[[T], Headers] | None = None,
        timestamp: Callable[[T], int | datetime] | None = None,
        partition: Callable[[T], int] | None = None,
        create_partitions: int | None = 4,
        delivery: Delivery = EXACTLY_ONCE,
        key_codec: Codec[Any] | None = None,
        partitioner: str | None = None,
    ) -> None:
        fields = {
            "topic_name": topic, "value": value, "key": key, "headers": headers, "timestamp": timestamp,
            "partition": partition, "create_partitions": create_partitions, "delivery": delivery,
            "key_codec": key_codec, "topics": (topics,) if isinstance(topics, str) else tuple(topics),
            "partitioner": partitioner,
        }  # fmt: skip
        if problem := _topics_problem(topic, fields["topics"]):
            raise GraphError(f"{location(caller())}: KafkaSink: {problem}")
        for field, content in fields.items():
            object.__setattr__(self, field, content)

    @property
    def topic(self) -> str:
        """The topic that is written to, unless there are `routes`."""
        return self.topic_name if isinstance(self.topic_name, str) else ", ".join(self.topics)

    @property
    def routes(self) -> Routes[T] | None:
        if isinstance(self.topic_name, str):
            return None
        return Routes(self.topic_name, {topic: self._part(topic) for topic in self.topics})

    def _part(self, topic: str) -> KafkaSink[T]:
        """The same sink of one of its topics."""
        part = copy.copy(self)
        object.__setattr__(part, "topic_name", topic)
        object.__setattr__(part, "topics", ())
        return part

    @property
    def needs_type(self) -> bool:
        """True unless a codec is given."""
        return self.value is None

    def codec(self, type_: Any) -> Codec[Any]:
        """The codec of values if the stream has this type."""
        return codec_for(value_type(type_) if self.value is None else self.value)

    def encoder(self, type_: Any, partitions: int | None = None) -> KafkaEncoder:
        """The encoder of records of this type, for a topic with so many *partitions*; ``partition=`` needs them."""
        require(self.partition is None or partitions is not None, "the partitions of a topic are counted before output")
        value_codec, key_codec = self.codec(type_), self._codec_of_keys(type_)
        envelope = value_codec if isinstance(value_codec, DebeziumCodec) else None
        keyed = envelope is None and holds_keys(type_)
        own_key: Callable[[Any], object] | None = attrgetter("key") if keyed else None
        if envelope is not None:
            own_key = envelope.key_of
        headers = self.headers or (attrgetter("headers") if holds_records(type_) else None)
        placing = None if self.partition is None else Placing(self.partition, self.topic, partitions or 0)
        return KafkaEncoder(
            opened(value_codec, self.topic, "value"),
            keyed=keyed,
            key=self.key or own_key,
            headers=headers,
            timestamp=self.timestamp,
            placing=placing,
            key_codec=None if key_codec is None else opened(key_codec, self.topic, "key"),
            tombstones=envelope is not None and envelope.tombstones,
        )

    def _codec_of_keys(self, type_: Any) -> Codec[Any] | None:
        """The codec of keys, if one is given, or comes with that of the values."""
        codec = self.codec(type_)
        return codec.key_codec if isinstance(codec, DebeziumCodec) and self.key is None else self.key_codec

    def as_source(self, type_: Any) -> KafkaSource[Any]:
        """A source of the records that the sink writes of a stream of this type."""
        from exactlyonce.connectors.kafka.source import KafkaSource

        key = BytesCodec() if self.key_codec is None else self.key_codec
        return KafkaSource.records(self.topic, value=self.codec(type_), key=key)

    def open_writer(self, context: WriterContext) -> Opened:
        """The writer of one subtask; its transactional ids, if it has any, are of this attempt."""
        from exactlyonce.sinks.kafka.deferred import DeferredWriter
        from exactlyonce.sinks.kafka.writer import KafkaWriter, PlainWriter, TransactionPool

        encoder = self.encoder(context.type, context.partitions)
        clock, producers = context.clients.clock, context.clients.producers(self.topic, context.partitioner)
        if self.delivery == EXACTLY_ONCE:
            writer = KafkaWriter(
                sink=context.sink, topic=self.topic, producers=producers, clock=clock, subtask=context.subtask,
                pool=TransactionPool(map(str, _transactional_ids(context))), prepared=context.prepared,
            )  # fmt: skip
            return Opened(writer, encoder)
        plain = PlainWriter(sink=context.sink, topic=self.topic, producers=producers, clock=clock)
        return Opened(plain if self.delivery == AT_LEAST_ONCE else DeferredWriter(plain), encoder)

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the topic and the functions, and of the type for the codec."""
        if problem := topic_problem(self.topic):
            yield problem
        for name in ("key", "headers", "timestamp", "partition"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                yield f"{name}={function!r} must be a function of the output"
        if self.key_codec is not None and not isinstance(self.key_codec, Codec):
            yield f"key_codec={self.key_codec!r} must be a codec, as AvroCodec(str)"
        for codec in (self.value, self.key_codec):
            if isinstance(codec, Codec):
                yield from registry_problems(codec)
        if self.partitioner is not None and self.partitioner not in PARTITIONERS:
            yield f"partitioner={self.partitioner!r} must be one of {', '.join(sorted(PARTITIONERS))}"
        elif self.partitioner is not None and self.partition is not None:
            yield "partition= and partitioner= both choose the partition: give one of them"
        count = self.create_partitions
        if count is not None and not (isinstance(count, int) and count > 0):
            yield f"create_partitions={count!r} must be a number from 1 on, or None"
        if isinstance(self.value, DebeziumCodec):
            if not holds_changes(type_):
                yield f"value= writes changes, and the stream is of {type_name(type_)}: map it to Change"
            yield from self.value.writing_problems()
            if self.key_codec is not None and self.key is None:
                yield "key_codec= goes with key=: DebeziumCodec has the codec of its keys"
        elif self.value is not None or type_ is not UNKNOWN:
            yield from codec_problems(self.codec, type_)

    def check_services(self, type_: Any) -> None:
        check_writing(self.codec(type_), self.topic, "value")
        if (key_codec := self._codec_of_keys(type_)) is not None:
            check_writing(key_codec, self.topic, "key")

    def describe(self, type_: Any) -> dict[str, Any]:
        """Topic and codecs, without functions."""
        keys = {} if self.key_codec is None else {"key": self.key_codec.describe()}
        return {"sink": "kafka", "topic": self.topic, "value": self.codec(type_).describe(), **keys}


def _topics_problem(topic: object, topics: Any) -> str | None:
    """The mistake in the choice of a topic; names are checked with the graph."""
    if isinstance(topic, str):
        return "topics= goes with a function as the topic: topic=lambda output: ..." if topics else None
    if not callable(topic):
        return f"the topic is {topic!r}, and must be a name, or a function that gives one of topics="
    if not topics or len({*topics}) < len(topics):
        return "the topic is a function: declare all topics that it may give, each once, as topics=[...]"
    return shared_name_problem(map(str, topics))


def gives_times(sink: object) -> bool:
    """Whether *sink* is a `KafkaSink` with ``timestamp=``."""
    return isinstance(sink, KafkaSink) and sink.timestamp is not None


def gives_partitions(sink: object) -> bool:
    """Whether *sink* is a `KafkaSink` with ``partition=``."""
    return isinstance(sink, KafkaSink) and sink.partition is not None


def gives_keys(sink: object, type_: Any) -> bool:
    """Whether *sink* is a `KafkaSink` whose outputs may have keys if its stream has this type."""
    return isinstance(sink, KafkaSink) and (sink.key is not None or holds_keys(type_))


def gives_newest_rows(sink: object, type_: Any) -> bool:
    """Whether *sink* writes a stream of changes as the newest row by key, for a compacted topic."""
    return holds_changes(type_) and not (isinstance(sink, KafkaSink) and isinstance(sink.value, DebeziumCodec))


def _transactional_ids(context: WriterContext) -> Iterator[TransactionalId]:
    """The transactional ids of one sink subtask in an attempt."""
    for slot in range(context.slots):
        yield TransactionalId(
            context.pipeline, context.sink, context.subtask, context.incarnation, str(context.attempt), str(slot)
        )


class Outputs(msgspec.Struct, array_like=True):
    """Encoded outputs in order; those before `done` have been produced. The length is the number of the rest."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None
    headers: Sequence[list[tuple[str, Any]]] | None
    """The values are bytes, text or None."""
    timestamps: Sequence[int] | None = None
    """In ms since 1970; None: the client's time."""
    done: int = 0
    partitions: Sequence[int] | None = None
    """None: the client chooses them."""
    records: Sequence[int] | None = None
    """The place of each output's record in the batch; None: a record has one output."""

    def __len__(self) -> int:
        return self.left

    def with_tombstones(self, deleted: Sequence[bool]) -> Outputs:
        """The same with a null value after each output that is *deleted*, under its key."""
        if True not in deleted:
            return self
        places = [place for place, is_deleted in enumerate(deleted) for _ in range(1 + is_deleted)]
        values: list[bytes | None] = [self.values[place] for place in places]
        for number, place in enumerate(places[:-1]):
            if places[number + 1] == place:
                values[number + 1] = None

        def twice(column: Sequence[T] | None) -> list[T] | None:
            return column if column is None else [column[place] for place in places]

        return Outputs(
            values, twice(self.keys), twice(self.headers), twice(self.timestamps),
            partitions=twice(self.partitions), records=places,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """The number of outputs still to be produced."""
        return len(self.values) - self.done

    @property
    def size(self) -> int:
        """Bytes of all values and keys."""
        return sum(map(len, filter(None, self.values))) + sum(map(len, filter(None, self.keys or ())))


@dataclass(frozen=True)
class Placing:
    """The user's choice of partitions."""

    function: Callable[[Any], int]
    topic: str
    count: int
    """The number of the topic's partitions when the work began."""

    def partitions(self, outputs: Sequence[Any]) -> list[int]:
        """The partition of each output; TypeError or ValueError if the topic has none such."""
        partitions: list[Any] = mapped("partition", self.function, outputs)
        if set(map(type, partitions)) == {int} and min(partitions) >= 0 and max(partitions) < self.count:
            return partitions
        return list(map(self._partition, partitions))

    def _partition(self, partition: object) -> int:
        expected = f"topic {self.topic!r} has partitions 0 to {self.count - 1}"
        if not isinstance(partition, int) or isinstance(partition, bool):
            raise TypeError(f"partition= has given {partition!r:.100}, which must be an int; {expected}")
        if not 0 <= partition < self.count:
            raise ValueError(
                f"partition= has given {partition}, and {expected}. If it has got more since, run again; else correct "
                f"the function, or add partitions to the topic"
            )
        return int(partition)


class KafkaEncoder:
    """Encodes batches for one topic. Each list has one entry per output; None in it is Kafka's null. With *tombstones*,
    a delete has two outputs, the second of which has a null value."""

    def __init__(
        self,
        codec: Codec[Any],
        *,
        keyed: bool,
        key: Callable[[Any], object] | None,
        headers: Callable[[Any], Headers] | None,
        timestamp: Callable[[Any], int | datetime] | None,
        placing: Placing | None,
        key_codec: Codec[Any] | None,
        tombstones: bool,
    ) -> None:
        self.codec = codec
        self._tombstones = tombstones
        self._keyed = keyed
        self._key = key
        self._headers = headers
        self._timestamp = timestamp
        self._placing = placing
        self._key_codec = key_codec
        self._encode_key = encode_key if key_codec is None else _encode_by(key_codec)

    def encode(self, records: Sequence[Any]) -> Outputs:
        """The encoded batch."""
        outputs = Outputs(
            self.values(records),
            self.keys(records),
            self.headers(records),
            self.timestamps(records),
            partitions=self.partitions(records),
        )
        if self._tombstones:
            outputs = outputs.with_tombstones([record.op == "delete" for record in records])
        for codec, parts in ((self.codec, outputs.values), (self._key_codec, outputs.keys)):
            if isinstance(codec, OpenedCodec) and parts is not None:
                outputs.headers = codec.headers(outputs.headers, parts)
        return outputs

    def values(self, outputs: Sequence[Any]) -> Sequence[bytes | None]:
        """The values, encoded."""
        if self._keyed:
            outputs = [record.value for record in outputs]
        if isinstance(self.codec, JsonCodec):
            values: list[bytes | None] = list(map(self.codec.encode, outputs))
            return values if b"null" not in values else list(map(_or_tombstone, values, outputs))
        encode = self.codec.encode
        values = [None if output is None else encode(output) for output in outputs]
        if set(map(type, values)) != {bytes}:
            for value, output in zip(values, outputs, strict=True):
                if output is not None and not isinstance(value, bytes):
                    raise TypeError(_no_value(self.codec, value))
        return values

    def keys(self, outputs: Sequence[Any]) -> list[bytes | None] | None:
        """The keys, encoded; None if there are none."""
        if self._key is None:
            return None
        keys: list[Any] = mapped("key", self._key, outputs)
        encode = self._encode_key
        if encode is encode_key:  # keys of one type take no function of ours for each
            encode = _ENCODE_ALL.get(frozenset(map(type, keys)), encode)
        return list(map(encode, keys))

    def headers(self, outputs: Sequence[Any]) -> list[list[tuple[str, bytes | None]]] | None:
        """The headers; None if there are none."""
        if self._headers is None:
            return None
        headers: list[Any] = mapped("headers", self._headers, outputs)
        return list(map(list if _are_plain(headers) else _header_list, headers))

    def timestamps(self, outputs: Sequence[Any]) -> list[int] | None:
        """The times, in ms since 1970; None if there are none."""
        if self._timestamp is None:
            return None
        times: list[Any] = mapped("timestamp", self._timestamp, outputs)
        if set(map(type, times)) == {int} and min(times) > 0 and max(times) <= _TIMESTAMP_MAX_MS:
            return times
        return list(map(_timestamp_ms, times))

    def partitions(self, outputs: Sequence[Any]) -> list[int] | None:
        """The partitions; None if the client chooses them."""
        return self._placing.partitions(outputs) if self._placing is not None else None


def _or_tombstone(value: bytes | None, output: object) -> bytes | None:
    """A value in JSON; None alone becomes Kafka's null, which deletes."""
    if value != b"null":
        return value
    if output is not None:
        raise ValueError(f"{output!r:.100} is null in JSON, which a reader would take for a deletion")
    return None


def _no_value(codec: Codec[Any], value: object) -> str:
    if value is None:
        return (
            f"the codec {codec.name!r} has made None of it, which would be written as a deletion. Where that is meant, "
            f"let None be the output"
        )
    return f"the codec {codec.name!r} has made {type(value).__name__} of it; its encode= is to return bytes"


def _are_plain(headers: Sequence[Any]) -> bool:
    """Whether the client takes the headers of all records as they are."""
    if not set(map(type, headers)) <= {list, tuple}:
        return False
    pairs = list(chain.from_iterable(headers))
    if not pairs:
        return True
    if set(map(type, pairs)) != {tuple} or set(map(len, pairs)) != {2}:
        return False
    names, values = zip(*pairs, strict=True)
    return (
        set(map(type, names)) == {str}
        and set(map(type, values)) <= {bytes, type(None)}
        and all(map(_is_utf8, set(names)))
    )


def _is_utf8(text: str) -> bool:
    """The client would end the process over a name that is not UTF-8."""
    return text.isascii() or text.encode(errors="ignore").decode() == text


def _header_list(headers: Any) -> list[tuple[str, bytes | None]]:
    """The headers of one record, with text as UTF-8; TypeError if they are not pairs."""
    if isinstance(headers, str | bytes | Mapping) or not isinstance(headers, Iterable):
        raise TypeError(f"headers= has given {type(headers).__name__}; it must give (name, bytes) pairs, as a list")
    return list(map(_header, headers))


def _header(pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"headers= has given {pair!r:.100} among its pairs; each must be (name, bytes)")
    name, value = pair
    if not isinstance(name, str) or not _is_utf8(name):
        raise TypeError(f"headers= has given {name!r:.100} as a name, which must be text")
    if isinstance(value, str):
        value = str.encode(value)
    if value is not None and not isinstance(value, bytes):
        raise TypeError(f"headers= has given {type(value).__name__} as the value of {name!r}, which must be bytes")
    return str.__str__(name), value


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIMESTAMP_MAX_MS = (1 << 63) - 1


def _timestamp_ms(time: object) -> int:
    """A timestamp as ms; TypeError or ValueError if it is not one. 0 would be the client's own time."""
    expected = "it must give milliseconds since 1970, as an int from 1 on, or a datetime with a time zone"
    if isinstance(time, datetime):
        if time.utcoffset() is None:
            raise ValueError(f"timestamp= has given {time!r}, which has no time zone; {expected}")
        time = (time - _EPOCH) // timedelta(milliseconds=1)
    if not isinstance(time, int) or isinstance(time, bool):
        raise TypeError(f"timestamp= has given {time!r:.100}; {expected}")
    if not 0 < time <= _TIMESTAMP_MAX_MS:
        raise ValueError(f"timestamp= has given {time}; {expected}")
    return int(time)


def encode_key(key: object) -> bytes | None:
    """A key for Kafka: text in UTF-8, bytes as they are, None as null, all else JSON."""
    if isinstance(key, str):
        return str.encode(key)  # also the text of an enumeration's member
    if key is None or type(key) is bytes:
        return key
    if type(key) is int:
        return _encode_json(key)
    if isinstance(key, bytes | bytearray):
        return bytes(key)
    encoded = _encode_json(key)
    require_finite(key, encoded)
    return _or_tombstone(encoded, key)


def _encode_by(codec: Codec[Any]) -> Callable[[object], bytes | None]:
    """Encodes keys by *codec*; None stays null."""
    return lambda key: None if key is None else codec.encode(key)


_encode_json = msgspec.json.Encoder(order="deterministic").encode
_ENCODE_ALL: Mapping[frozenset[type], Callable[[Any], bytes]] = {
    frozenset({str}): str.encode, frozenset({int}): _encode_json,
}  # fmt: skip
"""Encodes keys that are all of these types, as `encode_key` does."""


@dataclass(frozen=True, init=False)
class DeadLetters(DeadLetterTarget):
    """Writes records that cannot be processed to a topic, in the same checkpoint as the outputs of the others.

    Give it as ``on_error=`` to a source, an operator or a sink; several may have the same topic.

    - *max_per_checkpoint*: the number of dead letters of that source, operator or sink in one checkpoint, from 0 on.
      With more the pipeline stops before the checkpoint, so that none of these is written; None: no limit.
    - *max_share*: the same as a share of the checkpoint's input records, from 0 to 1. One letter is never too many.
    - *create_partitions*: the partition count with which a missing topic is created; None makes that an error.
    """

    topic: str
    limits: DeadLetterLimits
    create_partitions: int | None

    def __init__(
        self,
        topic: str,
        *,
        max_per_checkpoint: int | None = None,
        max_share: float | None = None,
        create_partitions: int | None = 4,
    ) -> None:
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "limits", DeadLetterLimits(max_per_checkpoint, max_share))
        object.__setattr__(self, "create_partitions", create_partitions)

    def sink(self) -> KafkaSink[DeadLetter]:
        return KafkaSink(self.topic, value=BytesCodec(), create_partitions=self.create_partitions)
