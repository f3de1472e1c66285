"""`df.write.format("exactlyonce")`: all rows of a batch write in Kafka, or none; or in a store.

    (df.write.format("exactlyonce").mode("append")
        .option("sinkId", "orders-2025")
        .option("kafka.bootstrap.servers", "127.0.0.1:9092")
        .option("topic", "orders")
        .option("writeId", "2025-11-21")
        .save())

Options and columns are those of `streaming_sink`. With a `writeId` the write happens once: a job that is run again with
an id that is among the last thousand of its sink writes nothing. Without one, a job whose driver died after its
decision cannot be told from one that was not decided; except in a function of `foreachBatch`, where the query, the
batch and the write's place in the function are its id. One job at a time may write to a sink; others take one of their
own.

Spark tells its tasks, and not its driver's Python processes, of which query and batch they are part. So the driver
sends every task the sink's position, each task looks whether its job is held there, and its message tells the driver
which job that was. On Spark Connect the tasks are not told either: there a function gives a `writeId` with the batch's
number in it.

All transactions of a write are open until its last task ends: that must take less time than `transactionTimeout`, 15
minutes unless it is given or the broker allows less. Compute first (into a table), publish after; if need be in parts.

Invariant: the rows become visible as a whole, in a store task by task, once the driver has decided; until then a
failure leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from exactlyonce.engines.spark.sink.options import parse_sink_options
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.writer import FormatWriter, batch_of, flushed_of
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql.types import StructType


class BatchWriter(FormatWriter, DataSourceArrowWriter):
    """See the module. What the tasks are told is part of the one that commits, too."""

    def job_of(self, context: TaskContext) -> Job:
        """The whole write is one."""
        batch = None if self.options.write_id else batch_of(context)
        return batch or Job(write_id=self.options.write_id)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Once all tasks are done."""
        flushed = flushed_of(messages)
        if flushed:
            self.asked(lambda driver: driver.commit(flushed[0].job, flushed))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Once a task has failed too often, or after a `commit` that raised."""
        self.abort_job()


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """The writer of a batch."""
    if overwrite:
        raise ConfigError('What a sink has written cannot be overwritten: write with .mode("append").')
    return BatchWriter(parse_sink_options(options, schema, streaming=False))
