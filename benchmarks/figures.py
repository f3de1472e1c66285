"""The measured figures, and their bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec


class Bound(NamedTuple):
    """The required value of a figure, and the aim."""

    required: float
    aim: float
    at_least: bool
    """Whether more is better."""

    def verdict(self, value: float) -> str:
        """`pass`, with a star where the aim is reached too, or `short`."""
        sign = 1 if self.at_least else -1
        if sign * value >= sign * self.aim:
            return "pass*"
        return "pass" if sign * value >= sign * self.required else "short"


class Figure(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    value: float
    unit: str = ""
    detail: str = ""
    """The measurements behind it, in a few words."""

    def __str__(self) -> str:
        return f"{self.name}: {_number(self.value, self.unit)}"


BOUNDS = {
    "answers of --serve a second, beside a run at half load": Bound(2000, 5000, at_least=True),
    "p99 of them": Bound(20, 5, at_least=False),
    "running total with --serve, asked 1,000 times a second, ratio": Bound(0.95, 0.98, at_least=True),
    "first key of 10,000,000, asked of the topic alone": Bound(2, 1, at_least=False),
    "p99 of the next keys of its key group, of 10,000,000": Bound(20, 5, at_least=False),
    "pass-through, ratio": Bound(0.8, 0.95, at_least=True),
    "running total, 1,000 keys, ratio": Bound(0.75, 0.9, at_least=True),
    "running total, 1,000,000 keys, ratio": Bound(0.55, 0.7, at_least=True),
    "running total of a file of JSON lines, ratio": Bound(0.8, 0.9, at_least=True),
    "tumbling count, against the running total": Bound(0.8, 1.2, at_least=True),
    "tumbling fold of a user's function, against the running total": Bound(0.6, 0.9, at_least=True),
    "hopping count of 60 s every 5 s, against the running total": Bound(0.5, 0.9, at_least=True),
    "session count, against the running total": Bound(0.4, 0.7, at_least=True),
    "as-of join of 10 records with 1 version, against the running total": Bound(0.4, 0.6, at_least=True),
    "interval join with 1 match each, against the running total": Bound(0.3, 0.45, at_least=True),
    "join of tables by a foreign key, 100,000 customers, against the running total": Bound(0.2, 0.3, at_least=True),
    "deduplication of 1,000,000 ids, against the running total": Bound(0.3, 0.45, at_least=True),
    "deduplication of 1,000,000 ids by arrival, against the running total": Bound(0.5, 0.7, at_least=True),
    "longest gap between batches, 1,000,000 windows end at once": Bound(150, 60, at_least=False),
    "windows a second, 1,000,000 end at once": Bound(200_000, 500_000, at_least=True),
    "checkpoint of 1,000,000 expired windows, bytes against writing them": Bound(0.05, 0.001, at_least=False),
    "p99 visibility of the last window after idle, minus the interval": Bound(1000, 200, at_least=False),
    "order log of a tumbling count, per record": Bound(0.05, 0.01, at_least=False),
    "enrich by a service of 20 ms, 200 records in flight, 50 a call, ratio": Bound(0.8, 0.95, at_least=True),
    "map_batches of the same, against map": Bound(0.6, 0.8, at_least=True),
    "timers and a join on a twentieth of a processor, ratio": Bound(0.5, 0.8, at_least=True),
    "recovery once the processor is free again": Bound(5, 2, at_least=False),
    "p99 visibility minus the interval": Bound(300, 100, at_least=False),
    "p99 from produce to visible, interval 100 ms": Bound(300, 150, at_least=False),
    "unaligned checkpoints under back-pressure, times sooner": Bound(5, 8, at_least=True),
    "unaligned checkpoints without back-pressure, ratio": Bound(0.95, 1.0, at_least=True),
    "checkpoints a minute, slow records after shuffles": Bound(20, 40, at_least=True),
    "checkpoints a minute, sinks with a quota": Bound(20, 30, at_least=True),
    "running total with --ui and --metrics, ratio": Bound(0.98, 1.0, at_least=True),
    "slowest answer of /live while a worker is stopped": Bound(50, 10, at_least=False),
    "processor time of `--help`": Bound(0.3, 0.15, at_least=False),
    "processor time of `explain`": Bound(0.5, 0.3, at_least=False),
    "processor time of `checkpoints`": Bound(0.8, 0.5, at_least=False),
    "1 % of 1,000,000 keys changed, bytes against all": Bound(0.05, 0.02, at_least=False),
    "longest gap between batches, 1,000,000 keys": Bound(100, 30, at_least=False),
    "start to first new record, 1,000,000 keys": Bound(10, 4, at_least=False),
    "resident memory, checkpoint 300 against 30": Bound(1.1, 1.0, at_least=False),
    "rocksdb against hashmap, state twice the budget, zipf keys": Bound(0.3, 0.5, at_least=True),
    "rocksdb against hashmap, state ten times the budget, uniform keys": Bound(0.1, 0.2, at_least=True),
    "resident memory of a worker against its budget": Bound(1.2, 1.0, at_least=False),
    "SIGKILL to first new record, 10,000,000 keys, lazily": Bound(5, 2, at_least=False),
    "all state restored, 10,000,000 keys, per GB": Bound(15, 10, at_least=False),
    "trigger to finalized, 50,000 changed keys/s of 10,000,000, hashmap, p99": Bound(500, 250, at_least=False),
    "trigger to finalized, 50,000 changed keys/s of 10,000,000, rocksdb, p99": Bound(500, 250, at_least=False),
    "state read for 1 of 128 key groups, 1,000,000 keys": Bound(2, 1.5, at_least=False),
    "reading through Spark, against a loop by hand": Bound(0.7, 1.0, at_least=True),
    "backfill on Spark, running total, against local engine": Bound(0.3, 0.7, at_least=True),
    "backfill on Spark, running total, against by hand on Spark": Bound(0.8, 1.0, at_least=True),
    "backfill on Spark, tumbling count, against local engine": Bound(0.6, 0.9, at_least=True),
    "audit on two executors, against one": Bound(1.7, 1.9, at_least=True),
    "audit on Spark, running total, against its backfill": Bound(0.5, 0.7, at_least=True),
    "streaming sink on Spark, ratio": Bound(0.8, 0.95, at_least=True),
    "backfill --on spark against run, 20,000,000 records": Bound(0.8, 1.0, at_least=True),
    "chunk with 128 units against 2, 5,000,000 records": Bound(1.5, 1.2, at_least=False),
    "overhead of a chunk, 5,000,000 records": Bound(0.5, 0.3, at_least=False),
    "core time of a subtask": Bound(60, 30, at_least=False),
    "p50 from produce to visible, catch-up --follow": Bound(800, 400, at_least=False),
    "p99 from produce to visible, catch-up --follow": Bound(2000, 1000, at_least=False),
    "Kafka to PostgreSQL, ratio": Bound(0.5, 0.8, at_least=True),
    "Kafka to MariaDB, ratio": Bound(0.5, 0.8, at_least=True),
    "Kafka to Redis, ratio": Bound(0.5, 0.8, at_least=True),
    "Kafka to DuckDB, ratio": Bound(0.5, 0.8, at_least=True),
    "changes into Kafka, against psycopg reading the slot, ratio": Bound(0.5, 0.7, at_least=True),
    "changes into Kafka": Bound(80_000, 120_000, at_least=True),
    "rows of a table into Kafka, against psycopg reading one COPY, ratio": Bound(0.5, 0.7, at_least=True),
    "p50 from commit to visible minus the interval": Bound(50, 20, at_least=False),
    "p99 from commit to visible minus the interval": Bound(200, 100, at_least=False),
    "resident memory of a worker, one transaction of 5,000,000 rows": Bound(300, 100, at_least=False),
    "log kept while the captured table is idle": Bound(64, 32, at_least=False),
    "running total in avro with a registry, against JSON": Bound(0.6, 0.8, at_least=True),
    "running total in protobuf with a registry, against JSON": Bound(0.4, 0.6, at_least=True),
    "records to Parquet files, against pyarrow": Bound(0.7, 0.9, at_least=True),
    "records to Parquet files in S3 (moto), against pyarrow": Bound(0.7, 0.9, at_least=True),
    "records to Delta, against deltalake alone": Bound(0.7, 0.9, at_least=True),
    "records to Iceberg, against pyiceberg alone": Bound(0.7, 0.9, at_least=True),
    "commit of a checkpoint to Delta, p99": Bound(300, 150, at_least=False),
    "commit of a checkpoint to Iceberg, p99": Bound(500, 250, at_least=False),
    "commit of a checkpoint to PostgreSQL, p99": Bound(300, 150, at_least=False),
    "commit of a checkpoint to MariaDB, p99": Bound(300, 150, at_least=False),
    "commit of a checkpoint to Redis, p99": Bound(300, 150, at_least=False),
    "commit of a checkpoint to DuckDB, p99": Bound(300, 150, at_least=False),
}
"""By the figure's name; figures without bounds are for information."""


def table(figures: Iterable[Figure]) -> str:
    """The figures and their bounds as text."""
    rows = [("figure", "value", "required", "aim", "", "detail")]
    for figure in figures:
        bound = BOUNDS.get(figure.name)
        limits = (_number(bound.required, ""), _number(bound.aim, "")) if bound else ("", "")
        verdict = bound.verdict(figure.value) if bound else ""
        rows.append((figure.name, _number(figure.value, figure.unit), *limits, verdict, figure.detail))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  "
        f"{row[4]:<{widths[4]}}  {row[5]}".rstrip()
        for row in rows
    )


def as_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """The figures and their bounds as JSON values."""
    rows = []
    for figure in figures:
        bound = BOUNDS.get(figure.name)
        limits = {**bound._asdict(), "verdict": bound.verdict(figure.value)} if bound else {}
        rows.append({**msgspec.to_builtins(figure), **limits})
    return rows


def _number(value: float, unit: str) -> str:
    """
    >>> _number(0.04321, ""), _number(12345.6, "records/s")
    ('0.043', '12,346 records/s')
    """
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {unit}".strip()
