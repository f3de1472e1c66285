"""The streaming sink without transactions, for `spark_sink` to compare with. Sent to Spark's workers by value.

Invariant: the same columns, the same arguments of the same client, the same wait for the broker at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from exactlyonce.checkpoint.events import Ack
from exactlyonce.engines.spark.sink.options import parse_sink_options
from exactlyonce.engines.spark.sink.position import SparkJob
from exactlyonce.engines.spark.sink.task import Flushed, outputs_of, rows
from exactlyonce.engines.spark.sink.writer import StreamWriter, TaskMessage
from exactlyonce.sinks.kafka.open_transaction import TUNING, OpenTransaction, ProducerFailure, initialised

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType


class PlainWriter(StreamWriter):
    """The sink, at least once, without decisions."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def write(self, iterator: Iterator[RecordBatch]) -> TaskMessage:
        """As `sink.task.write_task`, without a transaction."""
        topic = self.options.topic
        config, failures = {**TUNING, **self.options.client().confluent()}, list[ProducerFailure]()
        producer = initialised(config, topic, None, 0, failures.append)
        transaction = OpenTransaction("", producer, subject="plain", failures=failures)
        for batch in iterator:
            for name, outputs in outputs_of(list(rows(batch, self.options.columns, topic))):
                transaction.write(name, outputs)
        transaction.flush()
        transaction.drop()
        return TaskMessage(Flushed(0, SparkJob(), Ack("", 0, 0)))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing can be done."""


class PlainSource(DataSource):
    """The format `plain`."""

    @classmethod
    def name(cls) -> str:
        return "plain"

    def streamWriter(self, schema: StructType, overwrite: bool) -> PlainWriter:
        return PlainWriter(parse_sink_options(self.options, schema, streaming=True))
