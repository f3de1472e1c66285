"""Event time where it costs most: windows that end at once, their checkpoints, quiet inputs, and order logs."""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import closing
from statistics import median

from bench import Bench
from cluster import LIMIT_S, PARTITIONS, Digest, reader, require_records
from elsewhere import growth
from figures import Figure
from job import Failed, Job
from keyed_state import KeyedTotals
from orders import encoded
from spark_backfill import client_of

from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history

FEW = 100
"""Orders of as many customers: some of them in each partition."""
IDLE_MS = 2_000
INTERVAL_MS = 500


def scenario(bench: Bench) -> Iterator[Figure]:
    """All of them."""
    yield from _at_once(bench)
    yield _expired(bench)
    yield _quiet(bench)
    yield _order_log(bench)


def _at_once(bench: Bench) -> Iterator[Figure]:
    """Each customer has a window; the first orders of the next windows end all of them, and the others follow."""
    windows = bench.size(1_000_000, 250_000)
    state = _Windows(bench, windows)
    state.feed(2 * windows)
    with state.job("--until", "latest", interval=f"{INTERVAL_MS}ms") as job:
        rate = growth(bench, state.sink, windows, job.process.pid, job.failure, "read_uncommitted").records_s
        gaps = [event["longest_gap_ms"] for event in job.finish()]
    state.require_counts()
    detail = f"{', '.join(f'{gap:.0f}' for gap in gaps)} ms by checkpoint"
    yield Figure(f"longest gap between batches, {windows:,} windows end at once", max(gaps), "ms", detail)
    yield Figure(f"windows a second, {windows:,} end at once", rate, detail="from the first write to the last")


def _expired(bench: Bench) -> Figure:
    """Bytes of a checkpoint with all windows, and of the next one, in which they are over."""
    windows = bench.size(1_000_000, 250_000)
    state, sizes = _Windows(bench, windows), []
    for orders in (windows, FEW):
        state.feed(orders)
        with state.job("--until", "latest", interval="10m") as job:
            sizes.append(job.finish()[-1]["bytes"])
    state.require_counts()
    written, expired = sizes
    name = f"checkpoint of {windows:,} expired windows, bytes against writing them"
    return Figure(name, expired / written, detail=f"{expired:,} bytes against {written:,}")


class _Windows(KeyedTotals):
    """One order of each of *windows* customers in a window of 10 s, then in the next one."""

    def __init__(self, bench: Bench, windows: int) -> None:
        super().__init__(bench, windows, "rounds", orders=str(windows))

    def require_counts(self) -> None:
        """The first window of each customer is there, once; then make room."""
        values = (
            b'{"key":"c%07d","start":"1970-01-01T00:00:00Z","end":"1970-01-01T00:00:10Z","value":1,"revision":0}'
            % customer
            for customer in range(self.keys)
        )
        expected, written = Digest(self.keys, sum(map(zlib.crc32, values))), self.bench.cluster.digest(self.sink)
        if written != expected:
            raise Failed(f"the counts of {self.keys} windows should be {expected}, not {written}")
        self.delete()


def _quiet(bench: Bench) -> Figure:
    """From the last order to its window in a read_committed reader's view, without the time until it may close."""
    state = KeyedTotals(bench, FEW, "quiet", idle=f"{IDLE_MS}ms")
    late_ms = list[float]()
    with (
        state.job(interval=f"{INTERVAL_MS}ms") as job,
        closing(reader(bench.cluster.servers, state.sink, range(PARTITIONS), **{"fetch.wait.max.ms": 5})) as consumer,
    ):
        job.next_checkpoint()
        for number in range(bench.size(60, 5)):
            bench.cluster.feed(state.source, encoded(range(number * FEW, (number + 1) * FEW), list(range(FEW))))
            began_s, deadline_s, unseen = time.monotonic(), time.monotonic() + LIMIT_S, FEW
            while unseen:
                messages = consumer.consume(unseen, 0.01)
                require_records(messages)
                unseen -= len(messages)
                late_ms += [(time.monotonic() - began_s) * 1000 - IDLE_MS - INTERVAL_MS] * len(messages)
                if time.monotonic() > deadline_s:
                    raise Failed(
                        f"{unseen} of {FEW} windows are not seen after {LIMIT_S:.0f} s: {job.checkpoints[-1:]}"
                    )
        job.stop()
    state.delete()
    late_ms.sort()
    detail = f"p50 {median(late_ms):,.0f} ms; {len(late_ms):,} windows"
    return Figure(
        "p99 visibility of the last window after idle, minus the interval",
        late_ms[len(late_ms) * 99 // 100],
        "ms",
        detail,
    )


def _order_log(bench: Bench) -> Figure:
    """Of a tumbling count of four partitions, on two workers."""
    records, sink = bench.size(3_000_000, 1_000_000), f"windows-{uuid.uuid4().hex[:8]}"
    source = bench.input(records, 1_000)
    bench.cluster.create(sink)
    options = ("--until", "latest", "--parallelism", "2", "--num-retained", "1000")
    with Job(
        bench.cluster.servers, "windowed", *options, name=sink, source=source, sink=sink, window="tumbling"
    ) as job:
        read = job.finish()[-1]["records_in"]
    manifests = read_history(client_of(bench), sink).retained
    bench.cluster.delete(sink)
    logged = sum(ref.size for manifest in manifests for log in manifest.order_logs for ref in log.blocks)
    if read != records or not logged:
        raise Failed(f"{read} of {records} records were read, {logged} bytes logged")
    return Figure(
        "order log of a tumbling count, per record",
        logged / records,
        "B",
        f"{logged:,} bytes, {len(manifests)} checkpoints",
    )
