"""A Kafka topic as a source: the topic, its cluster, the start, and the codecs. It opens no connection."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, overload

from exactlyonce.checkpoint.records.manifest import TOPICS
from exactlyonce.connectors.registry import all_bytes_of, bytes_of, check_reading, opened
from exactlyonce.connectors.registry import problems as registry_problems
from exactlyonce.connectors.source import (
    RangeContext,
    ReaderContext,
    RecordDecoder,
    SourceReader,
    SplitFinder,
    SplitReader,
)
from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.changes import holds_changes
from exactlyonce.pipeline.codec import Codec, Ignored, codec_for
from exactlyonce.pipeline.dead_letters import DeadLetter, OnError
from exactlyonce.pipeline.debezium import DebeziumCodec
from exactlyonce.pipeline.errors import ConfigError, GraphError, users_errors
from exactlyonce.pipeline.location import caller, location
from exactlyonce.pipeline.names import name_problem, shared_name_problem, topic_problem
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.sizes import is_count
from exactlyonce.pipeline.source import Source, TimeOf

if TYPE_CHECKING:
    from confluent_kafka import Message
    from typing_extensions import TypedDict, TypeForm, Unpack

    from exactlyonce.connectors.kafka.client_config import ClientConfig
    from exactlyonce.connectors.kafka.topics import Topics

    class _Options(TypedDict, total=False):
        """What both ways to read a topic take."""

        pattern: str | None
        start: Start
        start_group: str | None
        cluster: Cluster | None
        on_error: OnError


@dataclass(frozen=True)
class Cluster:
    """A cluster that does not have the checkpoints: ``Cluster("eu", {"bootstrap.servers": "eu-1:9092"})``.

    - *name* stands for it in checkpoints and errors, as ``kafka:eu/orders``. Addresses may change, the name may not.
    - *settings*: librdkafka's, as of the cluster of the checkpoints. Secrets are given by reference, as ``env:NAME`` or
      ``file:/path``; ``bootstrap.servers`` may be.
    """

    name: str
    settings: Mapping[str, Any] = field(repr=False)

    @cached_property
    def client(self) -> ClientConfig:
        """How to reach it. Raises `ConfigError` for settings that no client takes."""
        from exactlyonce.connectors.kafka.client_config import ClientConfig  # descriptions import no client library

        return ClientConfig(self.settings)

    def place(self, topic: str) -> str:
        """The `SourceOffset.topic` of *topic* here.

        >>> Cluster("eu", {}).place("orders")
        'kafka:eu/orders'
        """
        return f"kafka:{self.name}/{topic}"

    def problems(self) -> Iterator[str]:
        """The mistakes in it, each with its remedy."""
        if problem := name_problem(self.name):
            yield f"cluster: {problem}"
        try:
            written_out = self.client.secrets_written_out
        except ConfigError as error:
            yield f"cluster {self.name!r}: {error}"
            return
        if written_out:
            yield (
                f"cluster {self.name!r} has {', '.join(written_out)} written out: put it into a variable, as "
                f'"env:NAME", or into a file, as "file:/path"'
            )


T = TypeVar("T")
V = TypeVar("V")

Start = Literal["earliest", "latest"] | datetime | Mapping[int, int]
"""The start of a pipeline without a checkpoint; partitions missing from a mapping begin at their earliest offset."""

KEY_TYPES = (bytes, str, int, float, bool)
"""The types of keys, which cross processes untyped: every encoding keeps these."""


@dataclass(frozen=True, init=False, eq=False)
class KafkaSource(Source[T]):
    """Reads a topic: ``KafkaSource("orders", value=Order)`` gives `Order`.

    `KafkaSource.records` gives each with its key, timestamp and place.

    - *topic*: its name, or the names of several in a list: then the stream is the union of a source for each,
      ``<id>-<topic>``, with the other arguments in common. `Record.topic` tells them apart.
    - *pattern*: instead of a topic, a regular expression that the whole names of topics match: ``"orders-.*"``. All of
      them are read from their earliest offset, also those that come while the pipeline runs.
    - *value*: a type (`bytes` as they are, `str` in UTF-8, all else JSON) or a codec, as ``AvroCodec(Order)``. A null
      value is an error unless the type admits None: ``value=Order | None``.
    - *start*: where to begin without a checkpoint: "earliest", "latest", an aware datetime, or offsets by partition.
    - *start_group*: a consumer group without members, at whose offsets to begin without a checkpoint; *start* counts
      for the partitions in which it has none. The group is only read.
    - *cluster*: a `Cluster` that has the topic, if it is not the cluster of the checkpoints.
    - *on_error* for a record that does not decode: "fail" stops the pipeline and names the record and the field; "skip"
      counts it, logs it and goes on; ``DeadLetters("orders-dead")`` writes it to that topic, with the reason. An
      outage that a codec meets (`Unavailable`, OSError) is none of these.
    - *time*: the event time of a record, for windows: an `EventTime`, or only its *at*: the name of a field of *value*,
      or a function of the record.
    """

    topic_name: str
    """The first of `topic_names`; empty of a pattern."""
    topic_names: tuple[str, ...]
    pattern: str | None
    several: bool
    """Whether the topics were given as a list, which may grow."""
    value_codec: Codec[Any]
    key_codec: Codec[Any]
    value_type: Any
    metadata: bool
    """Whether it gives `Record`."""
    start: Start
    start_group: str | None
    cluster: Cluster | None
    on_error: OnError
    time: TimeOf[Any] | None
    is_changelog: bool

    # type checkers see no TypeForm in ``Order | None`` where there are overloads: hence the second one of each
    @overload
    def __init__(
        self: KafkaSource[V], topic: str | Sequence[str] = ..., *, value: TypeForm[V] | Codec[V],
        time: TimeOf[V] | None = ..., **options: Unpack[_Options],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: KafkaSource[Any], topic: str | Sequence[str] = ..., *, value: UnionType | type[Any],
        time: TimeOf[Any] | None = ..., **options: Unpack[_Options],
    ) -> None: ...  # fmt: skip
    def __init__(
        self,
        topic: str | Sequence[str] = (),
        *,
        value: Any,
        pattern: str | None = None,
        start: Start = "earliest",
        start_group: str | None = None,
        cluster: Cluster | None = None,
        on_error: OnError = "fail",
        time: TimeOf[Any] | None = None,
    ) -> None:
        names = (topic,) if isinstance(topic, str) else tuple(topic)
        shown = repr(topic) if pattern is None else f"pattern={pattern!r}"
        if pattern is None:
            problem = _topics_problem(names, start)
        else:
            problem = _pattern_problem(pattern, names, start, start_group, cluster)
        if problem:
            raise GraphError(f"{location(caller())}: KafkaSource({shown}): {problem}")
        try:
            value_codec = codec_for(value)
        except shape.UnsupportedType as error:
            raise GraphError(f"{location(caller())}: KafkaSource({shown}): {error}") from None
        fields = {
            "topic_name": names[0] if names else "",
            "topic_names": names,
            "pattern": pattern,
            "several": pattern is None and not isinstance(topic, str),
            "value_codec": value_codec,
            "key_codec": codec_for(bytes),
            "value_type": value_codec.type if isinstance(value, Codec) else value,
            "metadata": False,
            "start": start,
            "start_group": start_group,
            "cluster": cluster,
            "on_error": on_error,
            "time": time,
            "is_changelog": False,
        }
        for name, content in fields.items():
            object.__setattr__(self, name, content)

    @overload
    @classmethod
    def records(
        cls, topic: str | Sequence[str] = ..., *, value: TypeForm[V] | Codec[V], key: type[Any] | Codec[Any] = ...,
        time: TimeOf[Record[V]] | None = ..., **options: Unpack[_Options],
    ) -> KafkaSource[Record[V]]: ...  # fmt: skip
    @overload
    @classmethod
    def records(
        cls, topic: str | Sequence[str] = ..., *, value: UnionType | type[Any], key: type[Any] | Codec[Any] = ...,
        time: TimeOf[Any] | None = ..., **options: Unpack[_Options],
    ) -> KafkaSource[Record[Any]]: ...  # fmt: skip
    @classmethod
    def records(
        cls, topic: str | Sequence[str] = (), *, value: Any, key: type[Any] | Codec[Any] = bytes, **options: Any
    ) -> KafkaSource[Any]:
        """Reads a topic as `Record`: ``KafkaSource.records("orders", value=Order, key=str)`` gives `Record[Order]`.

        *key* is the type of `Record.key`: bytes, str, int, float, bool, or a codec of one of them. The other arguments
        are those of `KafkaSource`; a function for *time* takes the `Record`.
        """
        if problem := _key_problem(key):
            raise GraphError(f"{location(caller())}: KafkaSource.records({topic!r}): {problem}")
        return cls(topic, value=value, **options)._with(metadata=True, key_codec=codec_for(key))

    @property
    def topic(self) -> str | None:
        return self.topic_name if self.pattern is None else None

    @property
    def place(self) -> str:
        if self.pattern is not None:
            return f"{TOPICS}{self.pattern}"
        return self.topic_name if self.cluster is None else self.cluster.place(self.topic_name)

    @property
    def client(self) -> ClientConfig | None:
        return None if self.cluster is None else self.cluster.client

    @property
    def parts(self) -> Mapping[str, KafkaSource[T]]:
        return {name: self._part(name) for name in self.topic_names} if self.several else {}

    def _part(self, topic: str) -> KafkaSource[T]:
        """The same source of one of its topics."""
        return self._with(topic_name=topic, topic_names=(topic,), several=False)

    def _with(self, **fields: Any) -> KafkaSource[T]:
        changed = copy.copy(self)
        for name, content in fields.items():
            object.__setattr__(changed, name, content)
        return changed

    def changelog(self) -> KafkaSource[Any] | None:
        """A null value deletes, or the change of a row. The time of a null value is its Kafka timestamp."""
        if holds_changes(self.value_type):
            return None if self.metadata else self._with(is_changelog=True)
        if not self.metadata:
            return None
        return self._with(value_type=hints.union([*hints.members(self.value_type), type(None)]), is_changelog=True)

    @property
    def key_type(self) -> Any:
        if isinstance(self.value_codec, DebeziumCodec) and not self.metadata:
            return self.value_codec.key_type
        return self.key_codec.type

    @property
    def type(self) -> Any:
        """The value's type, or `Record` of it; of a changelog of changes, the rows by their keys."""
        if self.is_changelog and not self.metadata:
            (row,) = get_args(self.value_type)
            return Record[hints.union([*hints.members(row), type(None)])]  # type: ignore[misc]  # at run time
        return Record[self.value_type] if self.metadata else self.value_type  # type: ignore[name-defined]  # at run time

    @property
    def timed_type(self) -> Any:
        return self.value_type

    def time_function(self, at: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
        of = super().time_function(at)
        if not (self.is_changelog and self.metadata):
            return of
        return lambda record: record.timestamp_ms if record.value is None else of(record)

    @property
    def decode_value(self) -> Callable[[bytes | None], Any]:
        """Decodes a value of Kafka, null included; maps over a batch."""
        decode: Callable[[Any], Any] = opened(self.value_codec, self.topic_name, "value").decode
        if self.value_codec.ignores_null:
            return lambda data: _ignored() if data is None else decode(data)
        if not hints.admits_none(self.value_type):
            return decode
        return lambda data: None if data is None else decode(data)

    @property
    def decode_key(self) -> Callable[[bytes | None], Any]:
        """Decodes a key of Kafka; a null key is None."""
        decode: Callable[[Any], Any] = opened(self.key_codec, self.topic_name, "key").decode
        return lambda data: None if data is None else decode(data)

    @property
    def value_of(self) -> Callable[[Message], bytes | None]:
        """Gives the argument of `decode_value`."""
        return bytes_of(self.value_codec, "value")

    @property
    def key_of(self) -> Callable[[Message], bytes | None]:
        """Gives the argument of `decode_key`."""
        return bytes_of(self.key_codec, "key")

    def key_problem(self, error: BaseException) -> str:
        return f"the key is not {shape.type_name(self.key_codec.type)}: {error}"

    def value_problem(self, data: bytes | None, error: BaseException) -> str:
        if data is None:
            name = shape.type_name(self.value_type)
            return f"the value is null (a tombstone): declare value={name} | None if the topic has them"
        return f"the value is not {shape.type_name(self.value_type)} in {self.value_codec.name}: {error}"

    # --- of a pattern ---------------------------------------------------------------------------------------------

    @property
    def looks_at(self) -> str:
        return f"{self.place}: no topic matches"

    @property
    def repeats(self) -> bool:
        return True

    def reads(self, topic: str) -> bool:
        if self.pattern is None:
            return super().reads(topic)
        from exactlyonce.connectors.kafka.pattern import matcher

        return matcher(self.pattern)(topic)

    def finder(self, source: str, topics: Topics) -> SplitFinder:
        """The finder of the topics of a pattern."""
        from exactlyonce.connectors.kafka.pattern import PatternFinder

        return PatternFinder(source, self.place, self.reads, topics)

    # --- of a topic -----------------------------------------------------------------------------------------------

    def first_offsets(self, source: str, topics: Topics) -> dict[int, int]:
        """The first offset by partition of a pipeline without a checkpoint; *source* is its id.

        Raises `ConfigError` if *start* or the offsets of *start_group* do not fit the topic.
        """
        offsets = self._start_offsets(source, topics)
        return offsets | (self.group_offsets(source, topics, self.start_group) if self.start_group is not None else {})

    def group_offsets(self, source: str, topics: Topics, group: str, setting: str = "start_group") -> dict[int, int]:
        from exactlyonce.connectors.kafka.group_offsets import committed

        return committed(topics, source, group, self.topic_name, setting, self.place)

    def starting(self, start: Start) -> KafkaSource[T]:
        return self._with(start=start, start_group=None)

    def _start_offsets(self, source: str, topics: Topics) -> dict[int, int]:
        """The offsets of *start*."""
        first = topics.start_offsets(self.topic_name)
        match self.start:
            case "earliest":
                return first
            case "latest":
                return topics.end_offsets(self.topic_name, committed=True)
            case datetime():
                return topics.offsets_at(self.topic_name, int(self.start.timestamp() * 1000))
        unknown = sorted(set(self.start) - set(first))
        if unknown:
            raise ConfigError(
                f"Source {source!r} starts at partitions {unknown} of {self.topic!r}, which has only {len(first)}. "
                f"Correct start=."
            )
        return {**first, **self.start}

    def open_reader(self, context: ReaderContext) -> SourceReader:
        if self.pattern is not None:
            from exactlyonce.connectors.kafka.pattern import PatternReader

            return PatternReader(context, self.place)
        from exactlyonce.connectors.kafka.reader import KafkaReader

        positions = context.positions
        config, make = context.clients.consumers(self.topic_name, self.client)
        return KafkaReader(
            source=context.source,
            topic=self.topic_name,
            place=self.place,
            topic_id=positions[0].topic_id if positions else "",
            offsets={position.partition: position.offset for position in positions},
            targets=context.targets or {},
            config=config,
            epochs={position.partition: position.leader_epoch for position in positions if position.leader_epoch >= 0},
            make=make,
            divide=context.divide,
        )

    def open_range(self, context: RangeContext) -> SplitReader:
        if self.pattern is not None:
            from exactlyonce.connectors.kafka.pattern import PatternRange

            return PatternRange(context)
        from exactlyonce.connectors.kafka.range_reader import SourceRange

        return SourceRange(context, self.topic_name, self.client)

    def decoder(self) -> RecordDecoder:
        if self.pattern is not None:
            from exactlyonce.connectors.kafka.pattern import PatternDecoder

            return PatternDecoder(KafkaDecoder(self))
        return KafkaDecoder(self)

    def check_services(self) -> None:
        check_reading(self.value_codec)
        if self.metadata:
            check_reading(self.key_codec)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.pattern is None and (problem := topic_problem(self.topic_name)):
            yield problem
        if problem := _start_problem(self.start):
            yield problem
        yield from registry_problems(self.value_codec)
        yield from registry_problems(self.key_codec)
        if self.cluster is not None:
            yield from self.cluster.problems()
        if self.start_group is not None and not (isinstance(self.start_group, str) and self.start_group):
            yield f"start_group={self.start_group!r} must be the name of a consumer group"

    def describe(self) -> dict[str, Any]:
        """The topic, its cluster and the codec; the start is not part of the source's identity."""
        read = {"topic": self.topic} if self.pattern is None else {"pattern": self.pattern}
        value, cluster = self.value_codec.describe(), {} if self.cluster is None else {"cluster": self.cluster.name}
        return {
            "source": "kafka", **read, "value": value, "metadata": self.metadata, **cluster, **self.describe_time(),
        }  # fmt: skip


def _ignored() -> NoReturn:
    raise Ignored("its value is null")


def record_of(message: Message, value: Any, key: Any) -> Record[Any]:
    """The record of *message* with this value and key: its own bytes, or what they decode to."""
    return Record(
        value,
        key,
        message.timestamp()[1],
        tuple(message.headers() or ()),  # type: ignore[arg-type]  # a consumed message has pairs of text and bytes
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
    )


class KafkaDecoder:
    """The `RecordDecoder` of a source."""

    def __init__(self, source: KafkaSource[Any]) -> None:
        self._source = source
        self._value, self._key = source.value_of, source.key_of
        self._values = all_bytes_of(source.value_codec, "value")
        self._decode_value, self._decode_key = source.decode_value, source.decode_key
        self.decode: Callable[[Any], Any] = self._record if source.metadata else self._decode_value
        if source.is_changelog and not source.metadata:
            self.decode = self._row

    def parts(self, records: Sequence[Any]) -> Sequence[Any]:
        return records if self._source.metadata else self._values(records)

    def _record(self, message: Message) -> Record[Any]:
        return record_of(message, self._decode_value(self._value(message)), self._decode_key(self._key(message)))

    def _row(self, data: bytes | None) -> Record[Any]:
        row: Record[Any] = self._decode_value(data).record()
        return row

    def letter(self, record: Message) -> DeadLetter:
        return record_of(record, record.value(), record.key())

    def problem(self, record: Message, error: BaseException) -> str:
        """The problem of the key, if the value decodes."""
        value = self._value(record)
        if self._source.metadata and self._decodes(value):
            return self._source.key_problem(error)
        return self._source.value_problem(value, error)

    def _decodes(self, value: bytes | None) -> bool:
        try:
            self._decode_value(value)
        except users_errors():
            return False
        return True

    def times_ms(self, records: Sequence[Message]) -> Iterator[int]:
        from confluent_kafka import Message

        return map(itemgetter(1), map(Message.timestamp, records))


def _pattern_problem(
    pattern: object, topics: tuple[str, ...], start: object, start_group: object, cluster: Cluster | None
) -> str | None:
    if topics:
        return "give topics or a pattern, not both"
    try:
        re.compile(str(pattern))
    except re.error as error:
        return f"pattern= is no regular expression: {error}"
    if start != "earliest" or start_group is not None:
        return "topics of a pattern begin at their earliest offset: leave out start= and start_group="
    if cluster is not None:
        return "a pattern is of the cluster that has the checkpoints: of another one list the topics, with cluster="
    return None


def _topics_problem(topics: tuple[str, ...], start: object) -> str | None:
    if not topics or len({*topics}) < len(topics):
        return "give one topic or more, each once"
    if len(topics) > 1 and isinstance(start, Mapping):
        return "start= gives offsets by partition, of one topic: read each of these by a source of its own"
    return shared_name_problem(map(str, topics))


def _key_problem(key: Any) -> str | None:
    names = ", ".join(type_.__name__ for type_ in KEY_TYPES)
    if isinstance(key, Codec):
        of = shape.type_name(key.type)
        return None if key.type in KEY_TYPES else f"key= is a codec of {of}, which must be one of {names}"
    return None if key in KEY_TYPES else f"key={shape.type_name(key)} must be one of {names}"


def _start_problem(start: Any) -> str | None:
    if isinstance(start, datetime):
        return None if start.tzinfo else f"start={start!r} has no time zone: give tzinfo, as timezone.utc"
    if isinstance(start, Mapping):
        offsets = [*start.keys(), *start.values()]
        fits = all(is_count(offset, 0) for offset in offsets)
        return None if fits else f"start={start!r} must map partitions to offsets, both integers from 0 on"
    named = start in ("earliest", "latest")
    return None if named else f'start={start!r} must be "earliest", "latest", a datetime or offsets'
