"""A running total and a tumbling count over history on Spark, against the local engine and against a job by hand.

All three run at the same parallelism, over the same topic, and emit every update of a total, or each window that has
ended. The backfill and the job by hand are timed from the first task's launch to the last task's end, in a session that
is warm; the local engine from its first commit to its last.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
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
from work import SIZE_MS, Work, counts, totals

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import Submit
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.session import session
from exactlyonce.engines.spark.submit import submit_to
from exactlyonce.pipeline.loading import Loaded, load_reference

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent
PARALLELISM = 2
MASTER = f"local[{PARALLELISM}]"
ORDER = "id long, customer string, total long, ts long"


class Quiet:
    """A silent `WorkListener`."""

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


def client_of(bench: Bench) -> ClientConfig:
    """The settings of the pipelines' clients."""
    return ClientConfig({"bootstrap.servers": bench.cluster.servers, **WRITER, **QUIET})


def backfill(bench: Bench, submit: Submit, staging: Path, work: Work, sink: str) -> float:
    """Records a second of a backfill."""
    options = RunOptions(client_of(bench), parallelism=PARALLELISM)
    loaded = loaded_at(work.pipeline, work.source, sink)
    done = CatchUp(loaded, options, Quiet(), chunk_records=10 * work.records).lead(submit, staging)
    if (done.records, done.records_out) != (work.records, work.expected.records):
        raise Failed(f"{done.records} were read, {done.records_out} written, of {work}")
    return work.records / done.work_ms * 1000.0


def local(bench: Bench, work: Work, sink: str) -> float:
    """Records a second of the local engine."""
    arguments = ("--until", "latest", "--parallelism", str(PARALLELISM))
    with Job(bench.cluster.servers, work.pipeline, *arguments, name=sink, source=work.source, sink=sink) as job:
        return rate_of(job.finish(), work.records)


def by_hand(spark: SparkSession, bench: Bench, work: Work, sink: str) -> float:
    """Records a second of a job by hand: our reader, a query, JSON, a producer without transactions."""
    from pyspark.sql import functions as f

    read = spark.read.format("exactlyonce").option("subscribe", work.source)
    orders = (
        read.option("kafka.bootstrap.servers", bench.cluster.servers)
        .load()
        .select("timestamp", "partition", "offset", f.from_json(f.col("value").cast("string"), ORDER).alias("order"))
        .where(f.col("order.id") < work.records)  # later ones only end windows
    )
    results = QUERIES[work.pipeline](orders)
    message = f.struct(*results.columns)
    messages = results.select(f.col("customer").cast("binary"), f.to_json(message).cast("binary"))
    began_s = time.monotonic()
    messages.mapInArrow(partial(_produce, bench.cluster.servers, sink), "count long").collect()
    return work.records / (time.monotonic() - began_s)


def _totals(orders: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    customer = f.col("order.customer")
    earlier = Window.partitionBy(customer).orderBy("timestamp", "partition", "offset")
    summed = f.sum("order.total").over(earlier.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    return orders.select(customer, summed.alias("sum"), f.col("order.ts"))


def _counts(orders: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    number = f.col("order.id")
    ms = number + 2_000 - number * 7_919 % 1_500
    window = f.window(f.timestamp_millis(ms), f"{SIZE_MS} milliseconds")
    by_window = orders.groupBy(f.col("order.customer"), window).agg(f.count("*").alias("count"))
    return by_window.select("customer", f.unix_millis("window.start").alias("start"), "count")


QUERIES = {"totals": _totals, "counts": _counts}
"""By pipeline."""


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


def rounds(bench: Bench, make: Callable[[Bench, int], Work], records: int, count: int) -> Iterator[Rates]:
    """All three in turns; each must write what the work expects."""
    from exactlyonce.spark import register

    with session(MASTER, {"spark.driver.memory": "3g"}, "benchmark") as spark, TemporaryDirectory() as folder:
        register(spark)
        warm, work = make(bench, 100_000), make(bench, records)
        for number in range(count + 1):
            given = work if number else warm
            runners = {
                "backfill": partial(backfill, bench, submit_to(spark), Path(folder)),
                "local": partial(local, bench),
                "by-hand": partial(by_hand, spark, bench),
            }
            if not number:
                del runners["local"]
            rates = {}
            for name, runner in runners.items():
                sink = f"{name}-{uuid.uuid4().hex[:8]}"
                bench.cluster.create(sink)
                rates[name] = runner(given, sink)
                if (written := bench.cluster.digest(sink)) != given.expected:
                    raise Failed(f"{name} wrote {written} of {given}")
                bench.cluster.delete(sink)
            if number:
                texts = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
                bench.say(f"{work.pipeline}, round {number}: {texts} records/s")
                yield Rates(*rates.values())


def scenario(bench: Bench) -> Iterator[Figure]:
    """The two ratios of both pipelines."""
    records = bench.size(5_000_000, 1_000_000)
    for title, make in (("running total", totals), ("tumbling count", counts)):
        measured = list(rounds(bench, make, records, bench.rounds or bench.size(2, 1)))
        spark = median(rates.spark for rates in measured)
        for name, against in (("local engine", "local"), ("by hand on Spark", "by_hand")):
            yield Figure(
                f"backfill on Spark, {title}, against {name}",
                median(rates.spark / getattr(rates, against) for rates in measured),
                detail=f"{spark:,.0f} against {median(getattr(rates, against) for rates in measured):,.0f} records/s",
            )
