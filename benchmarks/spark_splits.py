"""A topic of one partition on two cores: a backfill whose units split it, against one with a unit for it.

The backfill maps each order at some cost. Its units are timed, from the first one's launch to the last one's end, in a
session that is warm.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench import Bench
from figures import Figure
from job import Failed
from orders import uniform
from spark_backfill import MASTER, PARALLELISM, Quiet, client_of, loaded_at
from work import CUSTOMERS

from exactlyonce.engines.bounded import stages
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import Submit
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.session import session
from exactlyonce.engines.spark.submit import submit_to


class Advances(Quiet):
    """Keeps what a catch-up tells."""

    def __init__(self) -> None:
        self.all: list[Advanced] = []

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self.all.append(advanced)


def backfill(bench: Bench, submit: Submit, staging: Path, source: str, records: int) -> float:
    """Seconds of the units of a backfill."""
    sink = f"signed-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    options = RunOptions(client_of(bench), parallelism=PARALLELISM)
    advances = Advances()
    loaded = loaded_at("signing", source, sink)
    done = CatchUp(loaded, options, advances, chunk_records=10 * records, from_nothing=True).lead(submit, staging)
    if (done.records, done.records_out) != (records, records):
        raise Failed(f"{done.records} of {records} were read, {done.records_out} written")
    bench.cluster.delete(sink)
    (advanced,) = advances.all
    ended_ms = max(receipt.ended_ms for receipt in advanced.receipts)
    return (ended_ms - min(receipt.began_ms for receipt in advanced.receipts)) / 1000


def scenario(bench: Bench) -> Iterator[Figure]:
    """The ratio."""
    records, offsets_min = bench.size(2_000_000, 400_000), stages.SPLIT_OFFSETS_MIN
    source = f"orders-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(source, partitions=1)
    bench.cluster.feed(source, uniform(records, CUSTOMERS))
    rounds = list[tuple[float, float]]()
    with session(MASTER, {}, "benchmark") as spark, TemporaryDirectory() as folder:
        submit, staging = submit_to(spark), Path(folder)
        backfill(bench, submit, staging, source, records)
        for number in range(1, (bench.rounds or bench.size(3, 1)) + 1):
            split_s = backfill(bench, submit, staging, source, records)
            try:
                stages.SPLIT_OFFSETS_MIN = records
                whole_s = backfill(bench, submit, staging, source, records)
            finally:
                stages.SPLIT_OFFSETS_MIN = offsets_min
            bench.say(f"round {number}: {split_s:.1f} s in splits, {whole_s:.1f} s in one unit")
            rounds.append((split_s, whole_s))
    bench.cluster.delete(source)
    yield Figure(
        "units of a backfill of one partition on two cores, in splits against one unit",
        median(whole_s / split_s for split_s, whole_s in rounds),
        detail=f"{records:,} records",
    )
