"""Reading through Spark against a plain loop of confluent-kafka in as many processes, in alternating rounds.

Both fill the same Arrow columns and return sums of the records, which are compared. Spark is timed in a warm session,
from the action to its result, with planning, the transfer of columns into the JVM and an aggregation. The loop is timed
from the start signal to the last process's result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from bench import Bench
from cluster import PARTITIONS
from figures import Figure
from job import Failed

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
PROCESSES = 2
CUSTOMERS = 1_000
LIMIT_S = 1800.0
SEEN = ("count(*)", "sum(length(key) + length(value))", "sum(offset)")


class Rates(NamedTuple):
    """Records a second of one round."""

    spark: float
    by_hand: float
    without_collections: float
    """By hand, with the garbage collector off."""


class Run(NamedTuple):
    """One read of the whole topic."""

    elapsed_s: float
    seen: list[int]


def through_spark(spark: SparkSession, servers: str, topic: str) -> Run:
    """Our format."""
    began_s = time.monotonic()
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic}
    row = spark.read.format("exactlyonce").options(**options).load().selectExpr(*SEEN).collect()[0]
    return Run(time.monotonic() - began_s, list(row))


def by_hand(servers: str, topic: str, ends: dict[int, int], word: str) -> Run:
    """The loop, in processes that are waiting when the clock starts."""
    shares = [[f"{ends[p]}:{p}" for p in range(first, PARTITIONS, PROCESSES)] for first in range(PROCESSES)]
    commands = [[sys.executable, "reading_by_hand.py", servers, topic, *share] for share in shares]
    loops = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE) for command in commands]
    try:
        _lines(loops)
        began_s = time.monotonic()
        for loop in loops:
            loop.stdin.write(f"{word}\n".encode())  # type: ignore[union-attr]  # it is a pipe
            loop.stdin.flush()  # type: ignore[union-attr]  # the same
        seen = [json.loads(line) for line in _lines(loops)]
        return Run(time.monotonic() - began_s, list(map(sum, zip(*seen, strict=True))))
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def _lines(loops: list[subprocess.Popen[bytes]]) -> list[bytes]:
    """A line of each."""
    lines = [loop.stdout.readline() for loop in loops]  # type: ignore[union-attr]  # it is a pipe
    if not all(lines):
        raise Failed("a loop by hand has ended early; its output is above")
    return lines


def rounds(bench: Bench, topic: str, records: int, count: int) -> Iterator[Rates]:
    """All in turns, without Spark's first."""
    from exactlyonce.spark import register

    servers = bench.cluster.servers
    topics = Topics(ClientConfig({"bootstrap.servers": servers}))
    ends = topics.end_offsets(topic, committed=True)
    topics.close()
    with session(f"local[{PROCESSES}]", {}, "benchmark") as spark:
        register(spark)
        through_spark(spark, servers, topic)
        for number in range(count):
            runs = (
                through_spark(spark, servers, topic),
                by_hand(servers, topic, ends, "go"),
                by_hand(servers, topic, ends, "without collections"),
            )
            if len({tuple(run.seen) for run in runs}) != 1 or runs[0].seen[0] != records:
                raise Failed(f"not the same records were read: {[run.seen for run in runs]}")
            rates = Rates(*(records / run.elapsed_s for run in runs))
            bench.say(
                f"round {number + 1}: {rates.spark:,.0f} records/s, by hand {rates.by_hand:,.0f}, without collections "
                f"{rates.without_collections:,.0f}"
            )
            yield rates


def scenario(bench: Bench) -> Iterator[Figure]:
    """The ratio."""
    records = bench.size(5_000_000, 1_000_000)
    measured = list(rounds(bench, bench.input(records, CUSTOMERS), records, bench.rounds or bench.size(4, 1)))
    spark = median(rates.spark for rates in measured)
    for name, against in (("", "by_hand"), (" without garbage collection", "without_collections")):
        yield Figure(
            f"reading through Spark, against a loop by hand{name}",
            median(rates.spark / getattr(rates, against) for rates in measured),
            detail=f"{spark:,.0f} against {median(getattr(rates, against) for rates in measured):,.0f} records/s, "
            f"{PROCESSES} processes, {len(measured)} rounds",
        )
