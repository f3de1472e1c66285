"""A driver: copies files of JSON lines to a store, one file a batch, until a run of the query has met the end of them.

`python store_targets_job.py FOLDER OPTIONS`, where OPTIONS are those of the write, as JSON; a run that fails is
followed by another one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.errors import PySparkException
from streaming_sink_job import RUNS_MAX, session  # type: ignore[import-not-found]  # lies beside it

from exactlyonce.engines.spark.data_source import register


def main(folder: Path, options: dict[str, str]) -> None:
    spark = session("classic")
    register(spark)
    files = spark.readStream.schema("id long, customer string, total long").format("json")
    rows = files.option("maxFilesPerTrigger", 1).load(str(folder / "in")).repartition(2)
    writer = rows.writeStream.format("exactlyonce").trigger(availableNow=True).options(**options)
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
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
