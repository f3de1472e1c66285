"""The options of `spark.read` and `spark.readStream`, checked, in Spark's own words.

Invariants: nothing is opened; an option that is not known, or means nothing here, is an error that names what there is;
a secret written as a reference (`env:NAME`, `file:/path`) stays one, in every process, until a client is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import EARLIEST, LATEST
from exactlyonce.pipeline.errors import ConfigError

KAFKA = "kafka."
START = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
END = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
BATCH_ONLY, STREAM_ONLY = END, ("maxOffsetsPerTrigger",)
OPTIONS = ("subscribe", *START, *END, "failOnDataLoss", "includeHeaders", "maxOffsetsPerTrigger", "minPartitions")
_NAMED = {"earliest": EARLIEST, "latest": LATEST}

_SCHEMA = (
    StructType()
    .add("key", BinaryType())
    .add("value", BinaryType())
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
    .add("timestamp", TimestampType())
    .add("timestampType", IntegerType())
)
_HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

ByPartition = Mapping[str, Mapping[int, int]]
"""Numbers by topic and partition."""


@dataclass(frozen=True)
class Bound:
    """Where the ranges begin, or end, as the user wrote it: for all partitions alike, or for each."""

    option: str
    alike: int = LATEST
    each: ByPartition | None = None
    timestamps: bool = False
    """The numbers are milliseconds since 1970, not offsets."""


@dataclass(frozen=True)
class ReadOptions:
    """A read, whole."""

    topics: tuple[str, ...]
    start: Bound
    end: Bound
    fail_on_data_loss: bool
    include_headers: bool
    partitions_min: int
    offsets_per_trigger_max: int | None
    client_settings: Mapping[str, str] = field(repr=False)

    def client(self) -> ClientConfig:
        """How to reach the cluster; made where it is used, so that no looked-up secret travels."""
        return ClientConfig(self.client_settings)


def read_schema(options: ReadOptions) -> StructType:
    """The columns of Spark's own Kafka source."""
    return StructType([*_SCHEMA, StructField("headers", _HEADERS)] if options.include_headers else [*_SCHEMA])


def parse_read_options(given: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """Check and parse; *streaming* as far as it is known. Names may be written in any case, as always in Spark."""
    options = {name.lower(): value for name, value in given.items()}
    kafka = {name[len(KAFKA) :]: value for name, value in options.items() if name.startswith(KAFKA)}
    _refuse_unknown(options, streaming)
    if "bootstrap.servers" not in kafka:
        raise ConfigError("kafka.bootstrap.servers is not set. Name at least one broker, as host:port.")
    parsed = ReadOptions(
        topics=_topics(options.get("subscribe", "")),
        start=_bound(options, START, LATEST if streaming else EARLIEST),
        end=_bound(options, END, LATEST),
        fail_on_data_loss=flag(options, "failOnDataLoss", True),
        include_headers=flag(options, "includeHeaders", False),
        partitions_min=count(options, "minPartitions") or 1,
        offsets_per_trigger_max=count(options, "maxOffsetsPerTrigger"),
        client_settings=kafka,
    )
    _refuse_impossible(parsed, streaming)
    parsed.client()
    return parsed


def _refuse_unknown(options: Mapping[str, str], streaming: bool | None) -> None:
    known = {name.lower(): name for name in OPTIONS}
    unknown = sorted(name for name in options if name not in known and not name.startswith(KAFKA))
    if unknown:
        raise ConfigError(
            f"There is no option {', '.join(map(repr, unknown))}. Options are: {', '.join(OPTIONS)}, and "
            f"kafka.NAME for any setting of librdkafka, as kafka.bootstrap.servers."
        )
    if streaming is None:
        return
    misplaced = [name for name in (BATCH_ONLY if streaming else STREAM_ONLY) if name.lower() in options]
    if misplaced:
        kinds = ("streams, which have no end", "spark.read") if streaming else ("spark.read", "streams")
        raise ConfigError(f"{', '.join(misplaced)} is not for {kinds[0]}: it is for {kinds[1]}. Leave it out.")


def _topics(text: str) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not topics:
        raise ConfigError("subscribe is not set. Name the topics to read, separated by commas.")
    return topics


def _bound(options: Mapping[str, str], names: tuple[str, ...], default: int) -> Bound:
    given = [name for name in names if name.lower() in options]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} contradict each other. Keep one of them.")
    if not given:
        return Bound(names[0], default)
    name, text = given[0], options[given[0].lower()].strip()
    if name == names[1]:
        return Bound(name, number(name, text), timestamps=True)
    if name == names[0] and text.lower() in _NAMED:
        return Bound(name, _NAMED[text.lower()])
    return Bound(name, each=_by_partition(name, text), timestamps=name == names[2])


def _by_partition(name: str, text: str) -> ByPartition:
    try:
        found = msgspec.json.decode(text, type=dict[str, dict[int, int]])
    except msgspec.DecodeError as error:
        named = " earliest, latest or" if name.endswith("Offsets") else ""
        raise ConfigError(
            f"{name} is {text!r}, which cannot be read ({error}). "
            f'Write{named} JSON by topic and partition: {{"orders": {{"0": 23, "1": 42}}}}.'
        ) from None
    return found


def _refuse_impossible(options: ReadOptions, streaming: bool | None) -> None:
    """Bounds that no topic can have."""
    for bound in (options.start, options.end):
        numbers = [bound.alike] if bound.each is None else [n for each in bound.each.values() for n in each.values()]
        if any(number < (0 if bound.timestamps else EARLIEST) for number in numbers):
            raise ConfigError(f"{bound.option}: offsets are -2 (earliest), -1 (latest) or from 0 on; times from 0 on.")
        if bound.each is not None and set(bound.each) != set(options.topics):
            raise ConfigError(
                f"{bound.option} names the topics {', '.join(sorted(bound.each))}, but subscribe "
                f"{', '.join(sorted(options.topics))}. Name the same ones."
            )
        if bound.timestamps:
            continue
        if bound is options.end and EARLIEST in numbers:
            raise ConfigError(f"{bound.option}: a range cannot end at the earliest offset. Give latest or an offset.")
        if bound is options.start and LATEST in numbers and streaming is False:
            raise ConfigError(f"{bound.option}: a batch cannot begin at the latest offset: it would have no records.")


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    """The option *name* of *options*, whose names are in lower case."""
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name} is {text!r}: write true or false.")
    return text == "true"


def count(options: Mapping[str, str], name: str) -> int | None:
    """The option *name*, from 1 on; None: it is not given."""
    if name.lower() not in options:
        return None
    found = number(name, options[name.lower()])
    if found < 1:
        raise ConfigError(f"{name} is {found}: it must be at least 1.")
    return found


def number(name: str, text: str) -> int:
    """The option *name*, which is *text*."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: write a whole number.") from None
