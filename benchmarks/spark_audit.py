"""An audit of a running total on Spark: on two executors against one, and against the backfill that wrote it.

Executors have a core each, in a session that is warm. A backfill is timed from the first task's launch to the last
task's end, an audit from its call to its report.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from bench import Bench
from figures import Figure
from job import Failed
from spark_backfill import PARALLELISM, Quiet, backfill, client_of, loaded_at
from work import Work, totals

from exactlyonce.engines.bounded.audit import Audit
from exactlyonce.engines.spark.session import session
from exactlyonce.engines.spark.submit import executors_of, submit_to

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WARM_RECORDS = 100_000
MASTER = "local-cluster[{},1,2048]"
SETTINGS = {"spark.driver.memory": "2g", "spark.executor.memory": "1g", "spark.pyspark.python": sys.executable}


class Listener(Quiet):
    """A silent `PartListener`."""

    def passed(self, offsets: int) -> None:
        pass


class Rates(NamedTuple):
    """Records a second of one round."""

    backfill: float
    two: float
    one: float


def audit(spark: SparkSession, bench: Bench, staging: Path, work: Work, sink: str) -> float:
    """Records a second of the audit of a backfill into *sink*; it must find all right."""
    began_s = time.monotonic()
    loaded = loaded_at(work.pipeline, work.source, sink)
    report = Audit(loaded, client_of(bench)).run(executors_of(spark, staging), Listener())
    elapsed_s = time.monotonic() - began_s
    counts = report.records_in, report.records_out
    if counts != (work.records, work.expected.records) or report.findings or report.unjudged:
        raise Failed(f"the audit says: {report.verdict} {report.unjudged}")
    return work.records / elapsed_s


def rounds(bench: Bench, records: int, count: int) -> Iterator[Rates]:
    """Backfill and audit on two executors, then the same audit on one."""
    warm, work = totals(bench, WARM_RECORDS), totals(bench, records)
    for number in range(1, count + 1):
        sinks = [f"audited-{uuid.uuid4().hex[:8]}" for _ in range(2)]
        bench.cluster.create(*sinks)
        with TemporaryDirectory() as folder:
            staging = Path(folder)
            with session(MASTER.format(PARALLELISM), SETTINGS, "benchmark") as spark:
                submit = submit_to(spark)
                backfill(bench, submit, staging, warm, sinks[0])
                audit(spark, bench, staging, warm, sinks[0])
                written = backfill(bench, submit, staging, work, sinks[1])
                two = audit(spark, bench, staging, work, sinks[1])
            with session(MASTER.format(1), SETTINGS, "benchmark") as spark:
                audit(spark, bench, staging, warm, sinks[0])
                one = audit(spark, bench, staging, work, sinks[1])
        bench.cluster.delete(*sinks)
        bench.say(f"round {number}: backfill {written:,.0f}, audit on two {two:,.0f}, on one {one:,.0f}")
        yield Rates(written, two, one)


def scenario(bench: Bench) -> Iterator[Figure]:
    """The two ratios."""
    records = bench.size(5_000_000, 1_000_000)
    measured = list(rounds(bench, records, bench.rounds or bench.size(2, 1)))
    rates = [median(getattr(of_round, name) for of_round in measured) for name in Rates._fields]
    yield Figure(
        "audit on two executors, against one",
        median(of_round.two / of_round.one for of_round in measured),
        detail=f"{rates[1]:,.0f} against {rates[2]:,.0f} records/s",
    )
    yield Figure(
        "audit on Spark, running total, against its backfill",
        median(of_round.two / of_round.backfill for of_round in measured),
        detail=f"{rates[1]:,.0f} against {rates[0]:,.0f} records/s",
    )
