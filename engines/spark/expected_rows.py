"""The expected output of a sink as a DataFrame, whose tasks read staged files.

Invariant: a row is an output as its sink gets it: bytes for Kafka, the record for a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from exactlyonce.engines.bounded.recompute import ExpectedLane
from exactlyonce.engines.bounded.unit.staging import Origin, OutputBatch, OutputFile, StagedFiles, batches_of
from exactlyonce.engines.spark.source.record_columns import HEADERS
from exactlyonce.engines.spark.source.spark_types import SparkColumn, Unfit, column
from exactlyonce.pipeline.errors import ConfigError, RecordError, text_of
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.loading import Reference, load_reference
from exactlyonce.pipeline.shape import UnsupportedType, describe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])
_unpack = msgspec.msgpack.Decoder().decode
_TIME = pa.timestamp("us", "UTC")


class ExpectedRows:
    """Makes the rows of the outputs of a sink."""

    def __init__(self, graph: LogicalGraph, node: Node) -> None:
        assert node.sink is not None
        self._sink, self._of_kafka, self._topic = node.id, node.sink.transactional, node.sink.topic
        self._value: SparkColumn | None = None if self._of_kafka else _record_column(graph, node)
        self.schema = spark.StructType()
        if self._value is None:
            self.schema = (
                self.schema.add("key", spark.BinaryType())
                .add("value", spark.BinaryType())
                .add("headers", HEADERS)
                .add("topic", spark.StringType())
                .add("partition", spark.IntegerType())
                .add("timestamp", spark.TimestampType())
            )
        else:
            self.schema.add("value", self._value.type)
        self.schema = (
            self.schema.add("checkpoint", spark.LongType())
            .add("input_topic", spark.StringType())
            .add("input_partition", spark.IntegerType())
            .add("input_offset", spark.LongType())
        )
        self._arrow = to_arrow_schema(self.schema, timezone="UTC")

    def batches(self, lane: ExpectedLane) -> Iterator[pa.RecordBatch]:
        """The rows of *lane*, in order. Raises `RecordError` for a value that its column cannot hold."""
        with closing(StagedFiles()) as files:
            outputs = _outputs_decoder.decode(files.message(lane.outputs))
        for batch in batches_of(outputs, lane.lane, by_partition=lane.by_partition):
            yield self._batch(lane.checkpoint, batch)

    def _batch(self, checkpoint: int, batch: OutputBatch) -> pa.RecordBatch:
        count = len(batch.values)
        none, origins = [None] * count, batch.origins or []
        columns: dict[str, Any] = {
            "checkpoint": pa.repeat(pa.scalar(checkpoint, pa.int64()), count),
            "input_topic": [topic for topic, _, _ in origins],
            "input_partition": [partition for _, partition, _ in origins],
            "input_offset": [offset for _, _, offset in origins],
        }
        if self._value is None:
            columns |= {
                "key": batch.keys or none,
                "value": batch.values,
                "headers": batch.headers or [[]] * count,
                "topic": [self._topic] * count,
                "partition": batch.partitions or none,
                "timestamp": pa.array(batch.timestamps or none, pa.timestamp("ms", "UTC")).cast(_TIME),
            }
        else:
            columns["value"] = list(map(self._record, batch.values, origins))
        arrays = [pa.array(columns[field.name], field.type) for field in self._arrow]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _record(self, value: bytes | None, origin: Origin) -> Any:
        assert self._value is not None
        try:
            return self._value.value(_unpack(value or b""))
        except (Unfit, OverflowError) as error:
            topic, partition, offset = origin
            raise RecordError(
                f"The record of sink {self._sink!r} that {topic}[{partition}] offset {offset} gave is no "
                f"{self._value.type.simpleString()}: {text_of(error)}."
            ) from None


def _record_column(graph: LogicalGraph, node: Node) -> SparkColumn:
    type_ = graph.type_of(node.inputs[0])
    try:
        if type_ is UNKNOWN:
            raise UnsupportedType("its type is unknown")
        return column(describe(type_))
    except UnsupportedType as error:
        raise ConfigError(
            f"The records of sink {node.id!r} have no columns: {error}. Declare the type that the function before it "
            f"returns, by an annotation or output=."
        ) from None


def expected_frame(spark: SparkSession, reference: Reference, sink: str, lanes: Sequence[ExpectedLane]) -> DataFrame:
    """The outputs in *lanes* as a DataFrame, as long as their files exist."""
    work = [msgspec.msgpack.encode(lane) for lane in lanes]
    tasks = max(1, len(work))
    run = partial(_run, reference, sink, work)
    return spark.range(0, tasks, 1, tasks).mapInArrow(run, _rows_of(reference, sink).schema)


def require_columns(reference: Reference, sink: str) -> None:
    """Raise ConfigError if the output of *sink* has no columns."""
    _rows_of(reference, sink)


def _rows_of(reference: Reference, sink: str) -> ExpectedRows:
    graph = load_reference(reference).build()
    return ExpectedRows(graph, graph.node(sink))


def _run(
    reference: Reference, sink: str, work: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Read the lanes whose numbers are in *batches*."""
    rows = _rows_of(reference, sink)
    for number in chain.from_iterable(batch.column(0).to_pylist() for batch in batches):
        if number < len(work):
            yield from rows.batches(msgspec.msgpack.decode(work[number], type=ExpectedLane))
