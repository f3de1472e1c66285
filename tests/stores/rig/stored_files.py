"""A pipeline whose running totals go to files in S3 or HDFS; every worker imports this module."""

from __future__ import annotations

from together import running_totals

from exactlyonce import Pipeline
from exactlyonce.sinks import FileSink

FORMATS = ("parquet", "avro", "jsonl")


def filed(name: str, url: str) -> Pipeline:
    pipeline, sums = running_totals(name)
    for format in FORMATS:
        sums.sink(format, FileSink(f"{url}/{format}", format=format))
    return pipeline
