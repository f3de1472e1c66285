"""A program whose session ends in its second checkpoint: `ended_session.py KIND SERVERS`.

KIND `backfill`: the program stops the session as a stage begins. `follow`: it does so while a task computes
number 7. It prints the error, and the checkpoint at which a second call on another session ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import until

from exactlyonce import Pipeline
from exactlyonce.cli.main import main
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.sinks import KafkaSink
from exactlyonce.spark import backfill, catch_up
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, FOLDER = "ENDED_SESSION_NAME", "ENDED_SESSION_FOLDER"
"""The environment of the program and of its tasks: the name of the pipeline, and a folder of the test."""
CHUNK = 5
"""The records of a chunk; the second one has number 7."""
name = os.environ.get(NAME, "ended")
held = Path(os.environ.get(FOLDER, ""), "held")
"""The file that says that a task has the number."""


def double(number: int) -> int:
    if number == 7 and not held.exists():
        held.touch()
        threading.Event().wait(LIMIT_S)
    return 2 * number


pipeline = Pipeline(name)
pipeline.source("in", KafkaSource(f"{name}-in", value=int)).map(double).sink("out", KafkaSink(f"{name}-out"))


def session() -> SparkSession:
    from pyspark.sql import SparkSession

    return SparkSession.builder.master("local[2]").getOrCreate()


@contextmanager
def stopping(spark: SparkSession) -> Iterator[None]:
    """Another thread stops *spark* once a task has number 7. The block ends with it."""

    def stop() -> None:
        until(held.exists)
        spark.stop()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def followed(servers: str) -> str:
    """The last line of the command that follows the input."""
    line = ["catch-up", "ended_session:pipeline", "--bootstrap-servers", servers]
    with redirect_stderr(StringIO()) as said:
        code = main([*line, "--follow", "--on", "spark", "--chunk-records", str(CHUNK)])
    return f"exit code {code}: {said.getvalue().splitlines()[-1]}"


def failed(kind: str, spark: SparkSession, **given: Any) -> str:
    """The error of a call whose session ends."""

    def stop_in_second(progress: object) -> None:
        if "checkpoint 2, " in str(progress):
            held.touch()  # no task needs to wait
            spark.stop()

    try:
        if kind == "backfill":
            backfill(spark, pipeline, progress=stop_in_second, **given)
            return "no error"
        backfill(spark, pipeline, to=json.dumps({f"{name}-in": {"0": CHUNK}}), **given)
        with stopping(spark):
            return followed(given["bootstrap_servers"])
    except ExactlyOnceError as error:
        return f"{type(error).__name__}: {error}"


def run(kind: str, servers: str) -> None:
    given: dict[str, Any] = {"bootstrap_servers": servers, "parallelism": 2, "chunk_records": CHUNK}
    given["staging"] = held.with_name("staging")
    error = failed(kind, session(), **given)
    spark = session()
    print(json.dumps({"error": error, "checkpoint": catch_up(spark, pipeline, **given).checkpoint}))
    spark.stop()


if __name__ == "__main__":
    run(*sys.argv[1:])
