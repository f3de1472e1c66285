"""Kafka Streams, Flink, Quix Streams and Bytewax beside ours: a running total, a tumbling count, an interval join of
orders with their payments, and deduplication of orders that come twice.

Each runs as a whole process on the same topics, with commits every 500 ms and parallelism 1. State is in memory, but on
disk in Quix, its only way, and in the join of Kafka Streams, whose windows in memory are searched time by time. All are
exactly once, but for Bytewax, whose sink is at least once. All are measured from outside, from the first commit to the
last: the growth of the visible records, and the processor time of all processes. Each output is compared with what it
must be. Windows give final results, and the input ends with orders that end all windows before them. No record is late.
Downloads the others once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import uuid
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import Bench
from cluster import PARTITIONS, QUIET
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from figures import Figure
from job import Failed, Job
from work import Work, counts, once, payments, totals

from exactlyonce.connectors.embedded.jars import cache_dir
from exactlyonce.connectors.embedded.programs import dying_with_parent

HERE = Path(__file__).parent / "others"
LIMIT_S = 900.0
LOOK_INTERVAL_S = 0.02
SETTLED_S = 2.0
"""Silence that counts as the end: longer than a commit interval."""
OPENED = tuple(
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.lang", "java.net", "java.nio", "java.time", "java.util", "java.util.concurrent")
)
"""For Flink, as its own scripts do."""


@cache
def java(name: str, *options: str) -> list[str]:
    """Java with the jars of *name*.xml, and the program of *name*_pipelines.java."""
    home = cache_dir() / f"others-{name}"
    pom = (HERE / f"{name}.xml").read_bytes()
    if not (runtime := shutil.which("java")) or not shutil.which("javac") or not shutil.which("mvn"):
        raise Failed("Kafka Streams and Flink are downloaded by Maven and compiled by a JDK: install both.")
    if not (home / "pom.xml").exists() or (home / "pom.xml").read_bytes() != pom:
        shutil.rmtree(home, ignore_errors=True)
        goal = ("dependency:copy-dependencies", f"-DoutputDirectory={home}/jars")
        subprocess.run(["mvn", "--batch-mode", "--quiet", "--file", HERE / f"{name}.xml", *goal], check=True)
        (home / "pom.xml").write_bytes(pom)
    path = f"{home}/jars/*:{home}/classes"
    program = HERE / f"{name}_pipelines.java"
    subprocess.run(["javac", "-cp", path, "-d", home / "classes", program], check=True)
    return [runtime, "-Xmx1g", *options, "-cp", path, f"{name.title()}Pipelines"]


@cache
def python(name: str, *packages: str) -> list[str]:
    """Python in an environment of its own with *packages*, and the program *name*_pipelines.py."""
    home = cache_dir() / packages[0]
    if not (home / "installed").exists():
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (home / "installed").touch()
    return [str(home / "bin" / "python"), str(HERE / f"{name}_pipelines.py")]


class System(NamedTuple):
    """Another system, whose program takes a pipeline, servers, input, output and a folder for state."""

    title: str
    program: Callable[[], list[str]]
    """Installs it the first time."""
    guarantee: str
    share: int
    """It gets one record in so many, for it is slower."""
    unable: frozenset[Callable[[Bench, int], Work]] = frozenset()
    """Pipelines that it does not have."""


SYSTEMS = {
    "streams": System("Kafka Streams", partial(java, "streams"), "exactly once", 1),
    "flink": System("Flink", partial(java, "flink", *OPENED), "exactly once", 1),
    "quix": System("Quix Streams", partial(python, "quix", "quixstreams==3.28.1"), "exactly once", 15),
    "bytewax": System(
        "Bytewax",
        partial(python, "bytewax", "bytewax==0.21.1", "confluent-kafka", "orjson"),
        "at least once",
        10,
        frozenset({payments, once}),
    ),
}


@contextmanager
def running(command: list[str]) -> Iterator[tuple[int, Callable[[], str | None]]]:
    """*command* as a process that is killed in the end: its id, and a function that returns its output if it has ended
    before."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(dying_with_parent(command), stdout=output, stderr=output)

        def failure() -> str | None:
            if process.poll() is None:
                return None
            output.seek(0)
            return f"{command[0]} ended with {process.returncode}: {output.read()[-2000:]}"

        try:
            yield process.pid, failure
        finally:
            process.kill()
            process.wait()


class Speed(NamedTuple):
    """Of a run, from one commit to another."""

    records_s: float
    processor_us: float
    """Processor time of all its processes for a record."""

    def __str__(self) -> str:
        return f"{self.records_s:,.0f} records/s with {self.processor_us:.1f} µs"


class Look(NamedTuple):
    """The visible records and the processor time so far."""

    at_s: float
    records: int
    processor_s: float


def growth(
    bench: Bench,
    sink: str,
    records: int,
    pid: int,
    failure: Callable[[], str | None],
    isolation: str = "read_committed",
) -> Speed:
    """The speed of process *pid* from the first commit to the last, until readers of *sink* see *records* and no more.

    Measured by offsets, so markers are counted with records: a few for each commit. With "read_uncommitted" as
    *isolation* it is from the first write to the last.
    """
    consumer = Consumer(
        {"bootstrap.servers": bench.cluster.servers, "group.id": "look", "isolation.level": isolation, **QUIET}
    )
    partitions = [TopicPartition(sink, partition) for partition in range(PARTITIONS)]
    looks: list[Look] = []
    deadline = time.monotonic() + LIMIT_S
    while not looks or looks[-1].records < records or time.monotonic() < looks[-1].at_s + SETTLED_S:
        if ended := failure():
            raise Failed(ended)
        if time.monotonic() > deadline:
            raise Failed(f"{sink} has {looks[-1].records if looks else 0} of {records} records after {LIMIT_S:.0f} s")
        visible = sum(end_of(consumer, partition) for partition in partitions)
        if visible > (looks[-1].records if looks else 0):
            looks.append(Look(time.monotonic(), visible, processor_s(pid)))
        time.sleep(LOOK_INTERVAL_S)
    consumer.close()
    if len(looks) < 3:
        raise Failed(f"{records} records are too few for three commits")
    first, last = looks[0], looks[-1]
    grown = last.records - first.records
    return Speed(grown / (last.at_s - first.at_s), (last.processor_s - first.processor_s) / grown * 1e6)


def processor_s(pid: int) -> float:
    """Processor time of a process and its descendants; those that have ended count if somebody has waited for them."""
    home = Path(f"/proc/{pid}")
    try:
        ticks = sum(map(int, (home / "stat").read_text().rpartition(")")[2].split()[11:15]))
        children = [child for task in (home / "task").iterdir() for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") + sum(processor_s(int(child)) for child in children)


def end_of(consumer: Consumer, partition: TopicPartition) -> int:
    """Its end for *consumer*; 0 while its broker does not lead it yet, as just after its topic was made."""
    try:
        return int(consumer.get_watermark_offsets(partition)[1])
    except KafkaException as error:
        if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
            raise
        return 0


def measured(bench: Bench, name: str, work: Work) -> Speed:
    """The speed of *name*, ours or another, in records of the input."""
    sink = f"{name}-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    results = work.expected.records
    if name == "ours":
        with Job(bench.cluster.servers, work.pipeline, name=sink, source=work.source, sink=sink) as job:
            speed = growth(bench, sink, results, job.process.pid, job.failure)
    else:
        with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-", ignore_cleanup_errors=True) as folder:
            arguments = (work.pipeline, bench.cluster.servers, work.source, sink, folder)
            with running([*SYSTEMS[name].program(), *arguments]) as (pid, failure):
                speed = growth(bench, sink, results, pid, failure)
    if (written := bench.cluster.digest(sink)) != work.expected:
        raise Failed(f"{name} wrote {written} instead of {work.expected}")
    bench.cluster.delete(sink)
    return Speed(speed.records_s * work.records / results, speed.processor_us * results / work.records)


WORKS = {
    "running total": totals,
    "tumbling count": counts,
    "interval join": payments,
    "deduplication by arrival": once,
}


def scenario(bench: Bench) -> Iterator[Figure]:
    """Ours against the others, round by round; a slower one gets less to do."""
    records = bench.size(3_000_000, 600_000)
    for title, make in WORKS.items():
        systems = {name: system for name, system in SYSTEMS.items() if make not in system.unable}
        shares = {"ours": 1, **{name: system.share for name, system in systems.items()}}
        works = {share: make(bench, records // share) for share in sorted(set(shares.values()))}
        speeds: dict[str, list[Speed]] = {name: [] for name in shares}
        for number in range(bench.rounds or bench.size(2, 1)):
            for name in shares if number % 2 == 0 else reversed(shares):
                speeds[name].append(measured(bench, name, works[shares[name]]))
                bench.say(f"{title}, round {number + 1}: {name} {speeds[name][-1]} a record")
        for name, system in systems.items():
            ratios = [our.records_s / other.records_s for our, other in zip(speeds["ours"], speeds[name], strict=True)]
            detail = f"{_median(speeds['ours'])} against {_median(speeds[name])}, {len(ratios)} rounds"
            yield Figure(f"{title} against {system.title}, {system.guarantee}", median(ratios), detail=detail)
        bench.cluster.delete(*(topic for work in works.values() for topic in work.source.split(",")))


def _median(speeds: list[Speed]) -> Speed:
    return Speed(*map(median, zip(*speeds, strict=True)))
