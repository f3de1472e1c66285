"""A running total over history on Spark: the backfill, against the local engine and against a job by hand.

All three run at the same parallelism, over the same topic, and emit every update. The backfill and the job by hand are
timed from the first task's launch to the last task's end, in a session that is warm; the local engine from its first
commit to its last.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import Bench
from cluster import QUIET, WRITER
from figures import Figure
from job import Failed, Job
from throughput import rate_of

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.session import session
from exactlyonce.engines.spark.submit import submit_to
from exactlyonce.pipeline.loading import Loaded, load_reference

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
PARALLELISM = 2
CUSTOMERS = 1_000
MASTER = f"local[{PARALLELISM}]"
ORDER = "id long, customer string, total long, ts long"


class Quiet:
    """A silent `Progress`."""

    def note(self, text: str) -> None:
        pass

    def began(self, manifest: Any, offsets: int) -> None:
        pass

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        pass


def loaded_at(attribute: str, source: str, sink: str) -> Loaded:
    """The pipeline *attribute* of `benchmarked` from a topic into another, named like that."""
    params = {"name": sink, "source": source, "sink": sink}
    reference: dict[str, object] = {
        "module": "benchmarked", "attribute": attribute, "params": params, "path": str(HERE)
    }  # fmt: skip
    return Loaded(load_reference(reference), reference)


def totals_at(source: str, sink: str) -> Loaded:
    """The running total."""
    return loaded_at("totals", source, sink)


def client_of(bench: Bench) -> ClientConfig:
    """The settings of the pipelines' clients."""
    return ClientConfig({"bootstrap.servers": bench.cluster.servers, **WRITER, **QUIET})


def backfill(bench: Bench, submit: Submit, staging: Path, source: str, sink: str, records: int) -> float:
    """Records a second of a backfill."""
    options = RunOptions(client_of(bench), parallelism=PARALLELISM)
    done = CatchUp(totals_at(source, sink), options, Quiet(), chunk_records=10 * records).lead(submit, staging)
    if done.records != records or done.records_out != records:
        raise Failed(f"{done.records} of {records} were read, {done.records_out} written")
    return records / done.work_ms * 1000.0


def local(bench: Bench, source: str, sink: str, records: int) -> float:
    """Records a second of the local engine."""
    arguments = ("--until", "latest", "--parallelism", str(PARALLELISM))
    with Job(bench.cluster.servers, "totals", *arguments, name=sink, source=source, sink=sink) as job:
        return rate_of(job.finish(), records)


def by_hand(spark: SparkSession, bench: Bench, source: str, sink: str, records: int) -> float:
    """Records a second of a job by hand: our reader, a window, JSON, a producer without transactions."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    read = spark.read.format("exactlyonce").option("subscribe", source)
    orders = (
        read.option("kafka.bootstrap.servers", bench.cluster.servers)
        .load()
        .select("timestamp", "partition", "offset", f.from_json(f.col("value").cast("string"), ORDER).alias("order"))
    )
    customer = f.col("order.customer")
    earlier = Window.partitionBy(customer).orderBy("timestamp", "partition", "offset")
    summed = f.sum("order.total").over(earlier.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    total = f.struct(customer.alias("customer"), summed.alias("sum"), f.col("order.ts").alias("ts"))
    updates = orders.select(customer.cast("binary").alias("key"), f.to_json(total).cast("binary").alias("value"))
    began_s = time.monotonic()
    rows = updates.mapInArrow(partial(_produce, bench.cluster.servers, sink), "count long").collect()
    elapsed_s = time.monotonic() - began_s
    if sum(row[0] for row in rows) != records:
        raise Failed(f"the job by hand has written {rows}")
    return records / elapsed_s


def _produce(servers: str, topic: str, batches: Iterable[Any]) -> Iterator[Any]:
    """Runs in the task."""
    import pyarrow
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "max.in.flight": 1, **WRITER, **QUIET})
    count = 0
    for batch in batches:
        keys = batch.column(0).to_pylist()
        for key, value in zip(keys, batch.column(1).to_pylist(), strict=True):
            try:
                producer.produce(topic, value, key)
            except BufferError:
                producer.poll(0.1)
                producer.produce(topic, value, key)
        producer.poll(0)
        count += len(keys)
    producer.flush()
    yield pyarrow.RecordBatch.from_arrays([pyarrow.array([count])], ["count"])


class Rates(NamedTuple):
    """Records a second of one round."""

    spark: float
    local: float
    by_hand: float


def rounds(bench: Bench, source: str, records: int, count: int) -> Iterator[Rates]:
    """All three in turns; each must write one total for each order."""
    from exactlyonce.spark import register

    with session(MASTER, {"spark.driver.memory": "3g"}, "benchmark") as spark, TemporaryDirectory() as folder:
        register(spark)
        warm = bench.input(100_000, CUSTOMERS)
        counts: set[tuple[int, int]] = set()
        for number in range(count + 1):
            topic, size = (source, records) if number else (warm, 100_000)
            sinks = [f"{runner}-{uuid.uuid4().hex[:8]}" for runner in ("backfill", "local", "by-hand")]
            bench.cluster.create(*sinks)
            rates = Rates(
                backfill(bench, submit_to(spark), Path(folder), topic, sinks[0], size),
                local(bench, topic, sinks[1], size) if number else 1.0,
                by_hand(spark, bench, topic, sinks[2], size),
            )
            counts.update((size, bench.cluster.digest(sink).records) for sink in sinks if number or sink != sinks[1])
            bench.cluster.delete(*sinks)
            if number:
                bench.say(f"round {number}: {rates.spark:,.0f}, local {rates.local:,.0f}, by hand {rates.by_hand:,.0f}")
                yield rates
        if wrong := [pair for pair in counts if pair[0] != pair[1]]:
            raise Failed(f"not every order gave an update: {wrong}")


def scenario(bench: Bench) -> Iterator[Figure]:
    """The two ratios."""
    records = bench.size(5_000_000, 1_000_000)
    measured = list(rounds(bench, bench.input(records, CUSTOMERS), records, bench.rounds or bench.size(2, 1)))
    spark = median(rates.spark for rates in measured)
    for name, against in (("local engine", "local"), ("by hand on Spark", "by_hand")):
        yield Figure(
            f"backfill on Spark, running total, against {name}",
            median(rates.spark / getattr(rates, against) for rates in measured),
            detail=f"{spark:,.0f} against {median(getattr(rates, against) for rates in measured):,.0f} records/s",
        )
