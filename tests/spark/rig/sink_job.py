"""A driver: copies files of JSON lines to a sink, one file a batch, until a run of the query has met the end of them.

`python sink_job.py FOLDER OPTIONS [classic | connect | FALLS]`, where OPTIONS are those of the write, as JSON. A failed
run is followed by another one. `connect` starts a server of Spark Connect for its session. FALLS is a list of
`BATCH.WRITE=raise|exit`: a function of `foreachBatch` writes each batch in two parts, and fails once after these.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from exactlyonce.spark import register

RUNS_MAX = 12
EXIT_CODE = 9


def session(kind: str) -> SparkSession:
    """A small session. All drivers are of one application, as where a cluster starts one again that has died."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    if kind == "connect":
        return SparkSession.builder.remote("local[2,3]").getOrCreate()
    builder = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.test.appId", "application_1_0001")
    return builder.config("spark.log.level", "OFF").config("spark.driver.memory", "512m").getOrCreate()


def writing_in_two_parts(folder: Path, options: dict[str, str], falls: str) -> Callable[[DataFrame, int], None]:
    ways = dict(each.split("=") for each in falls.split(","))

    def fall(place: str) -> None:
        mark = folder / f"fell-{place}"
        if place not in ways or mark.exists():
            return
        mark.touch()
        if ways[place] == "exit":
            os._exit(EXIT_CODE)
        raise RuntimeError(place)

    def write(rows: DataFrame, batch: int) -> None:
        for number, part in enumerate((rows.where("value like '%0}'"), rows.where("value not like '%0}'"))):
            part.write.format("exactlyonce").mode("append").options(**options).save()
            fall(f"{batch}.{number}")

    return write


def main(folder: Path, options: dict[str, str], kind: str = "classic") -> None:
    spark = session(kind)
    register(spark)
    files = spark.readStream.schema("id long, customer string, total long").format("json")
    rows = files.option("maxFilesPerTrigger", 1).load(str(folder / "in"))
    if "topic" in options:
        rows = rows.selectExpr("to_json(struct(*)) as value")
    if "=" in kind:
        writer = rows.writeStream.foreachBatch(writing_in_two_parts(folder, options, kind))
    else:
        writer = rows.repartition(2).writeStream.format("exactlyonce").options(**options)
    writer = writer.trigger(availableNow=True).option("checkpointLocation", str(folder / "checkpoint"))
    for run in range(1, RUNS_MAX + 1):
        try:
            writer.start().awaitTermination()
        except PySparkException as error:
            print(f"run {run}: {str(error)[-300:]}", flush=True)
        else:
            print(f"{run} runs", flush=True)
            return
    sys.exit(f"not done after {RUNS_MAX} runs")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:])
