"""A program with a session of its own: `program.py KIND SERVERS NAME FOLDER`. It prints a line of JSON.

KIND `submitted`: by spark-submit; the pipeline is the module `submitted_pipeline` in FOLDER. `connect`: with a server
of Spark Connect, `cluster`: with executors in processes of their own; the pipeline is a cell of a notebook, whose file
is away while units run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from exactlyonce import Pipeline
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.loading import cell_file, importable
from exactlyonce.spark import audit, backfill

CELL = """\
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def double(number: int) -> int:
    return 2 * number // (number - 13)


pipeline = Pipeline("{name}")
pipeline.source("in", KafkaSource("{name}-in", value=int)).map(double).sink("out", KafkaSink("{name}-out"))
"""


def cell_of_notebook(name: str) -> Pipeline:
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "exactlyonce")
    shell.run_cell_magic("pipeline", "doubling", CELL.format(name=name))
    pipeline: Pipeline = shell.user_ns["pipeline"]
    return pipeline


def main(kind: str, servers: str, name: str, folder: Path) -> None:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder
    if kind in ("connect", "cluster"):
        named = builder.appName("mine").config("spark.executor.memory", "512m")
        remote = named.remote("local[2]") if kind == "connect" else named.master("local-cluster[1,2,512]")
        spark, pipeline = remote.getOrCreate(), cell_of_notebook(name)
    else:
        sys.path.insert(0, str(folder))
        spark = builder.getOrCreate()
        pipeline = importlib.import_module("submitted_pipeline").pipeline
    spark.addTag("mine")
    lines: list[str] = []
    tags: set[str] = set()
    file = cell_file(importable(pipeline).reference)

    def on_progress(progress: object) -> None:
        lines.append(str(progress))
        tags.update(spark.getTags())
        if file is not None and file.exists():
            file.rename(away)

    away = folder / "away.py"
    given: dict[str, Any] = {"bootstrap_servers": servers, "staging": folder / "staging"}
    summary = backfill(spark, pipeline, to=json.dumps({f"{name}-in": {"0": 10}}), progress=on_progress, **given)
    if file is not None:
        away.rename(file)
    report = audit(spark, pipeline, **given)
    try:
        backfill(spark, pipeline, **given)
    except RecordError as error:
        cause, facts = str(error.__cause__), dict(error.facts)
    print(json.dumps({
        "records": summary.records, "checkpoint": summary.checkpoint, "judged": report.records_out,
        "findings": len(report.findings), "lines": lines, "tags": sorted(tags), "tags_after": sorted(spark.getTags()),
        "cause": cause, "facts": facts, "name": spark.conf.get("spark.app.name"),
        "master": spark.conf.get("spark.master", ""), "count": spark.range(3).count(),
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
