"""From produced to visible to a read_committed reader, by one clock: at half of the rate that the machine sustains, and
with checkpoints in quick succession at a rate that any machine sustains.

Nothing is fed before the job takes checkpoints and the observer reads, and the feeder feeds on, on a machine that is
slow, until as many checkpoints as a figure needs were completed meanwhile.

Feeder, engine, observer and broker share the machine, so what it sustains is measured with all of them live: the
feeder feeds as fast as it can, and what the engine processes meanwhile counts.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import budget
from bench import Bench
from figures import Figure
from job import Event, Failed, Job

HERE = Path(__file__).parent
INTERVAL_MS = 500
DENSE_INTERVAL_MS = 100
DENSE_RATE = 20_000
"""Records a second."""
WARM_UP_S = 5
CUSTOMERS = 1_000
CHECKPOINTS_MIN = 3
"""As few can be judged: a rate lies between the first and the last."""

Process = subprocess.Popen[str]


class Load(NamedTuple):
    """Running totals under load, and what they looked like to a reader."""

    fed: dict[str, Any]
    events: list[Event]
    checkpoints: list[Event]
    """Those with records that were completed while the feeder fed, `CHECKPOINTS_MIN` at least."""
    seen: dict[str, Any]


def visible(bench: Bench) -> Iterator[Figure]:
    """Running totals under a steady load."""
    rate, seconds = _sustained(bench) / 2, bench.size(65, 10)
    fed, events, checkpoints, seen = _load(bench, rate, seconds, INTERVAL_MS)
    bench.say(f"{fed['records']:,} records fed; {seen['records']:,} of them timed")
    durations = sorted(each["duration_ms"] for each in checkpoints)
    load = f"{rate:,.0f} records/s, interval {INTERVAL_MS} ms, {seconds} s"
    deliveries = budget.Deliveries(fed["delivered"])
    waits = budget.waits_ms(events, seen["batches"], deliveries)
    latest = f"at most {max(waits) - INTERVAL_MS:,.0f} ms; p99 of the feeder's delays {fed['p99_late_ms']:.0f} ms"
    latest += f"; {seen['p99_ms'] - INTERVAL_MS:,.0f} ms with the feeder's and the observer's own time"
    yield Figure("p50 visibility minus the interval", budget.shared_by(waits, 50) - INTERVAL_MS, "ms", load)
    yield Figure("p99 visibility minus the interval", budget.shared_by(waits, 99) - INTERVAL_MS, "ms", latest)
    yield Figure("duration of its checkpoints", durations[len(durations) // 2], "ms", f"at most {durations[-1]} ms")
    yield from budget.figures(list(budget.stages(events, seen["batches"], deliveries, INTERVAL_MS)))


def dense(bench: Bench) -> Iterator[Figure]:
    """Running totals with many checkpoints a second: what a checkpoint costs shows, and hardly what a record does."""
    seconds = bench.size(35, 10)
    fed, _, checkpoints, seen = _load(bench, DENSE_RATE, seconds, DENSE_INTERVAL_MS)
    durations = sorted(each["duration_ms"] for each in checkpoints)
    latest = f"p50 {seen['p50_ms']:,.0f} ms, at most {seen['p100_ms']:,.0f} ms; {seen['records']:,} records timed"
    yield Figure("p99 from produce to visible, interval 100 ms", seen["p99_ms"], "ms", latest)
    per_s = f"{len(checkpoints)} checkpoints; p99 of the feeder's delays {fed['p99_late_ms']:.0f} ms"
    yield Figure("duration of its dense checkpoints", durations[len(durations) // 2], "ms", per_s)


def _sustained(bench: Bench) -> float:
    """Records a second that the engine processes while as many as possible are fed, and an observer reads."""
    first, *_, last = _load(bench, math.inf, bench.size(15, 6), INTERVAL_MS).checkpoints
    rate: float = (last["records_in"] - first["records_in"]) / (last["at_ms"] - first["at_ms"]) * 1000
    bench.say(f"{rate:,.0f} records/s are sustained, fed and observed")
    return rate


def _load(bench: Bench, rate: float, seconds: float, interval_ms: int) -> Load:
    source, sink = f"orders-{uuid.uuid4().hex[:8]}", f"totals-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(source, sink)
    with (
        Job(bench.cluster.servers, "totals", interval=f"{interval_ms}ms", name=sink, source=source, sink=sink) as job,
        script("observer.py", bench, sink, WARM_UP_S) as observer,
    ):
        await_line(observer)
        job.next_checkpoint()
        with script("paced.py", bench, source, CUSTOMERS, rate, seconds) as feeder:
            await_line(feeder)
            for _ in range(CHECKPOINTS_MIN):
                job.next_checkpoint(1)
            fed = told(feeder)
        checkpoints = [each for each in job.checkpoints if each["records_in"]]
        job.next_checkpoint(fed["records"])
        job.stop()
        seen = told(observer)
    bench.cluster.delete(source, sink)
    return Load(fed, job.events, checkpoints, seen)


@contextmanager
def script(name: str, bench: Bench, *arguments: object) -> Iterator[Process]:
    """A process that reads its standard input to the end; gone after the `with`."""
    command = [sys.executable, name, bench.cluster.servers, *map(str, arguments)]
    with subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def await_line(process: Process) -> None:
    """Until it says, by a line, that it is at work."""
    assert process.stdout is not None
    if not process.stdout.readline():
        raise Failed(f"{process.args!r} ended before it was at work, with {process.wait()}")


def told(process: Process) -> dict[str, Any]:
    """What the process prints once its standard input has ended."""
    output, _ = process.communicate()
    if process.returncode:
        raise Failed(f"{process.args!r} ended with {process.returncode}")
    told: dict[str, Any] = json.loads(output)
    return told
