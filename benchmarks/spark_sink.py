"""The exactly-once sink of Structured Streaming against the same sink without transactions, in alternating rounds.

Both write micro-batches of 200,000 rows, the lines of a text file, so that the sink is most of the cost. A batch is
timed from Spark's trigger to its end, commit included; the first of each query does not count.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench import Bench
from cluster import QUIET, WRITER
from figures import Figure
from job import Failed

from exactlyonce.engines.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 200_000
PARALLELISM = 2
LIMIT_S = 1800


def lines(folder: Path, batches: int) -> None:
    """A file for each batch."""
    folder.mkdir()
    for number in range(batches):
        ids = range(number * ROWS, (number + 1) * ROWS)
        orders = (f'{{"id":{id_},"customer":"customer-{id_ % 1000}","total":{id_ % 997},"ts":17}}' for id_ in ids)
        (folder / f"{number}.txt").write_text("\n".join(orders))


def run(bench: Bench, spark: SparkSession, sink: str, source: Path, checkpoint: Path) -> float:
    """Rows a second of the format *sink*."""
    topic = f"{sink}-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(topic)
    orders = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
    client = {"bootstrap.servers": bench.cluster.servers, **QUIET, **WRITER}
    options = {"sinkId": topic, "topic": topic, **{f"kafka.{name}": str(value) for name, value in client.items()}}
    keyed = orders.selectExpr("substring(value, 7, 6) as key", "value")
    writer = keyed.writeStream.format(sink).options(**options).option("checkpointLocation", str(checkpoint / topic))
    query = writer.trigger(availableNow=True).start()
    if not query.awaitTermination(LIMIT_S):
        raise Failed(f"{topic}: the query has not ended in {LIMIT_S} s; its last progress is {query.lastProgress}")
    done = [progress for progress in query.recentProgress if progress["numInputRows"]]
    if bench.cluster.digest(topic).records != ROWS * len(done):
        raise Failed(f"{topic} has not the rows of {len(done)} batches")
    bench.cluster.delete(topic)
    measured: list[int] = [progress["durationMs"]["triggerExecution"] for progress in done[1:]]
    return 1000 * ROWS * len(measured) / sum(measured)


def scenario(bench: Bench) -> Iterator[Figure]:
    """Ours and the plain one, which take turns to go first."""
    import plain_sink
    from pyspark import cloudpickle

    from exactlyonce.spark import register

    cloudpickle.register_pickle_by_value(plain_sink)  # type: ignore[no-untyped-call]  # workers do not find the file
    pairs: list[tuple[float, float]] = []
    with session(f"local[{PARALLELISM}]", {}, "benchmark") as spark, TemporaryDirectory(prefix="exactlyonce-") as place:
        register(spark)
        spark.dataSource.register(plain_sink.PlainSource)
        folder = Path(place)
        lines(folder / "warm", 2)
        lines(folder / "in", bench.size(11, 4))
        for sink in ("exactlyonce", "plain"):
            run(bench, spark, sink, folder / "warm", folder)
        for number in range(bench.rounds or bench.size(4, 2)):
            measured = {}
            for sink in ("exactlyonce", "plain") if number % 2 == 0 else ("plain", "exactlyonce"):
                measured[sink] = run(bench, spark, sink, folder / "in", folder)
            ours, plain = measured["exactlyonce"], measured["plain"]
            pairs.append((ours, plain))
            bench.say(f"round {number + 1}: {ours:,.0f} rows/s, plain {plain:,.0f}: {ours / plain:.2f}")
    rates = f"{median(ours for ours, _ in pairs):,.0f} against {median(plain for _, plain in pairs):,.0f} rows/s"
    yield Figure(
        "streaming sink on Spark, ratio",
        median(ours / plain for ours, plain in pairs),
        detail=f"{rates}, {len(pairs)} rounds",
    )
