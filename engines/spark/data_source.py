"""The format `exactlyonce` for `spark.read`, `spark.readStream`, `df.write` and `df.writeStream`.

Invariants: Spark sends the class to its workers by name, so they need this package; options are checked before anything
is opened, and an unknown one is an error; what reads and what writes is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from exactlyonce.engines.spark.source.read_options import parse_read_options, read_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class ExactlyOnceDataSource(DataSource):
    """Kafka topics, read exactly and written exactly once; other stores, written exactly once."""

    @classmethod
    def name(cls) -> str:
        return "exactlyonce"

    def schema(self) -> StructType:
        """Asked for when something is read and the user gives none."""
        return read_schema(parse_read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from exactlyonce.engines.spark.source.reading import RangesReader

        return RangesReader(parse_read_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from exactlyonce.engines.spark.source.stream_reading import StreamReader

        return StreamReader(parse_read_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from exactlyonce.engines.spark.sink.writing import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from exactlyonce.engines.spark.sink.streaming import stream_writer

        return stream_writer(self.options, schema, overwrite)


def register(spark: SparkSession) -> None:
    """Make the format known to a session: once, before it is used."""
    spark.dataSource.register(ExactlyOnceDataSource)
