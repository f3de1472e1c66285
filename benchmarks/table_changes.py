"""Captured changes: their speed and that of a table's rows, the way of a commit into Kafka, memory, and the log kept.

The machine's own PostgreSQL is started; if that is not installed the scenario says so, and has no figures. `exactlyonce
run` writes the changes of a table to a topic, whose records a plain consumer counts. The other side of a ratio is
`changes_by_hand.py`, which reads the same slot or table and does nothing with it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psycopg
from bench import Bench
from figures import Figure
from job import Failed, Job
from store_servers import missing, running
from throughput import LIMIT_S
from visibility import WARM_UP_S, await_line, script, told

HERE = Path(__file__).parent
ORDERS = "CREATE TABLE {} (id bigint PRIMARY KEY, customer text NOT NULL, total int NOT NULL, ts bigint NOT NULL)"
ROWS = "SELECT n, 'c' || lpad((n % 1000)::text, 7, '0'), n % 97 + 1, 1700000000000000 FROM generate_series({}, {}) n"
BOTH = """
DO $$ BEGIN FOR low IN 1..{changes} / 2 BY 50 LOOP
    INSERT INTO {table} {rows};
    UPDATE {table} SET total = total + 1 WHERE id BETWEEN low AND low + 49;
    COMMIT;
END LOOP; END $$
"""
"""Transactions of 50 new rows and their updates."""
INTERVAL_MS = 500
COMMIT_ROWS, COMMIT_S = 10, 0.01
"""The rows of a commit that is timed, and the pace of commits."""
BUSY_BYTES, BUSY_S = 100_000, 0.1
"""What is written beside the idle table, and how often: 1 MB a second."""


class Table(NamedTuple):
    """A table that is captured, with a slot of its own."""

    url: str
    name: str

    @property
    def slot(self) -> str:
        """Its publication's name, too."""
        return f"of_{self.name}"

    def set_up(self) -> None:
        """`exactlyonce changes setup`: the server keeps the changes from now on."""
        command = [sys.executable, "-m", "exactlyonce.cli.main", "changes", "setup", "benchmarked:captured"]
        params = [part for name, value in self._params("").items() for part in ("--param", f"{name}={value}")]
        done = subprocess.run([*command, *params], cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise Failed(f"changes setup ended with {done.returncode}: {done.stderr}")

    def job(self, bench: Bench, sink: str, *arguments: str, snapshot: str = "never") -> Job:
        """`exactlyonce run` from the table to the topic *sink*."""
        params = self._params(sink, snapshot)
        return Job(bench.cluster.servers, "captured", *arguments, interval=f"{INTERVAL_MS}ms", **params)

    def _params(self, sink: str, snapshot: str = "never") -> dict[str, str]:
        named = {"name": sink or "captured", "sink": sink or "captured"}
        return {**named, "dsn": self.url, "table": self.name, "slot": self.slot, "snapshot": snapshot}


class Read(NamedTuple):
    """The changes, or rows, that a process has read."""

    rate: float
    """In a second, from the first to the last."""
    cpu_us: float
    """The processor time of each, with the start of the process; that of the servers is not in it."""


def scenario(bench: Bench) -> Iterator[Figure]:
    """All of it."""
    if lacking := missing("postgres"):
        bench.say(lacking)
        return
    with running("postgres") as url, closing(psycopg.connect(url, autocommit=True)) as session:
        yield from changes(bench, session, url)
        yield from rows(bench, session, url)
        yield from visible(bench, session, url)
        yield from one_transaction(bench, session, url)
        yield from idle(bench, session, url)


def changes(bench: Bench, session: psycopg.Connection, url: str) -> Iterator[Figure]:
    """Changes a second, of one slot that both read again and again."""
    count = bench.size(1_000_000, 100_000)
    table = _captured(bench, session, url, "changes")
    _execute(session, "SELECT pg_copy_logical_replication_slot('{0}', 'kept')", table.slot)
    _execute(session, BOTH, changes=count, table=table.name, rows=ROWS.format("low", "low + 49"))

    def again(way: str) -> Read:
        _execute(session, "SELECT pg_drop_replication_slot('{0}')", table.slot)
        _execute(session, "SELECT pg_copy_logical_replication_slot('kept', '{0}')", table.slot)
        return ours(bench, table, count) if way == "ours" else by_hand("slot", url, table.slot, count)

    reads = _in_turns(bench, "changes", ("ours", "slot"), again)
    yield _ratio("changes into Kafka, against psycopg reading the slot", reads, "slot", "changes")
    yield Figure("changes into Kafka", median(read.rate for read in reads["ours"]), "changes/s")
    _execute(session, "SELECT pg_drop_replication_slot('kept'), pg_drop_replication_slot('{0}')", table.slot)


def rows(bench: Bench, session: psycopg.Connection, url: str) -> Iterator[Figure]:
    """Rows a second that are there before."""
    count = bench.size(1_000_000, 100_000)
    table = _captured(bench, session, url, "rows")
    _execute(session, "INSERT INTO {0} {1}", table.name, ROWS.format(1, count))
    _execute(session, "SELECT pg_replication_slot_advance('{0}', pg_current_wal_lsn())", table.slot)
    _execute(session, "VACUUM ANALYZE {0}", table.name)

    def again(way: str) -> Read:
        if way == "ours":
            return ours(bench, table, count, "pages")
        return by_hand(way, url, table.name, count)

    reads = _in_turns(bench, "rows", ("ours", "copy", "typed"), again)
    yield _ratio("rows of a table into Kafka, against psycopg reading one COPY", reads, "copy", "rows")
    yield _ratio("rows of a table into Kafka, against psycopg reading one COPY as types", reads, "typed", "rows")
    _execute(session, "SELECT pg_drop_replication_slot('{0}')", table.slot)


def visible(bench: Bench, session: psycopg.Connection, url: str) -> Iterator[Figure]:
    """From commit to visible, under a steady load."""
    table, sink, seconds = _captured(bench, session, url, "paced"), _sink(bench), bench.size(65, 15)
    with table.job(bench, sink) as job, script("observer.py", bench, sink, WARM_UP_S) as observer:
        await_line(observer)
        job.next_checkpoint()
        count = _fed(session, table, seconds)
        job.next_checkpoint(count)
        job.stop()
        seen = told(observer)
    load = f"{COMMIT_ROWS / COMMIT_S:,.0f} rows/s in commits of {COMMIT_ROWS}, interval {INTERVAL_MS} ms, {seconds} s"
    latest = f"{seen['records']:,} rows timed, at most {seen['p100_ms'] - INTERVAL_MS:,.0f} ms"
    yield Figure("p50 from commit to visible minus the interval", seen["p50_ms"] - INTERVAL_MS, "ms", load)
    yield Figure("p99 from commit to visible minus the interval", seen["p99_ms"] - INTERVAL_MS, "ms", latest)
    _gone(bench, session, table, sink, count)


def _fed(session: psycopg.Connection, table: Table, seconds: float) -> int:
    """Commit rows for *seconds*, each with the time before its commit; -> the rows."""
    insert = f"INSERT INTO {table.name} VALUES (%s, %s, %s, %s)".encode()
    count, began = 0, time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        with session.transaction():
            now_us = time.time_ns() // 1000
            for number in range(count, count + COMMIT_ROWS):
                session.execute(insert, (number, f"c{number % 1000:07}", number % 97 + 1, now_us))
        count += COMMIT_ROWS
        time.sleep(max(0.0, began + elapsed + COMMIT_S - time.monotonic()))
    return count


def one_transaction(bench: Bench, session: psycopg.Connection, url: str) -> Iterator[Figure]:
    """The memory of a worker while one large transaction passes."""
    table, sink, count = _captured(bench, session, url, "large"), _sink(bench), bench.size(5_000_000, 300_000)
    _execute(session, "INSERT INTO {0} {1}", table.name, ROWS.format(1, count))
    largest, began = 0, time.monotonic()
    with table.job(bench, sink) as job:
        while job.next_checkpoint()["records_in"] < count:
            largest = max(largest, job.worker_bytes())
        job.stop()
    detail = f"{count:,} rows in {time.monotonic() - began:.0f} s, {len(job.checkpoints)} checkpoints"
    yield Figure("resident memory of a worker, one transaction of 5,000,000 rows", largest / 1e6, "MB", detail)
    _gone(bench, session, table, sink, count)


def idle(bench: Bench, session: psycopg.Connection, url: str) -> Iterator[Figure]:
    """The log that the server keeps while the captured table is idle and another one is busy."""
    table, sink, seconds = _captured(bench, session, url, "idle"), _sink(bench), bench.size(180, 60)
    _execute(session, "CREATE TABLE busy (text text)")
    _execute(session, "ALTER TABLE busy ALTER text SET STORAGE EXTERNAL")
    kept = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint FROM pg_replication_slots"
    sizes: list[int] = []
    with table.job(bench, sink) as job:
        job.next_checkpoint()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            _execute(session, "INSERT INTO busy VALUES (repeat('x', {0}))", BUSY_BYTES)
            ((size,),) = session.execute(kept.encode()).fetchall()
            sizes.append(size)
            time.sleep(BUSY_S)
        job.stop()
    detail = f"of {len(sizes) * BUSY_BYTES / 1e6:.0f} MB written in {seconds} s; {sizes[-1] / 1e6:.1f} MB at last"
    yield Figure("log kept while the captured table is idle", max(sizes) / 1e6, "MB", detail)
    _gone(bench, session, table, sink, 0)


def ours(bench: Bench, table: Table, count: int, snapshot: str = "never") -> Read:
    """`exactlyonce run`: from its first record to the end of its last checkpoint."""
    sink = _sink(bench)
    with _cpu_s() as cpu_s, table.job(bench, sink, "--until", "latest", snapshot=snapshot) as job:
        first_ms, checkpoints = job.first_record_ms(), job.finish()
    _require(bench, sink, count)
    last_ms = max(event["at_ms"] for event in checkpoints if event["records_committed"])
    return Read(count / (last_ms - first_ms) * 1000, cpu_s[0] / count * 1e6)


def by_hand(way: str, url: str, name: str, count: int) -> Read:
    """`changes_by_hand.py`."""
    command = [sys.executable, "changes_by_hand.py", way, url, name, str(count)]
    with _cpu_s() as cpu_s:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise Failed(f"reading by hand ended with {done.returncode}: {done.stderr}")
    return Read(count / float(json.loads(done.stdout)["seconds"]), cpu_s[0] / count * 1e6)


@contextmanager
def _cpu_s() -> Iterator[list[float]]:
    """The processor time of the processes that begin and end within, once they have."""
    spent = list[float]()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield spent
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _in_turns(bench: Bench, what: str, ways: tuple[str, ...], read: Callable[[str], Read]) -> dict[str, list[Read]]:
    """What each of *ways* has read, in rounds; they take turns to go first."""
    reads: dict[str, list[Read]] = {way: [] for way in ways}
    for number in range(bench.rounds or bench.size(3, 1)):
        for way in ways if number % 2 == 0 else reversed(ways):
            reads[way].append(read(way))
        shown = ", ".join(f"{way} {of_way[-1].rate:,.0f} ({of_way[-1].cpu_us:.1f} us)" for way, of_way in reads.items())
        bench.say(f"round {number + 1}, {what}/s (processor time of each): {shown}; load {os.getloadavg()[0]:.1f}")
    return reads


def _ratio(name: str, reads: dict[str, list[Read]], other: str, what: str) -> Figure:
    mine, others = reads["ours"], reads[other]
    ratios = [a.rate / b.rate for a, b in zip(mine, others, strict=True)]
    rate, other_rate = (median(read.rate for read in each) for each in (mine, others))
    cpu_us, other_us = (median(read.cpu_us for read in each) for each in (mine, others))
    rates = f"{rate:,.0f} against {other_rate:,.0f} {what}/s, {cpu_us:.1f} against {other_us:.1f} us of processor"
    spread = f"{len(ratios)} rounds, {min(ratios):.2f} to {max(ratios):.2f}"
    return Figure(f"{name}, ratio", median(ratios), detail=f"{rates}; {spread}")


def _captured(bench: Bench, session: psycopg.Connection, url: str, name: str) -> Table:
    """An empty table, whose changes the server keeps from now on."""
    table = Table(url, name)
    _execute(session, ORDERS, name)
    table.set_up()
    return table


def _sink(bench: Bench) -> str:
    sink = f"captured-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    return sink


def _require(bench: Bench, sink: str, count: int) -> None:
    """Raise unless the topic has so many records; it is gone then."""
    if (records := bench.cluster.digest(sink).records) != count:
        raise Failed(f"{count} records are to be in the topic, and there are {records}")
    bench.cluster.delete(sink)


def _gone(bench: Bench, session: psycopg.Connection, table: Table, sink: str, count: int) -> None:
    """Look at the output, and let the server forget the slot."""
    _require(bench, sink, count)
    _execute(session, "SELECT pg_drop_replication_slot('{0}')", table.slot)


def _execute(session: psycopg.Connection, statement: str, *values: object, **named: object) -> None:
    session.execute(statement.format(*values, **named).encode())
