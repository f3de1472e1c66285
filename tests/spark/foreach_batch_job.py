"""A driver: `foreachBatch` with a function that writes each batch in two parts, and falls over behind given writes.

`python foreach_batch_job.py SERVERS SINK_ID TOPIC FOLDER FALLS`, where FALLS is a list of `BATCH.WRITE=raise|exit`,
each of which happens once: a run that raised is followed by another one, one that exited is not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from streaming_sink_job import session  # type: ignore[import-not-found]  # lies beside it

from exactlyonce.engines.spark.data_source import register

EXIT_CODE = 9


def main(servers: str, sink_id: str, topic: str, folder: Path, falls: str) -> None:
    spark = session("classic")
    register(spark)
    ways = dict(each.split("=") for each in falls.split(",") if each)

    def fall(place: str) -> None:
        mark = folder / f"fell-{place}"
        if place not in ways or mark.exists():
            return
        mark.touch()
        if ways[place] == "exit":
            os._exit(EXIT_CODE)
        raise RuntimeError(place)

    def write(rows: DataFrame, batch: int) -> None:
        for number, part in enumerate((rows.where("value like '%0'"), rows.where("value not like '%0'"))):
            options = {"sinkId": sink_id, "topic": topic, "kafka.bootstrap.servers": servers}
            part.write.format("exactlyonce").mode("append").options(**options).save()
            fall(f"{batch}.{number}")

    files = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder / "in"))
    writer = files.writeStream.foreachBatch(write).trigger(availableNow=True)
    for _ in range(len(ways) + 1):
        try:
            writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
        except PySparkException as error:
            print(str(error)[-300:], flush=True)
        else:
            return
    sys.exit("not done")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5])
