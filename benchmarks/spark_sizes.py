"""Where Spark pays: whole commands by size, and the cost of a chunk that is no unit's work, narrow and wide.

The commands compute the same running total over the same topic, each as a whole process from its start to its end:
`run --until latest`, `backfill --on driver` and `backfill --on spark`. Their outputs are counted.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from bench import Bench
from figures import Figure
from job import Failed, Job
from spark_backfill import MASTER, PARALLELISM, Quiet, client_of, loaded_at

from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.unit.messages import Published, Receipt
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.session import session
from exactlyonce.engines.spark.submit import submit_to

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CUSTOMERS = 1_000
SIZES = (100_000, 1_000_000, 5_000_000, 20_000_000)
WIDE = 128
FEW_RECORDS = 2_000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def crossing(bench: Bench) -> Iterator[Figure]:
    """Records a second of whole commands, by size."""
    widths = "--parallelism", str(PARALLELISM)
    commands = {
        "run": ("run", "--until", "latest", *widths),
        "backfill --on driver": ("backfill", "--on", "driver", *widths),
        "backfill --on spark": ("backfill", "--on", "spark", "--master", MASTER, *widths),
    }
    for records in SIZES[: bench.size(len(SIZES), 2)]:
        source = bench.input(records, CUSTOMERS)
        seconds = {name: _seconds(bench, source, records, *command) for name, command in commands.items()}
        detail = "; ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items())
        bench.say(f"{records:,} records: {detail}")
        for name in list(commands)[1:]:
            yield Figure(f"{name} against run, {records:,} records", seconds["run"] / seconds[name], "", detail)


def _seconds(bench: Bench, source: str, records: int, command: str, *options: str) -> float:
    sink = f"totals-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    began_s = time.monotonic()
    with Job.of(command, bench.cluster.servers, "totals", *options, name=sink, source=source, sink=sink) as job:
        job.finish()
    taken_s = time.monotonic() - began_s
    if (seen := bench.cluster.digest(sink).records) != records:
        raise Failed(f"{command} has written {seen} of {records} records")
    bench.cluster.delete(sink)
    return taken_s


class Chunk(NamedTuple):
    """A chunk of a backfill, in a warm session."""

    taken_s: float
    overhead_s: float
    """All of it in which no unit and no publication ran."""
    core_s: float
    """The processors' time of the driver, Spark and its Python workers."""
    subtasks: int


def widths(bench: Bench) -> Iterator[Figure]:
    """A chunk with 2 and with 128 units of each stage."""
    records = bench.size(5_000_000, 200_000)
    source, few = bench.input(records, CUSTOMERS), bench.input(FEW_RECORDS, CUSTOMERS)
    with session(MASTER, {"spark.driver.memory": "3g"}, "benchmark") as spark, TemporaryDirectory() as folder:
        chunk(bench, spark, Path(folder), few, FEW_RECORDS, PARALLELISM)
        wide_and_empty = chunk(bench, spark, Path(folder), few, FEW_RECORDS, WIDE)
        narrow = chunk(bench, spark, Path(folder), source, records, PARALLELISM)
        wide = chunk(bench, spark, Path(folder), source, records, WIDE)
    size = f"{records:,} records"
    detail = f"{narrow.taken_s:.1f} s with {PARALLELISM}, {wide.taken_s:.1f} s with {WIDE}"
    yield Figure(f"chunk with {WIDE} units against {PARALLELISM}, {size}", wide.taken_s / narrow.taken_s, "", detail)
    yield Figure(f"overhead of a chunk, {size}", narrow.overhead_s, "s", f"with {WIDE} units {wide.overhead_s:.2f} s")
    core_ms = 1000 * wide_and_empty.core_s / wide_and_empty.subtasks
    yield Figure("core time of a subtask", core_ms, "ms", f"{wide_and_empty.subtasks} of a chunk of {FEW_RECORDS:,}")


class _Timed(Quiet):
    """Keeps what a catch-up tells."""

    def __init__(self) -> None:
        self.advances: list[Advanced] = []
        self.ended_s = self.began_s = 0.0

    def began(self, manifest: object, offsets: int) -> None:
        self.began_s = time.monotonic()

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self.advances.append(advanced)
        self.ended_s = time.monotonic()


def chunk(bench: Bench, spark: SparkSession, staging: str | Path, source: str, records: int, parallelism: int) -> Chunk:
    """One chunk of a new pipeline over all of *source*."""
    sink = f"totals-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    timed, options, measured_s = _Timed(), RunOptions(client_of(bench), parallelism=parallelism), core_s()
    loaded = loaded_at("totals", source, sink)
    done = CatchUp(loaded, options, timed, chunk_records=10 * records).lead(submit_to(spark), staging)
    used_s = core_s() - measured_s
    if (done.records, done.records_out) != (records, records):
        raise Failed(f"{done.records} of {records} were read, {done.records_out} written")
    bench.cluster.delete(sink)
    (advanced,) = timed.advances
    taken_s = timed.ended_s - timed.began_s
    return Chunk(taken_s, taken_s - _spans_s(advanced), used_s, len(advanced.receipts))


def _spans_s(advanced: Advanced) -> float:
    """The time in which units of a stage, or publications, ran."""
    spans: dict[str, tuple[int, int]] = {}
    done: list[tuple[str, Receipt | Published]] = [(receipt.ack.task, receipt) for receipt in advanced.receipts]
    done += (("publish", published) for published in advanced.publications)
    for name, work in done:
        first, last = spans.get(name, (work.began_ms, work.ended_ms))
        spans[name] = min(first, work.began_ms), max(last, work.ended_ms)
    return sum(last - first for first, last in spans.values()) / 1000


def core_s() -> float:
    """The processors' time so far of this process and all below it."""
    parents: dict[int, tuple[int, float]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        own = sum(map(int, fields[11:15]))  # with the time of children that have ended
        parents[int(status.parent.name)] = int(fields[1]), own / TICKS_PER_S
    below, total_s = {os.getpid()}, 0.0
    while below:
        total_s += sum(parents[process][1] for process in below)
        below = {process for process, (parent, _) in parents.items() if parent in below}
    return total_s
