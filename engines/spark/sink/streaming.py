"""`df.writeStream.format("exactlyonce")`: every batch of a streaming query in Kafka, or in a store, exactly once.

    (df.selectExpr("cast(id as string) key", "to_json(struct(*)) value")
        .writeStream.format("exactlyonce")
        .option("sinkId", "orders-to-kafka")
        .option("kafka.bootstrap.servers", "127.0.0.1:9092")
        .option("topic", "orders")
        .option("checkpointLocation", "/data/orders-to-kafka")
        .start())

Columns: `value` (binary or string) and, where wanted, `key`, `topic`, `partition`, `headers`, as in Spark's own Kafka
sink. Options:

| option | means |
| --- | --- |
| `sinkId` | required: the name under which the cluster remembers what was written; one for every sink, permanently |
| `topic` | where every row goes; without it the column `topic` says so |
| `kafka.NAME` | librdkafka's settings; secrets as references, `env:NAME` or `file:/path` |
| `transactionTimeout` | "5m": what a batch has from its first row on, and how long a dead query holds readers back |
| `adoptQuery` | the id of the query that has written to the sink so far, if this one is to go on in its place |
| `acceptLoss` | the number of a checkpoint whose loss is accepted, after a halt that named it |
| `sink` | `kafka`; or `postgres`, `mysql`, `redis`, `files`, see `target`: all columns are fields then |

Invariants: a batch becomes visible as a whole, once; Spark may write a batch again, and abort one that is decided: the
decision in `<sinkId>.checkpoints` stands, and rows other than those that were decided are never skipped in silence.
Spark sends the writer to its executors before every batch, which is when the driver is asked; the writer that commits
is another one, in another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from exactlyonce.engines.spark.sink.options import parse_sink_options
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.writer import FormatWriter, batch_of, flushed_of
from exactlyonce.pipeline.errors import require

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql.types import StructType


class StreamWriter(FormatWriter, DataSourceStreamArrowWriter):
    """See the module."""

    def job_of(self, context: TaskContext) -> Job:
        """One batch of one query."""
        batch = batch_of(context)
        require(batch is not None, "A batch of a query has its number")
        assert batch is not None
        return Job(batch.query, batch.batch)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Once all tasks are done."""
        flushed = flushed_of(messages)
        if flushed:
            job = flushed[0].job
            require(job.batch == batchId, "Tasks write the batch that Spark commits")
            self.asked(lambda driver: driver.commit(job, flushed))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Once a task has failed too often, or after a `commit` that raised."""
        self.abort_job()


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """The writer of a stream; output mode complete writes all rows of every batch, as Spark's own Kafka sink does."""
    return StreamWriter(parse_sink_options(options, schema, streaming=True))
