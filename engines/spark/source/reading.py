"""Records of Kafka as Arrow columns: what a task of Spark does, and the batch read.

Invariants: a task reads exactly the range that it was given on the driver, of the topic with the id that it had there;
no function of ours runs per record. Rows have no order across tasks, and a task has the order of its partition.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from confluent_kafka import Message
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from exactlyonce.connectors.kafka.range_reader import RangeGone, RangeReader
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.spark.source.ranges import Range, available, held, ranges_between, require_same_topic
from exactlyonce.engines.spark.source.read_options import ReadOptions, read_schema
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_RECORDS = 10_000
"""Of one Arrow batch: with more, the messages leave the processor's cache before they become columns."""


class RangesReader(DataSourceReader):
    """A batch read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        require_schema(options, schema)
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """One task for each range; Spark asks on the driver, once for each frame that was loaded."""
        config = self._options.client()
        config.check()
        topics = Topics(config)
        try:
            return [InputPartition(each) for each in ranges_between(self._options, topics)]
        finally:
            topics.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return record_batches(self._options, partition.value)


def require_schema(options: ReadOptions, schema: StructType) -> None:
    """Raise `ConfigError` unless *schema* is ours: a user may give one."""
    ours = read_schema(options)
    if schema != ours:
        raise ConfigError(f"The schema is always {ours.simpleString()}. Leave .schema(...) out, and use select.")


def record_batches(options: ReadOptions, wanted: Range) -> Iterator[pa.RecordBatch]:
    """The rows of a range."""
    if not wanted.size:
        return
    config = options.client()
    topics = Topics(config)
    reader = RangeReader(wanted.topic, wanted.partition, wanted.start, wanted.end, config)
    schema = to_arrow_schema(read_schema(options), timezone="UTC")
    try:
        _require_same_topic(topics, wanted)
        while batch := _next(reader, schema):
            yield batch
        _require_same_topic(topics, wanted)
    except RangeGone:
        if options.fail_on_data_loss:
            raise
        yield from record_batches(options, _left(topics, replace(wanted, start=reader.position)))
    finally:
        reader.close()
        topics.close()


def _require_same_topic(topics: Topics, wanted: Range) -> None:
    require_same_topic(topics.describe([wanted.topic])[wanted.topic], wanted.topic_id)


def _left(topics: Topics, wanted: Range) -> Range:
    """What is there of *wanted*; nothing of a topic that was made anew."""
    now = held(topics, [wanted.topic])[wanted.topic]
    if now.topic_id != wanted.topic_id:
        return replace(wanted, end=wanted.start)
    return available(wanted, now, fail_on_data_loss=False)


def _next(reader: RangeReader, schema: pa.Schema) -> pa.RecordBatch | None:
    """The next rows; None: there are no more.

    The garbage collector pauses: it would walk over the messages of a batch many times, which doubles what a record
    costs, and finds nothing, as reference counts free them all.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        messages = reader.read(BATCH_RECORDS)
        return _record_batch(messages, reader, schema) if messages else None
    finally:
        if collecting:
            gc.enable()


def _record_batch(messages: list[Message], reader: RangeReader, schema: pa.Schema) -> pa.RecordBatch:
    """One array for each column. Milliseconds become microseconds, which is what Spark counts in."""
    count = len(messages)
    types, times_ms = zip(*map(Message.timestamp, messages), strict=True)
    columns = [
        pa.array(list(map(Message.key, messages)), pa.binary()),
        pa.array(list(map(Message.value, messages)), pa.binary()),
        pa.repeat(pa.scalar(reader.topic, pa.string()), count),
        pa.repeat(pa.scalar(reader.partition, pa.int32()), count),
        _offsets(messages),
        pa.array(times_ms, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
        _timestamp_types(types),
    ]
    if len(schema) > len(columns):
        columns.append(pa.array(list(map(Message.headers, messages)), schema.field("headers").type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _offsets(messages: list[Message]) -> pa.Array:
    """Offsets only grow, so that their first and last tell whether there is a gap."""
    first, last = messages[0].offset() or 0, messages[-1].offset() or 0
    if last - first + 1 == len(messages):
        return pa.array(np.arange(first, last + 1, dtype=np.int64))
    return pa.array(list(map(Message.offset, messages)), pa.int64())


def _timestamp_types(types: tuple[int, ...]) -> pa.Array:
    """Kafka's own numbers, 0 for the producer's time, 1 for the broker's, -1 for none: librdkafka's are one higher."""
    if types.count(types[0]) == len(types):
        return pa.repeat(pa.scalar(types[0] - 1, pa.int32()), len(types))
    return pa.array([each - 1 for each in types], pa.int32())
