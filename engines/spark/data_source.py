"""The format `exactlyonce` for `spark.read`, `spark.readStream`, `df.write` and `df.writeStream`.

Invariants: Spark sends the class to its workers by name, so they need this package; options are checked before anything
is opened; readers and writers are imported where they are used; every thread of the program finds the format.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.readwriter import DataFrameReader, DataFrameWriter
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

from exactlyonce.engines.spark.session import is_connect
from exactlyonce.engines.spark.shown_errors import shown_alone
from exactlyonce.engines.spark.source.read_options import (
    HISTORY,
    STATE,
    is_of_history,
    is_of_state,
    parse_history_options,
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
    """Kafka topics, read exactly and written exactly once; other stores, written exactly once; state; checkpoints."""

    _state: StatePlan | None = None
    """The plan of a read of state, from Spark's question for the schema. Spark passes it on to the read."""
    _types: Reference | None = None
    """The pipeline with the types of a read of topics, in the same way."""

    @classmethod
    def name(cls) -> str:
        return "exactlyonce"

    @shown_alone
    def schema(self) -> StructType:
        """The schema of a read, if the user gives none."""
        if is_of_state(self.options):
            return self._state_plan().columns().schema
        if is_of_history(self.options):
            from exactlyonce.engines.spark.source.history_reading import SCHEMA

            return SCHEMA
        from exactlyonce.engines.spark.source.record_columns import RecordColumns

        options = parse_read_options(self.options)
        return RecordColumns(options, self._types_of(options)).schema

    @shown_alone
    def reader(self, schema: StructType) -> DataSourceReader:
        if is_of_state(self.options):
            from exactlyonce.engines.spark.source.state_reading import StateReader

            return StateReader(self._state_plan(), schema)
        if is_of_history(self.options):
            from exactlyonce.engines.spark.source.history_reading import HistoryReader

            return HistoryReader(parse_history_options(self.options), schema)
        from exactlyonce.engines.spark.source.reading import RangesReader

        options = parse_read_options(self.options, streaming=False)
        return RangesReader(options, self._types_of(options), schema)

    @shown_alone
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from exactlyonce.engines.spark.source.reading import StreamReader

        if is_of_state(self.options):
            raise ConfigError(f"The option {STATE} is for spark.read: the state at a checkpoint is no stream.")
        if is_of_history(self.options):
            raise ConfigError(f"The option {HISTORY} is for spark.read: the list of checkpoints is no stream.")
        options = parse_read_options(self.options, streaming=True)
        return StreamReader(options, self._types_of(options), schema)

    @shown_alone
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from exactlyonce.engines.spark.sink.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    @shown_alone
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
    """Register the format with a session, once, before it is used; then any thread may use it."""
    spark.dataSource.register(ExactlyOnceDataSource)
    if not is_connect(spark):
        for owner, method in _LOOK_FOR_A_FORMAT:
            if not hasattr(getattr(owner, method), "__wrapped__"):
                setattr(owner, method, _in_own_session(getattr(owner, method)))


_LOOK_FOR_A_FORMAT: tuple[tuple[Any, str], ...] = (
    (DataFrameReader, "load"), (DataFrameWriter, "save"), (DataStreamReader, "load"), (DataStreamWriter, "start"),
)  # fmt: skip
"""The calls of PySpark by which Spark looks for the format of a Python source: in the thread's active session."""


def _in_own_session(call: Callable[..., Any]) -> Callable[..., Any]:
    """*call*, with the session of its frame as the active one of a thread that has none.

    Spark sets it in a program's first thread alone, and fails with DATA_SOURCE_NOT_FOUND in others.
    """

    @wraps(call)
    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        sessions = self._spark._jvm.org.apache.spark.sql.SparkSession
        if not sessions.getActiveSession().isDefined():
            sessions.setActiveSession(self._spark._jsparkSession)
        return call(self, *arguments, **options)

    return called
