"""The format `exactlyonce` for `spark.read`, `spark.readStream`, `df.write` and `df.writeStream`.

Invariants: Spark sends the class to its workers by name, so they need this package; options are checked before anything
is opened; readers and writers are imported where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from exactlyonce.engines.spark.source.read_options import (
    STATE,
    is_of_state,
    parse_read_options,
    parse_state_options,
)
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from exactlyonce.engines.spark.source.read_options import ReadOptions
    from exactlyonce.engines.spark.source.state_reading import StatePlan
    from exactlyonce.pipeline.loading import Reference


class ExactlyOnceDataSource(DataSource):
    """Kafka topics, read exactly and written exactly once; other stores, written exactly once; state, read."""

    _state: StatePlan | None = None
    """The plan of a read of state, from Spark's question for the schema. Spark passes it on to the read."""
    _types: Reference | None = None
    """The pipeline with the types of a read of topics, in the same way."""

    @classmethod
    def name(cls) -> str:
        return "exactlyonce"

    def schema(self) -> StructType:
        """The schema of a read, if the user gives none."""
        if is_of_state(self.options):
            return self._state_plan().columns().schema
        from exactlyonce.engines.spark.source.record_columns import RecordColumns

        options = parse_read_options(self.options)
        return RecordColumns(options, self._types_of(options)).schema

    def reader(self, schema: StructType) -> DataSourceReader:
        if is_of_state(self.options):
            from exactlyonce.engines.spark.source.state_reading import StateReader

            return StateReader(self._state_plan(), schema)
        from exactlyonce.engines.spark.source.reading import RangesReader

        options = parse_read_options(self.options, streaming=False)
        return RangesReader(options, self._types_of(options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from exactlyonce.engines.spark.source.reading import StreamReader

        if is_of_state(self.options):
            raise ConfigError(f"The option {STATE} is for spark.read: the state at a checkpoint is no stream.")
        options = parse_read_options(self.options, streaming=True)
        return StreamReader(options, self._types_of(options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from exactlyonce.engines.spark.sink.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from exactlyonce.engines.spark.sink.options import parse_sink_options
        from exactlyonce.engines.spark.sink.writer import StreamWriter

        return StreamWriter(parse_sink_options(self.options, schema, streaming=True))

    def _types_of(self, options: ReadOptions) -> Reference | None:
        if self._types is None and options.types:
            self._types = load(options.types, options.params).reference
        return self._types

    def _state_plan(self) -> StatePlan:
        from exactlyonce.engines.spark.source.state_reading import plan_state

        if self._state is None:
            self._state = plan_state(parse_state_options(self.options))
        return self._state


def register(spark: SparkSession) -> None:
    """Register the format with a session, once, before it is used."""
    spark.dataSource.register(ExactlyOnceDataSource)
