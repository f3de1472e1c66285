"""A driver: copies text files to a topic, one file a batch, until a run of the query has met the end of them.

`python streaming_sink_job.py SERVERS SINK_ID TOPIC FOLDER [connect]`; a run that fails is followed by another one. With
`connect` the session is one of Spark Connect, whose server it starts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from exactlyonce.engines.spark.data_source import register

RUNS_MAX = 12


def session(kind: str) -> SparkSession:
    """A small session. All drivers are of one application, as where a cluster starts one again that has died."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    if kind == "connect":
        return SparkSession.builder.remote("local[2,3]").getOrCreate()
    builder = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.test.appId", "application_1_0001")
    return builder.config("spark.log.level", "OFF").config("spark.driver.memory", "512m").getOrCreate()


def main(servers: str, sink_id: str, topic: str, folder: Path, kind: str = "classic") -> None:
    spark = session(kind)
    register(spark)
    files = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder / "in"))
    writer = files.repartition(2).writeStream.format("exactlyonce").trigger(availableNow=True)
    writer = writer.option("sinkId", sink_id).option("topic", topic).option("kafka.bootstrap.servers", servers)
    for run in range(1, RUNS_MAX + 1):
        try:
            writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
        except PySparkException as error:
            print(f"run {run}: {str(error)[-300:]}", flush=True)
        else:
            print(f"{run} runs", flush=True)
            return
    sys.exit(f"not done after {RUNS_MAX} runs")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
