"""A pipeline with timers and an interval join on a twentieth of a processor, and once it has one again.

All its processes are in a cgroup with a quota of processor time. The broker is outside. Rates count results, by
the end of the output topic, whether they are committed or not. On a busy machine the quota is not always there to take;
so the twentieth is judged by the results per second of processor time, which the cgroup counts.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import Bench
from cluster import PARTITIONS
from confluent_kafka import Consumer, TopicPartition
from figures import Figure
from job import Failed, Job

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
SHARE = 0.05
CUSTOMERS = 1_000
SETTLED_S = 15.0
RECOVERED = 0.8
"""The part of the free rate at which the pipeline counts as recovered."""
RECOVERED_OVER_S = 1.0
LIMIT_S = 120.0


class Look(NamedTuple):
    """The results and the processor time so far."""

    at_s: float
    results: int
    processor_s: float


def scenario(bench: Bench) -> Iterator[Figure]:
    """Results on a twentieth of a processor, against as much processor time of a free one; then the recovery."""
    source, sink = bench.input(bench.size(6_000_000, 2_000_000), CUSTOMERS), f"scarce-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    with (
        Group() as group,
        _ends(bench, sink) as ends,
        Job(bench.cluster.servers, "paired", interval="1s", name=sink, source=source, sink=sink) as job,
    ):
        group.take(job.process.pid)
        job.next_checkpoint(1)

        def look() -> Look:
            if why := job.failure():
                raise Failed(why)
            return Look(time.monotonic(), ends(), group.processor_s())

        time.sleep(SETTLED_S)
        free = _rates(look(), _after(look, bench.size(20, 10)))
        bench.say(f"free: {free[0]:,.0f} results/s, {free[1]:,.0f} per second of processor time")
        group.limit(SHARE)
        time.sleep(SETTLED_S)
        scarce = _rates(look(), _after(look, bench.size(60, 30)))
        bench.say(f"on {SHARE:.0%}: {scarce[0]:,.0f} results/s, {scarce[1]:,.0f} per second of processor time")
        group.limit(1)
        began_s, before = time.monotonic(), look()
        while _rates(before, after := _after(look, RECOVERED_OVER_S))[0] < RECOVERED * free[0]:
            before = after
            if after.at_s - began_s > LIMIT_S:
                raise Failed(f"{LIMIT_S:.0f} s after the processor is free again, results still come slowly")
        took_s = after.at_s - began_s
        retries = sum("was not acknowledged" in event.get("text", "") for event in job.events)
    bench.cluster.delete(sink)
    detail = f"{scarce[1]:,.0f} against {free[1]:,.0f} results per second of processor time, {retries} late checkpoints"
    yield Figure("timers and a join on a twentieth of a processor, ratio", scarce[1] / free[1], detail=detail)
    detail = f"to {RECOVERED:.0%} of {free[0]:,.0f} results/s"
    yield Figure("recovery once the processor is free again", took_s, "s", detail)


class Group:
    """A cgroup of processes with a quota of processor time; a context."""

    def __enter__(self) -> Group:
        name = f"exactlyonce-{uuid.uuid4().hex[:8]}"
        self._unified = (CGROUPS / "cgroup.controllers").exists()
        places = [CGROUPS] if self._unified else [CGROUPS / "cpu", CGROUPS / "cpuacct"]
        self._folders = list(dict.fromkeys((place / name).parent.resolve() / name for place in places))
        try:
            for folder in self._folders:
                folder.mkdir()
            self.limit(1)
        except OSError as error:
            raise Failed(f"no cgroup with a quota of processor time can be made here: {error}") from error
        return self

    def __exit__(self, *raised: object) -> None:
        for folder in self._folders:
            end_s = time.monotonic() + LIMIT_S
            while (folder / "cgroup.procs").read_text() and time.monotonic() < end_s:
                time.sleep(0.1)
            folder.rmdir()

    def take(self, pid: int) -> None:
        """Its later children are in the group, too."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def limit(self, processors: float) -> None:
        quota_us = int(processors * PERIOD_US)
        if self._unified:
            (self._folders[0] / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (self._folders[0] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folders[0] / "cpu.cfs_quota_us").write_text(str(quota_us))

    def processor_s(self) -> float:
        """The processor time that its processes have had."""
        if self._unified:
            return int((self._folders[0] / "cpu.stat").read_text().split()[1]) / 1e6
        return int((self._folders[-1] / "cpuacct.usage").read_text()) / 1e9


@contextmanager
def _ends(bench: Bench, topic: str) -> Iterator[Callable[[], int]]:
    """A function that gives the number of messages in *topic*."""
    consumer = Consumer({"bootstrap.servers": bench.cluster.servers, "group.id": topic})
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    try:
        yield lambda: sum(consumer.get_watermark_offsets(partition)[1] for partition in partitions)
    finally:
        consumer.close()


def _after(look: Callable[[], Look], seconds: float) -> Look:
    time.sleep(seconds)
    return look()


def _rates(before: Look, after: Look) -> tuple[float, float]:
    """Results per second, and per second of processor time."""
    results = after.results - before.results
    return results / (after.at_s - before.at_s), results / max(after.processor_s - before.processor_s, 1e-9)
