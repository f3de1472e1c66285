"""Records of Kafka as Arrow columns: keys and values as bytes, or typed by the codecs of a pipeline's sources.

Invariants: rows have the order of their records; without types no function of ours runs per record. A record that its
codec or its column refuses is an error that names it, unless the user chooses otherwise; an outage that a codec meets
is never taken for a bad record. Each process makes its own columns from the pipeline's reference, since codecs do not
travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import pyarrow as pa
from confluent_kafka import Message
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from exactlyonce.engines.runtime.faults import is_bad_record, is_outage, retried
from exactlyonce.engines.spark.source.read_options import Mode, ReadOptions
from exactlyonce.engines.spark.source.spark_types import SparkColumn, Unfit, column
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ConfigError, RecordError, Unavailable, sendable, text_of, users_errors
from exactlyonce.pipeline.loading import Reference, load_reference
from exactlyonce.pipeline.shape import UnsupportedType, describe
from exactlyonce.sinks.kafka.sink import KafkaSink

HEADERS = spark.ArrayType(
    spark.StructType([spark.StructField("key", spark.StringType()), spark.StructField("value", spark.BinaryType())])
)
CORRUPT_RECORD = "_corrupt_record"
_CORRUPT = spark.StructType(
    [spark.StructField("key", spark.BinaryType()), spark.StructField("value", spark.BinaryType())]
)
_BYTES = spark.BinaryType()
_TIME = pa.timestamp("us", "UTC")

_pack, _unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
"""The conversion of an object to msgpack's plain values, from which `SparkColumn` converts."""


class TopicSource(Protocol):
    """The part of a Kafka source's description that is used here."""

    value_type: Any
    key_codec: Codec[Any]

    @property
    def value_of(self) -> Callable[[Message], bytes | None]: ...
    @property
    def key_of(self) -> Callable[[Message], bytes | None]: ...
    @property
    def decode_value(self) -> Callable[[bytes | None], Any]: ...
    @property
    def decode_key(self) -> Callable[[bytes | None], Any]: ...
    def key_problem(self, error: BaseException) -> str: ...
    def value_problem(self, data: bytes | None, error: BaseException) -> str: ...


class RecordColumns:
    """Makes the rows of a read; *reference* is the pipeline that `types` names, if any.

    Raises `ConfigError` if the pipeline has no source of a topic, or if topics have values of several types.
    """

    def __init__(self, options: ReadOptions, reference: Reference | None) -> None:
        self._options = options
        self._topics = _typed_topics(options, reference) if reference is not None else {}
        key, value = next((topic.types for topic in self._topics.values()), (_BYTES, _BYTES))
        self.schema = (
            spark.StructType()
            .add("key", key)
            .add("value", value)
            .add("topic", spark.StringType())
            .add("partition", spark.IntegerType())
            .add("offset", spark.LongType())
            .add("timestamp", spark.TimestampType())
            .add("timestampType", spark.IntegerType())
        )
        if options.include_headers:
            self.schema.add("headers", HEADERS)
        if options.mode is Mode.PERMISSIVE:
            self.schema.add(CORRUPT_RECORD, _CORRUPT)
        self._arrow = to_arrow_schema(self.schema, timezone="UTC")

    def batch(self, topic: str, partition: int, messages: list[Message]) -> pa.RecordBatch:
        """The rows of *messages*, one array for each column. Milliseconds become Spark's microseconds.

        Raises `RecordError` for a refused record, unless the mode allows it, and `Unavailable` for a codec's outage.
        """
        corrupt: list[Any] = []
        if self._topics:
            messages, keys, values, corrupt = self._typed(topic).rows(messages, self._options.mode)
        else:
            keys, values = list(map(Message.key, messages)), list(map(Message.value, messages))
        count = len(messages)
        types, times_ms = zip(*map(Message.timestamp, messages), strict=True) if messages else ((), ())
        columns = [
            pa.array(keys, self._arrow.field("key").type),
            pa.array(values, self._arrow.field("value").type),
            pa.repeat(pa.scalar(topic, pa.string()), count),
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            _offsets(messages),
            pa.array(times_ms, pa.timestamp("ms", "UTC")).cast(_TIME),
            _timestamp_types(types),
        ]
        if self._options.include_headers:
            columns.append(pa.array(list(map(Message.headers, messages)), self._arrow.field("headers").type))
        if self._options.mode is Mode.PERMISSIVE:
            columns.append(pa.array(corrupt, self._arrow.field(CORRUPT_RECORD).type))
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def _typed(self, topic: str) -> TypedTopic:
        if topic not in self._topics:
            raise ConfigError(
                f"The pipeline of types has no source or sink of topic {topic!r}, which subscribePattern matches. Let "
                f"the pattern match topics of {', '.join(self._topics)} alone, or leave types out."
            )
        return self._topics[topic]


def _offsets(messages: list[Message]) -> pa.Array:
    """The offsets; these only grow, so the first and last show whether there is a gap."""
    if messages:
        first, last = messages[0].offset() or 0, messages[-1].offset() or 0
        if last - first + 1 == len(messages):
            return pa.array(np.arange(first, last + 1, dtype=np.int64))
    return pa.array(list(map(Message.offset, messages)), pa.int64())


def _timestamp_types(types: tuple[int, ...]) -> pa.Array:
    """Kafka's numbers: 0 for the producer's time, 1 for the broker's, -1 for none. librdkafka's are one higher."""
    if types and types.count(types[0]) == len(types):
        return pa.repeat(pa.scalar(types[0] - 1, pa.int32()), len(types))
    return pa.array([type_ - 1 for type_ in types], pa.int32())


class RecordPart:
    """The keys or the values of a topic: *name* is `key` or `value`, *type_* their type."""

    def __init__(
        self,
        name: str,
        type_: Any,
        decode: Callable[[bytes | None], Any],
        undecodable: Callable[[bytes, BaseException], str],
    ) -> None:
        self.name = name
        self._column: SparkColumn = column(describe(type_))
        self._decode, self._undecodable = decode, undecodable

    @property
    def type(self) -> spark.DataType:
        return self._column.type

    def read(self, data: bytes | None) -> Any:
        """The value for Arrow; null stays None. Raises the codec's errors, `Unfit` and OverflowError."""
        return None if data is None else self._column.value(_unpack(_pack(self._decode(data))))

    def problem(self, data: bytes, error: BaseException) -> str:
        if isinstance(error, Unfit | OverflowError):
            return f"the {self.name} is no {self.type.simpleString()}: {text_of(error)}"
        return self._undecodable(data, error)


class TypedTopic:
    """The typed records of one topic."""

    def __init__(self, source: TopicSource) -> None:
        self._key_of, self._value_of, key_type = source.key_of, source.value_of, source.key_codec.type
        self._key = RecordPart("key", key_type, source.decode_key, lambda data, error: source.key_problem(error))
        self._value = RecordPart("value", source.value_type, source.decode_value, source.value_problem)

    @property
    def types(self) -> tuple[spark.DataType, spark.DataType]:
        return self._key.type, self._value.type

    def rows(self, messages: list[Message], mode: Mode) -> tuple[list[Message], list[Any], list[Any], list[Any]]:
        """The kept *messages*, their keys, their values, and the bytes of each refused one (else None)."""
        kept, keys, values, corrupt = [], [], [], []
        for message in messages:
            refused = None
            try:
                key, value = self._key.read(self._key_of(message)), self._value.read(self._value_of(message))
            except users_errors():
                key, value, problem = self._parts(message)
                if problem is not None:
                    if mode is Mode.FAILFAST:
                        raise _refusal(message, problem) from problem[1]
                    if mode is Mode.DROPMALFORMED:
                        continue
                    refused = {"key": message.key(), "value": message.value()}
            kept.append(message)
            keys.append(key)
            values.append(value)
            corrupt.append(refused)
        return kept, keys, values, corrupt

    def _parts(self, message: Message) -> tuple[Any, Any, tuple[str, BaseException] | None]:
        """Key and value, None for a refused one, and the first problem with its error. During an outage it waits.

        Raises for an error that does not say that the record is bad.
        """
        parts, problem = [], None
        for part, data in ((self._key, self._key_of(message)), (self._value, self._value_of(message))):
            try:
                parts.append(retried(partial(part.read, data)))
            except users_errors() as error:
                if not is_bad_record(error):
                    raise _failure(message, error) from error
                parts.append(None)
                problem = problem or (part.problem(cast(bytes, data), error), error)
        return parts[0], parts[1], problem


def _typed_topics(options: ReadOptions, reference: Reference) -> dict[str, TypedTopic]:
    sources = _sources(options, reference)
    typed = {}
    for name, source in sources.items():
        try:
            typed[name] = TypedTopic(source)
        except UnsupportedType as error:
            raise ConfigError(f"Topic {name!r} cannot have typed columns: {error}. Leave types out.") from None
    (first, *others) = typed
    for other in others:
        if typed[first].types != typed[other].types:
            shown = [", ".join(type_.simpleString() for type_ in typed[name].types) for name in (first, other)]
            raise ConfigError(
                f"Key and value of topic {first!r} are {shown[0]}, of topic {other!r} they are {shown[1]}. Read topics "
                f"of several types one by one."
            )
    return typed


def _sources(options: ReadOptions, reference: Reference) -> dict[str, TopicSource]:
    """The pipeline's source of each topic that is read; of a pattern, of each topic that matches.

    A topic that the pipeline writes has the codecs of its sink.
    """
    sources: dict[str, TopicSource] = {}
    every: list[str] = []
    graph = load_reference(reference).build()
    for node in graph.sources:
        if node.source is None or node.source.topic is None:
            continue
        name = node.source.place
        every.append(name)
        if options.matches(name):
            sources[name] = cast(TopicSource, node.source)
    for node in graph.sinks:
        if not isinstance(node.sink, KafkaSink):
            continue
        name = node.sink.topic
        every.append(name)
        if options.matches(name):
            written = cast(TopicSource, node.sink.as_source(graph.type_of(node.inputs[0])))
            if name in sources and TypedTopic(sources[name]).types != TypedTopic(written).types:
                raise ConfigError(f"Several sinks write to topic {name!r}, values of several types. Leave types out.")
            sources[name] = written
    missing = [name for name in options.topics if name not in sources]
    if missing or not sources:
        wanted = f"of topic {missing[0]!r}" if missing else f"that subscribePattern {options.pattern!r} matches"
        raise ConfigError(
            f"The pipeline of types has no source or sink {wanted}: its topics are {', '.join(every)}. Name the "
            f"pipeline that reads or writes these records, or leave types out."
        )
    return sources


def _place(message: Message) -> str:
    return f"{message.topic()}[{message.partition()}] offset {message.offset()}"


def _refusal(message: Message, problem: tuple[str, BaseException]) -> RecordError:
    return RecordError(
        sendable(
            f"The record at {_place(message)}: {problem[0]}. Fix the type or the producer; or set the option mode: "
            f"DROPMALFORMED leaves such records out, PERMISSIVE shows their bytes in a column {CORRUPT_RECORD}."
        ),
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
    )


def _failure(message: Message, error: BaseException) -> RecordError | Unavailable:
    """The error of a codec that met an outage, or that failed otherwise."""
    what = f"{type(error).__name__}: {text_of(error)}"
    if is_outage(error):
        return Unavailable(
            sendable(f"The codec met an outage at {_place(message)}: {what}. Spark tries the task again.")
        )
    return RecordError(
        sendable(
            f"The codec failed at {_place(message)}: {what}. That says neither that the record is bad nor that "
            f"something is away. Let the codec raise ValueError for a bad record, and exactlyonce.errors.Unavailable "
            f"for an outage."
        )
    )
