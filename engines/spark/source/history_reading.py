"""The retained checkpoints of a pipeline as a DataFrame, a row for each, as `DESCRIBE HISTORY` has them of a table.

Invariant: the log is read once, when the rows are planned; a checkpoint that expires meanwhile has its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
from exactlyonce.engines.spark.shown_errors import shown_alone
from exactlyonce.engines.spark.source.read_options import HistoryOptions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.windows import moment

_OFFSET = (
    spark.StructType()
    .add("source", spark.StringType())
    .add("topic", spark.StringType())
    .add("partition", spark.IntegerType())
    .add("offset", spark.LongType())
)
SCHEMA = (
    spark.StructType()
    .add("checkpoint", spark.LongType())
    .add("kind", spark.StringType())
    .add("state", spark.StringType())
    .add("triggered_at", spark.TimestampType())
    .add("completed_at", spark.TimestampType())
    .add("finalized_at", spark.TimestampType())
    .add("incarnation", spark.LongType())
    .add("parallelism", spark.IntegerType())
    .add("records_out", spark.LongType())
    .add("state_bytes", spark.LongType())
    .add("written_bytes", spark.LongType())
    .add("next_offsets", spark.ArrayType(_OFFSET))
)


class HistoryReader(DataSourceReader):
    def __init__(self, options: HistoryOptions, schema: spark.StructType) -> None:
        if schema != SCHEMA:
            raise ConfigError(f"The schema is {SCHEMA.simpleString()}. Leave .schema(...) out, and use select.")
        self._options = options

    @shown_alone
    def partitions(self) -> Sequence[InputPartition]:
        config = self._options.client()
        config.check()
        _, history = read_topic(config, self._options.pipeline)
        return [InputPartition([_row(history, manifest) for manifest in history.retained])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist(partition.value, schema=to_arrow_schema(SCHEMA, timezone="UTC"))


def _row(history: History, manifest: Manifest) -> dict[str, Any]:
    mark = history.finalized.get(manifest.checkpoint)
    offsets = [(at.source, at.topic, at.partition, at.offset) for at in manifest.offsets]
    return {
        "checkpoint": manifest.checkpoint, "kind": manifest.kind, "state": "decided" if mark is None else "finalized",
        "triggered_at": moment(manifest.triggered_at_ms), "completed_at": moment(manifest.completed_at_ms),
        "finalized_at": None if mark is None else moment(mark.at_ms), "incarnation": manifest.incarnation,
        "parallelism": manifest.parallelism,
        "records_out": sum(output.records for output in manifest.committables)
        + sum(output.records for output in manifest.staged),
        "state_bytes": manifest.state_bytes, "written_bytes": manifest.written_bytes,
        "next_offsets": [dict(zip(_OFFSET.names, offset, strict=True)) for offset in offsets],
    }  # fmt: skip
